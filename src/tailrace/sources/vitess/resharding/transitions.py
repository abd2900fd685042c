"""A shard's modes as a table: what happens to its stream, and what is done then. Pure.

    (start) ─▶ COPYING ─▶ STREAMING ─▶ AT_JOURNAL ─▶ RETIRED ─▶ (start), when traffic is switched back
                  ╰───────────┴─▶ JUNCTION ──╯
                  ╰───────────┴─▶ UNCONFIRMED ─▶ NEEDS_SNAPSHOT ─▶ COPYING, STREAMING or RETIRED

The page on resharding shows the table as a diagram; it is drawn from here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tailrace.sources.vitess.resharding.events import EndReason
from tailrace.sources.vitess.resharding.shard_state import Begun, ShardState
from tailrace.state_machine import StateMachine


class ShardMode(enum.StrEnum):
    """What is done about a shard."""

    COPYING = "copying"
    STREAMING = "streaming"
    # Its journal is the next thing in its stream, and was lost on the way: one stream with all participants
    # brings it.
    JUNCTION = "junction"
    # Whether it serves is not known: it has just been begun, or vtgate does not know it any more. The list of
    # shards tells.
    UNCONFIRMED = "unconfirmed"
    AT_JOURNAL = "at_journal"  # waits until all participants are there
    RETIRED = "retired"
    NEEDS_SNAPSHOT = "needs_snapshot"  # its stream can't be gone on with: its keys are to be copied again


class ShardEvent(enum.StrEnum):
    """What happens to a shard."""

    BEGINNING = "first position reached"
    POSITION = "position reached"
    COPIED = "copy completed"
    GATHERED = "one stream in place of several"
    JOURNAL = "journal reached"
    ALL_AT_JOURNAL = "all participants at the journal"
    PARTICIPANTS_ABSENT = "ended, not all participants in the stream"
    INTERRUPTED = "ended, or silent"
    UNKNOWN = "ended, shard unknown"
    LOST = "can't be gone on with"
    LISTED = "serves"
    NOT_LISTED = "others have its keys"
    SNAPSHOT_BEGUN = "snapshot of its keys begun"
    REQUESTED = "tables asked for again"
    STARTED = "start"


class ShardCommand(enum.StrEnum):
    """What is done for the shard, in the order given."""

    KEEP = "keep"  # write its state into the log, with what led to it
    OPEN = "open"  # a stream from its position
    OPEN_JUNCTION = "open junction"  # the same with all participants in it, after a moment, with a deadline
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
        # It had ceased to serve when it was begun.
        (mode, _E.NOT_LISTED): (_M.NEEDS_SNAPSHOT, (_C.CANCEL, _C.KEEP)),
    }


#: A move that is not here is not allowed. COPYING stands for COPYING or STREAMING where a stream is begun:
#: the shard's state says which of the two.
TRANSITIONS: dict[tuple[ShardMode, ShardEvent], Move] = {
    **_while_read(_M.COPYING, _C.OPEN),
    (_M.COPYING, _E.COPIED): (_M.STREAMING, (_C.KEEP,)),
    (_M.COPYING, _E.GATHERED): (_M.COPYING, (_C.CANCEL, _C.KEEP, _C.OPEN)),
    **_while_read(_M.STREAMING, _C.OPEN),
    (_M.STREAMING, _E.COPIED): (_M.STREAMING, ()),
    (_M.STREAMING, _E.REQUESTED): (_M.COPYING, (_C.CANCEL, _C.KEEP, _C.OPEN)),
    # No change of it counts before it is known that its next journal lies before us.
    (_M.STREAMING, _E.BEGINNING): (_M.UNCONFIRMED, (_C.CANCEL, _C.KEEP, _C.LIST)),
    (_M.COPYING, _E.BEGINNING): (_M.COPYING, (_C.KEEP, _C.LIST)),
    (_M.JUNCTION, _E.BEGINNING): (_M.JUNCTION, (_C.KEEP, _C.LIST)),
    **_while_read(_M.JUNCTION, _C.OPEN_JUNCTION),
    (_M.JUNCTION, _E.COPIED): (_M.JUNCTION, (_C.KEEP,)),
    (_M.JUNCTION, _E.LOST): (
        _M.COPYING,
        (_C.OPEN,),
    ),  # perhaps another participant's: this shard alone tells
    (_M.COPYING, _E.LISTED): (_M.COPYING, (_C.KEEP,)),
    (_M.JUNCTION, _E.LISTED): (_M.JUNCTION, (_C.KEEP,)),
    (_M.STREAMING, _E.LISTED): (_M.STREAMING, (_C.KEEP,)),
    (_M.UNCONFIRMED, _E.LISTED): (_M.COPYING, (_C.KEEP, _C.OPEN)),
    (_M.UNCONFIRMED, _E.NOT_LISTED): (_M.NEEDS_SNAPSHOT, (_C.KEEP,)),
    # Another participant was copied again, and begun behind the journal.
    (_M.AT_JOURNAL, _E.LOST): (_M.NEEDS_SNAPSHOT, (_C.KEEP,)),
    (_M.AT_JOURNAL, _E.ALL_AT_JOURNAL): (_M.RETIRED, (_C.KEEP,)),
    # It waits for a participant that is lost: the shard that takes both over is copied whole.
    (_M.AT_JOURNAL, _E.SNAPSHOT_BEGUN): (_M.RETIRED, (_C.KEEP,)),
    (_M.NEEDS_SNAPSHOT, _E.SNAPSHOT_BEGUN): (_M.RETIRED, (_C.KEEP,)),
    # As a shard that serves still, or again.
    (_M.NEEDS_SNAPSHOT, _E.STARTED): (_M.COPYING, (_C.KEEP, _C.OPEN)),
    (_M.AT_JOURNAL, _E.STARTED): (_M.COPYING, (_C.KEEP, _C.OPEN)),
    (_M.RETIRED, _E.STARTED): (_M.COPYING, (_C.KEEP, _C.OPEN)),
}

#: What the end of a stream is to a shard that is gone on with.
ENDED = {
    EndReason.INTERRUPTED: _E.INTERRUPTED,
    EndReason.PARTICIPANTS_ABSENT: _E.PARTICIPANTS_ABSENT,
    EndReason.SHARD_UNKNOWN: _E.UNKNOWN,
    EndReason.BEHIND: _E.INTERRUPTED,
}

#: Modes in which the keys of the shard are ours to bring, through this shard.
ACTIVE = frozenset(ShardMode) - {_M.RETIRED}
#: Modes in which a stream is open, or about to be.
READ = frozenset({_M.COPYING, _M.STREAMING, _M.JUNCTION})
#: Modes of shards that come no further by themselves.
STANDING = frozenset({_M.NEEDS_SNAPSHOT, _M.AT_JOURNAL})


@dataclass(frozen=True, slots=True)
class Shard(StateMachine[ShardMode, ShardEvent]):
    """A shard: its mode, what the log keeps of it, and its stream.

    :param kept: what the log keeps. `mode` follows from it after a restart.
    :param attempt: counts its streams; what comes of an earlier one is refused.
    :param task: that reads it; None: it has not been given one.
    :param failures: ends of its stream in a row.
    :param refusals: of these, since when the server says without a break that it can't give what follows.
    :param behind: so often in a row its server lacked transactions that were read.
    :param unlisted: so many lists of serving shards in a row lack it, or more; -1: none has had it since.
    :param participants: of its journal, which a junction has to bring.
    :param trouble: why its stream ended last, until it goes on.
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
        """Return the shard as a restart finds it."""
        return cls(mode_of(kept), kept=kept, unlisted=0)

    def step(self, event: ShardEvent, **changes: object) -> tuple[Shard, tuple[ShardCommand, ...]]:
        """Return the shard after `event`, and what is to be done; `changes` are fields that the event brings.

        :raises IllegalTransition: for a move that the table does not have; always a bug.
        """
        mode, commands = self.found(TRANSITIONS, event)
        moved = self.moved(event, mode, **changes)
        if mode is ShardMode.COPYING and moved.kept.copy is None:
            moved = self.moved(event, ShardMode.STREAMING, **changes)
        return moved, commands


#: Fields of a shard that goes on, and was in no trouble since.
UNTROUBLED: dict[str, object] = {
    "participants": (), "failures": 0, "refusals": 0, "behind": 0, "trouble": ""
}  # fmt: skip


def mode_of(kept: ShardState) -> ShardMode:
    """Return the mode of a shard of which no stream is open yet."""
    if kept.children:
        return ShardMode.RETIRED
    if kept.lost:
        return ShardMode.NEEDS_SNAPSHOT
    if kept.journal is not None:
        return ShardMode.AT_JOURNAL
    if kept.copy is not None:
        return ShardMode.COPYING
    return ShardMode.UNCONFIRMED if kept.begun is Begun.POSITION and kept.is_read else ShardMode.STREAMING
