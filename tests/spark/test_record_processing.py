"""Record processing on executors: the same result as in this process, whatever fails there."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark import cloudpickle

import tailrace
from tailrace.engine.commit_policies import Periodic
from tailrace.engine.contracts import RetriableError, StopEngine
from tailrace.engine.processing import Order, on_batch, on_record, stage
from tailrace.errors import Kind, TailraceError
from tailrace.records.events import Event
from tailrace.records.record import Record
from tailrace.spark.processing import SparkRunner
from tailrace.testing import LinesSource
from tests.support.engine import flowing
from tests.support.engine.flowing import (
    SOON_S,
    assert_in_order_for_each_key,
    drop_thirds,
    numbers,
    running,
    stream,
    to_text,
)
from tests.support.wait import wait_until

FLOWS: list[tuple[str, Order, bool]] = [
    ("batch", "ordered", False),
    ("batch", "ordered", True),
    ("record", "ordered", False),
    ("record", "ordered", True),
    ("record", "unordered", False),
    ("record", "unordered", True),
    ("record", "key", True),
]
#: Workers that start on a loaded machine take up to a minute to load their modules.
LATE_S = 240.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def on_spark(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Processors of a runner on Spark, whose workers do not have the modules of these tests."""
    cloudpickle.register_pickle_by_value(flowing)
    runner = SparkRunner("test", None)
    yield runner.processor_for
    runner.close()
    cloudpickle.unregister_pickle_by_value(flowing)
    tracker = spark.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds(), LATE_S, "the end of all jobs")
    assert spark.range(3).count() == 3, "a session that ran before is left running"


def writing(path: Path, also: Callable[[int], None] = lambda _: None) -> Callable[[Any], None]:
    """A handler that writes numbers of changes to a file, wherever it runs, after calling `also`."""

    def one(given: Any) -> None:
        record = given.record if hasattr(given, "record") else given
        number = record.source["n"]
        also(number)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{number} {os.getpid()}\n".encode())
        os.close(file)

    return one


