"""Decides which shards are read, from which positions, by which tasks: through reshards, restarts and lost
tasks. Pure.

Events come in one at a time; the caller carries out the returned commands in order, before the next event.
The states in the log are the only memory: a coordinator created from them continues.

- A shard is read by one stream, up to its journal. A journal stands for one switch of traffic.
- When all participants are at a journal, they retire and its targets start at its positions, in one
  transaction of the log: the participants' changes lie before it, the targets' changes after it. So a key's
  changes stay in order.
- No change is skipped silently: a shard whose stream can't continue from its position needs a snapshot, and
  the changes of its keys wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tailrace.backoff import Backoff
from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.resharding.assignment import assigned
from tailrace.sources.vitess.resharding.events import (
    AttemptEvent,
    CancelStream,
    ChunkReached,
    ChunksGathered,
    Command,
    CopyCompleted,
    CopyPlanned,
    EndReason,
    Event,
    JournalReached,
    Keep,
    ListShards,
    OpenStream,
    PositionReached,
    Probed,
    ProbeFailed,
    ShardsListed,
    ShardsServing,
    ShardStreamEnded,
    SnapshotRequested,
    TablesRequested,
    TablesStreamed,
)
from tailrace.sources.vitess.resharding.gtid_sets import CURRENT, TO_COPY, GtidSet
from tailrace.sources.vitess.resharding.key_ranges import KeyRange, by_keys, merged, overlapping, uncovered
from tailrace.sources.vitess.resharding.refusals import (
    BEHIND,
    BEHIND_MAX,
    FAILURES_TOLD,
    NO_JOURNAL,
    PURGED,
    PURGED_MAX,
    REFUSALS,
    STILL,
    UNLISTED_MAX,
)
from tailrace.sources.vitess.resharding.shard_state import (
    Begun,
    CommonKey,
    CopyState,
    Journal,
    ShardState,
    ahead_of,
    inherited_copy,
    same_key,
)
from tailrace.sources.vitess.resharding.transitions import (
    ACTIVE,
    ENDED,
    READ,
    STANDING,
    TRANSITIONS,
    UNTROUBLED,
    Shard,
    ShardCommand,
    ShardEvent,
    ShardMode,
)

#: Wait before a junction is opened, after the end of the shard's stream, and the junction's deadline, in
#: seconds. vtgate sleeps for half a minute if it finds no tablet during a switch; a new attempt is faster.
JUNCTION_WAIT_S, JUNCTION_DEADLINE_S = 1.0, 5.0

#: Waits before a stream that ended is opened again.
_BACKOFF = Backoff(first_s=0.2, longest_s=10.0)


class Coordinator:
    """The coordinator of a keyspace's shards: see the module. Not thread-safe.

    :param states: the states in the log, by shard; empty: nothing was captured yet.
    :param tasks: the tasks that read shards.
    :param copies: whether shards are copied at the first start; else they are read from the newest change on.
    :param common_key: the key from which a shard that took over from several continues a table's copy.
    """

    def __init__(
        self,
        states: Mapping[str, ShardState],
        tasks: Sequence[int] = (0,),
        *,
        copies: bool = True,
        common_key: CommonKey = same_key,
    ) -> None:
        self.shards: dict[str, Shard] = {name: Shard.restored(kept) for name, kept in states.items()}
        self.tasks = tuple(tasks)
        self.copies = copies
        self.common_key = common_key
        #: Lost shards whose keys are to be copied again as soon as possible.
        lost = {name for name, shard in self.shards.items() if shard.state is ShardMode.NEEDS_SNAPSHOT}
        self.requested = {name for name in lost if states[name].begun}
        self._commands: list[Command] = []
        self._kept: dict[str, ShardState] = {}

    def start(self) -> tuple[Command, ...]:
        """Return the first commands: shards continue from their states, and the shards are listed."""
        self._list()
        self._assign()
        return self._taken()

    def step(self, event: Event) -> tuple[Command, ...]:
        """Return the commands after `event`; none if its stream is over. The caller asks `accepts` first
        whether the rows that came with the event are written to the log.

        :raises TailraceError: `PROTOCOL_VIOLATION` if a journal or the list of shards leaves keys out.
        """
        if isinstance(event, ShardsListed):
            self._listed(event.shards)
        elif isinstance(event, ShardsServing):
            self._note_unlisted(event.shards)
        elif isinstance(event, SnapshotRequested):
            self.requested.update(self._in({ShardMode.NEEDS_SNAPSHOT}))
            if self.requested:
                self._list()
        elif isinstance(event, TablesRequested):
            self._copy_tables(event)
        elif self.accepts(event.shard, event.attempt):
            self._of_a_stream(event)
        return self._taken()

    def accepts(self, shard: str, attempt: int) -> bool:
        """Return whether this attempt is the shard's current stream; messages of earlier ones are refused."""
        found = self.shards.get(shard)
        return found is not None and found.attempt == attempt and found.state in READ

    @property
    def is_whole(self) -> bool:
        """Whether all shards are streamed, no copy remains, and no chunk is ahead of its shard."""
        held = [self.shards[name] for name in self._in(ACTIVE)]
        return bool(held) and all(
            shard.state is ShardMode.STREAMING and shard.kept.is_read and not shard.kept.ahead
            for shard in held
        )

    @property
    def needs_snapshot(self) -> tuple[KeyRange, ...]:
        """The key ranges that have to be copied again, as few as possible."""
        return merged(KeyRange.of_shard(name) for name in self._in({ShardMode.NEEDS_SNAPSHOT}))

    def is_unlisted(self, shard: str) -> bool:
        """Return whether a shard that is streamed no longer serves."""
        found = self.shards[shard]
        return found.state is ShardMode.STREAMING and found.unlisted >= UNLISTED_MAX

    @property
    def has_new_shards(self) -> bool:
        """Whether a streamed shard has been in no list of serving shards since its reading started."""
        return any(held.unlisted < 0 for held in self.shards.values() if held.state is ShardMode.STREAMING)

    def waits_for_snapshot(self, shard: str, listed: Iterable[str]) -> bool:
        """Return whether the changes of a serving shard wait until lost keys are copied again.

        :param listed: the shards that serve.
        """
        held, _ = self._component(set(overlapping(shard, self._in(ACTIVE))), tuple(listed))
        modes = {self.shards[name].state for name in held}
        return not self.requested and ShardMode.NEEDS_SNAPSHOT in modes and modes <= STANDING

    # ------------------------------------------------------------------ streams

    def _of_a_stream(self, event: AttemptEvent) -> None:
        match event:
            case PositionReached():
                self._reached(event)
            case TablesStreamed():
                self._streamed(event)
            case CopyPlanned():
                self._planned(event)
            case ChunkReached():
                self._chunk_reached(event)
            case ChunksGathered():
                kept = self.shards[event.shard].kept.by_one_stream(self.common_key, is_whole=event.is_whole)
                self._move(event.shard, ShardEvent.GATHERED, kept=kept, **UNTROUBLED)
            case CopyCompleted():
                kept = replace(self.shards[event.shard].kept, copy=None)
                self._move(event.shard, ShardEvent.COPIED, kept=kept)
            case JournalReached():
                self._at_journal(event)
            case ShardStreamEnded():
                self._ended(event)
            case Probed():
                self._probed(event)
            case ProbeFailed() if self.shards[event.shard].state is not ShardMode.JUNCTION:
                # It has been silent for long: report it to the user at once.
                self._interrupt(event.shard, event.trouble, reported=True)

    def _reached(self, event: PositionReached) -> None:
        shard = self.shards[event.shard]
        kept = replace(shard.kept, gtid=event.gtid)
        if event.last_keys is not None and kept.copy is not None:
            kept = replace(kept, copy=kept.copy.after(event.last_keys))
        if kept.ahead:
            kept = replace(kept, ahead=ahead_of(kept.ahead, kept.gtid))
        self._continue(event.shard, kept)

    def _continue(self, name: str, kept: ShardState) -> None:
        shard = self.shards[name]
        if not shard.kept.is_read:
            self._move(name, ShardEvent.BEGINNING, kept=kept, **UNTROUBLED)
            return
        # Every transaction takes this path: the step is not added to `steps`.
        shard.found(TRANSITIONS, ShardEvent.POSITION)
        self.shards[name] = replace(shard, kept=kept, failures=0, refusals=0, behind=0, trouble="")
        self._kept[name] = kept

    def _streamed(self, event: TablesStreamed) -> None:
        kept = self.shards[event.shard].kept
        if kept.copy is not None and not kept.copy.chunks:
            copy = replace(kept.copy, keys={**event.keys, **kept.copy.keys})
            self._continue(event.shard, replace(kept, copy=copy))

    def _planned(self, event: CopyPlanned) -> None:
        shard = self.shards[event.shard]
        if (copy := shard.kept.copy) is not None:
            kept = replace(shard.kept, copy=replace(copy, chunks=event.chunks))
            self.shards[event.shard] = replace(shard, kept=kept)
            self._kept[event.shard] = kept

    def _chunk_reached(self, event: ChunkReached) -> None:
        kept = self.shards[event.shard].kept
        after = kept.with_chunk(event.chunk, event.gtid, event.key, is_done=event.is_done)
        if after != kept:
            self._continue(event.shard, after)

    def _at_journal(self, event: JournalReached) -> None:
        if event.shard not in event.journal.participants:
            self._reached(PositionReached(event.shard, event.attempt, event.gtid))
            return
        kept = replace(self.shards[event.shard].kept, gtid=event.gtid, journal=event.journal)
        self._move(event.shard, ShardEvent.JOURNAL, kept=kept, trouble="", failures=0)
        self._switch_if_all_are_there(event.journal)
        self._lose_the_stranded()

    def _ended(self, event: ShardStreamEnded) -> None:
        shard = self.shards[event.shard]
        refusal = REFUSALS.get(event.reason)
        changes = {
            "failures": shard.failures + 1,
            "refusals": shard.refusals + 1 if refusal else 0,
            "behind": max(shard.behind, int(event.reason is EndReason.BEHIND)),
            "trouble": event.trouble or event.reason.value,
        }
        if refusal is None:
            changes["participants"] = event.participants or shard.participants
            if event.reason is EndReason.PARTICIPANTS_ABSENT:
                changes["kept"] = shard.kept.by_one_stream(self.common_key)
            self._move(event.shard, ENDED[event.reason], **changes)
        elif shard.state is ShardMode.JUNCTION and refusal[0] > 1:
            # The server's refusal may concern another participant.
            self._move(event.shard, ShardEvent.REFUSED, **changes | {"refusals": 0})
        elif shard.refusals + 1 < refusal[0]:
            self._move(event.shard, ShardEvent.INTERRUPTED, **changes)
        else:
            self._lose(event.shard, refusal[1] or event.trouble, **changes)

    def _lose(self, name: str, lost: str, **changes: object) -> None:
        kept = replace(self.shards[name].kept, lost=lost, journal=None)
        self._move(name, ShardEvent.LOST, kept=kept, **changes)

    def _probed(self, event: Probed) -> None:
        shard = self.shards[event.shard]
        if shard.state is ShardMode.JUNCTION:
            return  # it has a deadline
        if not shard.kept.is_read:
            self._interrupt(event.shard, "nothing was received from its stream")
            return
        ours, executed = GtidSet.parse(shard.kept.gtid), GtidSet.parse(event.executed)
        if not ours.contains(GtidSet.parse(event.purged)):
            if shard.refusals + 1 >= PURGED_MAX:
                self._lose(event.shard, PURGED)
            else:
                self._interrupt(event.shard, PURGED, refusals=shard.refusals + 1)
        elif not ours.intersection(executed).intervals:
            self._lose(
                event.shard, "it was created again: its server has none of the transactions that were read"
            )
        elif not executed.contains(ours):
            if shard.behind + 1 >= BEHIND_MAX:
                self._lose(event.shard, BEHIND)
            else:
                self._interrupt(event.shard, BEHIND, behind=shard.behind + 1)
        elif not ours.contains(executed):
            self._interrupt(event.shard, STILL)
        elif not event.serves and self.is_unlisted(event.shard):
            # A journal is written before others serve its keys: the server's transactions would include it.
            self._lose(event.shard, NO_JOURNAL)
        else:
            self.shards[event.shard] = replace(shard, behind=0, failures=0, refusals=0, trouble="")

    def _interrupt(self, name: str, trouble: str, *, reported: bool = False, **changes: object) -> None:
        shard = self.shards[name]
        if shard.task is not None:
            self._commands.append(CancelStream(name, shard.task, shard.attempt))
        failures = max(shard.failures + 1, FAILURES_TOLD if reported else 0)
        changes = {"failures": failures, "behind": 0, "refusals": 0, **changes}
        self._move(name, ShardEvent.INTERRUPTED, trouble=trouble, **changes)

    # ------------------------------------------------------------------ reshards

    def _switch_if_all_are_there(self, journal: Journal) -> None:
        if not all(self.is_at(name, journal) for name in journal.participants):
            return
        held = merged(map(KeyRange.of_shard, journal.participants))
        targets = dict(journal.targets)
        if held != merged(map(KeyRange.of_shard, targets)):
            raise TailraceError(
                Kind.PROTOCOL_VIOLATION,
                f"follow a reshard of {', '.join(journal.participants)}: its journal gives their keys to "
                f"{', '.join(targets) or 'no shard'}, whose key ranges differ",
                "report it, with the journal: it is in the tablets' table _vt.resharding_journal",
                {"journal": str(journal.id)},
            )
        parents = {name: self.shards[name].kept for name in journal.participants}
        for name in journal.participants:
            self._retire(name, ShardEvent.ALL_AT_JOURNAL, overlapping(name, targets))
        for name, gtid in journal.targets:
            names = overlapping(name, parents)
            copy = inherited_copy((parents[parent] for parent in names), self.common_key)
            self._begin(
                name, gtid, names, (parents[parent].epoch for parent in names), copy, is_at_journal=True
            )
        self._assign()

    def _lose_the_stranded(self) -> None:
        """Lose shards that wait at journals for each other: one of them was copied again, and started behind
        the others' journal, which it will never reach.
        """
        waiting = self._in({ShardMode.AT_JOURNAL})
        if len(waiting) < 2:
            return
        ours = self._in(ACTIVE)
        # A participant that has not reached it yet descends from the shards that have its keys now.
        waits_for = {
            name: {
                held
                for other in journal.participants
                if not self.is_at(other, journal)
                for held in overlapping(other, ours)
                if held in waiting
            }
            for name in waiting
            if (journal := self.shards[name].kept.journal) is not None
        }
        for name in waiting:
            if name in _reached_from(name, waits_for):
                self._lose(name, "it waits at a reshard, but another participant was copied behind it")

    def is_at(self, name: str, journal: Journal) -> bool:
        """Return whether a shard waits at the journal."""
        shard = self.shards.get(name)
        return shard is not None and shard.state is ShardMode.AT_JOURNAL and shard.kept.journal == journal

    def _retire(self, name: str, event: ShardEvent, children: tuple[str, ...]) -> None:
        # There may be many retired shards: only position, epoch, parents and children are kept.
        before = self.shards[name].kept
        kept = ShardState(before.gtid, before.epoch, before.parents, children=children)
        self.requested.discard(name)
        self._move(name, event, kept=kept, **UNTROUBLED)

    def _begin(
        self,
        name: str,
        gtid: str,
        parents: tuple[str, ...],
        epochs: Iterable[int],
        copy: CopyState | None,
        *,
        is_at_journal: bool = False,
    ) -> None:
        known = self.shards.get(name)
        # Higher than the parents' epochs, and than its own epoch before it was retired.
        epoch = max((*epochs, *(() if known is None else (known.kept.epoch,))), default=-1) + 1
        begun = Begun.CONFIRMED if is_at_journal else Begun.POSITION if copy is None else Begun.COPY
        kept = ShardState(gtid, epoch, parents, copy, begun=begun)
        self.shards[name] = known or Shard()
        self.requested.discard(name)
        self._move(name, ShardEvent.STARTED, kept=kept, unlisted=-1, **UNTROUBLED)

    # ------------------------------------------------------------------ the list of shards

    def _listed(self, listed: tuple[str, ...]) -> None:
        gaps = uncovered(KeyRange(), map(KeyRange.of_shard, listed))
        if gaps:
            raise TailraceError(
                Kind.PROTOCOL_VIOLATION,
                f"list the keyspace's shards: none serves {', '.join(map(str, gaps))}",
                "it is retried; if it persists, see vtctldclient GetSrvKeyspaces",
                {"shards": ", ".join(listed)},
            )
        if not self.shards:
            gtid, copy = (TO_COPY, CopyState()) if self.copies else (CURRENT, None)
            for name in by_keys(listed):
                self._begin(name, gtid, (), (), copy)
            self._assign()
            return
        for name in self._in(READ | {ShardMode.UNCONFIRMED}):
            self._confirm(name, listed)
        while waiting := by_keys(self.requested):
            lost, targets = self._component({waiting[0]}, listed)
            if not self._copy_component(lost, targets):
                self._list(JUNCTION_WAIT_S)
                return

    def _note_unlisted(self, listed: tuple[str, ...]) -> None:
        if uncovered(KeyRange(), map(KeyRange.of_shard, listed)):
            return  # it may lack any shard
        for name in self._in(READ):
            shard = self.shards[name]
            unlisted = 0 if name in listed else min(shard.unlisted + (shard.unlisted >= 0), UNLISTED_MAX)
            if unlisted != shard.unlisted:
                self.shards[name] = replace(shard, unlisted=unlisted)

    def _confirm(self, name: str, listed: tuple[str, ...]) -> None:
        shard = self.shards[name]
        begun, is_read = shard.kept.begun, shard.kept.is_read
        if shard.state is not ShardMode.UNCONFIRMED and not begun:
            return
        if name not in listed:
            # Nothing of a shard counts before its start is confirmed: its successors start unrequested.
            if begun:
                self.requested.add(name)
            children = ", ".join(overlapping(name, listed))
            lost = f"it was not read up to the reshard that gave its keys to {children}"
            self._move(name, ShardEvent.NOT_LISTED, kept=replace(shard.kept, lost=lost))
        elif shard.state is ShardMode.UNCONFIRMED or is_read:
            # It still serves after its reading started: its next journal lies ahead.
            kept = replace(shard.kept, begun=Begun.CONFIRMED if is_read else begun)
            self._move(name, ShardEvent.LISTED, kept=kept)

    def _component(self, lost: set[str], listed: tuple[str, ...]) -> tuple[set[str], set[str]]:
        """Return our shards that share keys with `lost` through serving shards, or that wait for one of these
        at a journal; and the serving shards.
        """
        ours = self._in(ACTIVE)
        while True:
            targets = {name for held in lost for name in overlapping(held, listed)}
            found = {name for target in targets for name in overlapping(target, ours)} | lost
            found |= {
                name
                for name in ours
                if (journal := self.shards[name].kept.journal) is not None
                and found.intersection(journal.participants)
            }
            if found == lost:
                return lost, targets
            lost = found

    def _copy_component(self, lost: set[str], targets: set[str]) -> bool:
        """Start copying `targets` in place of `lost`; return false if it isn't possible yet."""
        if any(self.shards[name].state not in STANDING for name in lost):
            return False  # it still reaches its journal, or is found to be lost
        before = {name: self.shards[name].kept for name in lost}
        # Start at the newest position only if all started there and nothing of them counts.
        copies = any(kept.copy is not None or kept.begun is not Begun.POSITION for kept in before.values())
        gtid = TO_COPY if copies else CURRENT
        copy = CopyState(is_again=any(kept.is_read for kept in before.values())) if copies else None
        for name in by_keys(lost - targets):
            self._retire(name, ShardEvent.SNAPSHOT_BEGUN, overlapping(name, targets))
        for name in by_keys(targets):
            parents = tuple(parent for parent in overlapping(name, before) if parent != name)
            self._begin(name, gtid, parents, (kept.epoch for kept in before.values()), copy)
        self.requested -= lost
        self._assign()
        return True

    def _copy_tables(self, event: TablesRequested) -> None:
        for name, keys in event.keys.items():
            shard = self.shards[name]
            copy = CopyState(keys, frozenset(keys.keys() - event.tables), is_again=True)
            self._move(name, ShardEvent.REQUESTED, kept=replace(shard.kept, copy=copy))

    # ------------------------------------------------------------------ tasks

    def _assign(self) -> None:
        """Assign a task to each shard that is or may be read; reopen the streams whose task changes."""
        wanted = self._in(READ | {ShardMode.UNCONFIRMED})
        tasks = assigned(wanted, self.tasks, {name: self.shards[name].task for name in wanted})
        for name in wanted:
            shard, task = self.shards[name], tasks[name]
            if task == shard.task:
                continue
            if shard.task is not None and shard.state in READ:
                self._commands.append(CancelStream(name, shard.task, shard.attempt))
            self.shards[name] = replace(shard, task=task)
            if shard.state in READ:
                self._open(name)

    def _open(self, name: str, wait_s: float = 0.0) -> None:
        shard = replace(self.shards[name], attempt=self.shards[name].attempt + 1)
        if (copy := shard.kept.copy) is not None and not copy.is_begun:
            # The copy starts at a new position, whatever it had before: that may be behind a journal.
            begun = replace(shard.kept, gtid=TO_COPY, begun=Begun.COPY, copy=replace(copy, chunks=()))
            shard = replace(shard, kept=begun)
        self.shards[name] = shard
        if shard.task is None:
            return  # `_assign` opens it
        gtid, keys = shard.kept.request
        positions = {name: gtid}
        is_junction = shard.state is ShardMode.JUNCTION
        if is_junction:
            positions |= {other: self._position(other) for other in shard.participants if other != name}
        self._commands.append(
            OpenStream(
                name,
                shard.task,
                shard.attempt,
                positions,
                keys,
                wait_s,
                JUNCTION_DEADLINE_S if is_junction else None,
            )
        )

    def _position(self, name: str) -> str:
        # The server may no longer have the position of a lost shard.
        shard = self.shards.get(name)
        if shard is None or shard.state is ShardMode.NEEDS_SNAPSHOT or not shard.kept.is_read:
            return CURRENT
        return shard.kept.gtid

    def _list(self, wait_s: float = 0.0) -> None:
        self._commands = [found for found in self._commands if not isinstance(found, ListShards)]
        self._commands.append(ListShards(wait_s))

    # ------------------------------------------------------------------ moves

    def _move(self, name: str, event: ShardEvent, **changes: object) -> None:
        before = self.shards[name]
        shard, commands = before.step(event, **changes)
        self.shards[name] = shard
        for command in commands:
            match command:
                case ShardCommand.KEEP:
                    self._kept[name] = shard.kept
                case ShardCommand.CANCEL:
                    if before.task is not None:
                        self._commands.append(CancelStream(name, before.task, before.attempt))
                case ShardCommand.LIST:
                    # Nothing of a started shard counts until the list confirms that it serves: list at once.
                    # A shard unknown to vtgate may appear soon: wait.
                    self._list(0.0 if event is ShardEvent.BEGINNING else JUNCTION_WAIT_S)
                case ShardCommand.OPEN:
                    if event is ShardEvent.STARTED:
                        # `_assign` opens it, once all shards that start now are known.
                        self.shards[name] = replace(shard, task=None, attempt=shard.attempt + 1)
                    else:
                        self._open(name, replace(_BACKOFF, attempts=max(0, shard.failures - 1)).wait_s)
                case ShardCommand.OPEN_JUNCTION:
                    self._open(name, JUNCTION_WAIT_S)

    def _in(self, modes: Iterable[ShardMode]) -> list[str]:
        wanted = frozenset(modes)
        return by_keys(name for name, shard in self.shards.items() if shard.state in wanted)

    def _taken(self) -> tuple[Command, ...]:
        commands, kept = self._commands, self._kept
        self._commands, self._kept = [], {}
        # States are written first: streams opened by these commands send nothing before that.
        return (Keep(kept), *commands) if kept else tuple(commands)


def _reached_from(name: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    after = list(edges[name])
    while after:
        following = after.pop()
        if following not in found:
            found.add(following)
            after += edges[following]
    return found
