"""Delivery in order: of whole batches, or record by record, on a thread of the task's own."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from tailrace.engine.contracts import Committer, StopEngine
from tailrace.engine.processing.context import ProcessingConfig, ProcessingContext
from tailrace.engine.processing.handlers import HandlerKind, check_done, where
from tailrace.engine.processing.in_flight import SETTLE_RECORDS, SETTLE_S, InFlightLimiter
from tailrace.engine.processing.stage import ReadyBatch, StageExecutor, StageFuture
from tailrace.engine.retry import GivenUpError
from tailrace.records.batch import Batch, Offset


class OrderedDispatcher:
    """Delivers one thing after another, in the order in which batches were put in."""

    def __init__(
        self, terms: ProcessingConfig, means: ProcessingContext, stage_executor: StageExecutor | None
    ) -> None:
        self._stage_executor = stage_executor
        self._handler = terms.handler
        self._limiter = means.limiter
        self._committer = means.committer
        self._guarded = _Guarded(means.committer, means.limiter)
        self._staging = means.retrying(terms, "transformation and conversion")
        self._retrying = means.retrying(terms, "handler")
        self._waiting: queue.SimpleQueue[StageFuture | None] = queue.SimpleQueue()

    def put(self, batch: Batch) -> None:
        """Have a batch staged, and delivered after those before it."""
        self._waiting.put(StageFuture(batch, self._stage_executor))

    def wake(self) -> None:
        """Have `run` return once it has heard that nothing more is delivered."""
        self._waiting.put(None)

    def run(self) -> None:
        """Deliver until `wake`; on the delivering thread."""
        while (staging := self._waiting.get()) is not None:
            if self._limiter.shut.is_set():
                staging.cancel()
                continue
            try:
                ready = self._staging.call(staging.result)
                self._deliver(ready, staging.size_bytes)
            except (GivenUpError, CancelledError):
                continue
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                self._limiter.fail(error)

    def _deliver(self, ready: ReadyBatch, size_bytes: int) -> None:
        batch, committer, limiter = ready.batch, self._committer, self._limiter
        if not len(ready.given):
            limiter.mark(committer.mark_processed, batch)
        elif self._handler.takes is HandlerKind.BATCH:
            self._call_whole(committer.mark_processed, batch, ready.given)
        else:
            limiter.mark(committer.mark_dropped, batch)
            if self._handler.takes is HandlerKind.RECORD:
                self._call_each(ready, size_bytes)
                return
            self._call_whole(_nothing, batch, ready.given, self._guarded)
        limiter.finish(batch, committer, size_bytes)

    def _call_whole(self, mark: Callable[[Batch], None], batch: Batch, *given: Any) -> None:
        """Call the handler with a batch, and mark it."""
        limiter, began_s = self._limiter, time.monotonic()
        if not limiter.enter():
            raise GivenUpError
        try:
            try:
                self._call(*given)
            except Exception as error:  # noqa: BLE001 - what is final is raised again
                self._call_again(error, batch, None, *given)
        except StopEngine as stop:
            limiter.leave(mark, batch)
            limiter.fail(stop)
        except BaseException:
            limiter.leave()
            raise
        else:
            limiter.leave(mark, batch)
        finally:
            limiter.settle(time.monotonic() - began_s)

    def _call_each(self, ready: ReadyBatch, size_bytes: int) -> None:
        """Call the handler with each record of a batch, and mark them, many together."""
        limiter, call, clock_s = self._limiter, self._handler.call, time.monotonic
        in_flight = limiter.begin(ready.batch, self._committer, size_bytes)
        done, is_shut = in_flight.done, limiter.shut.is_set
        if not limiter.enter():
            raise GivenUpError
        began_s = clock_s()
        try:
            for place, given in ready.by_record():
                for one in given:
                    if is_shut():
                        raise GivenUpError
                    try:
                        if (returned := call(one)) is not None:
                            check_done(returned)
                    except Exception as error:  # noqa: BLE001 - what is final is raised again
                        limiter.settle()
                        self._call_again(error, ready.batch, place, one)
                done.append(place)
                if len(done) >= SETTLE_RECORDS or clock_s() - began_s >= SETTLE_S:
                    limiter.settle(clock_s() - began_s)
                    began_s = clock_s()
        except StopEngine as stop:
            if one is given[-1]:
                done.append(place)
            limiter.fail(stop)
        finally:
            limiter.leave()
            limiter.settle(clock_s() - began_s)

    def _call(self, *given: Any) -> None:
        if (returned := self._handler.call(*given)) is not None:
            check_done(returned)

    def _call_again(self, error: Exception, batch: Batch, place: int | None, *given: Any) -> None:
        """Call the handler where its `error` says so; that counts as the first attempt."""
        errors = [error]

        def attempt() -> None:
            if errors:
                raise errors.pop()
            if self._limiter.shut.is_set():
                raise GivenUpError
            self._call(*given)

        try:
            self._retrying.call(attempt)
        except (GivenUpError, StopEngine):
            raise
        except Exception as final:
            where(final, batch, place)
            raise


class _Guarded:
    # The committer as a handler gets it: what it marks after everything was given up is not heard.
    def __init__(self, committer: Committer, limiter: InFlightLimiter) -> None:
        self._committer = committer
        self._limiter = limiter

    def mark_processed(self, batch: Batch, place: int | None = None, offset: Offset | None = None) -> None:
        self._limiter.mark(self._committer.mark_processed, batch, place, offset)

    def mark_places(self, batch: Batch, places: Sequence[int]) -> None:
        self._limiter.mark(self._committer.mark_places, batch, places)

    def mark_dropped(self, batch: Batch) -> None:
        self._limiter.mark(self._committer.mark_dropped, batch)

    def mark_batch_finished(self, batch: Batch) -> None:
        self._committer.mark_batch_finished(batch)


def _nothing(_: Batch) -> None:
    pass
