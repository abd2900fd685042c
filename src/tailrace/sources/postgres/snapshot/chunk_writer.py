"""Writes rows of a snapshot into the log, one unit at a time, for several concurrent readers.

A unit has one chunk, or all chunks of a table that must be one unit. Only the readers of one unit write
to the log until it is closed, and take turns frame by frame; the readers of other units keep a bounded
amount of rows in memory and wait.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailrace import failpoints
from tailrace.errors import Stopped
from tailrace.model import POSTGRES_EPOCH_US
from tailrace.protocol import frames
from tailrace.sources.postgres.schema.catalog import PublishedTable
from tailrace.sources.postgres.schema.source_tables import Name
from tailrace.sources.postgres.streaming.appender import PostgresAppender

#: Interval, in seconds, at which a waiting reader checks whether it must still wait.
LOOK_S = 0.1


#: A frame of rows, and its number of rows.
RowFrame = tuple[bytearray, int]


class Postponed(Exception):  # noqa: N818 - not an error: the chunk is read in a later window
    """Raised if a chunk can't be read in this window, also in the other readers of its unit.

    `planned_again`: the table was altered since it was planned, so it is planned again.
    """

    def __init__(self, *, planned_again: bool = False) -> None:
        super().__init__()
        self.planned_again = planned_again


@dataclass(slots=True, eq=False)
class Unit:
    """A unit to be written: the content of its first frame, and the chunks that remain to be written."""

    name: dict[str, Any]
    parts: int = 1
    rows: int = 0
    given_up: bool = False
    head_written: set[int] = field(default_factory=set)  # oids of tables whose schema is in it


class ChunkWriter:
    """Writes units as of the consistent point `lsn`. Any thread.

    :param name_of: as for `PublishedTable.facts_frame`.
    :param admitted: waits until units may be written at this point of the log; raises an error if that
        will never happen.
    :param closing: a context for a unit, entered before its end is appended and left when it is completely in
        the log; it may return facts of the table, which are appended before the end.
    """

    def __init__(
        self,
        appender: PostgresAppender,
        lsn: int,
        stopping: threading.Event,
        *,
        name_of: Callable[[int], Name | None],
        admitted: Callable[[], None],
        closing: Callable[[Unit], AbstractContextManager[dict[str, Any] | None]],
    ) -> None:
        self._appender = appender
        self._lsn = lsn
        self._stopping = stopping
        self._name_of = name_of
        self._admitted = admitted
        self._closing = closing
        self._turn = threading.Condition()
        self._open: Unit | None = None
        self._ordinal = 0  # of the next row: all units of one `lsn` share one numbering
        self._ordinal_closed = 0  # after the last unit that was closed
        self._failed = False

    def write(self, unit: Unit, table: PublishedTable, rows: Sequence[RowFrame]) -> None:
        """Write frames of a table's rows, each with its number of rows, into `unit`; open it if necessary.

        :raises Postponed: if the unit was given up.
        :raises Stopped: if the task was asked to stop, or another unit failed.
        """
        self._admitted()
        with self._turn:
            self._take_turn(unit)
            if table.oid not in unit.head_written:
                self._begin(unit, table)
            for frame, count in rows:
                struct.pack_into("!Q", frame, frames.ROWS_ORDINAL_AT, self._ordinal)
                self._appender.append(np.frombuffer(frame, np.uint8))
                self._ordinal += count
                failpoints.hit("snapshot.in_copy")

    def part_done(self, unit: Unit, rows: int) -> None:
        """Note that one more chunk of `unit` is completely written; the last one closes the unit."""
        with self._turn:
            self._refuse_if_over(unit)
            unit.rows += rows
            unit.parts -= 1
            if unit.parts:
                return
            now_us = time.time_ns() // 1000
            end = frames.control_frame(frames.SNAPSHOT_END, self._lsn, now_us, {"rows": unit.rows})
            failpoints.hit("snapshot.before_chunk_end")
            with self._closing(unit) as facts:
                if facts is not None:
                    end = frames.control_frame(frames.FACTS, self._lsn, 0, facts) + end
                self._append(end)
                failpoints.hit("snapshot.after_chunk")
            self._open, self._ordinal_closed = None, self._ordinal
            self._turn.notify_all()

    def give_up(self, unit: Unit) -> None:
        """Remove the part of `unit` that is in the log; other units may continue."""
        with self._turn:
            unit.given_up = True
            if self._open is unit:
                self._discard()
            self._turn.notify_all()

    def fail(self) -> None:
        """Make every later write raise `Stopped`."""
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def discard(self) -> None:
        """Remove an unfinished unit from the log, after all readers have ended."""
        with self._turn:
            if self._open is not None:
                self._discard()

    def _discard(self) -> None:
        self._appender.discard_open_unit()
        self._open, self._ordinal = None, self._ordinal_closed

    def _take_turn(self, unit: Unit) -> None:
        while self._open is not None and self._open is not unit:
            self._refuse_if_over(unit)
            self._turn.wait(LOOK_S)
        self._refuse_if_over(unit)

    def _refuse_if_over(self, unit: Unit) -> None:
        if self._failed or self._stopping.is_set():
            raise Stopped
        if unit.given_up:
            raise Postponed

    def _begin(self, unit: Unit, table: PublishedTable) -> None:
        in_force = self._appender.facts_in_force
        known = in_force.get(table.oid)
        if known is not None and known.pending:
            raise Postponed  # the snapshot's facts would replace those that readers wait for
        now_us = time.time_ns() // 1000
        begin = b""
        if self._open is None:
            begin = frames.control_frame(frames.SNAPSHOT_BEGIN, self._lsn, now_us, unit.name)
        # From here on, the log may have a part of the unit.
        self._open = unit
        # Facts first: a reader that takes schema frames one by one then finds one version, not two.
        head = table.facts_frame(self._lsn, in_force, self._name_of)
        head += table.schema_frames(self._lsn, now_us - POSTGRES_EPOCH_US)
        self._append(begin + head)
        unit.head_written.add(table.oid)

    def _append(self, frame: bytes) -> None:
        self._appender.append(np.frombuffer(frame, np.uint8))
