"""The engine alone, with a prepared source: the costs of delivery, processing and commits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.engine.contracts import ConnectorContext, Settings, SourceTask, TaskContext
from tailrace.engine.engine import Engine
from tailrace.engine.offsets.stores import MemoryOffsetStore
from tailrace.engine.offsets.tracker import Tracker
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.records.group import Group
from tailrace_bench.support.report import Result, machine, median

ROWS = 2_000_000
BATCH_ROWS = 20_000
TURNS = 3
GOAL_ROWS_S = 1_000_000.0

#: Divisor of the number of records for handlers of single records, as each is a Python call.
RECORDS_PART = 10


class _Offsets:
    # Offsets of a batch, created when they are read.
    def __init__(self, first: int) -> None:
        self._first = first

    def __getitem__(self, place: int) -> Offset:
        return {"at": self._first + place + 1}


class _Prepared:
    """A connector with one task, which returns the same group of records repeatedly."""

    def __init__(self, group: Group, batches: int) -> None:
        self._group = group
        self._batches = batches

    def start(self, context: ConnectorContext) -> None:
        pass

    def task_settings(self, tasks_max: int) -> Sequence[Settings]:
        return [{}]

    def create_task(self) -> SourceTask:
        return _Task(self._group, self._batches)

    def stop(self) -> None:
        pass


class _Task:
    def __init__(self, group: Group, batches: int) -> None:
        self._group = group
        self._batches = batches
        self._given = 0

    def start(self, context: TaskContext) -> None:
        self._finish = context.finish

    def poll(self, timeout_s: float) -> Batch | None:
        if self._given == self._batches:
            self._finish()
            return None
        size = len(self._group)
        # A group caches what it decodes, so each batch has a new one.
        group = self._group.with_topic(self._group.topic)
        batch = Batch({}, (group,), size, _Offsets(self._given * size))
        self._given += 1
        return batch

    def commit(self, partition: Partition, offset: Offset) -> None:
        pass

    def stop(self) -> None:
        pass


def measure(rows: int | None = None) -> Result:
    """Send `rows` records of ten columns through the engine, in batches; then in its other modes.

    The time is from the start of the engine to its end, with everything committed.
    """
    rows = rows or ROWS
    size = min(rows, BATCH_ROWS)
    group = prepared(size)
    batches = max(1, rows // size)
    few = max(1, batches // RECORDS_PART)
    _seconds(group, 1, on_batch=_nothing)
    whole = [_seconds(group, batches, on_batch=_nothing) for _ in range(TURNS)]
    value = batches * size / median(whole)

    def rate(count: int, **engine: Any) -> int:
        return round(count * size / _seconds(group, count, **engine))

    def by(order: str) -> Mapping[str, Any]:
        return {"record_processing": {"order": order}}

    return Result(
        name="stages",
        value=value,
        unit="records/s",
        ratio=value / GOAL_ROWS_S,
        reference="the goal, a million records a second in batches",
        limit="hand-over: nothing is decoded, transformed or converted",
        setup=machine() | {"rows": batches * size, "batch_rows": size, "turns": TURNS},
        details={
            "batches_with_a_filter_records_s": rate(batches, on_batch=_nothing, transformations=[_Odd()]),
            "batches_as_json_records_s": rate(few, on_batch=_nothing, converter="json"),
            "records_ordered_records_s": rate(few, on_record=_nothing),
            "records_ordered_key_looked_at_records_s": rate(few, on_record=_look_at_key),
            "records_unordered_records_s": rate(few, on_record=_nothing, options=by("unordered")),
            "records_by_key_records_s": rate(few, on_record=_nothing, options=by("key")),
            **{
                f"records_{order}_as_json_records_s": rate(
                    few, on_record=_nothing, converter="json", options=by(order)
                )
                for order in ("ordered", "unordered", "key")
            },
            "hand_over_us_a_batch": round(_hand_over_us(), 1),
            "tracker_mark_in_order_ns": round(_tracker_ns(in_order=True)),
            "tracker_mark_out_of_order_ns": round(_tracker_ns(in_order=False)),
        },
    )


def prepared(count: int) -> Group:
    """Return inserts into a table of ten columns, as Arrow columns."""
    numbers = np.arange(count, dtype=np.int64)
    texts = pc.cast(pa.array(numbers), pa.string())
    names = [f"c{n}" for n in range(9)]
    after = pa.StructArray.from_arrays(
        [pa.array(numbers), *([texts, pa.array(numbers)] * 4), texts], names=["id", *names]
    )
    columns = {
        "op": pa.array(np.repeat("c", count)),
        "key": pa.StructArray.from_arrays([pa.array(numbers)], names=["id"]),
        "before": pa.nulls(count, after.type),
        "after": after,
        "source": pa.StructArray.from_arrays([pa.array(numbers)], names=["log_offset"]),
    }
    return Group.of_columns("public.bench", np.arange(count), pa.RecordBatch.from_pydict(columns))


class _Odd:
    """A transformation that keeps every other record."""

    def apply(self, group: Group) -> list[Group]:
        return [group.take(np.flatnonzero(group.index % 2))]

    def close(self) -> None:
        pass


def _nothing(_: Any) -> None:
    pass


def _look_at_key(record: Any) -> None:
    _ = record.key


def _seconds(group: Group, batches: int, **engine: Any) -> float:
    running = Engine(name="bench", connector=_Prepared(group, batches), offsets=MemoryOffsetStore(), **engine)
    began = time.perf_counter()
    running.run()
    return time.perf_counter() - began


def _hand_over_us(batches: int = 2000) -> float:
    one = prepared(1)
    return (_seconds(one, batches, on_batch=_nothing) - _seconds(one, 1, on_batch=_nothing)) / batches * 1e6


def _tracker_ns(*, in_order: bool, count: int = 200_000) -> float:
    tracker = Tracker()
    tracker.begin(0, count, _Offsets(0))
    began = time.perf_counter_ns()
    for place in range(count) if in_order else range(count - 1, -1, -1):
        tracker.mark(0, place)
    return (time.perf_counter_ns() - began) / count
