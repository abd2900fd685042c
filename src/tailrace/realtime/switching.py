"""Who feeds a consumer, memory or the log: two state machines that speak by markers in the log. Pure.

    real-time side   OFF ──▶ STARTING ──▶ ON ──▶ STOPPING ──▶ OFF
                                 ╰───────────────────╯
    log's side       ACTIVE ──TRY_START_REALTIME──▶ PASSIVE ──STOP_REALTIME──▶ ACTIVE

Both sides are in the process that runs the consumer, and hand over to one dispatcher, one at a time: what
is *sent* is in its queue, in the log's order; what is *handled* is what the consumer's own record says (its
offset store, its target), from which it goes on after a crash, by the log's side. What holds, whichever line
a crash comes at:

- The log's side becomes PASSIVE at the start marker of this process alone, where everything before is sent.
  The real-time side works from there on.
- That it is on is kept before TRY_START_REALTIME is written, and off after STOP_REALTIME is durable: a side
  that is kept as on at its start writes STOP_REALTIME before anything else, and begins again.
- A stop waits until nothing more is sent from memory: the log's side takes over at what was sent last.
- REALTIME says no more than what is handled. The log lets go of no more than that, on either side.

Positions are log offsets, exclusive. A marker says in the log:

    {"marker": "realtime", "consumer": NAME, "log_offset": N}       everything before N is handled
    {"marker": "stop_realtime", "consumer": NAME, "log_offset": N}  the log's side takes over, at N
    {"marker": "try_start_realtime", "consumer": NAME}              the log's side goes up to here

A marker is the content of a progress frame, which says nothing else: who knows nothing of markers takes it as
one. It stands between transactions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tailrace.protocol import frames
from tailrace.state_machine import StateMachine


class MarkerKind(enum.StrEnum):
    """What a marker says."""

    REALTIME = "realtime"
    STOP_REALTIME = "stop_realtime"
    TRY_START_REALTIME = "try_start_realtime"


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker of one consumer.

    :param log_offset: everything before it is handled; -1 for `TRY_START_REALTIME`, whose place says all.
    """

    kind: MarkerKind
    consumer: str
    log_offset: int = -1

    def frame(self, position: int, time_us: int) -> bytes:
        """Return the frame to append at a boundary: `position` and `time_us` are those of the log there."""
        content: dict[str, str | int] = {"marker": str(self.kind), "consumer": self.consumer}
        if self.kind is not MarkerKind.TRY_START_REALTIME:
            content["log_offset"] = self.log_offset
        return frames.control_frame(frames.PROGRESS, position, time_us, content)


class RealtimeMode(enum.StrEnum):
    """What the real-time side is about."""

    OFF = "off"
    STARTING = "starting"  # memory fills, and the log's side has yet to come to the marker
    ON = "on"
    STOPPING = "stopping"


class RealtimeEvent(enum.StrEnum):
    """What happens to the real-time side."""

    SWITCHED_ON = "switched on"
    SWITCHED_OFF = "switched off"
    OVERFLOWED = "buffer full"
    START_DURABLE = "start marker durable"
    LOG_PASSIVE = "log side passive"
    HANDLED = "handled"
    WORKER_ENDED = "worker ended"
    STOP_DURABLE = "stop marker durable"


class RealtimeCommand(enum.StrEnum):
    """What the driver of the real-time side does, in the order given, before it takes the next event."""

    KEEP = "keep"  # `RealtimeSide.is_kept_on` and `position`, durably
    FILL = "fill"  # begin to fill the buffer
    DROP = "drop"  # the buffer
    MARK_START = "mark start"  # answered by START_DURABLE
    WORK = "work"  # send what the buffer has from `position` on
    END_WORK = "end work"  # answered by WORKER_ENDED, when nothing more is sent from memory
    MARK_HANDLED = "mark handled"
    MARK_STOP = "mark stop"  # the log's side takes over; answered by STOP_DURABLE


_S, _E, _C = RealtimeMode, RealtimeEvent, RealtimeCommand

_GIVE_UP = (_S.STOPPING, (_C.DROP, _C.END_WORK))

#: A move that is not here is not allowed.
TRANSITIONS: dict[tuple[RealtimeMode, RealtimeEvent], tuple[RealtimeMode, tuple[RealtimeCommand, ...]]] = {
    (_S.OFF, _E.SWITCHED_ON): (_S.STARTING, (_C.KEEP, _C.FILL, _C.MARK_START)),
    (_S.STARTING, _E.SWITCHED_OFF): _GIVE_UP,
    (_S.STARTING, _E.OVERFLOWED): _GIVE_UP,
    (_S.STARTING, _E.START_DURABLE): (_S.STARTING, ()),
    (_S.STARTING, _E.LOG_PASSIVE): (_S.ON, (_C.WORK,)),
    (_S.ON, _E.SWITCHED_OFF): _GIVE_UP,
    (_S.ON, _E.OVERFLOWED): _GIVE_UP,
    (_S.ON, _E.HANDLED): (_S.ON, (_C.MARK_HANDLED,)),
    (_S.STOPPING, _E.WORKER_ENDED): (_S.STOPPING, (_C.MARK_STOP,)),
    (_S.STOPPING, _E.STOP_DURABLE): (_S.OFF, (_C.KEEP,)),
}

