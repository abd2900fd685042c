"""Receives one connection's stream, drops what the log has, appends the rest, and detects silence.

Everything here runs on the receiving thread. The status timer and the fsync have separate
threads, whose errors are raised here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tailrace.errors import REPORT_STREAM, Kind, Stopped, TailraceError
from tailrace.model import POSTGRES_EPOCH_US, format_lsn
from tailrace.protocol import frames
from tailrace.sources.postgres.connection.errors import STREAMING, UNTIL_BACK, connection_lost
from tailrace.sources.postgres.connection.text_encoding import TextEncoding
from tailrace.sources.postgres.connection.transport import Keepalive, Transport
from tailrace.sources.postgres.snapshot.watermark import SnapshotWatermark
from tailrace.sources.postgres.streaming.appender import PostgresAppender
from tailrace.sources.postgres.streaming.frame_filters import MessageFilter, ResumptionFilter
from tailrace.sources.postgres.streaming.standby_status import StatusTimer
from tailrace.sources.postgres.streaming.timeline import StandbyTimeline

log = structlog.get_logger(__name__)

#: Longest wait of one receive, in seconds; a request to stop is noticed within this time.
RECEIVE_WAIT_S = 0.2
#: The same while a snapshot waits until the stream reaches its LSN.
EXPECTED_WAIT_S = 0.02

#: Without captured changes, the log's position follows the server's WAL end when it is this many bytes
#: behind, or after the heartbeat's interval, so the server can remove WAL of other tables.
IDLE_PROGRESS_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class AwaitedPosition:
    """The position for which `caught_up` waits; an idle receiver moves the log's position to it."""

    position: int = 0


