"""One chunk by COPY: what the server sends becomes frames of rows, as they are.

A chunk counts when the command has completed and the server's own count of rows is the number
that came. Until then its rows are held in memory, or, when they are more than may be held,
stand in a unit of the log that is not closed yet, or in a file that another process stages.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tailrace.capture.catalog import PublishedTable
from tailrace.capture.chunks import Chunk, Stretch
from tailrace.capture.failures import connection_lost
from tailrace.capture.session import Session, Stopped
from tailrace.capture.transport import Transport
from tailrace.capture.units import Head, RowFrame, Unit
from tailrace.capture.wire import lines
from tailrace.errors import Kind, TailraceError
from tailrace.model import POSTGRES_EPOCH_US
from tailrace.protocol import frames

#: A frame of rows is cut at the first line end after so many bytes came together.
FRAME_BYTES = 1024 * 1024

#: A server that computes (a filter, a slow disk) is quiet for long; its end is noticed by TCP.
SILENCE_S_MAX = 3600.0

RECEIVE_WAIT_S = 0.2

#: Readers of one and the same unit need not hold much: they write in turns.
SHARED_HELD_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class TableProgress:
    """How far one table's snapshot is; the estimate is the server's statistics.

    `rows` are those that were read, in chunks that are done and in those that are under way.
    Changed by several threads, through its methods.
    """

    rows: int
    rows_estimated: int
    done: bool
    chunks: int = 0  # 0: not planned yet
    chunks_done: int = 0
    began_s: float = 0.0  # on the monotonic clock; 0: nothing was read in this run
    rows_before: int = 0  # read before this run
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def plan(self, chunks: int, rows_estimated: int, *, chunks_done: int = 0, rows: int = 0) -> None:
        """The table was planned, or a plan is gone on with."""
        with self._lock:
            self.chunks, self.chunks_done, self.rows_estimated = chunks, chunks_done, rows_estimated
            self.rows = self.rows_before = rows
            self.done = chunks_done == chunks

    def add(self, rows: int, *, chunks: int = 0) -> None:
        """So many rows more were read; so many chunks more are done."""
        with self._lock:
            self.began_s = self.began_s or time.monotonic()
            self.rows += rows
            self.chunks_done += chunks
            self.done = 0 < self.chunks <= self.chunks_done

    def eta_s(self, now_s: float) -> float | None:
        """Return the seconds left at the pace so far; None if it can't be said."""
        if self.done:
            return 0.0
        read = self.rows - self.rows_before
        left = self.rows_estimated - self.rows
        if not self.began_s or read <= 0 or left <= 0:
            return None
        return left * (now_s - self.began_s) / read


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """The COPY of one chunk, as whoever runs it must know it. A plain value, may be pickled.

    `relation` and `table` are the oid and the name under which the rows stand in the log; `stretch`
    is what is locked, and must still be what it was when it was planned.
    """

    relation: int
    table: str
    number: int  # of the chunk
    stretch: Stretch
    command: str


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A chunk to be read, and the unit that it becomes a part of."""

    table: PublishedTable
    chunk: Chunk
    unit: Unit
    where: str
    progress: TableProgress
    shared: bool  # other chunks become parts of the same unit

    @property
    def order(self) -> CopyOrder:
        """What is to be asked of the server."""
        filters = [text for text in (self.table.row_filter, self.where) if text]
        command = self.chunk.copy_command([column.name for column in self.table.columns], filters)
        name = self.table.qualified_name
        return CopyOrder(self.table.oid, name, self.chunk.number, self.chunk.stretch, command)

    def head(self, lsn: int) -> Head:
        """Return what makes the table's schema frames as of `lsn`."""

        def frames_of(now_us: int, in_force: Mapping[str, bytes]) -> bytes:
            table = self.table
            # Facts first: whoever reads the schema frames one by one then finds one version, not two.
            return table.facts_frame(lsn, in_force) + table.schema_frames(lsn, now_us - POSTGRES_EPOCH_US)

        return frames_of


