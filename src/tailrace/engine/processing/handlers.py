"""The kinds of handlers: of batches, of single records, those that commit themselves, and async ones."""

from __future__ import annotations

import asyncio
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
    """What a handler is called with."""

    BATCH = "batch"
    RECORD = "record"
    BATCH_AND_COMMITTER = "batch and committer"


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler, and what it takes."""

    takes: HandlerKind
    call: Callable[..., Any]


def on_batch(call: Callable[..., Any]) -> Handler:
    """Return a handler of batches, converted where there is a converter; one of `manual` stays one."""
    if isinstance(call, Manual):
        return Handler(HandlerKind.BATCH_AND_COMMITTER, Manual(_awaited(call.call)))
    return Handler(HandlerKind.BATCH, _awaited(call))


def on_record(call: Callable[..., Any]) -> Handler:
    """Return a handler of single records, or of events where there is a converter."""
    return Handler(HandlerKind.RECORD, _awaited(call))


def is_async(call: Callable[..., Any]) -> bool:
    """Return whether a call returns a coroutine, which `on_batch` and `on_record` wait for."""
    called = call if inspect.isroutine(call) else getattr(call, "__call__", call)  # noqa: B004
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(called)


def _awaited(call: Callable[..., Any]) -> Callable[..., Any]:
    return AwaitedCall(call) if is_async(call) else call


class AwaitedCall:
    """An async handler as a plain one: called on any thread, it returns when its coroutine has ended.

    All its coroutines run on one event loop, which has a thread of its own from the first call on: what they
    share, such as a session of a client, belongs to that loop. Pickles as its function.
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
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _outcome(call: Callable[..., Awaitable[Any]], given: tuple[Any, ...]) -> BaseException | None:
    # What it raises is raised by the thread that waits: on the loop's thread, some of it would end the loop.
    try:
        await call(*given)
    except BaseException as error:  # noqa: BLE001
        return error
    return None


@dataclass(frozen=True, slots=True)
class Manual:
    """A handler of batches that says itself what is processed; see `manual`."""

    call: Callable[[Batch, Committer], Any] | Callable[[Events, Committer], Any]

    def __call__(self, batch: Any, committer: Committer) -> None:
        returned = self.call(batch, committer)
        # A future's work is under way, and may mark when it is done. That of these has not begun.
        if inspect.iscoroutine(returned) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
            check_done(returned)


def manual(call: Callable[[Batch, Committer], Any] | Callable[[Events, Committer], Any]) -> Manual:
    """Return a handler of batches, for `Engine(on_batch=…)`, that is given the committer as well.

    Nothing counts as processed because the handler returned: it marks records or the batch with the
    committer, then or later, on any thread. What transformations dropped is marked for it. A batch
    that is never marked holds up the commits of all after it.
    """
    return Manual(call)


def check_done(returned: object) -> None:
    """Refuse what a handler returned if it is work that is still to be done: nobody waits for it.

    What was handed over counts as processed when its handler returns. Called when it is not None.
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
        "and what was handed over would count as processed",
        "do the work before returning: give the async function itself, exhaust a generator, wait for a "
        "future's result; or give on_batch=manual(…) and mark what is processed when it is",
    )


def where(error: BaseException, batch: Batch, place: int | None) -> None:
    """Note on a handler's error what was handled, for who reads its trace; no values."""
    topics = sorted({group.topic for group in batch.groups if place is None or place in group.index})
    what = f"a batch of {len(batch)} records" if place is None else f"record {place} of a batch"
    offset = batch.end_offset if place is None else batch.offsets[place]
    error.add_note(
        f"raised while {what} of {', '.join(topics[:5])} was handled, which ends at {dict(offset or {})}"
    )
