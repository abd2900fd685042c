"""The subscriptions to one log: each gets its changes from memory at the log's head, or else from the log.

Everything runs on one event loop, except decoding and reading, which the feed's thread and a pool do.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import as_failure
from tailrace.ranges.changes import PENDING_S
from tailrace.ranges.plan import MIB
from tailrace.subscriptions.events import DecodedRange, EventLines
from tailrace.subscriptions.feed import Feed
from tailrace.subscriptions.filters import ChangeFilter
from tailrace.subscriptions.head import Audience, LogHead, Subscription, Take
from tailrace.subscriptions.served_log import ServedLog

#: Limit of the ring, in bytes of the log; decoded and with the JSON it is a few times larger.
RING_BYTES_MAX = 8 * MIB
RING_RANGES_MAX = 4096
#: Limit of a delivered part, in bytes, except for a single larger change.
SENT_BYTES_MAX = 256 * 1024
#: Interval in which a subscription without changes is sent its position, in seconds.
HEARTBEAT_S = 30.0

T = TypeVar("T")


#: Formats changes for a client; the second argument is the suffix of log offsets.
Form = Callable[[EventLines, str], T]


class Hub:
    """The subscriptions to one log.

    :param pool: reads and decodes for subscriptions that are behind, and computes expressions.
    """

    def __init__(self, log: ServedLog, pool: ThreadPoolExecutor, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._log, self._pool, self._heartbeat_s = log, pool, heartbeat_s
        self._head: LogHead[DecodedRange, ChangeFilter] | None = None
        self._feed: Feed | None = None
        self._starting = asyncio.Lock()
        self._wakers: dict[Subscription[ChangeFilter], asyncio.Future[None]] = {}
        self._looking: dict[Audience[ChangeFilter], asyncio.Task[None]] = {}
        self._failures: dict[Audience[ChangeFilter], TailraceError] = {}
        #: The part that was formatted last: its batch, filter, start and form; the part; its end.
        self._last: tuple[tuple[object, ...], Any, int] | None = None
        self._is_closing = False

    async def position(self, wanted: ChangeFilter, begin: str | None) -> tuple[int, str]:
        """Return the log offset at which a subscription starts, and the suffix of this log's offsets.

        :raises TailraceError: as `ServedLog.check` and `ServedLog.begin`; `LOG_MISSING`, `LOG_CORRUPT`.
        """
        is_followed = self._head is not None

        def find() -> tuple[int, str]:
            if not is_followed:
                self._log.close()  # there may be another log at the path since the last subscription
            self._log.check(wanted)
            return self._log.begin(begin), self._log.mark

        return await self._in_pool(find)

    async def deliveries(
        self, wanted: ChangeFilter, at: int, form: Form[T]
    ) -> AsyncGenerator[tuple[T | None, int]]:
        """Yield the selected changes from `at` on in parts, each with the log offset to continue from next.

        After a time without changes, yields the offset with None. Ends only with `close`.

        Yielded parts are not queued here, so a slow subscriber holds at most one part in memory.

        :raises TailraceError: as `ServedLog.read`.
        """
        head, loop = await self._started(), asyncio.get_running_loop()
        subscription = head.join(wanted, at)
        mark, said_s = self._log.mark, loop.time()
        try:
            while not self._is_closing:
                part = await self._next(head, subscription, form, mark)
                if part is not None or loop.time() >= said_s + self._heartbeat_s:
                    yield part, head.place(subscription)
                    said_s = loop.time()
        finally:
            self._leave(head, subscription)

    def close(self) -> None:
        """End all subscriptions; returns at once."""
        self._is_closing = True
        if self._feed is not None:
            self._feed.stop()
        for waker in self._wakers.values():
            _wake(waker)

    async def _next(
        self,
        head: LogHead[DecodedRange, ChangeFilter],
        subscription: Subscription[ChangeFilter],
        form: Form[T],
        mark: str,
    ) -> T | None:
        """Return the next part of a subscription; None: there is none this time."""
        if (error := self._failures.get(subscription.audience)) is not None:
            raise error
        take, batch = head.step(subscription)
        if take is Take.LOG:
            events = await self._of_log(subscription)
            return form(events, mark) if len(events) else None
        if batch is None:
            await self._woken(subscription)
            return None
        wanted, begin = subscription.audience.wanted, subscription.at
        if not batch.has_looked(wanted):
            await self._in_pool(batch.look, wanted)
        # Subscriptions at the head with the same filter follow one another, and reuse the part.
        key = batch, wanted, begin, form
        if self._last is None or self._last[0] != key:
            rest = batch.events(wanted).since(begin)
            events = rest.first(SENT_BYTES_MAX)
            end = events.end if len(events) < len(rest) else batch.end
            self._last = key, form(events, mark) if len(events) else None, end
        _, part, subscription.at = self._last
        return part

    async def _of_log(self, subscription: Subscription[ChangeFilter]) -> EventLines:
        try:
            found = await self._in_pool(self._log.read, subscription.at, subscription.audience.wanted)
        except TailraceError as error:
            if error.kind is not Kind.SCHEMA_PENDING:
                raise
            await asyncio.sleep(PENDING_S)
            return EventLines()
        events, subscription.at = found
        return events

    async def _woken(self, subscription: Subscription[ChangeFilter]) -> None:
        """Wait until a subscription is woken, or for the heartbeat's interval."""
        waker = self._wakers[subscription] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await waker
        except TimeoutError:
            return
        finally:
            del self._wakers[subscription]

    async def _started(self) -> LogHead[DecodedRange, ChangeFilter]:
        async with self._starting:
            if self._head is None:
                loop = asyncio.get_running_loop()
                end = await self._in_pool(self._log.end)
                head: LogHead[DecodedRange, ChangeFilter] = LogHead(
                    end, ranges_max=RING_RANGES_MAX, bytes_max=RING_BYTES_MAX
                )
                self._feed = Feed(
                    self._log,
                    end,
                    wanted=lambda: head.wanted,
                    deliver=functools.partial(_on_loop, loop, self._arrived, head),
                    fail=functools.partial(_on_loop, loop, self._failed, head),
                )
                self._head = head
                self._feed.start()
            return self._head

    def _leave(
        self, head: LogHead[DecodedRange, ChangeFilter], subscription: Subscription[ChangeFilter]
    ) -> None:
        head.leave(subscription)
        audience = subscription.audience
        if not audience.subscriptions:
            self._failures.pop(audience, None)
            for batch in head.ring.between(head.ring.start, head.ring.end):
                batch.forget(audience.wanted)
        if self._head is head and not head.audiences:
            assert self._feed is not None
            self._feed.stop()
            self._head = self._feed = self._last = None

    def _arrived(self, head: LogHead[DecodedRange, ChangeFilter], batch: DecodedRange) -> None:
        if self._head is not head:
            return
        self._wake(head.append(batch))
        for audience in head.audiences:
            if audience in self._looking or audience in self._failures:
                continue  # its task will reach this batch
            if not batch.means(audience.wanted):
                head.looked(audience, batch, found=False)
            elif batch.has_looked(audience.wanted):
                self._wake(head.looked(audience, batch, found=batch.look(audience.wanted)))
            else:
                self._looking[audience] = asyncio.create_task(self._look(head, audience))

    async def _look(
        self, head: LogHead[DecodedRange, ChangeFilter], audience: Audience[ChangeFilter]
    ) -> None:
        """Filter batches for an audience up to the ring's end."""
        try:
            while audience.subscriptions and (batch := head.next_range(audience)) is not None:
                found = await self._in_pool(batch.look, audience.wanted)
                self._wake(head.looked(audience, batch, found=found))
        except Exception as error:  # noqa: BLE001 - it ends the subscriptions
            self._fail(audience, as_failure(error))
        finally:
            del self._looking[audience]

    def _failed(self, head: LogHead[DecodedRange, ChangeFilter], error: TailraceError) -> None:
        """End all subscriptions with the error of following the log; later ones open the log again."""
        if self._head is head:
            self._head = self._feed = None
            self._log.close()
        for audience in head.audiences:
            self._fail(audience, error)

    def _fail(self, audience: Audience[ChangeFilter], error: TailraceError) -> None:
        self._failures[audience] = error
        self._wake(list(audience.subscriptions))

    def _wake(self, subscriptions: list[Subscription[ChangeFilter]]) -> None:
        for subscription in subscriptions:
            if (waker := self._wakers.get(subscription)) is not None:
                _wake(waker)

    async def _in_pool(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function on the pool and return its result.

        :raises TailraceError: for every error, as clients are sent no other ones.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        except TailraceError:
            raise
        except Exception as error:
            raise as_failure(error) from error


def _wake(waker: asyncio.Future[None]) -> None:
    if not waker.done():
        waker.set_result(None)


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return  # the loop has ended, and with it the subscriptions
