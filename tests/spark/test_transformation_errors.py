"""Errors raised by transformations, predicates and converters mean the same as those of a handler."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pyspark import cloudpickle

from tailrace.converters.contract import Converter
from tailrace.converters.native import PythonConverter
from tailrace.engine.contracts import RetriableError, StopEngine
from tailrace.errors import Kind, TailraceError
from tailrace.records.events import Converted
from tailrace.records.group import Group
from tailrace.records.record import Record
from tailrace.testing import LinesSource
from tests.support.engines import Store, engine_of

pytestmark = pytest.mark.timeout(600)

LINES = 50
#: In the middle of a batch of 10.
AT = 25
ROLES = ["transformation", "record transformation", "predicate", "converter"]
PLACES = [pytest.param(("threads", order)) for order in ("batch", "ordered", "unordered", "key")]
PLACES += [pytest.param(("spark", order), marks=pytest.mark.ci) for order in ("batch", "unordered", "key")]


@dataclass
class Raising:
    """Raises when it reaches line `AT`: the first time, or always."""

    folder: Path
    error: BaseException
    times: int

    def meet(self, group: Group) -> None:
        numbers = group.columns.column("after").field("number").to_pylist()
        if AT not in numbers:
            return
        for time in range(self.times):
            try:
                os.close(os.open(self.folder / f"time {time}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            raise self.error

    def apply(self, group: Group) -> Iterable[Group]:
        self.meet(group)
        return [group]

    def matches(self, group: Group) -> npt.NDArray[np.bool_]:
        self.meet(group)
        return np.zeros(len(group), np.bool_)

    def convert(self, group: Group) -> Converted:
        self.meet(group)
        return PythonConverter().convert(group)

    def close(self) -> None:
        pass


@dataclass
class OfRecords:
    raising: Raising

    def apply_record(self, record: Record) -> Record | None:
        if record.after["number"] == AT:
            self.raising.meet(record.group)
        return record

    def close(self) -> None:
        pass


@pytest.fixture(params=PLACES, ids=" ".join)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    runs_on, order = request.param
    if runs_on == "spark":
        request.getfixturevalue("spark")
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield runs_on, order
    if runs_on == "spark":
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def run(role: str, raising: Raising, place: tuple[str, str], store: Store) -> list[int]:
    """Run an engine; return the numbers of the lines that the handler got, in order."""
    runs_on, order = place
    path = raising.folder / "got"

    def one(given: Any) -> None:
        record = given.record if hasattr(given, "record") else given
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{record.after['number']}\n".encode())
        os.close(file)

    def whole(batch: Any) -> None:
        for given in batch:
            one(given)

    roles: dict[str, dict[str, Any]] = {
        "transformation": {"transformations": [raising]},
        "record transformation": {"transformations": [OfRecords(raising)]},
        "predicate": {"predicates": {"p": raising}, "transformations": [{"type": "drop", "predicate": "p"}]},
        "converter": {"converter": raising},
    }
    arguments = roles[role]
    arguments["on_batch" if order == "batch" else "on_record"] = whole if order == "batch" else one
    processing = {"runs_on": runs_on, "order": "ordered" if order == "batch" else order}
    try:
        engine_of(
            LinesSource(LINES),
            offsets=store,
            options={"record_processing": {**processing, "shutdown_timeout_ms": 60_000}},
            **arguments,
        ).run()
    finally:
        got = [int(line) for line in path.read_text().split()] if path.exists() else []
    return got


@pytest.mark.parametrize("role", ROLES)
def test_a_retriable_error_repeats_the_records_and_none_comes_twice(
    role: str, place: tuple[str, str], tmp_path: Path
) -> None:
    store = Store()
    got = run(role, Raising(tmp_path, RetriableError("a moment"), 2), place, store)
    assert sorted(got) == list(range(1, LINES + 1))
    assert store.line() == LINES


@pytest.mark.parametrize("role", ROLES)
def test_stop_engine_ends_with_success_and_nothing_of_that_batch_is_committed(
    role: str, place: tuple[str, str], tmp_path: Path
) -> None:
    store = Store()
    raising = Raising(tmp_path, StopEngine(), 1)
    got = run(role, raising, place, store)
    assert AT not in got
    # Processed records are committed, but none of that batch: all records come once in the two runs.
    assert store.line() < AT
    assert sorted(set(run(role, raising, place, store))) == list(range(1, LINES + 1))
    assert store.line() == LINES


@pytest.mark.parametrize("role", ROLES)
def test_any_other_error_fails_the_task(role: str, place: tuple[str, str], tmp_path: Path) -> None:
    store = Store()
    with pytest.raises(TailraceError) as raised:
        run(role, Raising(tmp_path, ValueError("a row"), 1), place, store)
    assert raised.value.kind is (Kind.CONVERSION_FAILED if role == "converter" else Kind.TASK_FAILED)
    assert "a row" not in str(raised.value)
    assert store.line() < AT


def test_the_raising_converter_fulfils_the_converter_protocol() -> None:
    assert isinstance(Raising(Path(), ValueError(), 0), Converter)
