"""The subscriptions to one log: each takes what it wants, from memory at the log's head, else from the log.

All on one event loop, but for what decodes and reads: that is done by the feed's thread and by a pool.
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

#: Of the log, decoded; with the JSON it is a few times larger.
RING_BYTES_MAX = 8 * MIB
RING_RANGES_MAX = 4096
#: Most bytes that are handed over at a time, but for one change that is larger.
SENT_BYTES_MAX = 256 * 1024
#: A subscription to which nothing comes is told its place so often.
HEARTBEAT_S = 30.0

T = TypeVar("T")


#: How changes are written for a client; takes what stands behind log offsets as well.
Form = Callable[[EventLines, str], T]


class Hub:
    """The subscriptions to one log.

    :param pool: reads and decodes for those who are behind, and computes expressions.
    """

    def __init__(self, log: ServedLog, pool: ThreadPoolExecutor, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._log, self._pool, self._heartbeat_s = log, pool, heartbeat_s
        self._head: LogHead[DecodedRange, ChangeFilter] | None = None
        self._feed: Feed | None = None
        self._starting = asyncio.Lock()
        self._wakers: dict[Subscription[ChangeFilter], asyncio.Future[None]] = {}
        self._looking: dict[Audience[ChangeFilter], asyncio.Task[None]] = {}
        self._failures: dict[Audience[ChangeFilter], TailraceError] = {}
        #: What was written last: batch, filter, begin and form; the part, and where it ends.
        self._last: tuple[tuple[object, ...], Any, int] | None = None
        self._is_closing = False

    async def position(self, wanted: ChangeFilter, begin: str | None) -> tuple[int, str]:
        """Return the log offset at which a subscription begins, and what stands behind those of this log.

        :raises TailraceError: as `ServedLog.check` and `ServedLog.begin`; `LOG_MISSING`, `LOG_CORRUPT`.
        """
        is_followed = self._head is not None

        def find() -> tuple[int, str]:
            if not is_followed:
                self._log.close()  # there may be another log since somebody looked
            self._log.check(wanted)
            return self._log.begin(begin), self._log.mark

        return await self._in_pool(find)

    async def deliveries(
        self, wanted: ChangeFilter, at: int, form: Form[T]
    ) -> AsyncGenerator[tuple[T | None, int]]:
        """Yield what is wanted from `at` on in parts, each with the log offset to go on at behind it.

        Where nothing has come for a while, the offset alone. For ever, or until `close`.

        Nothing of what is yielded is kept here, so that one who is slow holds no more than one part.

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
        """Return what a subscription takes next; None: nothing this time."""
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
        # Those who are at the head with the same filter come one after another.
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
        """Wait until there is something to do for a subscription, or it is time for a heartbeat."""
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
                continue  # its task comes to this batch
            if not batch.means(audience.wanted):
                head.looked(audience, batch, found=False)
            elif batch.has_looked(audience.wanted):
                self._wake(head.looked(audience, batch, found=batch.look(audience.wanted)))
            else:
                self._looking[audience] = asyncio.create_task(self._look(head, audience))

    async def _look(
        self, head: LogHead[DecodedRange, ChangeFilter], audience: Audience[ChangeFilter]
    ) -> None:
        """Look at batches for an audience until it has seen all of the ring."""
        try:
            while audience.subscriptions and (batch := head.next_range(audience)) is not None:
                found = await self._in_pool(batch.look, audience.wanted)
                self._wake(head.looked(audience, batch, found=found))
        except Exception as error:  # noqa: BLE001 - it goes to the subscriptions
            self._fail(audience, as_failure(error))
        finally:
            del self._looking[audience]

    def _failed(self, head: LogHead[DecodedRange, ChangeFilter], error: TailraceError) -> None:
        """The log can't be followed: end all subscriptions with the error; later ones open it again."""
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
        """Return what a function returns.

        :raises TailraceError: what it raises, whatever that is: clients hear of nothing else.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
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
