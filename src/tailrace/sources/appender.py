"""Appends chunks to the log on the receiving thread, and makes them durable on a second thread.

One fsync covers everything that was appended since the previous one, so the receiver never waits
for the disk. When the disk is full, the same chunk is tried again until there is room; meanwhile
nothing is read from the source, and the status timer keeps the connection alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import structlog

from tailrace import failpoints
from tailrace.backoff import Backoff
from tailrace.changelog.writer import LogWriter, Tail
from tailrace.errors import Kind, Stopped, TailraceError
from tailrace.protocol import frames
from tailrace.protocol.frames import Bytes, Numbers, Summary

log = structlog.get_logger(__name__)

#: Shortest time between two fsyncs, in seconds: more transactions share one.
SYNC_INTERVAL_S = 0.002

FULL_WAIT_S = 0.25
FULL_WAIT_S_MAX = 5.0

SYNC_DEADLINE_S = 300.0


class Appender:
    """The log's writer with its scan state and its syncing thread, while a task runs.

    Only the receiving thread calls `append` and `discard_open_unit`. The syncing thread calls `on_durable`
    after the durable position has increased.
    """

    def __init__(self, writer: LogWriter, stopping: threading.Event) -> None:
        self._writer = writer
        self._stopping = stopping
        self._state: Numbers = writer.scan_state()
        self._changed = threading.Condition()
        self._appends = 0
        self._synced = 0
        self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._sync_loop, name="tailrace-sync", daemon=True)
        self.on_durable: Callable[[], None] = lambda: None
        self.waiting_for_disk = False
        self.rows = 0
        self.bytes = 0

    def start(self) -> None:
        """Start the syncing thread."""
        self._thread.start()

    @property
    def tail(self) -> Tail:
        """The last appended boundary."""
        return self._writer.tail

    @property
    def durable(self) -> Tail:
        """The last durable boundary."""
        return self._writer.durable

    @property
    def schema_in_force(self) -> dict[str, bytes]:
        """Schema frames in force, by key."""
        return self._writer.schema_in_force

    @property
    def unit_open(self) -> bool:
        """Whether the log ends inside a transaction or snapshot."""
        return bool(self._state[frames.OPEN] != frames.NOTHING_OPEN)

    def check_fence(self) -> None:
        """Raise an error if this writer may no longer append or acknowledge.

        :raises TailraceError: `LOG_FENCED`, `LOG_WRITE_FAILED`.
        """
        self._writer.check_fence()

    def append(self, chunk: Bytes) -> Summary:
        """Append complete frames; wait while the disk is full.

        :raises TailraceError: `PROTOCOL_VIOLATION` if they are invalid; the error that ended the writer.
        :raises Stopped: if the task was asked to stop while the disk was full.
        """
        self.raise_failure()
        summary = frames.summarise(chunk, self._state)
        self._write(chunk, summary)
        return summary

    def append_progress(self, position: int, before: bytes = b"", *, time_us: int | None = None) -> None:
        """Append `before`, then a frame which says that the source has no further changes before `position`.

        :param time_us: the source's clock, in microseconds since 1970; default: this machine's clock.
        """
        now_us = time.time_ns() // 1000 if time_us is None else time_us
        frame = frames.control_frame(frames.PROGRESS, position, now_us, {})
        self.append(np.frombuffer(before + frame, np.uint8))

    def discard_open_unit(self) -> None:
        """Truncate the log to its last boundary: the source sends whole transactions again."""
        self.raise_failure()
        self._writer.discard_open_unit()
        self._state = self._writer.scan_state()

    def sync(self) -> Tail:
        """Wait until everything appended so far is durable; return the durable tail.

        :raises TailraceError: the error that ended the writer.
        """
        until = time.monotonic() + SYNC_DEADLINE_S
        with self._changed:
            target = self._appends
            while self._synced < target and self._error is None:
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() > until:
                    raise TailraceError(
                        Kind.LOG_WRITE_FAILED,
                        f"make the change log durable: the disk took longer than {SYNC_DEADLINE_S:g} s",
                        "check the disk under log.path, then start again: the source sends again what was "
                        "not acknowledged",
                    )
        self.raise_failure()
        return self._writer.durable

    def raise_failure(self) -> None:
        """Raise the error that ended the syncing thread, if there is one, on the calling thread."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the syncing thread after a last fsync, and close the writer.

        :raises TailraceError: the error that ended the writer.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(SYNC_DEADLINE_S)
        self._writer.close()

    def _write(self, chunk: Bytes, summary: Summary) -> None:
        failpoints.hit("capture.before_append")
        self._append(chunk, summary)
        failpoints.hit("capture.after_append")
        self.rows += summary.rows
        self.bytes += summary.size
        with self._changed:
            self._appends += 1
            self._changed.notify_all()

    def _append(self, chunk: Bytes, summary: Summary) -> None:
        backoff = Backoff(first_s=FULL_WAIT_S, longest_s=FULL_WAIT_S_MAX)
        while True:
            try:
                self._writer.append(chunk, summary)
            except TailraceError as error:
                if error.kind is not Kind.LOG_FULL:
                    raise
                if not self.waiting_for_disk:
                    log.warning("the disk under the log is full: waiting for room", error=str(error))
                self.waiting_for_disk = True
                if self._stopping.wait(backoff.wait_s):
                    raise Stopped from None
                self.raise_failure()
                backoff = backoff.failed()
            else:
                if self.waiting_for_disk:
                    log.info("there is room for the log again")
                self.waiting_for_disk = False
                return

    def _sync_loop(self) -> None:
        notified = self._writer.durable.position
        try:
            while True:
                with self._changed:
                    while self._synced == self._appends and not self._closed:
                        self._changed.wait(1.0)
                    if self._synced == self._appends:
                        return
                    target = self._appends
                position = self._writer.sync().position
                with self._changed:
                    self._synced = target
                    self._changed.notify_all()
                if position > notified:  # also if another thread made it durable
                    notified = position
                    self.on_durable()
                time.sleep(SYNC_INTERVAL_S)
        except Exception as error:  # noqa: BLE001 - raised again on the receiving thread
            with self._changed:
                self._error = error
                self._changed.notify_all()
