"""The watermark: the stream waits at a snapshot's LSN until the snapshot's chunks are in the log.

The stream must not pass the point at which rows of a snapshot belong. While that point is
unknown, the stream stays behind a limit that is certainly before it. Once it is known, the
stream advances to it, stops between two transactions, and waits until the rows are in the log.
Meanwhile the server's messages wait in the socket.

The receiving thread passes what it received through `pass_`; the snapshot's thread sets the
limit and the point, and releases the stream. Only one of them appends at a time: the stream
while it passes, the snapshot while the stream is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from tailrace.errors import Stopped
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.sources.postgres.streaming import frame_filters
from tailrace.sources.postgres.streaming.appender import PostgresAppender

#: Interval, in seconds, at which a waiting thread checks whether it must still wait.
LOOK_S = 0.05

_NONE: Numbers = np.empty(0, np.int64)


class StreamEnded(Exception):  # noqa: N818 - not an error: the connection that it met is over
    """Raised on the snapshot's thread when the stream has ended."""


class SnapshotWatermark:
    """The watermark at which one connection's stream waits for snapshots."""

    def __init__(self, appender: PostgresAppender) -> None:
        self._appender = appender
        self._changed = threading.Condition()
        self._limit: int | None = None  # commit records at or after it must wait
        self._point: int | None = None  # the snapshot's LSN, when it is known
        self._stopped_there = False
        self._over = False
        self._awaiting: Numbers = _NONE
        self._watched: Numbers = _NONE
        self._moved: set[int] = set()

    # The receiving thread

    @property
    def expected(self) -> bool:
        """Whether a snapshot waits until the stream reaches its LSN."""
        return self._point is not None

    def pass_(self, data: Bytes, keep_on: Callable[[], None], appended: Callable[[Bytes], None]) -> None:
        """Append `data`, complete frames; wait before those that may not pass the watermark yet.

        :param keep_on: called repeatedly while waiting; raises an error to end the wait.
        :param appended: appends frames; called with runs of them in order.
        """
        while len(data):
            with self._changed:
                end = len(data)
                if self._limit is not None:
                    end = frame_filters.before(data, self._limit, unit_open=self._appender.unit_open)
                now, data = data[:end], data[end:]
                if len(self._awaiting):
                    now = frame_filters.without(now, self._awaiting)
                if len(self._watched):
                    self._moved.update(frame_filters.moved(now, self._watched))
                if len(now):
                    appended(now)
                if len(data):
                    self._wait(keep_on)

    def progress(self, wal_end: int, keep_on: Callable[[], None], append: Callable[[int], None]) -> None:
        """Append that the source has no further changes before `wal_end`; wait if that is not allowed yet.

        Everything that the server sent before must have been passed.

        :param append: appends this for the given LSN.
        """
        while True:
            with self._changed:
                if self._limit is None or wal_end < self._limit:
                    append(wal_end)
                    return
                if self._point is None:
                    if self._limit > self._appender.tail.position:
                        append(self._limit)
                    return
                self._wait(keep_on)

    def leave(self) -> None:
        """Note that the stream has ended, and end the waits for it."""
        with self._changed:
            self._over = True
            self._stopped_there = False
            self._changed.notify_all()

    def _wait(self, keep_on: Callable[[], None]) -> None:
        limit = self._limit
        if self._point is not None:
            self._stopped_there = True
            self._changed.notify_all()
        try:
            while self._limit == limit and (self._stopped_there or self._point is None):
                self._changed.wait(LOOK_S)
                keep_on()
        finally:
            self._stopped_there = False

    # The snapshot's thread

    def hold(self, lsn: int) -> None:
        """Keep the stream before `lsn`, or at its present position if that is later; may be called again."""
        with self._changed:
            if self._point is None:
                self._limit = max(lsn, self._appender.tail.position, self._limit or 0)
                self._changed.notify_all()

    def at(self, lsn: int) -> None:
        """Let the stream advance to `lsn` and stop there."""
        with self._changed:
            self._limit = self._point = lsn
            self._changed.notify_all()

    def await_arrival(self, stopping: threading.Event, deadline_s: float) -> bool:
        """Wait until the stream has stopped at the point; return False if it did not within `deadline_s`.

        :raises StreamEnded: if the stream has ended.
        :raises Stopped: if `stopping` was set.
        """
        until = time.monotonic() + deadline_s
        with self._changed:
            while not self._stopped_there:
                if self._over:
                    raise StreamEnded
                if stopping.is_set():
                    raise Stopped
                if time.monotonic() > until:
                    return False
                self._changed.wait(LOOK_S)
            return True

    def require_arrived(self) -> None:
        """Check that the stream is still stopped at the point.

        :raises StreamEnded: if not; then nothing may be appended.
        """
        if not self._stopped_there:
            raise StreamEnded

    def release(self) -> None:
        """Let the stream continue."""
        with self._changed:
            self._limit = self._point = None
            self._stopped_there = False
            self._changed.notify_all()

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Keep the stream from appending while the block runs, which must be short."""
        with self._changed:
            yield

    def set_filters(self, *, leave_out: Iterable[int], watch: Iterable[int]) -> None:
        """From now on, leave out changes of the relations `leave_out`, and note for the relations `watch`
        when a row changes its key and is not sent completely.
        """
        with self._changed:
            self._awaiting = np.array(sorted(leave_out), np.int64)
            self._watched = np.array(sorted(watch), np.int64)

    def take_moved(self) -> frozenset[int]:
        """Return the relations for which that was noted since the last call."""
        with self._changed:
            moved = frozenset(self._moved)
            self._moved.clear()
            return moved
