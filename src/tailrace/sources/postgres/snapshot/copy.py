"""One chunk by COPY: what the server sends becomes frames of rows, as they are.

A chunk counts when the command has completed and the server's own count of rows is the number
that came. Until then its rows are held in memory, or, when they are more than may be held,
stand in a unit of the log that is not closed yet.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.errors import Kind, Stopped, TailraceError
from tailrace.model import POSTGRES_EPOCH_US
from tailrace.protocol import frames
from tailrace.sources.postgres.connection.backend_messages import lines
from tailrace.sources.postgres.connection.errors import condition_failure, connection_lost, of_condition
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.connection.transport import Transport
from tailrace.sources.postgres.schema.catalog import PublishedTable
from tailrace.sources.postgres.schema.table_metadata import KnownFacts
from tailrace.sources.postgres.snapshot.chunk_writer import Head, RowFrame, Unit
from tailrace.sources.postgres.snapshot.chunks import Chunk
from tailrace.sources.progress import TableProgress

#: A frame of rows is cut at the first line end after so many bytes came together.
FRAME_BYTES = 1024 * 1024

#: A server that computes (a filter, a slow disk) is quiet for long; its end is noticed by TCP.
SILENCE_S_MAX = 3600.0

#: The stream waits for a chunk that is read beside it. What computes longer than this between two rows
#: is not let hold it up when it was written for one snapshot alone.
CONDITION_S_MAX = 300.0

RECEIVE_WAIT_S = 0.2

#: Readers of one and the same unit need not hold much: they write in turns.
SHARED_HELD_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A chunk to be read, and the unit that it becomes a part of."""

    table: PublishedTable
    chunk: Chunk
    unit: Unit
    where: str
    progress: TableProgress
    shared: bool  # other chunks become parts of the same unit
    conditional: bool = False  # `where` has what somebody wrote for this snapshot

    def command(self) -> str:
        """Return the COPY that reads the chunk."""
        filters = [text for text in (self.table.row_filter, self.where) if text]
        return self.chunk.copy_command([column.name for column in self.table.columns], filters)

    def head(self, lsn: int, name_of: Callable[[int], tuple[str, str] | None] = lambda _: None) -> Head:
        """Return what makes the table's schema frames as of `lsn`.

        :param name_of: as `PublishedTable.facts_frame` takes it.
        """

        def frames_of(now_us: int, in_force: KnownFacts) -> bytes:
            table = self.table
            # Facts first: whoever reads the schema frames one by one then finds one version, not two.
            facts = table.facts_frame(lsn, in_force, name_of)
            return facts + table.schema_frames(lsn, now_us - POSTGRES_EPOCH_US)

        return frames_of


class ChunkCopy:
    """Reads one chunk over a session that is in the window's snapshot.

    :param write: called with the frames of rows in order, each with its number of rows; whole lines
        in COPY's form, their ordinal still 0. The last ones only when the server's count is right.
    :param held_bytes: what of a chunk is held in memory before it is first written.
    """

    def __init__(
        self,
        session: Session,
        job: ChunkJob,
        write: Callable[[Sequence[RowFrame]], None],
        stopping: threading.Event,
        *,
        row_bytes_max: int,
        held_bytes: int,
    ) -> None:
        self._session = session
        self._encoding = session.row_encoding
        self._job = job
        self._table = job.table.qualified_name
        self._write_frames = write
        self._stopping = stopping
        self._row_bytes_max = row_bytes_max
        self._held_bytes = held_bytes
        self._frame = _new_frame()
        self._held: list[RowFrame] = []
        self._size = 0
        self._rows = 0

    def run(self) -> None:
        """Read the chunk and write it.

        :raises TailraceError: `SNAPSHOT_FAILED` if the count is wrong, or the condition that somebody
            wrote fails or takes too long; what the server refused with; `SOURCE_UNREACHABLE`.
        :raises Stopped: if stopping was asked for. What `write` raises.
        """
        transport = self._session.copying(self._row_bytes_max, f"copy {self._table}")
        began = time.monotonic()
        try:
            command = self._session.encoded(self._job.command())
            transport.start(command, SILENCE_S_MAX, lambda: self._check(began))
            said = self._receive(transport)
        except TailraceError as error:
            if self._job.conditional:
                raise of_condition(error, f"copy {self._table}") from None
            raise
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
            self._check(heard_at if received.nothing else time.monotonic())
            if received.nothing:
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
                f"copy {self._table}: a row is larger than {self._row_bytes_max} bytes",
                "raise source.frame_bytes_max, if there is memory for such a row",
                {"table": self._table},
            )
        if not rows:
            return
        self._frame = _new_frame()
        self._frame += memoryview(frame)[end:]
        del frame[end:]
        if self._encoding is not None:
            frame[frames.SNAPSHOT_TEXT_AT :] = self._encoding.rows(bytes(frame[frames.SNAPSHOT_TEXT_AT :]))
        struct.pack_into("!cicIQI", frame, 0, b"d", len(frame) - 1, b"s", self._job.table.oid, 0, rows)
        self._held.append((frame, rows))
        self._size += len(frame)
        self._rows += rows
        self._job.progress.add(rows)
        if self._size > self._held_bytes:
            self._write()

    def _write(self) -> None:
        held, self._held, self._size = self._held, [], 0
        self._write_frames(held)

    @property
    def rows(self) -> int:
        """Rows that came so far."""
        return self._rows

    def _check(self, heard_at: float) -> None:
        """Raise `Stopped` if that was asked for, an error if the server has been silent for too long."""
        if self._stopping.is_set():
            raise Stopped
        silence_s_max = CONDITION_S_MAX if self._job.conditional else SILENCE_S_MAX
        if time.monotonic() - heard_at <= silence_s_max:
            return
        attempted, found = f"copy {self._table}", f"nothing came for {silence_s_max:g} s"
        if self._job.conditional:
            raise condition_failure(attempted, found)
        raise connection_lost(attempted, found)

    def _failure(self, found: str) -> TailraceError:
        return TailraceError(
            Kind.SNAPSHOT_FAILED,
            f"copy {self._table}: {found}",
            "nothing of this chunk is kept; it is read again at the next start",
            {"table": self._table, "chunk": self._job.chunk.number},
        )


def _new_frame() -> bytearray:
    return bytearray(frames.SNAPSHOT_TEXT_AT)
