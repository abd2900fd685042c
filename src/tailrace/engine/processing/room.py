"""How much a task may have under way, and the gate before each call of a handler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing.tally import Tally

#: How often who waits for room looks whether the engine wants the task to end.
_LOOK_S = 0.05


class Room:
    """Counts batches and bytes under way. Handlers are called, and what they did is marked, through it.

    The gate is shut once something failed, a handler wanted the end, or what is under way was given
    up; in the last case nothing is marked any more either. Any thread.

    :param stopping: set when the task is to end: then nobody waits for room any more.
    :param tally: is told what becomes of batches, until they are given up.
    """

    def __init__(self, batches_max: int, bytes_max: int, stopping: threading.Event, tally: Tally) -> None:
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._stopping = stopping
        self._tally = tally
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._batches = 0
        self._bytes = 0
        self._calls = 0
        self._given_up = False
        self._failure: BaseException | None = None
        #: Set once no handler is called any more.
        self.shut = threading.Event()

    @property
    def batches(self) -> int:
        """Batches under way."""
        return self._batches

    def take(self, size_bytes: int) -> None:
        """Wait until there is room for a batch, and take it. One batch always has room."""
        with self._lock:
            while (
                self._batches
                and (self._batches >= self._batches_max or self._bytes + size_bytes > self._bytes_max)
                and not self.shut.is_set()
                and not self._stopping.is_set()
            ):
                self._changed.wait(_LOOK_S)
            self._batches += 1
            self._bytes += size_bytes
            self._note_under_way()

    def give_back(self, size_bytes: int, *, delivered: int, polled: int) -> None:
        """Hear that a batch is done.

        :param delivered: how many of its records were handed over, of the `polled`.
        """
        with self._lock:
            self._batches -= 1
            self._bytes -= size_bytes
            self._note_under_way()
            if not self._given_up:
                self._tally.delivered += delivered
                self._tally.dropped += max(0, polled - delivered)
            self._changed.notify_all()

    def handled(self, began_s: float) -> None:
        """Hear that handlers were called on this thread since `began_s`, of `time.monotonic`."""
        with self._lock:
            self._tally.handling_s += time.monotonic() - began_s

    def tried_again(self) -> None:
        """Hear that something failed and is tried again."""
        with self._lock:
            self._tally.retries += 1

    def enter(self) -> bool:
        """Tell whether a handler may be called now; then `leave` must follow."""
        with self._lock:
            if self.shut.is_set():
                return False
            self._calls += 1
            return True

    def leave(self, mark: Callable[..., None] | None = None, *args: Any) -> None:
        """Hear that a call has ended, and mark what it did, unless that was given up meanwhile."""
        with self._lock:
            self._calls -= 1
            if mark is not None and not self._given_up:
                mark(*args)
            if self.shut.is_set():
                self._changed.notify_all()

    def mark(self, mark: Callable[..., None], *args: Any) -> None:
        """Mark what no handler had to be called for, unless that was given up."""
        with self._lock:
            if not self._given_up:
                mark(*args)

    def fail(self, error: BaseException) -> None:
        """Deliver nothing more: something went wrong, or a handler wants the end (`StopEngine`)."""
        with self._lock:
            # The first counts; but an error for more than a wish.
            if self._failure is None or isinstance(self._failure, StopEngine):
                self._failure = error
            self.shut.set()
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; after a failure, until no handler runs. Tell the first."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while self._calls if self.shut.is_set() else self._batches:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._batches == 0

    def give_up(self) -> None:
        """Have nothing more delivered or marked."""
        with self._lock:
            if not self._given_up:
                self._tally.batches = self._tally.size_bytes = 0
            self._given_up = True
            self.shut.set()
            self._changed.notify_all()

    def _note_under_way(self) -> None:
        # Under the lock. What was given up is no longer this task's; the next life has a room of its own.
        if not self._given_up:
            self._tally.batches, self._tally.size_bytes = self._batches, self._bytes