class Stream:
    """Receives from one started transport until the connection ends or the task is asked to stop.

    :param messages: drops logical messages that are not captured.
    :param timeline: of a server that is a standby; None: it can't change.
    :param encoding: converts the received text to UTF-8; None: it is UTF-8.
    :param raise_others: raises the error of another thread of this connection, if it has ended.
    :param silence_s: after this time without any message, the connection counts as lost.
    :param idle_s: after this time without a change, the log's position follows the server's.
    """

    def __init__(
        self,
        transport: Transport,
        appender: PostgresAppender,
        status: StatusTimer,
        stopping: threading.Event,
        *,
        silence_s: float,
        idle_s: float,
        wanted: AwaitedPosition,
        snapshot_watermark: SnapshotWatermark,
        messages: MessageFilter,
        timeline: StandbyTimeline | None,
        encoding: TextEncoding | None,
        raise_others: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._appender = appender
        self._status = status
        self._stopping = stopping
        self._silence_s = silence_s
        self._idle_s = idle_s
        self._wanted = wanted
        self._snapshot_watermark = snapshot_watermark
        self._messages = messages
        self._timeline = timeline
        self._encoding = encoding
        self._raise_others = raise_others
        self._filter = ResumptionFilter(appender.tail.position)
        self._progress_at = time.monotonic()
        self.server_end = appender.tail.position
        self.heard = False  # any message was received
        self.is_any_transaction = False  # was appended
        self.was_silent = False  # the connection was ended because of silence

    def run(self) -> None:
        """Receive until the task is asked to stop.

        :raises TailraceError: the error that ended the connection, the log, or the status timer.
        :raises Stopped: if the task was asked to stop while the disk was full or a snapshot was awaited.
        """
        heard_at = time.monotonic()
        asked = False
        while not self._stopping.is_set():
            expected = self._snapshot_watermark.expected
            received = self._transport.receive(EXPECTED_WAIT_S if expected else RECEIVE_WAIT_S)
            self._raise_failures()
            if received.nothing:
                self._settle()
                if expected:
                    self._status.ask()  # an idle server sends its position only on request
                if not received.silent:  # a part of a large message, which may take longer than the timeout
                    heard_at, asked = time.monotonic(), False
                silent_s = time.monotonic() - heard_at
                if silent_s > self._silence_s:
                    self.was_silent = True
                    raise connection_lost(STREAMING, f"nothing came for {silent_s:.0f} s")
                if silent_s > self._silence_s / 2 and not asked:
                    asked = True
                    self._status.ask()
                continue
            if received.message is not None:
                raise _ended(received.message[0])
            self._take(received.data, received.keepalive)
            # Only waiting for the source counts as silence, not the time that the log's disk needed.
            heard_at, asked, self.heard = time.monotonic(), False, True

    def _settle(self) -> None:
        """Append facts that have become known, even if no change is received that they precede."""
        appender = self._appender
        if appender.unit_open or (facts := appender.settled_facts()) is None:
            return
        tail = appender.tail
        appender.append_progress(tail.position, facts.tobytes(), time_us=tail.position_time_us)

    def _take(self, data: frames.Bytes, keepalive: Keepalive | None) -> None:
        if len(data) and not self._filter.done:
            data = self._filtered(data)
        if self._timeline is not None:
            self._timeline.before_append(data, unit_open=self._appender.unit_open)
            if keepalive is not None:
                self._timeline.before_position(keepalive.wal_end)
        if len(data) and self._encoding is not None:
            data = self._encoding.changes(data)
        data = self._messages.apply(data)
        if len(data):
            self._snapshot_watermark.pass_(data, self._keep_on, self._append)
        if keepalive is not None:
            if keepalive.reply_wanted:
                self._status.reply()
            self.server_end = max(self.server_end, keepalive.wal_end)
            self._follow(keepalive)

    def _append(self, data: frames.Bytes) -> None:
        summary = self._appender.append(data)
        self.server_end = max(self.server_end, summary.position)
        if summary.units:
            self.is_any_transaction = True
            self._progress_at = time.monotonic()

    def _follow(self, keepalive: Keepalive) -> None:
        """Let the log's position follow an idle server's WAL end.

        That is the end of the WAL that the server has decoded, and it has sent everything before it.
        """
        position = self._appender.tail.position
        ahead = keepalive.wal_end - position
        if ahead < 0 or self._appender.unit_open:
            return
        now = time.monotonic()
        due = ahead > 0 and (
            keepalive.reply_wanted  # a server that shuts down waits until its end is acknowledged
            or position < self._wanted.position
            or ahead > IDLE_PROGRESS_BYTES
            or now - self._progress_at >= self._idle_s
        )
        if due or self._snapshot_watermark.expected:
            time_us = keepalive.clock_us + POSTGRES_EPOCH_US
            self._snapshot_watermark.progress(
                keepalive.wal_end, self._keep_on, lambda lsn: self._append_progress(lsn, time_us)
            )

    def _append_progress(self, lsn: int, time_us: int) -> None:
        if lsn > self._appender.tail.position:
            self._appender.append_progress(lsn, time_us=time_us)
        self._progress_at = time.monotonic()

    def _keep_on(self) -> None:
        self._raise_failures()
        if self._stopping.is_set():
            raise Stopped

    def _filtered(self, data: frames.Bytes) -> frames.Bytes:
        before = self._filter.dropped
        left = self._filter.apply(data)
        if self._filter.done and self._filter.dropped:
            log.info(
                "dropped transactions that the log already has",
                transactions=self._filter.dropped,
                position=format_lsn(self._appender.tail.position),
            )
        elif self._filter.dropped and not before:
            log.info("the server begins with transactions that the log already has")
        return left

    def _raise_failures(self) -> None:
        self._appender.raise_failure()
        if self._status.error is not None:
            raise self._status.error
        self._raise_others()


def _ended(kind: bytes) -> TailraceError:
    """Return the error for a message that is not data and that the transport does not handle."""
    if kind in {b"c", b"C"}:
        return TailraceError(
            Kind.SOURCE_SHUTTING_DOWN,
            "read the stream: the server ended it, as it does when it shuts down",
            UNTIL_BACK,
        )
    return TailraceError(
        Kind.PROTOCOL_VIOLATION,
        f"read the stream: unexpected message of type {kind!r}",
        REPORT_STREAM,
    )
