"""Stores the snapshot plans on disk, consistent with the log after a crash at any point.

Only the unit in the log records that a chunk is done. The file `snapshot.state` has what is to be
read, and which units were durable when it was written; at a start, the log is searched from that
offset for later units. So the file may be older than the log, but never claims what the log does
not have. The bounds of a table's chunks are in a separate file, which is written before its first
chunk is read.
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

#: Seconds between checkpoints: a start after a kill searches what was appended in this time.
CHECKPOINT_S = 2.0

#: The file in a log's directory that has the plans.
PLANS = f"tasks/{TASK}/snapshot.state"


def kept_plans(directory: LogDirectory) -> SnapshotPlans:
    """Return the stored snapshot plans.

    :raises TailraceError: `LOG_CORRUPT`.
    """
    content = directory.state_read(PLANS)
    return SnapshotPlans() if content is None else SnapshotPlans.from_json(content)


class SnapshotState:
    """The snapshot plans of one log. `plans` is changed only under `lock`."""

    def __init__(self, directory: LogDirectory, appender: PostgresAppender) -> None:
        self.directory = directory
        self.appender = appender
        self._written_s = 0.0
        self._pending: list[tuple[int, Unit]] = []  # in the log, perhaps not durable: end offset, unit
        self._closing_from: int | None = None  # a unit is being closed that begins there or later
        #: Returns the relations whose rows may have moved in what was appended since the last call.
        self.take_moved: Callable[[], Iterable[int]] = frozenset
        self.lock = threading.RLock()
        self.plans = SnapshotPlans()

    def open(self) -> None:
        """Read the plans, and from the log the units that were written since the plans were stored.

        :raises TailraceError: `LOG_CORRUPT`; `SNAPSHOT_FAILED` if retention removed that part.
        """
        with self.lock:
            self.plans = kept_plans(self.directory)
            self._drop_others()
            if self.plans.open:
                self._search_log()

    def replace(self, plans: SnapshotPlans) -> None:
        """Replace the plans by `plans`, durably; the files of earlier snapshots are removed."""
        with self.lock:
            self.plans = plans
            self._pending.clear()
            self.write()
            self._drop_others()

    def write(self) -> None:
        """Store the plans durably, after noting the closed units that are durable."""
        with self.lock:
            # First: all units that are durable by now are in `_pending`.
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
        """Make durable what was appended, note all of its units, and store the plans."""
        self.appender.sync()
        self.write()

    def turn(self) -> None:
        """Store the plans if a checkpoint is due."""
        with self.lock:
            moved = self._durable_and_noted() > self.plans.log_offset
            if self.plans.open and moved and time.monotonic() - self._written_s >= CHECKPOINT_S:
                self.write()

    @contextmanager
    def closing(self, unit: Unit) -> Iterator[dict[str, Any] | None]:
        """Note that `unit` is complete in the log, if its end was appended within the context. Any thread.

        The context's value, if not None, is the table's facts, to be appended before the unit's end: with
        this unit, all of the table has been read.

        Until the unit is noted, the stored log offset stays before its end: the end may become durable at
        once, and a start that searched only after it would read the rows again and, until then, leave out
        their changes.
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
        # Only one unit is open at a time. If closing it failed, this stays until the next one is closed.
        return self.appender.durable.offset if self._closing_from is None else self._closing_from

    def finish(
        self,
        snapshot: SnapshotPlan,
        outcome: SnapshotOutcome = SnapshotOutcome.DONE,
        error: dict[str, object] | None = None,
    ) -> None:
        """Store, durably, that a snapshot has ended, with its outcome."""
        with self.lock:
            self.plans.finish(snapshot, outcome, time.time_ns() // 1000, error)
            self.write()
            self._drop_others()

    def abandon(
        self, snapshot: SnapshotPlan, outcome: SnapshotOutcome, error: dict[str, object] | None = None
    ) -> None:
        """Finish an incomplete snapshot, and warn of the tables whose changes were left out until then."""
        with self.lock:
            gaps = [table.qualified_name for table in snapshot.tables if table.is_awaited]
        self.finish(snapshot, outcome, error)
        if gaps:
            log.warning(
                "changes of tables whose rows were not read yet are not in the log; request their snapshot "
                "again",
                tables=gaps,
            )

    def keep_plan(
        self,
        snapshot: SnapshotPlan,
        table: TableSnapshotPlan,
        generation: int,
        relations: Sequence[ChunkedRelation],
    ) -> None:
        """Store the chunks of `table` in `generation`, durably, before the plans refer to them.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`; the plans must not be changed then.
        """
        content = {"stretches": [relation.as_json() for relation in relations]}
        self.directory.state_write(self._plan_name(snapshot, table, generation), content)

    def plan(self, snapshot: SnapshotPlan, table: TableSnapshotPlan) -> tuple[ChunkedRelation, ...]:
        """Return the stored chunks of `table`.

        :raises TailraceError: `LOG_CORRUPT` if they are missing.
        """
        content = self.directory.state_read(self._plan_name(snapshot, table, table.generation))
        if content is None:
            raise TailraceError(
                Kind.LOG_CORRUPT,
                f"read the plan of the snapshot of {table.qualified_name}: the file is missing",
                "restore the log's folder from a backup, or begin a new log with a new snapshot: set "
                "log.path to a new directory and drop the slot",
                {"file": self._plan_name(snapshot, table, table.generation)},
            )
        return tuple(ChunkedRelation.from_json(each) for each in content["stretches"])

    def _drop_others(self) -> None:
        """Remove the files of snapshots that are not open, also those of a process that was killed."""
        kept = tuple(f"snapshot-{snapshot.id}-" for snapshot in self.plans.open)
        for path in self.directory.task_path(TASK).glob("snapshot-*"):
            if not path.name.startswith(kept):
                path.unlink(missing_ok=True)

    def _search_log(self) -> None:
        """Note the units that were appended to the log after the plans were stored."""
        offset = self.plans.log_offset
        with LogReader.open(self.directory, TASK) as reader:
            end = reader.end().offset
            if offset < reader.start:
                raise TailraceError(
                    Kind.SNAPSHOT_FAILED,
                    "continue a snapshot: retention has removed the part of the log that shows which "
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
                # The row may have changed before the first chunk was read: reading it again does no harm.
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
