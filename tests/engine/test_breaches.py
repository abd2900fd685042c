"""Invalid results of a converter, task or store are reported by name, and nothing of them is committed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.records.events import Converted
from tailrace.records.group import Group
from tailrace.testing import LinesSource
from tests.support.engines import Store, engine_of


class Returning:
    """A converter that returns what a function makes of the number of records."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def convert(self, group: Group) -> Any:
        return self._make(len(group))

    def close(self) -> None:
        pass


BREACHES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda _: None, "it returned NoneType instead of Converted"),
    "a list": (lambda n: ["x"] * n, "it returned list instead of Converted"),
    "too few": (lambda n: Converted(None, ["x"] * (n - 1)), "it returned 9 events for 10 records"),
    "too many": (lambda n: Converted(None, ["x"] * (n + 1)), "it returned 11 events for 10 records"),
    "too few keys": (lambda n: Converted(["k"], ["x"] * n), "10 values and 1 keys"),
    "too few headers": (
        lambda n: Converted(None, ["x"] * n, pa.array([{"a": "b"}])),
        "10 values and 1 headers",
    ),
    "rows of none": (lambda n: Converted(None, ["x"], rows=np.array([n])), "are not rows of the group"),
    "rows that fall": (lambda _: Converted(None, ["x", "y"], rows=np.array([3, 2])), "its rows descend"),
    "rows that are none": (lambda _: Converted(None, ["x"], rows=[0]), "not an array of integers"),  # type: ignore[arg-type]
    "no length": (lambda _: Converted(None, iter("x")), "have no length"),
}


@pytest.mark.parametrize("handler", ["on_batch", "on_record"])
@pytest.mark.parametrize("name", BREACHES)
def test_an_invalid_result_of_a_converter_is_reported(name: str, handler: str) -> None:
    make, found = BREACHES[name]
    store, got = Store(), []
    engine = engine_of(LinesSource(20), converter=Returning(make), offsets=store, **{handler: got.append})
    with pytest.raises(TailraceError) as raised:
        engine.run()
    assert raised.value.kind is Kind.CONVERSION_FAILED
    assert found in raised.value.message
    assert raised.value.context["converter"] == "Returning"
    assert (got, store.line()) == ([], 0)


def test_a_converter_may_skip_records_and_return_several_events_for_one() -> None:
    got: list[Any] = []
    rows = np.array([1, 1, 4])
    convert = Returning(lambda _: Converted(None, ["a", "b", "c"], rows=rows))
    store = Store()
    engine_of(LinesSource(10), lambda event: got.append(event.value), converter=convert, offsets=store).run()
    assert got == ["a", "b", "c"]
    assert store.line() == 10


@pytest.mark.parametrize("polled", [[], {}, "text", 7, False])
def test_a_poll_that_returns_no_batch_is_reported(polled: Any) -> None:
    class Odd(LinesSource):
        def create_task(self) -> Any:
            task = super().create_task()
            task.poll = lambda _timeout_s: polled  # type: ignore[assignment, method-assign]
            return task

    with pytest.raises(TailraceError) as raised:
        engine_of(Odd(), lambda _: None).run()
    assert raised.value.kind is Kind.RECORD_INVALID
    assert f"the task returned {type(polled).__name__}, not a Batch" in raised.value.message
    assert raised.value.context["task"] == 0


@pytest.mark.parametrize("error", [TailraceError(Kind.OFFSETS_UNWRITABLE, "no room"), OSError("a row")])
@pytest.mark.parametrize("policy", ["always", "periodic"])
def test_an_engine_whose_store_never_writes_fails(error: Exception, policy: str) -> None:
    def refuse() -> None:
        raise error

    got: list[Any] = []
    engine = engine_of(
        LinesSource(20), got.append, offsets=Store(refuse), options={"offset_commit": {"policy": policy}}
    )
    with pytest.raises(TailraceError) as raised:
        engine.run()
    assert raised.value.kind is Kind.OFFSETS_UNWRITABLE
    assert "a row" not in str(raised.value)
    assert len(got) == 20


def test_an_engine_whose_store_hangs_at_the_end_fails() -> None:
    release = threading.Event()
    options = {"offset_commit": {"policy": "periodic", "timeout_ms": 50}}
    engine = engine_of(
        LinesSource(20), lambda _: None, offsets=Store(lambda: release.wait(60) and None), options=options
    )
    with pytest.raises(TailraceError, match="not ended in time") as raised:
        engine.run()
    release.set()
    assert raised.value.kind is Kind.OFFSETS_UNWRITABLE


def test_an_engine_whose_store_recovers_succeeds() -> None:
    left = [OSError(), OSError()]

    def refuse() -> None:
        if left:
            raise left.pop()

    store = Store(refuse)
    engine_of(LinesSource(50), lambda _: None, offsets=store).run()
    assert store.line() == 50