#: Events that bring the position.
_MOVES = frozenset({_E.START_DURABLE, _E.HANDLED, _E.WORKER_ENDED})


@dataclass(frozen=True, slots=True)
class RealtimeSide(StateMachine[RealtimeMode, RealtimeEvent]):
    """The real-time side of one consumer.

    :param position: while it starts, the end of its start marker; while it is on, what is handled; then what
        was sent last.
    """

    state: RealtimeMode = RealtimeMode.OFF
    position: int = 0

    @classmethod
    def restored(cls, is_on: bool, handled: int) -> tuple[RealtimeSide, tuple[RealtimeCommand, ...]]:
        """Return the side as a start finds it, and what is to be done: after a crash, its stop.

        :param is_on: as it was kept.
        """
        if is_on:
            return cls(_S.STOPPING, position=handled), (_C.MARK_STOP,)
        return cls(position=handled), ()

    def step(
        self, event: RealtimeEvent, log_offset: int = -1
    ) -> tuple[RealtimeSide, tuple[RealtimeCommand, ...]]:
        """Return the side after `event`, and what is to be done.

        :param log_offset: of `START_DURABLE`, the marker's end; of `HANDLED`, what is handled now; of
            `WORKER_ENDED`, what was sent last.
        :raises IllegalTransition: for a move that the table does not have; always a bug.
        """
        state, commands = self.found(TRANSITIONS, event)
        position = log_offset if event in _MOVES else self.position
        return self.moved(event, state, position=position), commands

    @property
    def is_kept_on(self) -> bool:
        """Whether `KEEP` keeps that it may be on: a start then writes its stop first."""
        return self.state is not _S.OFF

    def marker(self, command: RealtimeCommand, consumer: str) -> Marker:
        """Return the marker that a command of marking writes."""
        if command is _C.MARK_START:
            return Marker(MarkerKind.TRY_START_REALTIME, consumer)
        kind = MarkerKind.STOP_REALTIME if command is _C.MARK_STOP else MarkerKind.REALTIME
        return Marker(kind, consumer, self.position)


class LogMode(enum.StrEnum):
    """What the log's side is about."""

    ACTIVE = "active"
    PASSIVE = "passive"  # it sends nothing, and lets go of what markers say is handled


class LogEvent(enum.StrEnum):
    """What the log's side comes upon, or has done. A marker is come upon when it is durable."""

    HANDLED = "handled"
    TRY_START_REALTIME = "try_start_realtime"
    REALTIME = "realtime"
    STOP_REALTIME = "stop_realtime"


#: A move that is not here is not allowed.
LOG_TRANSITIONS: dict[tuple[LogMode, LogEvent], LogMode] = {
    (LogMode.ACTIVE, LogEvent.HANDLED): LogMode.ACTIVE,
    (LogMode.ACTIVE, LogEvent.TRY_START_REALTIME): LogMode.PASSIVE,
    (LogMode.ACTIVE, LogEvent.REALTIME): LogMode.ACTIVE,  # written before the stop
    (LogMode.PASSIVE, LogEvent.REALTIME): LogMode.PASSIVE,
    (LogMode.PASSIVE, LogEvent.STOP_REALTIME): LogMode.ACTIVE,
}


@dataclass(frozen=True, slots=True)
class LogSide(StateMachine[LogMode, LogEvent]):
    """The log's side of one consumer. A start finds it active, at what is handled.

    :param position: everything before is handled, as far as this side knows, and may be let go.
    :param read_from: where it took over last.
    """

    state: LogMode = LogMode.ACTIVE
    position: int = 0
    read_from: int = 0

    def step(self, event: LogEvent, log_offset: int = -1) -> LogSide:
        """Return the side after `event`.

        :param log_offset: of `STOP_REALTIME`, what was sent last; else what is handled.
        :raises IllegalTransition: for a move that the table does not have; always a bug.
        """
        mode = self.found(LOG_TRANSITIONS, event)
        if event is LogEvent.STOP_REALTIME:
            return self.moved(event, mode, read_from=log_offset)
        return self.moved(event, mode, position=max(self.position, log_offset))
