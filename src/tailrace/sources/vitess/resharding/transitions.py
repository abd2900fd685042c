"""The state machine of a shard: modes, events, and the commands that follow, as a table. Pure.

    (start) ─▶ COPYING ─▶ STREAMING ─▶ AT_JOURNAL ─▶ RETIRED ─▶ (start), when traffic is switched back
                  ╰───────────┴─▶ JUNCTION ──╯
                  ╰───────────┴─▶ UNCONFIRMED ─▶ NEEDS_SNAPSHOT ─▶ COPYING, STREAMING or RETIRED

The diagram on the documentation's page about resharding is generated from this table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tailrace.sources.vitess.resharding.events import EndReason
from tailrace.sources.vitess.resharding.shard_state import Begun, ShardState
from tailrace.state_machine import StateMachine


class ShardMode(enum.StrEnum):
    """The mode of a shard."""

    COPYING = "copying"
    STREAMING = "streaming"
    # Its journal is next in its stream, but vtgate didn't send it: one stream with all participants gets it.
    JUNCTION = "junction"
    # It is not known whether it serves: its reading has just started, or vtgate no longer knows it. The list
    # of shards decides.
    UNCONFIRMED = "unconfirmed"
    AT_JOURNAL = "at_journal"  # waits until all participants are there
    RETIRED = "retired"
    NEEDS_SNAPSHOT = "needs_snapshot"  # its stream can't continue: its keys are to be copied again


class ShardEvent(enum.StrEnum):
    """An event in the life of a shard."""

    BEGINNING = "first position reached"
    POSITION = "position reached"
    COPIED = "copy completed"
    GATHERED = "one stream in place of several"
    JOURNAL = "journal reached"
    ALL_AT_JOURNAL = "all participants at the journal"
    PARTICIPANTS_ABSENT = "ended, not all participants in the stream"
    INTERRUPTED = "ended, or silent"
    UNKNOWN = "ended, shard unknown"
    LOST = "stream can't continue"
    REFUSED = "stream with all participants can't continue"
    LISTED = "serves"
    NOT_LISTED = "others have its keys"
    SNAPSHOT_BEGUN = "snapshot of its keys begun"
    REQUESTED = "tables asked for again"
    STARTED = "start"


class ShardCommand(enum.StrEnum):
    """A step that is taken for the shard, in the order given."""

    KEEP = "keep"  # write its state to the log, with the rows that led to it
    OPEN = "open"  # a stream from its position
    OPEN_JUNCTION = "open junction"  # a stream with all participants, after a short wait, with a deadline
    CANCEL = "cancel"  # its stream
    LIST = "list"  # ask for the serving shards


_M, _E, _C = ShardMode, ShardEvent, ShardCommand
Move = tuple[ShardMode, tuple[ShardCommand, ...]]


def _while_read(mode: ShardMode, opened: ShardCommand) -> dict[tuple[ShardMode, ShardEvent], Move]:
    return {
        (mode, _E.POSITION): (mode, (_C.KEEP,)),
        (mode, _E.JOURNAL): (_M.AT_JOURNAL, (_C.CANCEL, _C.KEEP)),
        (mode, _E.PARTICIPANTS_ABSENT): (_M.JUNCTION, (_C.OPEN_JUNCTION,)),
        (mode, _E.INTERRUPTED): (mode, (opened,)),
        (mode, _E.UNKNOWN): (_M.UNCONFIRMED, (_C.LIST,)),
        (mode, _E.LOST): (_M.NEEDS_SNAPSHOT, (_C.CANCEL, _C.KEEP)),
        # It was no longer serving when its reading started.
        (mode, _E.NOT_LISTED): (_M.NEEDS_SNAPSHOT, (_C.CANCEL, _C.KEEP)),
    }


#: A transition that is not listed is illegal. Where a shard starts, COPYING stands for COPYING or STREAMING:
#: the shard's state decides which of the two.
TRANSITIONS: dict[tuple[ShardMode, ShardEvent], Move] = {
    **_while_read(_M.COPYING, _C.OPEN),
    (_M.COPYING, _E.COPIED): (_M.STREAMING, (_C.KEEP,)),
    (_M.COPYING, _E.GATHERED): (_M.COPYING, (_C.CANCEL, _C.KEEP, _C.OPEN)),
    **_while_read(_M.STREAMING, _C.OPEN),
    (_M.STREAMING, _E.COPIED): (_M.STREAMING, ()),
    (_M.STREAMING, _E.REQUESTED): (_M.COPYING, (_C.CANCEL, _C.KEEP, _C.OPEN)),
    # No change of it counts before it is known that its next journal lies ahead.
    (_M.STREAMING, _E.BEGINNING): (_M.UNCONFIRMED, (_C.CANCEL, _C.KEEP, _C.LIST)),
    (_M.COPYING, _E.BEGINNING): (_M.COPYING, (_C.KEEP, _C.LIST)),
    (_M.JUNCTION, _E.BEGINNING): (_M.JUNCTION, (_C.KEEP, _C.LIST)),
    **_while_read(_M.JUNCTION, _C.OPEN_JUNCTION),
    (_M.JUNCTION, _E.COPIED): (_M.JUNCTION, (_C.KEEP,)),
    # Another participant's stream may be the cause: a stream of this shard alone shows it.
    (_M.JUNCTION, _E.REFUSED): (_M.COPYING, (_C.OPEN,)),
    (_M.COPYING, _E.LISTED): (_M.COPYING, (_C.KEEP,)),
    (_M.JUNCTION, _E.LISTED): (_M.JUNCTION, (_C.KEEP,)),
    (_M.STREAMING, _E.LISTED): (_M.STREAMING, (_C.KEEP,)),
    (_M.UNCONFIRMED, _E.LISTED): (_M.COPYING, (_C.KEEP, _C.OPEN)),
    (_M.UNCONFIRMED, _E.NOT_LISTED): (_M.NEEDS_SNAPSHOT, (_C.KEEP,)),
    # Another participant was copied again, and started behind the journal.
    (_M.AT_JOURNAL, _E.LOST): (_M.NEEDS_SNAPSHOT, (_C.KEEP,)),
    (_M.AT_JOURNAL, _E.ALL_AT_JOURNAL): (_M.RETIRED, (_C.KEEP,)),
    # It waits for a participant that is lost: the shard that takes over from both is completely copied.
    (_M.AT_JOURNAL, _E.SNAPSHOT_BEGUN): (_M.RETIRED, (_C.KEEP,)),
    (_M.NEEDS_SNAPSHOT, _E.SNAPSHOT_BEGUN): (_M.RETIRED, (_C.KEEP,)),
    # It still serves, or serves again.
    (_M.NEEDS_SNAPSHOT, _E.STARTED): (_M.COPYING, (_C.KEEP, _C.OPEN)),
    (_M.AT_JOURNAL, _E.STARTED): (_M.COPYING, (_C.KEEP, _C.OPEN)),
    (_M.RETIRED, _E.STARTED): (_M.COPYING, (_C.KEEP, _C.OPEN)),
}

#: The event of a shard whose stream ended and will be opened again, by the reason of the end.
ENDED = {
    EndReason.INTERRUPTED: _E.INTERRUPTED,
    EndReason.PARTICIPANTS_ABSENT: _E.PARTICIPANTS_ABSENT,
    EndReason.SHARD_UNKNOWN: _E.UNKNOWN,
    EndReason.BEHIND: _E.INTERRUPTED,
}

#: Modes in which this shard is the one that delivers the changes of its keys.
ACTIVE = frozenset(ShardMode) - {_M.RETIRED}
#: Modes in which a stream is open, or about to be.
READ = frozenset({_M.COPYING, _M.STREAMING, _M.JUNCTION})
#: Modes of shards that don't progress by themselves.
STANDING = frozenset({_M.NEEDS_SNAPSHOT, _M.AT_JOURNAL})


@dataclass(frozen=True, slots=True)
class Shard(StateMachine[ShardMode, ShardEvent]):
    """A shard: its mode, its state in the log, and its stream.

    :param kept: the state in the log. The mode follows from it after a restart.
    :param attempt: number of its current stream; messages of earlier ones are refused.
    :param task: the task that reads it; None: no task is assigned.
    :param failures: number of consecutive ends of its stream.
    :param refusals: number of consecutive ends in which the server couldn't send what follows the position.
    :param behind: number of consecutive times that its server lacked transactions that were read.
    :param unlisted: number of consecutive lists of serving shards without it, up to `UNLISTED_MAX`; -1: it
        has been in none since its reading started.
    :param participants: the participants of its journal, which a junction has to include.
    :param trouble: why its stream ended last; empty once it continues.
    """

    state: ShardMode = ShardMode.RETIRED
    kept: ShardState = field(default_factory=ShardState)
    attempt: int = 0
    task: int | None = None
    failures: int = 0
    refusals: int = 0
    behind: int = 0
    unlisted: int = -1
    participants: tuple[str, ...] = ()
    trouble: str = ""

    @classmethod
    def restored(cls, kept: ShardState) -> Shard:
        """Return the shard of a state that a restart read from the log."""
        return cls(mode_of(kept), kept=kept, unlisted=0)

    def step(self, event: ShardEvent, **changes: object) -> tuple[Shard, tuple[ShardCommand, ...]]:
        """Return the shard after `event`, and the commands; `changes` are fields that the event sets.

        :raises IllegalTransition: for a transition that the table does not have; always a bug.
        """
        mode, commands = self.found(TRANSITIONS, event)
        moved = self.moved(event, mode, **changes)
        if mode is ShardMode.COPYING and moved.kept.copy is None:
            moved = self.moved(event, ShardMode.STREAMING, **changes)
        return moved, commands


#: Fields of a shard whose stream continues without a failure.
UNTROUBLED: dict[str, object] = {
    "participants": (), "failures": 0, "refusals": 0, "behind": 0, "trouble": ""
}  # fmt: skip


def mode_of(kept: ShardState) -> ShardMode:
    """Return the mode of a shard that has no open stream yet."""
    if kept.children:
        return ShardMode.RETIRED
    if kept.lost:
        return ShardMode.NEEDS_SNAPSHOT
    if kept.journal is not None:
        return ShardMode.AT_JOURNAL
    if kept.copy is not None:
        return ShardMode.COPYING
    return ShardMode.UNCONFIRMED if kept.begun is Begun.POSITION and kept.is_read else ShardMode.STREAMING