def written(path: Path) -> list[int]:
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def once(folder: Path, number: int) -> bool:
    """Return whether this is the first call for `number`, in any process."""
    try:
        os.close(os.open(folder / f"once-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def test_every_dispatcher_gives_the_same_as_in_this_process(
    on_spark: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 30)
    monkeypatch.setattr(stage, "PART_RECORDS_MIN", 1 + seed % 9)
    for takes, order, converts in FLOWS:
        found = []
        places: list[tuple[str, dict[str, Any]]] = [("here", {}), ("there", {"new_processor": on_spark})]
        for place, more in places:
            path = tmp_path / f"{takes} {order} {converts} {place}"
            one = writing(path)
            handler = on_record(one) if takes == "record" else on_batch(functools.partial(_each, one))
            with running(
                handler,
                order,
                transform=drop_thirds,
                convert=to_text if converts else None,
                batches_max=16,
                **more,
            ) as run:
                run.work_off(stream(seed, batches=8), LATE_S)
                assert run.committer.finish(SOON_S)
            got = written(path)
            if order == "key":
                assert_in_order_for_each_key(got, seed)
            found.append((got if order == "ordered" else sorted(got), run.store.last))
            pids = {line.split()[1] for line in path.read_text().splitlines()}
            assert (str(os.getpid()) in pids) == (place == "here" or order != "unordered")
        assert found[0] == found[1], (takes, order, converts, seed)
        whole = numbers(stream(seed, batches=8))
        assert found[1] == ([n for n in whole if n % 3], len(whole)), seed


def _each(one: Callable[[Any], None], batch: Any) -> None:
    for given in batch:
        one(given)


def test_retriable_errors_and_killed_workers_are_retried(
    on_spark: Callable[..., Any], tmp_path: Path
) -> None:
    def sometimes(number: int) -> None:
        if number % 11 == 5 and once(tmp_path, number):
            raise RetriableError("again")
        if number == 77 and once(tmp_path, number):
            os.kill(os.getpid(), signal.SIGKILL)

    path = tmp_path / "numbers"
    with running(
        on_record(writing(path, sometimes)), "unordered", new_processor=on_spark, batches_max=16
    ) as run:
        run.work_off(stream(5), LATE_S)
        assert run.committer.finish(SOON_S)
    got = written(path)
    assert set(got) == set(numbers(stream(5)))
    assert (tmp_path / "once-77").exists()
    assert run.store.last == len(numbers(stream(5)))
    # Records of a killed job came again; no others did.
    again = [n for n in set(got) if got.count(n) > 1]
    assert len(again) < len(set(got))


def test_no_offset_after_a_record_that_always_fails_is_committed(
    on_spark: Callable[..., Any], tmp_path: Path
) -> None:
    def failing(number: int) -> None:
        if number == 60:
            raise ValueError("no")

    path = tmp_path / "numbers"
    with running(on_record(writing(path, failing)), "unordered", new_processor=on_spark) as run:
        with pytest.raises(ValueError, match="no") as caught:
            run.work_off(stream(5), LATE_S)
        assert run.committer.finish(SOON_S)
    assert run.store.last <= 60
    got = set(written(path))
    assert 60 not in got
    assert set(range(run.store.last)) <= got, "everything committed was delivered"
    notes = "\n".join(caught.value.__notes__)
    assert "raised on an executor" in notes
    assert "failing" in notes
    assert "while record" in notes


def test_a_handler_that_returns_unfinished_work_is_refused(on_spark: Callable[..., Any]) -> None:
    with running(
        on_record(cast(Any, lambda one: (each for each in [one]))), "unordered", new_processor=on_spark
    ) as run:
        with pytest.raises(TailraceError, match="the handler returned a generator"):
            run.work_off(stream(5), LATE_S)
        assert run.committer.finish(SOON_S)
    assert run.store.last == 0


def test_a_handler_on_an_executor_may_end_the_engine(on_spark: Callable[..., Any], tmp_path: Path) -> None:
    def ending(number: int) -> None:
        if number == 9:
            raise StopEngine

    path = tmp_path / "numbers"
    with running(on_record(writing(path, ending)), "unordered", new_processor=on_spark, batches_max=1) as run:
        with pytest.raises(StopEngine):
            run.work_off(stream(5), LATE_S)
        assert run.committer.finish(SOON_S)
    assert set(range(run.store.last)) <= {*written(path), 9}
    assert max(written(path), default=0) < 200


@pytest.mark.parametrize("order", ["ordered", "key", "unordered"])
def test_jobs_end_with_the_task(
    order: Order, spark: Any, on_spark: Callable[..., Any], tmp_path: Path
) -> None:
    begun = tmp_path / "begun"

    def hanging(given: Any) -> Any:
        import threading

        begun.touch()
        threading.Event().wait(60)
        return given

    takes_there = order == "unordered"
    handler = on_record(hanging) if takes_there else on_record(lambda _: None)
    tracker = spark.sparkContext.statusTracker()
    with running(
        handler,
        order,
        transform=None if takes_there else hanging,
        new_processor=on_spark,
        policy=Periodic(0),
    ) as run:
        run.put(stream(5, batches=2))
        wait_until(begun.exists, LATE_S, "a handler or transformation that runs")
    wait_until(lambda: not tracker.getActiveJobsIds(), SOON_S, "the end of all jobs")
    assert run.store.last == 0


def test_an_engine_on_spark_delivers_in_order_in_this_process(spark: Any) -> None:
    got: list[Event] = []
    tailrace.Engine(
        connector=LinesSource(100, tasks=2, partitions=2, batch=20),
        on_record=got.append,
        converter="json",
        options={
            "record_processing": {"runs_on": "spark"},
            "transformations": [{"type": "filter", "where": "after.number % 2 = 0"}],
        },
        tasks_max=2,
    ).run()
    for partition in {json.dumps(dict(event.record.partition)) for event in got}:
        own = [e for e in got if json.dumps(dict(e.record.partition)) == partition]
        values = [json.loads(event.value)["after"]["number"] for event in own]
        assert values == sorted(values)
        assert values == [event.record.after["number"] for event in own]
    assert len(got) == 200
    assert spark.range(3).count() == 3, "a session that ran before is left running"


def test_a_handler_that_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    import threading

    lock = threading.Lock()

    def handler(record: Record) -> None:
        with lock:
            _ = record.key

    processing = {"runs_on": "spark", "order": "unordered"}
    with pytest.raises(TailraceError, match="the handler can't be sent to executors") as caught:
        tailrace.Engine(
            connector=LinesSource(1), on_record=handler, options={"record_processing": processing}
        )
    assert caught.value.kind is Kind.CONFIG_INVALID
    with pytest.raises(TailraceError, match="runs_on: spark is for the engine's own processors"):
        tailrace.Engine(connector=LinesSource(1), processor=_Mine, options={"record_processing": processing})  # type: ignore[arg-type]


class _Mine:
    pass
