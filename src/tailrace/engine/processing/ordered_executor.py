"""The ordered executor: calls the handler with batches or records, in order, on the dispatching thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tailrace.engine.contracts import Committer, StopEngine
from tailrace.engine.failures import GivenUpError
from tailrace.engine.processing.context import ProcessingContext
from tailrace.engine.processing.handlers import HandlerKind, check_done, where
from tailrace.engine.processing.in_flight import SETTLE_RECORDS, SETTLE_S, InFlightLimiter
from tailrace.engine.processing.stage import ReadyBatch
from tailrace.records.batch import Batch, Offset
from tailrace.records.record import Record


class OrderedExecutor:
    """Delivers one batch or record after another, in the order of the batches (`DeliveryExecutor`)."""

    def __init__(self, context: ProcessingContext) -> None:
        self._handler = context.terms.handler
        self._limiter = context.limiter
        self._committer = context.committer
        self._guarded = _Guarded(context.committer, context.limiter)
        self._retrying = context.retrying("handler")

    def add(self, ready: ReadyBatch, size_bytes: int) -> Iterator[None]:
        """As `DeliveryExecutor.add`: delivers the batch."""
        batch = ready.batch
        if self._handler.takes is HandlerKind.RECORD:
            self._call_each(ready, size_bytes)
        else:
            if self._handler.takes is HandlerKind.BATCH:
                self._call_whole(self._committer.mark_processed, batch, ready.given)
            else:
                self._call_whole(_nothing, batch, ready.given, self._guarded)
            self._limiter.finish(batch, size_bytes)
        return iter(())

    def close(self) -> None:
        """As `DeliveryExecutor.close`: does nothing, as the delivering thread checks the limiter."""

    def _call_whole(self, mark: Callable[[Batch], None], batch: Batch, *given: Any) -> None:
        """Call the handler with a batch, and mark it."""
        limiter, began_s = self._limiter, time.monotonic()
        if not limiter.enter():
            raise GivenUpError
        try:
            try:
                self._call(*given)
            except Exception as error:  # noqa: BLE001 - a final error is raised again
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
        """Call the handler with each record of a batch, and mark the records in groups."""
        limiter, call, clock_s = self._limiter, self._handler.call, time.monotonic
        in_flight = limiter.begin(ready.batch, size_bytes)
        if not limiter.enter():
            raise GivenUpError
        began_s, settle_at = clock_s(), SETTLE_RECORDS
        try:
            for delivered, one in ready.in_turn():
                if limiter.is_shut:
                    raise GivenUpError
                try:
                    if (returned := call(one)) is not None:
                        check_done(returned)
                except Exception as error:  # noqa: BLE001 - a final error is raised again
                    limiter.settle()
                    place = one.place if isinstance(one, Record) else one.record.place
                    self._call_again(error, ready.batch, place, one)
                in_flight.delivered = delivered
                if delivered >= settle_at or clock_s() - began_s >= SETTLE_S:
                    limiter.settle(clock_s() - began_s)
                    began_s, settle_at = clock_s(), delivered + SETTLE_RECORDS
            in_flight.delivered = len(ready.batch)
        except StopEngine as stop:
            in_flight.delivered = delivered
            limiter.fail(stop)
        finally:
            limiter.leave()
            limiter.settle(clock_s() - began_s)

    def _call(self, *given: Any) -> None:
        if (returned := self._handler.call(*given)) is not None:
            check_done(returned)

    def _call_again(self, error: Exception, batch: Batch, place: int | None, *given: Any) -> None:
        """Retry the handler if its `error` is retriable; the call that raised it is the first attempt."""
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
    # The committer as a handler gets it: marks are ignored once the batches in flight were abandoned.
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
