"""The kinds of handlers: of batches, of single records, and those that commit themselves."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tailrace.engine.contracts import Committer
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


def on_batch(call: Callable[..., None]) -> Handler:
    """Return a handler of batches, converted where there is a converter; one of `manual` stays one."""
    return Handler(HandlerKind.BATCH_AND_COMMITTER if isinstance(call, Manual) else HandlerKind.BATCH, call)


def on_record(call: Callable[..., None]) -> Handler:
    """Return a handler of single records, or of events where there is a converter."""
    return Handler(HandlerKind.RECORD, call)


@dataclass(frozen=True, slots=True)
class Manual:
    """A handler of batches that says itself what is processed; see `manual`."""

    call: Callable[[Batch, Committer], None] | Callable[[Events, Committer], None]

    def __call__(self, batch: Any, committer: Committer) -> None:
        self.call(batch, committer)


def manual(call: Callable[[Batch, Committer], None] | Callable[[Events, Committer], None]) -> Manual:
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
        "do the work before returning: asyncio.run a coroutine, exhaust a generator, wait for a future's "
        "result; or give on_batch=manual(…) and mark what is processed when it is",
    )


def where(error: BaseException, batch: Batch, place: int | None) -> None:
    """Note on a handler's error what was handled, for who reads its trace; no values."""
    topics = sorted({group.topic for group in batch.groups if place is None or place in group.index})
    what = f"a batch of {len(batch)} records" if place is None else f"record {place} of a batch"
    offset = batch.end_offset if place is None else batch.offsets[place]
    error.add_note(
        f"raised while {what} of {', '.join(topics[:5])} was handled, which ends at {dict(offset or {})}"
    )