class ChunkCopy:
    """Reads one chunk over a session that is in the window's snapshot.

    :param write: called with the frames of rows in order, each with its number of rows; whole lines
        in COPY's form, their ordinal still 0. The last ones only when the server's count is right.
    :param came: called with a number of rows as soon as they came.
    :param held_bytes: what of a chunk is held in memory before it is first written.
    """

    def __init__(
        self,
        session: Session,
        order: CopyOrder,
        write: Callable[[Sequence[RowFrame]], None],
        stopping: threading.Event,
        *,
        row_bytes_max: int,
        held_bytes: int,
        came: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._session = session
        self._order = order
        self._write_frames = write
        self._stopping = stopping
        self._row_bytes_max = row_bytes_max
        self._held_bytes = held_bytes
        self._came = came
        self._frame = _new_frame()
        self._held: list[RowFrame] = []
        self._size = 0
        self._rows = 0

    def run(self) -> None:
        """Read the chunk and write it.

        :raises TailraceError: `SNAPSHOT_FAILED` if the count is wrong; what the server refused
            with; `SOURCE_UNREACHABLE`.
        :raises Stopped: if stopping was asked for. What `write` raises.
        """
        transport = self._session.copying(self._row_bytes_max, f"copy {self._order.table}")
        try:
            transport.start(self._order.command, SILENCE_S_MAX)
            said = self._receive(transport)
        finally:
            transport.release()
        if said != self._rows:
            raise self._failure(f"the server counts {said} rows, {self._rows} came")
        self._write()

    def _receive(self, transport: Transport) -> int:
        """Take the rows that come; return how many the server says it sent."""
        said: int | None = None
        heard_at = time.monotonic()
        while True:
            received = transport.receive(RECEIVE_WAIT_S)
            if self._stopping.is_set():
                raise Stopped
            if received.nothing:
                if time.monotonic() - heard_at > SILENCE_S_MAX:
                    raise connection_lost(
                        f"copy {self._order.table}", f"nothing came for {SILENCE_S_MAX:g} s"
                    )
                continue
            if len(received.data):
                self._frame += received.data.data
                if len(self._frame) >= FRAME_BYTES:
                    self._cut()
            elif received.message is not None:
                kind, body = received.message
                if kind == b"C":
                    said = int(body.rstrip(b"\0").rpartition(b" ")[2])
                elif kind == b"Z":
                    break
            # Only waiting for the source is silence, not the time that the log took.
            heard_at = time.monotonic()
        self._cut()
        if len(self._frame) > frames.SNAPSHOT_TEXT_AT or said is None:
            raise self._failure("the rows end within a line or without the server's count")
        return said

    def _cut(self) -> None:
        """Make a frame of the whole lines that came and leave what follows them."""
        frame = self._frame
        rows, end = lines(np.frombuffer(frame, np.uint8)[frames.SNAPSHOT_TEXT_AT :])
        end += frames.SNAPSHOT_TEXT_AT
        if len(frame) - end > self._row_bytes_max:
            raise TailraceError(
                Kind.FRAME_TOO_LARGE,
                f"copy {self._order.table}: a row is larger than {self._row_bytes_max} bytes",
                "raise source.frame_bytes_max, if there is memory for such a row",
                {"table": self._order.table},
            )
        if not rows:
            return
        self._frame = _new_frame()
        self._frame += memoryview(frame)[end:]
        del frame[end:]
        struct.pack_into("!cicIQI", frame, 0, b"d", end - 1, b"s", self._order.relation, 0, rows)
        self._held.append((frame, rows))
        self._size += len(frame)
        self._rows += rows
        self._came(rows)
        if self._size > self._held_bytes:
            self._write()

    def _write(self) -> None:
        held, self._held, self._size = self._held, [], 0
        self._write_frames(held)

    @property
    def rows(self) -> int:
        """Rows that came so far."""
        return self._rows

    def _failure(self, found: str) -> TailraceError:
        return TailraceError(
            Kind.SNAPSHOT_FAILED,
            f"copy {self._order.table}: {found}",
            "nothing of this chunk is kept; it is read again at the next start",
            {"table": self._order.table, "chunk": self._order.number},
        )


def _new_frame() -> bytearray:
    return bytearray(frames.SNAPSHOT_TEXT_AT)
