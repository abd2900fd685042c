"""Delivery in order: of whole batches, or record by record, on a thread of the task's own."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from tailrace.engine.contracts import Committer, StopEngine
from tailrace.engine.processing.handlers import Takes, check_done, where
from tailrace.engine.processing.room import Room
from tailrace.engine.processing.stage import Ready, Stager, Staging
from tailrace.engine.processing.terms import Means, Terms
from tailrace.engine.retrying import GivenUpError
from tailrace.records.batch import Batch, Offset


class Serial:
    """Delivers one thing after another, in the order in which batches were put in."""

    def __init__(self, terms: Terms, means: Means, stager: Stager | None) -> None:
        self._stager = stager
        self._handler = terms.handler
        self._room = means.room
        self._committer = means.committer
        self._guarded = _Guarded(means.committer, means.room)
        self._staging = means.retrying(terms, "transformation and conversion")
        self._retrying = means.retrying(terms, "handler")
        self._waiting: queue.SimpleQueue[Staging | None] = queue.SimpleQueue()

    def put(self, batch: Batch) -> None:
        """Have a batch staged, and delivered after those before it."""
        self._waiting.put(Staging(batch, self._stager))

    def wake(self) -> None:
        """Have `run` return once it has heard that nothing more is delivered."""
        self._waiting.put(None)

    def run(self) -> None:
        """Deliver until `wake`; on the delivering thread."""
        while (staging := self._waiting.get()) is not None:
            if self._room.shut.is_set():
                staging.cancel()
                continue
            try:
                ready = self._staging.call(staging.result)
                self._deliver(ready)
            except (GivenUpError, CancelledError):
                continue
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                self._room.fail(error)
                continue
            batch = ready.batch
            self._room.give_back(staging.size_bytes, delivered=len(batch), polled=batch.polled)

    def _deliver(self, ready: Ready) -> None:
        began_s = time.monotonic()
        try:
            self._hand_over(ready)
        finally:
            self._room.handled(began_s)
        self._committer.mark_batch_finished(ready.batch)

    def _hand_over(self, ready: Ready) -> None:
        batch, committer = ready.batch, self._committer
        if not len(ready.given):
            self._room.mark(committer.mark_processed, batch)
        elif self._handler.takes is Takes.BATCH:
            self._call(committer.mark_processed, batch, None, ready.given)
        else:
            self._room.mark(committer.mark_dropped, batch)
            if self._handler.takes is Takes.RECORD:
                for place, given in ready.by_record():
                    for one in given[:-1]:
                        self._call(_nothing, batch, place, one)
                    if given:
                        self._call(committer.mark_processed, batch, place, given[-1])
                    else:
                        self._room.mark(committer.mark_processed, batch, place)
            else:
                self._call(_nothing, batch, None, ready.given, self._guarded)

    def _call(self, *call: Any) -> None:
        """Call the handler, again where it wants that, and mark; arguments as those of `_call_once`."""
        try:
            self._call_once(*call)
        except GivenUpError:
            raise
        except Exception as error:  # noqa: BLE001 - what is final is raised again
            try:
                self._call_again(error, *call)
            except Exception as final:
                where(final, call[1], call[2])
                raise

    def _call_again(self, error: Exception, *call: Any) -> None:
        # The error that there was counts as the first attempt.
        errors = [error]

        def attempt() -> None:
            if errors:
                raise errors.pop()
            self._call_once(*call)

        self._retrying.call(attempt)

    def _call_once(self, mark: Callable[..., None], batch: Batch, place: int | None, *given: Any) -> None:
        room = self._room
        if not room.enter():
            raise GivenUpError
        try:
            if (returned := self._handler.call(*given)) is not None:
                check_done(returned)
        except StopEngine as stop:
            room.leave(mark, batch, place)
            room.fail(stop)
        except BaseException:
            room.leave()
            raise
        else:
            room.leave(mark, batch, place)


class _Guarded:
    # The committer as a handler gets it: what it marks after everything was given up is not heard.
    def __init__(self, committer: Committer, room: Room) -> None:
        self._committer = committer
        self._room = room

    def mark_processed(self, batch: Batch, place: int | None = None, offset: Offset | None = None) -> None:
        self._room.mark(self._committer.mark_processed, batch, place, offset)

    def mark_dropped(self, batch: Batch) -> None:
        self._room.mark(self._committer.mark_dropped, batch)

    def mark_batch_finished(self, batch: Batch) -> None:
        self._committer.mark_batch_finished(batch)


def _nothing(*_: object) -> None:
    pass
