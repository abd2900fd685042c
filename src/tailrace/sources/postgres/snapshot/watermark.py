"""The watermark: the stream waits at a snapshot's LSN until the snapshot's chunks are in the log.

The stream may not run past the point at which rows of a snapshot are to stand. While that
point is not known it keeps behind a limit that surely lies before it; once it is known, the
stream comes up to it, stops between two transactions, and waits until the rows are in the log.
Meanwhile the server's messages wait in the socket.

Two sides use it. The receiving thread passes what came through `pass_`; the snapshot's thread
sets the limit, the point, and lets the stream go on. Only one of them appends: the stream
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

#: A wait looks this often whether there is still something to wait for.
LOOK_S = 0.05

_NONE: Numbers = np.empty(0, np.int64)


class StreamEnded(Exception):  # noqa: N818 - not an error: the connection that it met is over
    """Raised to the snapshot's side when the stream has left."""


class SnapshotWatermark:
    """The watermark at which one connection's stream waits for the snapshots beside it."""

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
        """Whether a snapshot waits for the stream to come to its LSN."""
        return self._point is not None

    def pass_(self, data: Bytes, keep_on: Callable[[], None], appended: Callable[[Bytes], None]) -> None:
        """Append `data`, whole frames, as far and as soon as they may pass.

        :param keep_on: called now and then while waiting; it raises if that is over.
        :param appended: appends; called with runs of frames in order.
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
        """Append that the source has nothing before `wal_end`, as far and as soon as it may pass.

        Nothing that the server sent before it said so may be left to be passed.

        :param append: appends it, for the LSN that it is given.
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
        """The stream is over: end the waits for it."""
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
        """Keep the stream behind `lsn`, or behind where it is already; later calls move that on."""
        with self._changed:
            if self._point is None:
                self._limit = max(lsn, self._appender.tail.position, self._limit or 0)
                self._changed.notify_all()

    def at(self, lsn: int) -> None:
        """Have the stream come up to `lsn` and stop there."""
        with self._changed:
            self._limit = self._point = lsn
            self._changed.notify_all()

    def await_arrival(self, stopping: threading.Event, deadline_s: float) -> bool:
        """Wait until the stream stands at the point; false if it did not come in time.

        :raises StreamEnded: if it never will.
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
        """Raise if the stream does not stand at the point any more.

        :raises StreamEnded: then nothing may be appended.
        """
        if not self._stopped_there:
            raise StreamEnded

    def release(self) -> None:
        """Let the stream go on."""
        with self._changed:
            self._limit = self._point = None
            self._stopped_there = False
            self._changed.notify_all()

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Nothing of the stream is appended while the block runs; keep it short."""
        with self._changed:
            yield

    def set_filters(self, *, leave_out: Iterable[int], watch: Iterable[int]) -> None:
        """From now on, keep rows that change in some relations out of the log, and note of others
        when a row changes its key and is not sent whole.
        """
        with self._changed:
            self._awaiting = np.array(sorted(leave_out), np.int64)
            self._watched = np.array(sorted(watch), np.int64)

    def take_moved(self) -> frozenset[int]:
        """Return the relations of which that was noted since this was last asked."""
        with self._changed:
            moved = frozenset(self._moved)
            self._moved.clear()
            return moved
