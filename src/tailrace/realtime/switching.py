"""Switching a consumer between memory and the log: two state machines, with markers in the log. Pure.

    real-time side   OFF ──▶ STARTING ──▶ ON ──▶ STOPPING ──▶ OFF
                                 ╰───────────────────╯
    log's side       ACTIVE ──TRY_START_REALTIME──▶ PASSIVE ──STOP_REALTIME──▶ ACTIVE

Both sides are in the process that runs the consumer. Only one at a time sends changes to the dispatcher.
*Sent* changes are in the dispatcher's queue, in the log's order. *Handled* is what the consumer's own record
says (its offset store, its target); after a crash the log's side continues from there. A crash at any line
preserves these invariants:

- The log's side becomes PASSIVE only at the start marker of this process, when everything before it is sent.
  The real-time side works from there on.
- The state "on" is stored before TRY_START_REALTIME is written, and "off" after STOP_REALTIME is durable: a
  side whose stored state at its start is "on" first writes STOP_REALTIME, and then starts again.
- A stop waits until nothing more is sent from memory: the log's side continues after what was sent last.
- The position in REALTIME is at most what is handled. Retention may remove the log up to there, not further.

Positions are log offsets, exclusive. Markers in the log:

    {"marker": "realtime", "consumer": NAME, "log_offset": N}       everything before N is handled
    {"marker": "stop_realtime", "consumer": NAME, "log_offset": N}  the log's side continues at N
    {"marker": "try_start_realtime", "consumer": NAME}              the log's side reads up to here

A marker is the content of a progress frame without other content; readers that do not know markers treat it
as a progress frame. It is written between transactions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tailrace.protocol import frames
from tailrace.state_machine import StateMachine


class MarkerKind(enum.StrEnum):
    """The kinds of markers."""

    REALTIME = "realtime"
    STOP_REALTIME = "stop_realtime"
    TRY_START_REALTIME = "try_start_realtime"


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker of one consumer.

    :param log_offset: everything before it is handled; -1 for `TRY_START_REALTIME`, which has only its place.
    """

    kind: MarkerKind
    consumer: str
    log_offset: int = -1

    def frame(self, position: int, time_us: int) -> bytes:
        """Return the frame to append at a boundary with this position and time of the log."""
        content: dict[str, str | int] = {"marker": str(self.kind), "consumer": self.consumer}
        if self.kind is not MarkerKind.TRY_START_REALTIME:
            content["log_offset"] = self.log_offset
        return frames.control_frame(frames.PROGRESS, position, time_us, content)


class RealtimeMode(enum.StrEnum):
    """The states of the real-time side."""

    OFF = "off"
    STARTING = "starting"  # the buffer fills, and the log's side has not reached the marker
    ON = "on"
    STOPPING = "stopping"


class RealtimeEvent(enum.StrEnum):
    """The events of the real-time side."""

    SWITCHED_ON = "switched on"
    SWITCHED_OFF = "switched off"
    OVERFLOWED = "buffer full"
    START_DURABLE = "start marker durable"
    LOG_PASSIVE = "log side passive"
    HANDLED = "handled"
    WORKER_ENDED = "worker ended"
    STOP_DURABLE = "stop marker durable"


class RealtimeCommand(enum.StrEnum):
    """The commands for the real-time side's driver, which runs them in order before the next event."""

    KEEP = "keep"  # store `RealtimeSide.is_kept_on` and `position`, durably
    FILL = "fill"  # start to fill the buffer
    DROP = "drop"  # empty the buffer
    MARK_START = "mark start"  # write the marker; followed by START_DURABLE
    WORK = "work"  # send the buffer's blocks from `position` on
    END_WORK = "end work"  # stop sending from memory; then followed by WORKER_ENDED
    MARK_HANDLED = "mark handled"
    MARK_STOP = "mark stop"  # the log's side continues; followed by STOP_DURABLE


_S, _E, _C = RealtimeMode, RealtimeEvent, RealtimeCommand

_GIVE_UP = (_S.STOPPING, (_C.DROP, _C.END_WORK))

#: The allowed transitions, with their commands.
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

