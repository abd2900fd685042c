"""A model of a consumer's process: both sides, one dispatcher, what is durable, crashes between commands.

The log is a tuple of changes and markers; an index into it is a log offset. What is appended is durable at
once, and a crash may come before the next command. Commands are carried out one by one; capture, dispatcher
and world may act between any two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.realtime.switching import (
    LogEvent,
    LogMode,
    LogSide,
    Marker,
    MarkerKind,
    RealtimeCommand,
    RealtimeEvent,
    RealtimeMode,
    RealtimeSide,
)

CHANGE = "change"
_CONSUMER = "c"
_E, _C, _M = RealtimeEvent, RealtimeCommand, RealtimeMode
_ANSWERS = {_C.MARK_START: _E.START_DURABLE, _C.MARK_STOP: _E.STOP_DURABLE}


@dataclass(frozen=True)
class Budget:
    """How often the world may still act."""

    changes: int
    overflows: int
    on: int
    off: int
    crashes: int

    def less(self, what: str) -> Budget:
        return replace(self, **{what: getattr(self, what) - 1})


@dataclass(frozen=True)
class Process:
    """The state that a crash loses.

    `sent`: every change before it is in the dispatcher's queue, or handled.
    """

    side: RealtimeSide = field(default_factory=RealtimeSide)
    log: LogSide = field(default_factory=LogSide)
    todo: tuple[RealtimeCommand, ...] = ()
    takes_over: bool = False  # a stop marker is to be written; the log's side goes on already
    answer: tuple[RealtimeEvent, int] | None = None  # of an appended start or stop marker
    released: int | None = None  # offset of an appended REALTIME marker
    filled_from: int | None = None  # the log offset at which the buffer begins
    lost: bool = False
    cursor: int | None = None  # next offset that the worker sends; None: it does not send
    sent: int = 0

    def after(self, event: RealtimeEvent, log_offset: int = -1) -> Process:
        side, commands = self.side.step(event, log_offset)
        return replace(self, side=replace(side, steps=()), todo=self.todo + commands)

    def log_after(self, event: LogEvent, log_offset: int = -1) -> Process:
        log = self.log.step(event, log_offset)
        sent = log.read_from if event is LogEvent.STOP_REALTIME else self.sent
        return replace(self, log=replace(log, steps=()), sent=sent)


@dataclass(frozen=True)
class World:
    """Everything: what is durable, the process, and the state of the changes."""

    budget: Budget
    log: tuple[Any, ...] = ()
    kept_on: bool = False
    process: Process = field(default_factory=Process)
    handed: int = 0  # every change before was handed to the dispatcher since the last crash, or is handled
    handled: int = 0  # every change before is handled, durably

    def next_change(self, at: int) -> int | None:
        return next((k for k in range(at, len(self.log)) if self.log[k] == CHANGE), None)

    def hands(self, at: int) -> World:
        """Check a change that is sent now."""
        assert at >= self.handed, f"repeated: {at}"
        assert at == self.next_change(self.handed), f"gap before {at}"
        return replace(self, handed=at + 1)

    def check(self) -> None:
        """Check the state."""
        assert self.process.log.position <= self.handled, "the position is past unhandled changes"
        for entry in self.log:
            if isinstance(entry, Marker) and entry.kind is MarkerKind.REALTIME:
                assert entry.log_offset <= self.handled, "a marker says that unhandled changes are handled"
        switches = [e.kind for e in self.log if isinstance(e, Marker) and e.kind is not MarkerKind.REALTIME]
        if switches and switches[-1] is MarkerKind.TRY_START_REALTIME:
            assert self.kept_on, "a start marker without a stop marker to follow"
        for before, after in itertools.pairwise(switches):
            assert (before, after) != (MarkerKind.TRY_START_REALTIME,) * 2, "two starts without a stop"


def inner(world: World) -> list[World]:
    """Return what the process may do next by itself."""
    return [*_commands(world), *_sends(world), *_keeps(world)]


def outer(world: World) -> Iterator[World]:
    """Yield what the world may do to the process."""
    budget, process = world.budget, world.process
    if budget.changes:
        yield replace(world, budget=budget.less("changes"), log=(*world.log, CHANGE))
    if budget.overflows and process.filled_from is not None:
        lost = replace(process, filled_from=None, lost=True)
        yield replace(world, budget=budget.less("overflows"), process=lost)
    is_ready = not process.todo and not process.takes_over
    if budget.on and is_ready and process.side.state is _M.OFF:
        yield replace(world, budget=budget.less("on"), process=process.after(_E.SWITCHED_ON))
    if budget.off and is_ready and process.side.state in (_M.STARTING, _M.ON):
        yield replace(world, budget=budget.less("off"), process=process.after(_E.SWITCHED_OFF))
    if budget.crashes:
        side, commands = RealtimeSide.restored(world.kept_on, world.handled)
        again = Process(side, LogSide(position=world.handled), commands, sent=world.handled)
        yield replace(world, budget=budget.less("crashes"), process=again, handed=world.handled)


def _commands(world: World) -> Iterator[World]:
    process = world.process
    if process.takes_over:
        yield _appended(world, replace(process, takes_over=False), _C.MARK_STOP)
    elif process.todo:
        yield _obeyed(world, replace(process, todo=process.todo[1:]), process.todo[0])
    elif process.lost and process.side.state in (_M.STARTING, _M.ON):
        yield replace(world, process=process.after(_E.OVERFLOWED))
    elif process.answer is not None:
        event, end = process.answer
        yield replace(world, process=replace(process, answer=None).after(event, end))
    elif process.side.state is _M.STARTING and process.sent >= process.side.position:
        passive = process.log_after(LogEvent.TRY_START_REALTIME)
        yield replace(world, process=passive.after(_E.LOG_PASSIVE))


def _obeyed(world: World, process: Process, command: RealtimeCommand) -> World:
    if command is _C.MARK_STOP:
        if process.log.state is LogMode.PASSIVE:
            process = process.log_after(LogEvent.STOP_REALTIME, process.side.position)
        return replace(world, process=replace(process, takes_over=True))
    if command in (_C.MARK_START, _C.MARK_HANDLED):
        return _appended(world, process, command)
    if command is _C.KEEP:
        return replace(world, kept_on=process.side.is_kept_on, process=process)
    if command is _C.END_WORK:
        ended = replace(process, cursor=None).after(_E.WORKER_ENDED, process.sent)
        return replace(world, process=ended)
    changes: dict[RealtimeCommand, dict[str, Any]] = {
        _C.FILL: {"filled_from": len(world.log), "lost": False},
        _C.DROP: {"filled_from": None},
        _C.WORK: {"cursor": process.sent},
    }
    return replace(world, process=replace(process, **changes[command]))


def _appended(world: World, process: Process, command: RealtimeCommand) -> World:
    marker = process.side.marker(command, _CONSUMER)
    log = (*world.log, marker)
    if command is _C.MARK_HANDLED:
        process = replace(process, released=marker.log_offset)
    else:
        process = replace(process, answer=(_ANSWERS[command], len(log)))
    return replace(world, log=log, process=process)


def _sends(world: World) -> Iterator[World]:
    process = world.process
    if process.cursor is not None and process.side.state is _M.ON and process.filled_from is not None:
        at = world.next_change(max(process.cursor, process.filled_from))
        if at is not None:
            sent = replace(process, cursor=at + 1, sent=at + 1)
            yield replace(world.hands(at), process=sent)
    if process.log.state is LogMode.ACTIVE and process.sent < len(world.log):
        at = process.sent
        found = world.hands(at) if world.log[at] == CHANGE else world
        yield replace(found, process=replace(process, sent=at + 1))


def _keeps(world: World) -> Iterator[World]:
    process = world.process
    if world.handled < world.handed:
        yield replace(world, handled=world.handed)
    if process.released is not None:
        yield replace(
            world, process=replace(process, released=None).log_after(LogEvent.REALTIME, process.released)
        )
    elif process.log.state is LogMode.ACTIVE:
        if process.log.position < world.handled:
            yield replace(world, process=process.log_after(LogEvent.HANDLED, world.handled))
    elif process.side.state is _M.ON and not process.todo and world.handled > process.side.position:
        yield replace(world, process=process.after(_E.HANDLED, world.handled))
