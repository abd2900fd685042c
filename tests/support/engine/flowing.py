"""What tests of processing share: batches from a seed, a recording offset store, a running processor."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.backoff import Backoff
from tailrace.engine.commit_policies import Always
from tailrace.engine.contracts import CommitPolicy, RecordProcessor
from tailrace.engine.offsets.committer import OffsetCommitter
from tailrace.engine.processing import Handler, Order, ProcessingConfig, processor_for
from tailrace.engine.threads import SystemClock
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.records.events import Converted
from tailrace.records.group import Group

PARTITION = {"server": "db"}
THREADS = 3
SOON_S = 60.0


class Remembering:
    """An offset store in memory that records all writes in order and fails where it is told to."""

    def __init__(self) -> None:
        self.writes: list[list[tuple[Partition, Offset]]] = []
        self.fails: Callable[[], None] = lambda: None

    def start(self) -> None:
        pass

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        return {}

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        self.fails()
        self.writes.append(list(offsets))

    def stop(self) -> None:
        pass

    @property
    def last(self) -> int:
        """The number of the last change whose offset was stored."""
        return int(self.writes[-1][0][1]["at"]) if self.writes else 0


@dataclass
class Run:
    """A processor at work."""

    processor: RecordProcessor
    committer: OffsetCommitter
    store: Remembering
    stopping: threading.Event
    told: list[Offset] = field(default_factory=list)

    def put(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self.committer.take(batch)
            self.processor.process(batch)

    def work_off(self, batches: Iterable[Batch], timeout_s: float = SOON_S) -> None:
        """Put batches in and wait until all of them are done."""
        self.put(batches)
        assert self.processor.drain(timeout_s)


@contextmanager
def running(
    handler: Handler,
    order: Order = "ordered",
    *,
    transform: Callable[[Group], Sequence[Group]] | None = None,
    convert: Callable[[Group], Converted] | None = None,
    policy: CommitPolicy | None = None,
    store: Remembering | None = None,
    retries: int = -1,
    batches_max: int = 4,
    bytes_max: int = 1 << 30,
    new_processor: Callable[[ProcessingConfig], RecordProcessor] = processor_for,
) -> Iterator[Run]:
    """Yield a run; cancel everything under way at the end."""
    clock, stopping, store = SystemClock(), threading.Event(), store or Remembering()
    told: list[Offset] = []
    committer = OffsetCommitter(
        store,
        policy or Always(),
        clock,
        committed=lambda _, offset: told.append(offset),
        timeout_s=5,
        name="test",
    )
    terms = ProcessingConfig(
        handler=handler,
        clock=clock,
        stopping=stopping,
        order=order,
        threads=THREADS,
        queue_batches_max=batches_max,
        queue_bytes_max=bytes_max,
        backoff=Backoff(retries, first_s=0.001, longest_s=0.002),
        name="test",
    )
    processor = new_processor(terms)
    with ThreadPoolExecutor(THREADS) as pool:
        processor.initialize(pool, transform, convert, committer)
        try:
            yield Run(processor, committer, store, stopping, told)
        finally:
            processor.close()
            committer.finish(5)


def stream(seed: int, batches: int = 12, most: int = 60, keys: int = 6) -> list[Batch]:
    """Return random batches: inserts, updates that change the key, truncates, two tables, no key."""
    chance = random.Random(seed)
    found: list[Batch] = []
    at = 0
    for _ in range(batches):
        size = chance.randrange(most)
        found.append(_batch(chance, at, size, keys))
        at += size
    return found


def _batch(chance: random.Random, at: int, size: int, keys: int) -> Batch:
    rows: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for place in range(size):
        topic = chance.choice(["public.a", "public.b", "public.keyless"])
        has_key = topic != "public.keyless"
        key, number = {"id": chance.randrange(keys)}, at + place
        after = {**key, "n": number}
        row: dict[str, Any] = {"op": "c", "key": key if has_key else None, "before": None, "after": after}
        kind = chance.random()
        if kind < 0.15 and has_key:
            row.update(op="u", before={"id": chance.randrange(keys), "n": None})
        elif kind < 0.18:
            row.update(op="t", key=None, after=None)
        row["source"] = {"n": number}
        rows.setdefault(topic, []).append((place, row))
    groups = []
    key_type = pa.struct([("id", pa.int64())])
    row_type = pa.struct([("id", pa.int64()), ("n", pa.int64())])
    for topic, listed in rows.items():
        schema = pa.schema(
            [
                ("op", pa.string()),
                ("key", key_type if topic != "public.keyless" else pa.null()),
                ("before", row_type),
                ("after", row_type),
                ("source", pa.struct([("n", pa.int64())])),
            ]
        )
        columns = pa.RecordBatch.from_pylist([row for _, row in listed], schema=schema)
        groups.append(Group.of_columns(topic, np.array([p for p, _ in listed], np.int64), columns))
    return Batch(PARTITION, tuple(groups), size, [{"at": at + k + 1} for k in range(size)], {"at": at + size})


def numbers(batches: Iterable[Batch]) -> list[int]:
    """Return the numbers of the changes in batches, in order."""
    return [record.source["n"] for batch in batches for record in batch]


def assert_in_order_for_each_key(got: list[int], seed: int) -> None:
    """Assert that the changes of each key are in order and on the right side of each truncate."""
    lanes: dict[Any, list[int]] = defaultdict(list)
    records = {r.source["n"]: r for batch in stream(seed) for r in batch}
    walls = [n for n, r in records.items() if r.op == "t"]
    at = {n: k for k, n in enumerate(got)}
    for n in got:
        found = records[n]
        keys = [found.key and found.key["id"]]
        if found.before is not None and found.key is not None:
            keys.append(found.before["id"])
        for key in set(keys):
            lanes[key if key is not None else found.topic].append(n)
    for lane in lanes.values():
        assert lane == sorted(lane), seed
    for wall in set(walls) & set(got):
        for n in got:
            assert (n < wall) == (at[n] < at[wall]) or n == wall, (seed, wall, n)


def drop_thirds(group: Group) -> list[Group]:
    """A transformation that drops every third change of the stream, and some whole groups."""
    n = np.array(group.columns.column("source").field(0))
    return [group.take(np.flatnonzero(n % 3 != 0))]


def to_text(group: Group) -> Converted:
    """A converter to text: the number of the change, and that of its key."""
    n = pa.array([str(v) for v in group.columns.column("source").field(0).to_pylist()])
    return Converted(None, n)
