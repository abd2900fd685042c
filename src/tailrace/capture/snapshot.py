"""The initial snapshot: rows that existed before the slot, in the same log as what follows.

Creating the slot exports a snapshot of the database as of the slot's consistent point. A
second session takes it over before anything else happens, and copies each published table out
of it: every change after that point comes through the slot, every row before it from here,
none from both.

The log gets one unit: 'B', then for each table its schema frames, facts and rows, then 'E'.
Readers see nothing of it before its end. What is cut short is cut off the log and begun
again, with a new slot.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import structlog

from tailrace import failpoints
from tailrace.capture import server
from tailrace.capture.appender import Appender
from tailrace.capture.catalog import PublishedTable, published_tables
from tailrace.capture.failures import connection_lost
from tailrace.capture.session import Session, Stopped, quote_literal
from tailrace.capture.transport import Transport
from tailrace.capture.wire import lines
from tailrace.config.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import POSTGRES_EPOCH_US, format_lsn
from tailrace.protocol import frames

log = structlog.get_logger(__name__)

#: A frame of rows is cut at the first line end after so many bytes came together.
FRAME_BYTES = 1024 * 1024

#: A server that computes (a filter, a slow disk) is quiet for long; its end is noticed by TCP.
SILENCE_S_MAX = 3600.0


@dataclass(slots=True)
class TableProgress:
    """How far one table's snapshot is; the estimate is the server's statistics."""

    rows: int
    rows_estimated: int
    done: bool


class Snapshot:
    """Copies what the publication sends, as of `created`, into the log.

    :param slot: checked after each table, so that its loss is not noticed hours later; None if
        it is a temporary one that may go.
    :param progress: filled as it goes, by qualified name.
    """

    def __init__(
        self,
        appender: Appender,
        stopping: threading.Event,
        *,
        slot: str | None,
        source: PostgresSource,
        frame_bytes_max: int,
        progress: dict[str, TableProgress],
    ) -> None:
        self._appender = appender
        self._stopping = stopping
        self._slot = slot
        self._source = source
        self._frame_bytes_max = frame_bytes_max
        self._progress = progress
        self._ordinal = 0

    def take(self, session: Session, created: server.CreatedSlot) -> None:
        """Copy all tables into the log and make them durable.

        :param session: a fresh session for SQL. The one that created the slot stays as it is.
        :raises TailraceError: `SNAPSHOT_FAILED`; `SLOT_INVALIDATED` or `SLOT_MISSING` if the slot
            was lost meanwhile; what the server refused with.
        """
        self._import(session, created.snapshot)
        lsn, now_us = created.consistent_point, time.time_ns() // 1000
        tables = published_tables(session, self._source)
        for table in tables:
            self._progress[table.qualified_name] = TableProgress(0, table.rows_estimated, done=False)
        content = {"tables": [table.qualified_name for table in tables]}
        self._append(frames.control_frame(frames.SNAPSHOT_BEGIN, lsn, now_us, content))
        for table in tables:
            self._copy(session, table, lsn, now_us)
            self._check_slot(session)
        session.run("COMMIT", "end the snapshot")
        self._append(frames.control_frame(frames.SNAPSHOT_END, lsn, now_us, {"rows": self._ordinal}))
        self._appender.sync()
        log.info("snapshot done", tables=len(tables), rows=self._ordinal, position=format_lsn(lsn))

    def facts_only(self, session: Session, created: server.CreatedSlot) -> None:
        """Write the tables' facts and the consistent point, without rows."""
        self._import(session, created.snapshot)
        lsn, now_us = created.consistent_point, time.time_ns() // 1000
        tables = published_tables(session, self._source)
        session.run("COMMIT", "end the snapshot")
        chunk = b"".join(table.facts_frame(lsn) for table in tables)
        self._append(chunk + frames.control_frame(frames.PROGRESS, lsn, now_us, {}))
        self._appender.sync()

    @staticmethod
    def _import(session: Session, snapshot: str) -> None:
        session.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "begin the snapshot")
        session.run(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot)}", "take over the slot's snapshot")

    def _copy(self, session: Session, table: PublishedTable, lsn: int, now_us: int) -> None:
        # Facts first: whoever reads the schema frames one by one then finds one version, not two.
        self._append(table.facts_frame(lsn) + table.schema_frames(lsn, now_us - POSTGRES_EPOCH_US))
        progress = self._progress[table.qualified_name]
        transport = session.copying(self._frame_bytes_max)
        transport.start(table.copy_command(), SILENCE_S_MAX)
        before = self._ordinal
        said = self._copy_rows(transport, table, progress)
        transport.release()
        written = self._ordinal - before
        if said != written:
            raise TailraceError(
                Kind.SNAPSHOT_FAILED,
                f"copy {table.qualified_name}: the server counts {said} rows, {written} came",
                "nothing of the snapshot is kept; it begins again at the next start",
                {"table": table.qualified_name},
            )
        progress.done = True

    def _copy_rows(self, transport: Transport, table: PublishedTable, progress: TableProgress) -> int:
        """Write the rows that come; return how many the server says it sent."""
        rest = bytearray()
        said: int | None = None
        heard_at = time.monotonic()
        while True:
            received = transport.receive(0.2)
            if self._stopping.is_set():
                raise Stopped
            if received.nothing:
                if time.monotonic() - heard_at > SILENCE_S_MAX:
                    raise connection_lost(
                        f"copy {table.qualified_name}", f"nothing came for {SILENCE_S_MAX:g} s"
                    )
                continue
            heard_at = time.monotonic()
            if len(received.data):
                rest += received.data.data
                if len(rest) >= FRAME_BYTES:
                    self._flush(table, rest, progress)
            elif received.message is not None:
                kind, body = received.message
                if kind == b"C":
                    said = int(body.rstrip(b"\0").rpartition(b" ")[2])
                elif kind == b"Z":
                    break
        self._flush(table, rest, progress)
        if rest or said is None:
            raise TailraceError(
                Kind.SNAPSHOT_FAILED,
                f"copy {table.qualified_name}: the rows end within a line or without the server's count",
                "nothing of the snapshot is kept; it begins again at the next start",
                {"table": table.qualified_name},
            )
        return said

    def _flush(self, table: PublishedTable, rest: bytearray, progress: TableProgress) -> None:
        """Write the whole lines of `rest` as one frame and leave what follows them."""
        rows, end = lines(np.frombuffer(rest, np.uint8))
        if len(rest) - end > self._frame_bytes_max:
            raise TailraceError(
                Kind.FRAME_TOO_LARGE,
                f"copy {table.qualified_name}: a row is larger than {self._frame_bytes_max} bytes",
                "raise source.frame_bytes_max, if there is memory for such a row",
                {"table": table.qualified_name},
            )
        if not rows:
            return
        frame = frames.snapshot_frame(table.oid, self._ordinal, rows, bytes(memoryview(rest)[:end]))
        self._append(frame)
        del rest[:end]
        self._ordinal += rows
        progress.rows += rows
        failpoints.hit("snapshot.in_copy")

    def _check_slot(self, session: Session) -> None:
        if self._slot is None:
            return
        # The view shows the slot as it is now, whatever snapshot the transaction reads.
        slot = server.slot_facts(session, self._slot)
        if slot is None or slot.invalidation:
            raise TailraceError(
                Kind.SLOT_INVALIDATED,
                f"take the snapshot: the slot {self._slot!r} "
                + ("was dropped" if slot is None else f"was invalidated ({slot.invalidation})")
                + " meanwhile",
                "raise max_slot_wal_keep_size; the snapshot begins again at the next start",
                {"slot": self._slot},
            )

    def _append(self, frame: bytes) -> None:
        self._appender.append(np.frombuffer(frame, np.uint8))