#: Events that set the position.
_MOVES = frozenset({_E.START_DURABLE, _E.HANDLED, _E.WORKER_ENDED})


@dataclass(frozen=True, slots=True)
class RealtimeSide(StateMachine[RealtimeMode, RealtimeEvent]):
    """The real-time side of one consumer.

    :param position: STARTING: the start marker's end; ON: what is handled; otherwise: what was sent last.
    """

    state: RealtimeMode = RealtimeMode.OFF
    position: int = 0

    @classmethod
    def restored(cls, is_on: bool, handled: int) -> tuple[RealtimeSide, tuple[RealtimeCommand, ...]]:
        """Return the side at a start, and the commands: after a crash, those of a stop.

        :param is_on: the stored state.
        """
        if is_on:
            return cls(_S.STOPPING, position=handled), (_C.MARK_STOP,)
        return cls(position=handled), ()

    def step(
        self, event: RealtimeEvent, log_offset: int = -1
    ) -> tuple[RealtimeSide, tuple[RealtimeCommand, ...]]:
        """Return the side after `event`, and the commands.

        :param log_offset: of `START_DURABLE`, the marker's end; of `HANDLED`, what is handled now; of
            `WORKER_ENDED`, what was sent last.
        :raises IllegalTransition: for a transition that the table does not have; always a bug.
        """
        state, commands = self.found(TRANSITIONS, event)
        position = log_offset if event in _MOVES else self.position
        return self.moved(event, state, position=position), commands

    @property
    def is_kept_on(self) -> bool:
        """The state that `KEEP` stores: whether the side may be on, so that a start first writes its stop."""
        return self.state is not _S.OFF

    def marker(self, command: RealtimeCommand, consumer: str) -> Marker:
        """Return the marker that a `MARK_…` command writes."""
        if command is _C.MARK_START:
            return Marker(MarkerKind.TRY_START_REALTIME, consumer)
        kind = MarkerKind.STOP_REALTIME if command is _C.MARK_STOP else MarkerKind.REALTIME
        return Marker(kind, consumer, self.position)


class LogMode(enum.StrEnum):
    """The states of the log's side."""

    ACTIVE = "active"
    PASSIVE = "passive"  # sends nothing; its position follows the markers


class LogEvent(enum.StrEnum):
    """The events of the log's side: changes were handled, or a marker is durable."""

    HANDLED = "handled"
    TRY_START_REALTIME = "try_start_realtime"
    REALTIME = "realtime"
    STOP_REALTIME = "stop_realtime"


#: The allowed transitions.
LOG_TRANSITIONS: dict[tuple[LogMode, LogEvent], LogMode] = {
    (LogMode.ACTIVE, LogEvent.HANDLED): LogMode.ACTIVE,
    (LogMode.ACTIVE, LogEvent.TRY_START_REALTIME): LogMode.PASSIVE,
    (LogMode.ACTIVE, LogEvent.REALTIME): LogMode.ACTIVE,  # written before the stop
    (LogMode.PASSIVE, LogEvent.REALTIME): LogMode.PASSIVE,
    (LogMode.PASSIVE, LogEvent.STOP_REALTIME): LogMode.ACTIVE,
}


@dataclass(frozen=True, slots=True)
class LogSide(StateMachine[LogMode, LogEvent]):
    """The log's side of one consumer. At a start it is active, at the position that is handled.

    :param position: everything before it is known to be handled, and retention may remove it.
    :param read_from: the position at which this side last continued from the real-time side.
    """

    state: LogMode = LogMode.ACTIVE
    position: int = 0
    read_from: int = 0

    def step(self, event: LogEvent, log_offset: int = -1) -> LogSide:
        """Return the side after `event`.

        :param log_offset: of `STOP_REALTIME`, what was sent last; otherwise what is handled.
        :raises IllegalTransition: for a transition that the table does not have; always a bug.
        """
        mode = self.found(LOG_TRANSITIONS, event)
        if event is LogEvent.STOP_REALTIME:
            return self.moved(event, mode, read_from=log_offset)
        return self.moved(event, mode, position=max(self.position, log_offset))
