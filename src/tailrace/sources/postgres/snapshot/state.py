"""Keeps the snapshot plans on disk, consistent with the log after a crash at any point.

That a chunk is done is written in one place: the unit in the log. The file `snapshot.state`
says what there is to do, and which units were durable when it was written; at a start, the log
is searched from there on for units that came later. So the file may be older than the log, and
never claims what the log does not hold. Where a table is cut is kept in a file of its own,
written before its first chunk is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import structlog

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tailrace.sources.postgres.snapshot.chunk_writer import Unit
from tailrace.sources.postgres.snapshot.chunks import ChunkedRelation
from tailrace.sources.postgres.snapshot.plan import (
    SnapshotOutcome,
    SnapshotPlan,
    SnapshotPlans,
    TableSnapshotPlan,
    numbers_of,
    unit_name,
)
from tailrace.sources.postgres.streaming import frame_filters
from tailrace.sources.postgres.streaming.appender import PostgresAppender

log = structlog.get_logger(__name__)

#: Between checkpoints: what a start after a kill has to search is what came in so long.
CHECKPOINT_S = 2.0

#: The file in a log's directory that has the plans.
PLANS = f"tasks/{TASK}/snapshot.state"


def kept_plans(directory: LogDirectory) -> SnapshotPlans:
    """Return the snapshot plans as they were last written down.

    :raises TailraceError: `LOG_CORRUPT`.
    """
    content = directory.state_read(PLANS)
    return SnapshotPlans() if content is None else SnapshotPlans.from_json(content)


class SnapshotState:
    """The snapshot plans of one log. `plans` is changed under `lock`."""

    def __init__(self, directory: LogDirectory, appender: PostgresAppender) -> None:
        self.directory = directory
        self.appender = appender
        self._written_s = 0.0
        self._pending: list[tuple[int, Unit]] = []  # in the log, perhaps not durable: end offset, unit
        self._closing_from: int | None = None  # a unit is being closed that begins there or later
        #: Returns the relations of which rows may have moved in what was appended since it was asked.
        self.take_moved: Callable[[], Iterable[int]] = frozenset
        self.lock = threading.RLock()
        self.plans = SnapshotPlans()

    def open(self) -> None:
        """Read the plans, and from the log what was done since it was written.

        :raises TailraceError: `LOG_CORRUPT`; `SNAPSHOT_FAILED` if retention removed that part.
        """
        with self.lock:
            self.plans = kept_plans(self.directory)
            self._drop_others()
            if self.plans.open:
                self._search_log()

    def replace(self, plans: SnapshotPlans) -> None:
        """Begin with other plans, durably; what an earlier one planned is forgotten."""
        with self.lock:
            self.plans = plans
            self._pending.clear()
            self.write()
            self._drop_others()

    def write(self) -> None:
        """Keep the plans, durably; of the units that were closed, those that are durable."""
        with self.lock:
            # In this order: what is durable by then has been noted.
            durable = self._durable_and_noted()
            self.plans.take_moves(self.take_moved())
            for end, unit in self._pending:
                if end <= durable:
                    self.plans.take_unit(unit.name, unit.rows)
            self._pending = [each for each in self._pending if each[0] > durable]
            self.plans.log_offset = durable
            self.directory.state_write(PLANS, self.plans.as_json())
            self._written_s = time.monotonic()

    def checkpoint(self) -> None:
        """Make durable what was appended, and take all of it in."""
        self.appender.sync()
        self.write()

    def turn(self) -> None:
        """Write if it is time to."""
        with self.lock:
            moved = self._durable_and_noted() > self.plans.log_offset
            if self.plans.open and moved and time.monotonic() - self._written_s >= CHECKPOINT_S:
                self.write()

    @contextmanager
    def closing(self, unit: Unit) -> Iterator[dict[str, Any] | None]:
        """Note that `unit` is whole in the log, if its end was appended within the context. Any thread.

        What is given, if anything, is the table's facts, to be appended before the unit's end: with this
        unit all of the table has been read.

        From before its end is in the log until it is noted, the plans keep to an offset before it: it may
        be durable before the next line runs, and a start that looked only behind it would read its rows once
        more and, until then, leave changes of them out.
        """
        with self.lock:
            self._closing_from = self._durable_and_noted()
            facts = self._facts_when_read(unit)
        yield facts
        with self.lock:
            self._pending.append((self.appender.tail.offset, unit))
            self._closing_from = None
        self.turn()

    def _facts_when_read(self, unit: Unit) -> dict[str, Any] | None:
        snapshot = self.plans.find(str(unit.name.get("snapshot")))
        if snapshot is None or not snapshot.replaces or "table" not in unit.name:
            return None
        table = snapshot.tables[unit.name["table"]]
        units = [unit, *(pending for _, pending in self._pending)]
        done = table.done.union(
            *(
                numbers_of(table, each.name["chunk"])
                for each in units
                if unit_name(snapshot, table, each.name.get("chunk")) == each.name
            )
        )
        frame = self.appender.schema_in_force.get(f"F{table.oid}")
        if not table.since_offset or frame is None or len(done) < (table.chunks or 0):
            return None
        return {**frames.control_json(frame), "read_from": table.since_offset}

    def _durable_and_noted(self) -> int:
        # Only one unit is open at a time. One that failed to be closed holds this until another is.
        return self.appender.durable.offset if self._closing_from is None else self._closing_from

    def finish(
        self,
        snapshot: SnapshotPlan,
        outcome: SnapshotOutcome = SnapshotOutcome.DONE,
        error: dict[str, object] | None = None,
    ) -> None:
        """Write down that a snapshot is over, however it ended."""
        with self.lock:
            self.plans.finish(snapshot, outcome, time.time_ns() // 1000, error)
            self.write()
            self._drop_others()

    def abandon(
        self, snapshot: SnapshotPlan, outcome: SnapshotOutcome, error: dict[str, object] | None = None
    ) -> None:
        """Finish a snapshot that is not whole, and say of which tables changes waited in vain for rows."""
        with self.lock:
            gaps = [table.qualified_name for table in snapshot.tables if table.is_awaited]
        self.finish(snapshot, outcome, error)
        if gaps:
            log.warning(
                "changes that were left out until the rows of a table are read are not in the log; ask for "
                "its snapshot again",
                tables=gaps,
            )

    def keep_plan(
        self,
        snapshot: SnapshotPlan,
        table: TableSnapshotPlan,
        generation: int,
        relations: Sequence[ChunkedRelation],
    ) -> None:
        """Keep where `table` is cut in `generation`, durably: before the plans speak of it.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`; the plans must be left as they were then.
        """
        content = {"stretches": [relation.as_json() for relation in relations]}
        self.directory.state_write(self._plan_name(snapshot, table, generation), content)

    def plan(self, snapshot: SnapshotPlan, table: TableSnapshotPlan) -> tuple[ChunkedRelation, ...]:
        """Return where `table` is cut.

        :raises TailraceError: `LOG_CORRUPT` if that is lost.
        """
        content = self.directory.state_read(self._plan_name(snapshot, table, table.generation))
        if content is None:
            raise TailraceError(
                Kind.LOG_CORRUPT,
                f"read the plan of the snapshot of {table.qualified_name}: it is not there",
                "restore the log's folder from a backup, or begin a new log with a new snapshot: set "
                "log.path to a new directory and drop the slot",
                {"file": self._plan_name(snapshot, table, table.generation)},
            )
        return tuple(ChunkedRelation.from_json(each) for each in content["stretches"])

    def _drop_others(self) -> None:
        """Remove where tables were cut by snapshots that are not open, also those of a process that died."""
        kept = tuple(f"snapshot-{snapshot.id}-" for snapshot in self.plans.open)
        for path in self.directory.task_path(TASK).glob("snapshot-*"):
            if not path.name.startswith(kept):
                path.unlink(missing_ok=True)

    def _search_log(self) -> None:
        """Take in the units that came into the log after the plans were written."""
        offset = self.plans.log_offset
        with LogReader.open(self.directory, TASK) as reader:
            end = reader.end().offset
            if offset < reader.start:
                raise TailraceError(
                    Kind.SNAPSHOT_FAILED,
                    "go on with a snapshot: retention has removed the part of the log that shows which "
                    "chunks are done",
                    "begin a new log with a new snapshot: set log.path to a new directory and drop the slot",
                    {"offset": offset, "log_start": reader.start},
                )
            watched = np.array(
                sorted(table.oid for each in self.plans.open for table in each.tables), np.int64
            )
            moved: set[int] = set()
            opened: dict[str, object] | None = None
            for ref in reader.blocks(offset, end) if end > offset else ():
                data = reader.read(ref)
                # Perhaps of a row before the first chunk: reading it once more does no harm.
                moved |= set(frame_filters.moved(data, watched))
                for at in frame_filters.snapshot_marks(data):
                    if ref.header.log_offset + int(at) < offset:
                        continue
                    _, frame = next(frames.each_frame(data[at:]))
                    content = frames.control_json(frame)
                    if frame[frames.SUBTYPE_AT] == frames.SNAPSHOT_BEGINS:
                        opened = content
                    elif opened is not None:
                        self.plans.take_unit(opened, int(content.get("rows", 0)))
                        opened = None
            self.plans.take_moves(moved)
        log.debug("searched the log for chunks that are done", begin=offset, end=end)

    def _plan_name(self, snapshot: SnapshotPlan, table: TableSnapshotPlan, generation: int) -> str:
        name = f"snapshot-{snapshot.id}-{table.number}-{generation}.state"
        return str((self.directory.task_path(TASK) / name).relative_to(self.directory.path))
