"""A model of a keyspace that is resharded, and of a capture that follows it: for the coordinator of shards.

A shard's binlog is a tuple of entries, and its position is their number. A switch of traffic copies the keys'
changes into the targets' binlogs, writes a journal into that of each source, and from then on the sources get
what the targets write (reverse replication), as in Vitess: a reader of a source past its journal, or of a
target from before its position, sees changes twice. Vitess can also switch without a journal.

The capture's commands are carried out at once; what it appends is durable with the next append, at the
latest. Streams deliver one entry at a time, in any order among each other, also after they have ended.

In a world with chunks, a copy is made by two streams at the same time, each of a range of keys, as of a
different position; the rest of an interrupted range is another one. Changes that a stream repeats afterwards
are judged as `RepeatedChangeFilter` passes them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tailrace.sources.vitess.resharding import coordinator as coordination
from tailrace.sources.vitess.resharding.events import (
    CancelStream,
    ChunkReached,
    ChunksGathered,
    CopyCompleted,
    CopyPlanned,
    EndReason,
    JournalReached,
    Keep,
    ListShards,
    OpenStream,
    PositionReached,
    Probed,
    ShardsListed,
    ShardsServing,
    ShardStreamEnded,
    SnapshotRequested,
    TablesRequested,
)
from tailrace.sources.vitess.resharding.key_ranges import KeyRange, overlapping
from tailrace.sources.vitess.resharding.shard_state import CopyChunk, Journal, ShardState
from tailrace.sources.vitess.resharding.transitions import Shard, ShardMode

#: Keyspace ids of the rows; each is a key of the one table.
KEYS = ("20", "90", "d0")
TABLE = "t"
#: A primary key before all rows.
LEAST = "00"
#: The second range begins with this key.
_BOUND = 0x90
#: In place of a chunk's number: the next ones are to be planned.
_PLANNED = -1

T = TypeVar("T")


def replace(value: T, **fields: Any) -> T:
    """As `dataclasses.replace`, for the model's own classes, in a fifth of the time: it was half of an
    exploration.
    """
    found = object.__new__(type(value))
    found.__dict__.update(value.__dict__, **fields)
    return found


@dataclass(frozen=True)
class Change:
    key: str
    number: int


Entry = Change | Journal | None  # None: a transaction of Vitess itself


@dataclass(frozen=True)
class Binlog:
    """One shard of the keyspace."""

    entries: tuple[Entry, ...] = (None,)
    serves: bool = True
    purged: int = 0
    generation: int = 0  # distinguishes shards of one name, of which one was deleted


@dataclass(frozen=True)
class Budget:
    """How often something may still happen; `writes` are the keys that are still to be written, in order."""

    writes: tuple[str, ...] = ()
    crashes: int = 0
    interruptions: int = 0
    late: int = 0  # deliveries of streams that have ended
    tasks: int = 0  # restarts with another number of tasks
    snapshots: int = 0
    tables: int = 0  # requests for a copy of all rows, beside the stream; in worlds without other copies
    purges: int = 0
    completes: int = 0

    def less(self, what: str) -> Budget:
        return replace(self, **{what: getattr(self, what) - 1})


Reshard = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Keyspace:
    """The state of Vitess."""

    shards: frozenset[tuple[str, Binlog]]
    written: tuple[int, ...] = (0,) * len(KEYS)
    reshards: tuple[Reshard, ...] = ()  # still to come
    switched: tuple[Reshard, ...] = ()  # whose sources still exist
    completed: int = 0
    has_journals: bool = True  # else a switch writes none, and sources get nothing more

    def binlogs(self) -> dict[str, Binlog]:
        return dict(self.shards)

    def serving(self) -> tuple[str, ...]:
        return tuple(sorted(name for name, binlog in self.shards if binlog.serves))


@dataclass(frozen=True)
class Stream:
    """A stream of a shard, as vtgate has it. `copied`: the last copied key; None: it copies nothing."""

    shard: str
    attempt: int
    task: int
    position: int
    together: tuple[str, ...]
    copied: str | None
    is_over: bool = False
    server: str = ""  # the shard's generation of its position; with another one, it brings only heartbeats
    is_missing: bool = False  # the shard did not exist when it was opened
    chunk: int | None = (
        None  # the number of the chunk that it copies, as of `position`; 0: it has yet to begin
    )


@dataclass(frozen=True)
class Captured:
    """The log, folded: how many changes of each key, and the states of the shards."""

    changes: tuple[int | None, ...] = (None,) * len(KEYS)
    states: frozenset[tuple[str, ShardState]] = frozenset()


@dataclass(frozen=True)
class World:
    budget: Budget
    keyspace: Keyspace
    shards: frozenset[tuple[str, Shard]] = frozenset()
    requested: frozenset[str] = frozenset()
    tasks: tuple[int, ...] = (0,)
    is_asked: bool = False  # a ListShards is to be answered
    listed: tuple[str, ...] | None = None  # the answer is on its way
    streams: frozenset[Stream] = frozenset()
    appended: Captured = field(default_factory=Captured)
    durable: Captured = field(default_factory=Captured)
    copies: bool = True
    looks: bool = False  # checks now and then for shards that no longer serve
    chunks: bool = False  # copies are made by several streams
    rereads: bool = False  # the changes before the copy are captured already, and none may be lost meanwhile

    def binlog(self, shard: str) -> Binlog | None:
        return self.keyspace.binlogs().get(shard)


def began(
    shards: tuple[str, ...],
    reshards: tuple[Reshard, ...],
    budget: Budget,
    *,
    copies: bool = False,
    chunks: bool = False,
) -> World:
    """Return the world before the first start: nothing is written, nothing captured."""
    keyspace = Keyspace(frozenset((name, Binlog()) for name in shards), reshards=reshards)
    world = World(budget, keyspace, copies=copies or chunks, chunks=chunks)
    return _started(world, Captured())


def running(
    shards: tuple[str, ...], reshards: tuple[Reshard, ...], budget: Budget, *, has_journals: bool = True
) -> World:
    """Return the world in which all shards are streamed, and nothing was written yet."""
    world = began(shards, reshards, budget)
    while moves := [found for found in inner(world) if found != world]:
        world = moves[0]
    captured = replace(world.appended, changes=(0,) * len(KEYS))
    keyspace = replace(world.keyspace, has_journals=has_journals)
    return replace(world, keyspace=keyspace, appended=captured, durable=captured, rereads=budget.tables > 0)


def looking(world: World) -> World:
    """Return a world that checks whether shards still serve, and has checked before."""
    return _stepped(replace(world, looks=True), ShardsServing(world.keyspace.serving()))


def _server(shard: str, binlog: Binlog) -> str:
    name = shard.replace("-", "f").ljust(8, "e")
    return f"{name}-0000-0000-0000-{binlog.generation:012}"


def _gtid(shard: str, binlog: Binlog, position: int) -> str:
    return f"MySQL56/{_server(shard, binlog)}:1-{position}"


def _position(gtid: str, binlog: Binlog) -> int:
    if gtid == "current":
        return len(binlog.entries)
    return _last(gtid) if gtid else 0


def _last(gtid: str) -> int:
    return int(gtid.rpartition(":")[2].rpartition("-")[2])


# ---------------------------------------------------------------------- the capture


def _coordinator(world: World) -> coordination.Coordinator:
    found = coordination.Coordinator({}, world.tasks, copies=world.copies, common_key=_common_key)
    found.shards = dict(world.shards)
    found.requested = set(world.requested)
    return found


def _common_key(keys: Sequence[str | None]) -> str | None:
    return min(key or LEAST for key in keys)


def _started(world: World, captured: Captured) -> World:
    found = coordination.Coordinator(
        dict(captured.states), world.tasks, copies=world.copies, common_key=_common_key
    )
    world = replace(
        world, streams=frozenset(), is_asked=False, listed=None, appended=captured, durable=captured
    )
    return _obeyed(world, found, found.start(), captured.changes)


def _stepped(world: World, event: Any, changes: tuple[int | None, ...] | None = None) -> World:
    found = _coordinator(world)
    commands = found.step(event)
    return _obeyed(world, found, commands, world.appended.changes if changes is None else changes)


def _obeyed(
    world: World, found: coordination.Coordinator, commands: Any, changes: tuple[int | None, ...]
) -> World:
    shards = {name: _without_trouble(shard) for name, shard in found.shards.items()}
    world = replace(
        world,
        shards=frozenset(shards.items()),
        requested=frozenset(found.requested),
    )
    kept: Mapping[str, ShardState] = {}
    for command in commands:
        match command:
            case Keep():
                kept = command.states
            case OpenStream():
                world = _opened(world, command)
            case CancelStream():
                world = _over(world, command.shard, command.attempt)
            case ListShards():
                world = replace(world, is_asked=True, listed=None)
    if kept or changes != world.appended.changes:
        states = dict(world.appended.states) | dict(kept)
        world = replace(world, durable=world.appended, appended=Captured(changes, frozenset(states.items())))
    return _forgotten(world)


def _without_trouble(shard: Shard) -> Shard:
    if not (shard.steps or shard.failures or shard.trouble):
        return shard
    return dataclasses.replace(shard, steps=(), failures=0, trouble="")


def _opened(world: World, command: OpenStream) -> World:
    copy = _state(world, command.shard).kept.copy
    if world.chunks and command.deadline_s is None and copy is not None and (copy.chunks or not copy.keys):
        planned = Stream(
            command.shard, command.attempt, command.task, 0, (command.shard,), "", chunk=_PLANNED
        )
        world = _over(world, command.shard, command.attempt - 1)
        return replace(world, streams=world.streams | {planned})
    binlog = world.binlog(command.shard)
    wanted = command.positions[command.shard]
    position = 0 if binlog is None else _position(wanted, binlog)
    server = wanted.removeprefix("MySQL56/").partition(":")[0] if ":" in wanted else ""
    copied = None if copy is None else command.keys.get(TABLE, "")
    if copy is not None and not command.keys and binlog is not None:
        position = len(binlog.entries)
    stream = Stream(
        command.shard, command.attempt, command.task, position, tuple(sorted(command.positions)), copied
    )
    stream = replace(stream, server=server, is_missing=binlog is None)
    world = _over(world, command.shard, command.attempt - 1)
    return replace(world, streams=world.streams | {stream})


def _over(world: World, shard: str, attempt: int) -> World:
    streams = {
        replace(found, is_over=True) if found.shard == shard and found.attempt <= attempt else found
        for found in world.streams
    }
    # A chunk's stream has a name of its own: late deliveries name a stream that is not known.
    return replace(
        world, streams=frozenset(each for each in streams if each.chunk is None or not each.is_over)
    )


def _forgotten(world: World) -> World:
    """Remove what can't matter any more from the state, also absolute values of numbers that are only
    compared.
    """
    if world.budget.late:
        return world
    return replace(
        world,
        streams=frozenset(replace(found, attempt=1) for found in world.streams if not found.is_over),
        shards=frozenset(
            (name, shard if shard.attempt == 1 else dataclasses.replace(shard, attempt=1))
            for name, shard in world.shards
        ),
    )


# ---------------------------------------------------------------------- what may happen


def inner(world: World) -> list[World]:
    """Return what happens by itself at some time."""
    return [
        *_listings(world),
        *_looks(world),
        *(
            found
            for stream in world.streams
            if not stream.is_over
            for found in _deliveries(world, stream, stream)
        ),
    ]


def outer(world: World) -> Iterator[World]:
    """Yield what the world may do."""
    yield from _vitess(world)
    budget = world.budget
    if budget.crashes:
        crashed = replace(world, budget=budget.less("crashes"))
        yield _started(crashed, world.appended)
        if world.durable != world.appended:
            yield _started(crashed, world.durable)
    if budget.tasks:
        tasks = (0, 1) if world.tasks == (0,) else (0,)
        yield _started(replace(world, budget=budget.less("tasks"), tasks=tasks), world.appended)
    for stream in world.streams:
        if stream.is_over:
            if budget.late:
                yield from _deliveries(replace(world, budget=budget.less("late")), stream, None)
        elif budget.interruptions:
            less = replace(world, budget=budget.less("interruptions"))
            less = replace(less, streams=_with(less, stream, replace(stream, is_over=True)))
            yield _stepped(less, ShardStreamEnded(stream.shard, stream.attempt, EndReason.INTERRUPTED))
    is_lost = any(shard.state is ShardMode.NEEDS_SNAPSHOT for _, shard in world.shards)
    if budget.snapshots and is_lost:
        yield _stepped(replace(world, budget=budget.less("snapshots")), SnapshotRequested())
    if budget.tables and _coordinator(world).is_whole:
        streamed = [name for name, shard in world.shards if shard.state is ShardMode.STREAMING]
        wanted = TablesRequested({name: {TABLE: LEAST} for name in streamed}, frozenset({TABLE}))
        yield _stepped(replace(world, budget=budget.less("tables")), wanted)


def _listings(world: World) -> Iterator[World]:
    if not world.is_asked:
        return
    if world.listed is None:
        yield replace(world, listed=world.keyspace.serving())
    else:
        answered = replace(world, is_asked=False, listed=None)
        yield _stepped(answered, ShardsListed(world.listed))


def _looks(world: World) -> Iterator[World]:
    if not world.looks:
        return
    yield _stepped(world, ShardsServing(world.keyspace.serving()))
    for stream in world.streams:
        binlog = world.binlog(stream.shard)
        is_asked = not stream.is_over and _coordinator(world).is_unlisted(stream.shard)
        if is_asked and binlog is not None:
            executed = _gtid(stream.shard, binlog, len(binlog.entries))
            yield _stepped(world, Probed(stream.shard, stream.attempt, executed, "", serves=False))


def _vitess(world: World) -> Iterator[World]:
    keyspace, budget = world.keyspace, world.budget
    if budget.writes:
        key, *keys = budget.writes
        place = KEYS.index(key)
        number = keyspace.written[place]
        shards = {
            name: replace(binlog, entries=(*binlog.entries, Change(key, number)))
            if _holds(name, key) and (binlog.serves or keyspace.has_journals)
            else binlog
            for name, binlog in keyspace.shards
        }
        written = (*keyspace.written[:place], number + 1, *keyspace.written[place + 1 :])
        after = replace(keyspace, shards=frozenset(shards.items()), written=written)
        yield replace(world, budget=replace(budget, writes=tuple(keys)), keyspace=after)
    if keyspace.reshards:
        yield replace(world, keyspace=_switched(keyspace))
    if keyspace.switched and budget.completes:
        (sources, _), *rest = keyspace.switched
        shards = {name: binlog for name, binlog in keyspace.shards if binlog.serves or name not in sources}
        after = replace(keyspace, shards=frozenset(shards.items()), switched=tuple(rest))
        after = replace(after, completed=keyspace.completed + 1)
        yield replace(world, budget=budget.less("completes"), keyspace=after)
    if budget.purges:
        for name, binlog in keyspace.shards:
            if binlog.serves and binlog.purged < len(binlog.entries):
                purged = keyspace.binlogs() | {name: replace(binlog, purged=len(binlog.entries))}
                after = replace(keyspace, shards=frozenset(purged.items()))
                yield replace(world, budget=budget.less("purges"), keyspace=after)


def _switched(keyspace: Keyspace) -> Keyspace:
    (sources, targets), *rest = keyspace.reshards
    binlogs = keyspace.binlogs()
    for name in targets:
        # Copied rows, or what reverse replication has brought already.
        before = binlogs.get(name)
        entries: tuple[Entry, ...] = (None,) if before is None else before.entries
        if before is None:
            entries += tuple(
                Change(key, number - 1)
                for key, number in zip(KEYS, keyspace.written, strict=True)
                if number and _holds(name, key)
            )
        generation = keyspace.completed if before is None else before.generation
        binlogs[name] = Binlog((*entries, None), generation=generation)
    positions = {name: _gtid(name, binlogs[name], len(binlogs[name].entries)) for name in targets}
    journal = Journal.of(7, sources, positions)
    for name in sources:
        last = (journal,) if keyspace.has_journals else ()
        binlogs[name] = replace(binlogs[name], entries=(*binlogs[name].entries, *last), serves=False)
    switched = (*keyspace.switched, (sources, targets))
    return replace(keyspace, shards=frozenset(binlogs.items()), reshards=tuple(rest), switched=switched)


@functools.cache
def _holds(shard: str, key: str) -> bool:
    return has_key(KeyRange.of_shard(shard), bytes.fromhex(key))


def has_key(key_range: KeyRange, keyspace_id: bytes) -> bool:
    """Tell whether a keyspace id is in a range."""
    return key_range.start <= keyspace_id and (key_range.end is None or keyspace_id < key_range.end)


# ---------------------------------------------------------------------- what a stream delivers


def _deliveries(world: World, stream: Stream, still: Stream | None) -> Iterator[World]:
    """Yield what a stream delivers next, each with the world after it.

    :param still: the stream, if it goes on; None: it has ended, and this is late.
    """

    def ended(reason: EndReason, participants: tuple[str, ...] = ()) -> World:
        after = world
        if still is not None:
            after = replace(world, streams=_with(world, stream, replace(stream, is_over=True)))
        return _stepped(after, ShardStreamEnded(stream.shard, stream.attempt, reason, participants))

    binlog = world.binlog(stream.shard)
    if binlog is not None and stream.chunk is not None:
        yield (_planned if stream.chunk == _PLANNED else _copied_of_chunk)(world, stream, binlog)
        return
    if binlog is None or stream.is_missing or any(world.binlog(name) is None for name in stream.together):
        yield ended(EndReason.SHARD_UNKNOWN)
        return
    if stream.server not in {"", _server(stream.shard, binlog)}:
        executed = _gtid(stream.shard, binlog, len(binlog.entries))
        yield _stepped(world, Probed(stream.shard, stream.attempt, executed, ""))
        return
    if stream.copied is None and not _state(world, stream.shard).kept.is_read:
        yield _read(world, stream, None, by=0)  # the answer to `current`
        return
    if stream.position < binlog.purged and stream.position < len(binlog.entries):
        yield ended(EndReason.PURGED)
        return
    if stream.position < len(binlog.entries):
        entry = binlog.entries[stream.position]
        if isinstance(entry, Journal):
            if len(stream.together) == 1 and len(entry.participants) > 1:
                yield ended(EndReason.PARTICIPANTS_ABSENT, entry.participants)
            gtid = _gtid(stream.shard, binlog, stream.position + 1)
            after = replace(world, streams=_with(world, stream, replace(stream, is_over=True)))
            yield _stepped(after, JournalReached(stream.shard, stream.attempt, entry, gtid))
        else:
            yield _read(world, stream, entry)
    elif stream.copied is not None:
        yield _copied(world, stream)


def _read(world: World, stream: Stream, entry: Entry, by: int = 1) -> World:
    moved = replace(stream, position=stream.position + by)
    changes = None
    if isinstance(entry, Change) and _is_sent(world, stream, entry, moved.position):
        changes = _with_change(world, stream, entry)
    keys = None if stream.copied is None else ({TABLE: stream.copied} if stream.copied else {})
    gtid = _gtid(stream.shard, world.keyspace.binlogs()[stream.shard], moved.position)
    event = PositionReached(stream.shard, stream.attempt, gtid, keys)
    return _stepped(replace(world, streams=_with(world, stream, moved)), event, changes)


def _is_sent(world: World, stream: Stream, change: Change, position: int) -> bool:
    """Tell whether a change comes that the log does not have from a chunk."""
    if stream.copied is not None:
        is_named = world.chunks and stream.copied != ""
        return is_named or world.rereads or change.key <= stream.copied
    ahead = _state(world, stream.shard).kept.ahead
    return not any(chunk.contains(int(change.key, 16)) and position <= _last(chunk.gtid) for chunk in ahead)


def _planned(world: World, stream: Stream, binlog: Binlog) -> World:
    """Plan the next chunks, by asking the shard, which answers while it serves."""
    less = replace(world, streams=world.streams - {stream})
    copy = _state(world, stream.shard).kept.copy
    assert copy is not None
    if not binlog.serves:
        if copy.is_begun:
            return _stepped(less, ChunksGathered(stream.shard, stream.attempt))
        whole = replace(stream, position=len(binlog.entries), chunk=None)
        return replace(less, streams=less.streams | {whole})
    chunks = tuple(part for chunk in copy.chunks for part in _parts(chunk)) or (
        CopyChunk(TABLE, "id", None, _BOUND), CopyChunk(TABLE, "id", _BOUND, None),
    )  # fmt: skip
    if chunks != copy.chunks:
        less = _stepped(less, CopyPlanned(stream.shard, stream.attempt, chunks))
    opened = {replace(stream, chunk=number) for number, chunk in enumerate(chunks) if not chunk.is_done}
    if not opened:
        return _stepped(less, ChunksGathered(stream.shard, stream.attempt, is_whole=True))
    return replace(less, streams=less.streams | opened)


def _parts(chunk: CopyChunk) -> tuple[CopyChunk, ...]:
    if chunk.is_done or not chunk.is_begun:
        return (chunk,)
    rest = int(chunk.key, 16) + 1
    done = dataclasses.replace(chunk, high=rest, is_done=True)
    return done, CopyChunk(TABLE, "id", rest, chunk.high)


def _copied_of_chunk(world: World, stream: Stream, binlog: Binlog) -> World:
    """Copy rows of a chunk, as of the position at which its stream was opened."""
    assert stream.chunk is not None
    copy = _state(world, stream.shard).kept.copy
    assert copy is not None
    chunk = copy.chunks[stream.chunk]
    position = stream.position or len(binlog.entries)
    keys = [
        key
        for key in KEYS
        if _holds(stream.shard, key) and chunk.contains(int(key, 16)) and key > (stream.copied or "")
    ]
    # Without interruptions of chunks, no state has a part of one.
    some = keys[:1] if world.budget.crashes or world.budget.interruptions else keys
    moved = replace(stream, position=position, copied=some[-1] if some else "")
    is_done = some == keys
    changes = list(world.appended.changes)
    for key in some:
        written = [
            entry.number + 1
            for entry in binlog.entries[:position]
            if isinstance(entry, Change) and entry.key == key
        ]
        changes[KEYS.index(key)] = max(written, default=0)
    others = [found for found in world.streams - {stream} if found.shard == stream.shard]
    if is_done:
        again = replace(stream, chunk=_PLANNED, position=0, copied="")
        left = world.streams - {stream} | (set() if others else {again})
    else:
        left = _with(world, stream, moved)
    gtid = _gtid(stream.shard, binlog, position)
    event = ChunkReached(stream.shard, stream.attempt, stream.chunk, gtid, moved.copied or "", is_done)
    return _stepped(replace(world, streams=left), event, tuple(changes))


def _copied(world: World, stream: Stream) -> World:
    """Copy a row, as of the end of the binlog, unless there are no more."""
    left = [key for key in KEYS if _holds(stream.shard, key) and key > (stream.copied or "")]
    gtid = _gtid(stream.shard, world.keyspace.binlogs()[stream.shard], stream.position)
    if not left:
        done = replace(stream, copied=None)
        after = replace(world, streams=_with(world, stream, done))
        shard = _state(world, stream.shard)
        if not shard.kept.is_read:
            after = _stepped(after, PositionReached(stream.shard, stream.attempt, gtid, {}))
        return _stepped(after, CopyCompleted(stream.shard, stream.attempt))
    moved = replace(stream, copied=left[0])
    changes = None
    if _accepts(world, stream):
        place = KEYS.index(left[0])
        changes = list(world.appended.changes)
        behind = f"key {left[0]} is read before its changes came"
        assert not world.rereads or changes[place] == world.keyspace.written[place], behind
        changes[place] = world.keyspace.written[place]
    event = PositionReached(stream.shard, stream.attempt, gtid, {TABLE: left[0]})
    after = replace(world, streams=_with(world, stream, moved))
    return _stepped(after, event, None if changes is None else tuple(changes))


def _with_change(world: World, stream: Stream, change: Change) -> tuple[int | None, ...] | None:
    """Check a change that is appended to the log."""
    if not _accepts(world, stream):
        return None
    place = KEYS.index(change.key)
    before = world.appended.changes[place]
    if before is None:
        is_before_its_row = world.chunks and stream.copied
        assert is_before_its_row or not world.copies, f"{change} of a row that was not copied"
        before = change.number
    # A chunk may have had changes from after a journal.
    is_resharded = world.chunks and bool(world.keyspace.switched)
    if is_resharded or _state(world, stream.shard).kept.copy is not None:
        # Rows that were copied twice may have repeated changes, but never one that skips the next.
        assert change.number <= before, f"gap: {change}, there are {before}"
    else:
        assert change.number == before, (
            f"{'gap' if change.number > before else 'repeated'}: {change}, not {before}"
        )
    changes = list(world.appended.changes)
    changes[place] = change.number + 1
    return tuple(changes)


def _accepts(world: World, stream: Stream) -> bool:
    return _coordinator(world).accepts(stream.shard, stream.attempt)


def _state(world: World, shard: str) -> Shard:
    return dict(world.shards).get(shard, Shard())


def _with(world: World, stream: Stream, after: Stream) -> frozenset[Stream]:
    return world.streams - {stream} | {after}


# ---------------------------------------------------------------------- at the end


def check(world: World) -> None:
    """Check any state: our shards have each key at most once."""
    active = [name for name, shard in world.shards if shard.state is not ShardMode.RETIRED]
    keyspace = world.keyspace
    if (
        keyspace.has_journals
        and not keyspace.completed
        and not any(binlog.purged for _, binlog in keyspace.shards)
    ):
        lost = [name for name, shard in world.shards if shard.state is ShardMode.NEEDS_SNAPSHOT]
        assert set(lost) <= world.requested, f"lost without reason: {lost}"
    for name in active:
        assert overlapping(name, active) == (name,), f"two shards have the same keys: {sorted(active)}"


def check_at_rest(world: World) -> None:
    """Check a state in which nothing happens by itself: everything is captured, or known to be lost."""
    lost = [name for name, shard in world.shards if shard.state is ShardMode.NEEDS_SNAPSHOT]
    for key, written, captured in zip(KEYS, world.keyspace.written, world.appended.changes, strict=True):
        if any(_holds(name, key) for name in lost) or _waits_for(world, key, lost):
            continue
        assert captured == written or (captured is None and not world.copies), (
            f"key {key}: {captured} of {written} changes"
        )
    if not lost:
        active = {name for name, shard in world.shards if shard.state is not ShardMode.RETIRED}
        assert active == set(world.keyspace.serving()), f"{active} are read, but others serve"


def _waits_for(world: World, key: str, lost: list[str]) -> bool:
    return any(
        shard.state is ShardMode.AT_JOURNAL
        and shard.kept.journal is not None
        and any(name in lost for name in shard.kept.journal.participants)
        for name, shard in world.shards
        if _holds(name, key)
    )
