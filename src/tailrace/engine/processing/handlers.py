"""The kinds of handlers: of batches, of single records, those that mark records themselves, async ones."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tailrace.engine.contracts import Committer
from tailrace.engine.threads import belonging
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch
from tailrace.records.events import Events


class HandlerKind(enum.StrEnum):
    """The arguments that a handler is called with."""

    BATCH = "batch"
    RECORD = "record"
    BATCH_AND_COMMITTER = "batch and committer"


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler and its kind."""

    takes: HandlerKind
    call: Callable[..., Any]


def on_batch(call: Callable[..., Any]) -> Handler:
    """Return a handler of batches, or of events if there is a converter; a `Manual` keeps its kind."""
    if isinstance(call, Manual):
        return Handler(HandlerKind.BATCH_AND_COMMITTER, Manual(_awaited(call.call)))
    return Handler(HandlerKind.BATCH, _awaited(call))


def on_record(call: Callable[..., Any]) -> Handler:
    """Return a handler of single records, or of single events if there is a converter."""
    return Handler(HandlerKind.RECORD, _awaited(call))


def is_async(call: Callable[..., Any]) -> bool:
    """Return whether calling `call` returns a coroutine, for which `on_batch` and `on_record` wait."""
    called = call if inspect.isroutine(call) else getattr(call, "__call__", call)  # noqa: B004
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(called)


def takes(call: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with `count` arguments, as far as Python knows it."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # of built-in functions
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _awaited(call: Callable[..., Any]) -> Callable[..., Any]:
    return AwaitedCall(call) if is_async(call) else call


class AwaitedCall:
    """A blocking wrapper of an async handler: called on any thread, it returns when its coroutine has ended.

    All its coroutines run on one event loop, which has its own thread from the first call on: objects that
    they share, such as a client's session, belong to that loop. Pickles as its function.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> tuple[type[AwaitedCall], tuple[Callable[..., Awaitable[Any]]]]:
        return AwaitedCall, (self._call,)

    def __call__(self, *given: Any) -> None:
        error = asyncio.run_coroutine_threadsafe(_outcome(self._call, given), self._running()).result()
        if error is not None:
            raise error

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=belonging(lambda: _run(loop)), name="tailrace async handler", daemon=True
                )
                thread.start()
                weakref.finalize(self, loop.call_soon_threadsafe, loop.stop).atexit = False
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    # A task that raises `SystemExit` interrupts the loop; the coroutine that awaits the task gets it, too.
    while not loop.is_closed():
        with contextlib.suppress(BaseException):
            loop.run_forever()
            loop.close()


async def _outcome(call: Callable[..., Awaitable[Any]], given: tuple[Any, ...]) -> BaseException | None:
    # Its errors are raised on the waiting thread: on the loop's thread, some of them would end the loop.
    try:
        await call(*given)
    except BaseException as error:  # noqa: BLE001
        return error
    return None


@dataclass(frozen=True, slots=True)
class Manual:
    """A handler of batches that marks processed records itself; see `manual`."""

    call: Callable[[Batch, Committer], Any] | Callable[[Events, Committer], Any]

    def __call__(self, batch: Any, committer: Committer) -> None:
        returned = self.call(batch, committer)
        # The work behind a future is running, and may mark when it is done; that of these has not begun.
        if inspect.iscoroutine(returned) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
            check_done(returned)


def manual(call: Callable[[Batch, Committer], Any] | Callable[[Events, Committer], Any]) -> Manual:
    """Return a handler of batches, for `Engine(on_batch=…)`, that is called with the committer as well.

    When the handler returns, nothing counts as processed yet: it marks records or the batch with the
    committer, then or later, on any thread. Records that transformations dropped are marked for it. A batch
    that is never marked blocks the commits of all later batches.
    """
    return Manual(call)


def check_done(returned: object) -> None:
    """Refuse a handler's return value if it is unfinished work: nothing would wait for it.

    Records count as processed when their handler returns. Called if the value is not None.
    :raises TailraceError: `CONFIG_INVALID`, which is final.
    """
    generates = inspect.isgenerator(returned) or inspect.isasyncgen(returned)
    if not (generates or inspect.isawaitable(returned) or isinstance(returned, Future)):
        return
    if inspect.iscoroutine(returned):
        returned.close()
    raise TailraceError(
        Kind.CONFIG_INVALID,
        f"handle records: the handler returned a {type(returned).__name__}, whose work may not be done, "
        "and its records would count as processed",
        "do the work before returning: pass the async function itself, exhaust a generator, wait for a "
        "future's result; or pass on_batch=manual(…) and mark records when they are processed",
    )


def where(error: BaseException, batch: Batch, place: int | None) -> None:
    """Add a note to a handler's error that identifies its records, for readers of the trace; no values."""
    topics = sorted({group.topic for group in batch.groups if place is None or place in group.index})
    what = f"a batch of {len(batch)} records" if place is None else f"record {place} of a batch"
    offset = batch.end_offset if place is None else batch.offsets[place]
    error.add_note(
        f"raised while {what} of {', '.join(topics[:5])} was handled, which ends at {dict(offset or {})}"
    )
