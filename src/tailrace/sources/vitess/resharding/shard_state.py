"""The state of a shard in the log: one JSON object, written whenever it changes and read after a restart.
Pure.

    {"v": 1, "gtid": "MySQL56/…"}                        a shard that is streamed: some 100 bytes
    "epoch", "from"                                      of a shard that a reshard created: epoch, parents
    "copy": {"keys": {table: …}, "done": [table, …]}     while one stream copies the shard
    "copy": {"chunks": [{…}, …]}                          while several streams copy it, one chunk each
    "ahead": [{…}, …]                                    chunks that the log has beyond "gtid"
    "journal": {…}                                       the shard is at its journal
    "to"                                                 the shard is retired: the shards that took over
    "lost"                                               why its stream can't continue
    "begun"                                              its start is not yet confirmed: see `Begun`

A state is written inside the transaction that leads to it, so that the state of all shards is known at every
boundary of the log; only the states that changed are written. A state doesn't name a task. A state with
chunks has version 2.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.resharding.gtid_sets import TO_COPY, GtidSet, is_read

VERSION = 2


class Begun(enum.StrEnum):
    """How the reading of a shard started, until it is confirmed that the shard was serving then."""

    CONFIRMED = ""  # it was serving, or the reading started at a journal
    COPY = "copy"
    POSITION = "position"  # the newest one


@dataclass(frozen=True, slots=True)
class CopyChunk:
    """A table, or a range of its primary key, that is copied by a stream of its own.

    :param column: the key's column, if the key is one integer column: an interrupted copy is divided there.
    :param low: the range's first key; None: no lower limit.
    :param high: the range's end, exclusive; None: no upper limit.
    :param gtid: for the rows up to `key`, the log has everything up to this position; empty: nothing yet.
    :param key: the primary key up to which the chunk is copied; empty: no row is copied.
    :param is_done: all of its rows are copied.
    """

    table: str
    column: str = ""
    low: int | None = None
    high: int | None = None
    gtid: str = ""
    key: str = ""
    is_done: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether the log has anything of the chunk."""
        return bool(self.gtid)

    @property
    def is_range(self) -> bool:
        """Whether the chunk is a part of its table."""
        return self.low is not None or self.high is not None

    def contains(self, value: int) -> bool:
        """Return whether a key lies in the range."""
        return (self.low is None or self.low <= value) and (self.high is None or value < self.high)

    def as_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("table", "column", "low", "high", "gtid", "key")}
        found = {name: value for name, value in found.items() if value is not None and value != ""}
        return {**found, "done": True} if self.is_done else found

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CopyChunk:
        given = {"table": "", **content}  # a shard without tables has one chunk, without a table
        return cls(is_done=given.pop("done", False), **given)


def common_position(chunks: Iterable[CopyChunk]) -> str:
    """Return the position up to which the log has all chunks that have begun; `TO_COPY`: none has."""
    gtids = {chunk.gtid for chunk in chunks if chunk.is_begun}
    if len(gtids) < 2:
        return next(iter(gtids), TO_COPY)
    first, *others = (GtidSet.parse(gtid) for gtid in gtids)
    for other in others:
        first = first.intersection(other)
    return str(first)


def ahead_of(chunks: Iterable[CopyChunk], gtid: str) -> tuple[CopyChunk, ...]:
    """Return the chunks that the log has beyond `gtid`."""
    position = GtidSet.parse(gtid)
    return tuple(chunk for chunk in chunks if not position.contains(GtidSet.parse(chunk.gtid)))


@dataclass(frozen=True, slots=True)
class CopyState:
    """The progress of the copy of a shard's tables.

    A stream's VGTIDs name only the tables that are being copied. From them alone, a position between two
    tables looks like the end of the copy, and one inside a table like a copy that has yet to read the
    tables before. So the last primary key of finished tables is kept, too, and sent again: the server then
    finds no more of their rows to read.

    :param keys: table → the primary key up to which it is copied, as text that the protocol's side writes
        and reads.
    :param done: tables that are finished.
    :param is_again: the shard had been captured before and was lost: rows that this copy doesn't read no
        longer exist.
    :param chunks: of a copy by several streams; `keys` and `done` are empty then.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    done: frozenset[str] = frozenset()
    is_again: bool = False
    chunks: tuple[CopyChunk, ...] = ()

    @property
    def is_begun(self) -> bool:
        """Whether the log has rows of the copy. If not, it starts again: a position alone can't resume it."""
        return bool(self.keys) or any(chunk.is_begun for chunk in self.chunks)

    @property
    def copied(self) -> frozenset[str]:
        """The tables that are completely copied."""
        missing = {chunk.table for chunk in self.chunks if not chunk.is_done}
        return self.done | {chunk.table for chunk in self.chunks if chunk.table not in missing}

    def by_one_stream(self, common: CommonKey) -> CopyState:
        """Return the copy that one stream continues from the chunks' common position.

        A table of which the log has rows is named with a key, so that its changes are sent: the key up to
        which it is copied without a gap, or a key before all rows.
        """
        keys: dict[str, str] = {}
        for table in {chunk.table for chunk in self.chunks}:
            chunks = [chunk for chunk in self.chunks if chunk.table == table]
            last = ""
            for chunk in chunks:
                last = chunk.key or last
                if not chunk.is_done:
                    break
            known = next((chunk.key for chunk in chunks if chunk.key), None)
            key = last or (common([known, None]) if known else None)
            if key:
                keys[table] = key
        return CopyState(keys, frozenset(keys) & self.copied, self.is_again)

    def after(self, last_keys: Mapping[str, str]) -> CopyState:
        """Return the state after a VGTID with `last_keys`: tables that it no longer names are finished."""
        return replace(
            self, keys={**self.keys, **last_keys}, done=frozenset(self.keys.keys() - last_keys.keys())
        )

    def __hash__(self) -> int:
        return hash((frozenset(self.keys.items()), self.done, self.is_again, self.chunks))


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal that a switch of traffic writes on each source shard. Its `id` alone is not unique: a
    second switch in the same direction may have the same one.

    :param participants: the source shards, sorted.
    :param targets: the shards that serve after it, each with the position from which it serves; sorted.
    """

    id: int
    participants: tuple[str, ...]
    targets: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, number: int, participants: Iterable[str], targets: Mapping[str, str]) -> Journal:
        """Return the journal with participants and targets sorted."""
        return cls(number, tuple(sorted(participants)), tuple(sorted(targets.items())))

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "participants": list(self.participants), "targets": dict(self.targets)}


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of a shard in the log: see the module.

    :param gtid: everything up to here is in the log; `TO_COPY`, `CURRENT`: nothing is yet.
    :param epoch: increases with each reshard and each new copy: positions order transactions of one epoch.
    :param parents: the shards whose keys it took over; empty: it existed at the start.
    :param children: the shards that took over its keys; not empty: it is retired.
    :param lost: why its stream can't continue.
    :param begun: not empty: its journal may lie before `gtid`.
    :param ahead: copied chunks; the log already has each one's changes up to the chunk's own position.
    """

    gtid: str = TO_COPY
    epoch: int = 0
    parents: tuple[str, ...] = ()
    copy: CopyState | None = None
    journal: Journal | None = None
    children: tuple[str, ...] = ()
    lost: str = ""
    begun: Begun = Begun.CONFIRMED
    ahead: tuple[CopyChunk, ...] = ()

    @property
    def is_read(self) -> bool:
        """Whether the position names transactions: something of the shard was read."""
        return is_read(self.gtid)

    @property
    def request(self) -> tuple[str, Mapping[str, str]]:
        """The position and the primary keys with which a stream is opened.

        A copy without a known key starts again: given a position alone, the server would consider the copy
        done.
        """
        if self.copy is None:
            return self.gtid, {}
        return (self.gtid, self.copy.keys) if self.copy.keys else (TO_COPY, {})

    def with_chunk(self, number: int, gtid: str, key: str, *, is_done: bool) -> ShardState:
        """Return the state after a chunk of the copy has progressed; unchanged if the log has nothing of it.

        In that case only its snapshot was opened, which may be opened again at another position.
        """
        if self.copy is None or number >= len(self.copy.chunks):
            return self
        before = self.copy.chunks[number]
        if not (key or is_done or before.is_begun):
            return self
        chunk = replace(before, gtid=gtid, key=key or before.key, is_done=is_done)
        chunks = (*self.copy.chunks[:number], chunk, *self.copy.chunks[number + 1 :])
        position = self.gtid if gtid == before.gtid else common_position(chunks)
        return replace(self, gtid=position, copy=replace(self.copy, chunks=chunks))

    def by_one_stream(self, common: CommonKey, *, is_whole: bool = False) -> ShardState:
        """Return the state from which one stream continues a copy in chunks.

        The stream sends changes again that chunks already had. Once the copy is complete, these are filtered
        out; before, chunks may have read them from behind a journal, and they are kept.
        """
        if self.copy is None or not self.copy.chunks:
            return self
        if is_whole:
            return replace(self, copy=None, ahead=ahead_of(self.copy.chunks, self.gtid))
        return replace(self, copy=self.copy.by_one_stream(common))

    def as_json(self) -> dict[str, Any]:
        """Return the object that is written to the log."""
        # A reader of version 1 doesn't know chunks, and would send their changes again.
        has_chunks = bool(self.ahead) or (self.copy is not None and bool(self.copy.chunks))
        found: dict[str, Any] = {"v": VERSION if has_chunks else 1, "gtid": self.gtid}
        if self.epoch:
            found["epoch"] = self.epoch
        if self.parents:
            found["from"] = list(self.parents)
        if self.copy is not None:
            found["copy"] = {"keys": dict(self.copy.keys), "done": sorted(self.copy.done)}
            if self.copy.is_again:
                found["copy"]["again"] = True
            if self.copy.chunks:
                found["copy"]["chunks"] = [chunk.as_json() for chunk in self.copy.chunks]
        if self.journal is not None:
            found["journal"] = self.journal.as_json()
        if self.children:
            found["to"] = list(self.children)
        if self.lost:
            found["lost"] = self.lost
        if self.begun:
            found["begun"] = self.begun.value
        if self.ahead:
            found["ahead"] = [chunk.as_json() for chunk in self.ahead]
        return found

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ShardState:
        """Return the state that `as_json` wrote.

        :raises TailraceError: `LOG_FORMAT_UNKNOWN` if a later version wrote it.
        """
        if content.get("v") not in range(1, VERSION + 1):
            raise TailraceError(
                Kind.LOG_FORMAT_UNKNOWN,
                f"read a shard's state from the log: it has version {content.get('v')}, the newest supported "
                f"one is {VERSION}",
                "run the version of Tailrace that wrote the log, or a later one",
            )
        copy, journal = content.get("copy"), content.get("journal")
        chunks = () if copy is None else tuple(map(CopyChunk.from_json, copy.get("chunks", ())))
        return cls(
            # During a copy in chunks, a frame may have the position of one chunk.
            gtid=common_position(chunks) if chunks else content["gtid"],
            epoch=content.get("epoch", 0),
            parents=tuple(content.get("from", ())),
            copy=None
            if copy is None
            else CopyState(copy["keys"], frozenset(copy["done"]), copy.get("again", False), chunks),
            journal=None
            if journal is None
            else Journal.of(journal["id"], journal["participants"], journal["targets"]),
            children=tuple(content.get("to", ())),
            lost=content.get("lost", ""),
            begun=Begun(content.get("begun", "")),
            ahead=tuple(map(CopyChunk.from_json, content.get("ahead", ()))),
        )


#: Given the parents' keys of one table (None: its copy has not begun), returns the key behind which a shard
#: that takes over copies it; None: from the table's start.
CommonKey = Callable[[Sequence[str | None]], str | None]


def same_key(keys: Sequence[str | None]) -> str | None:
    """Return the parents' key if all have the same one, else None: the order of different keys is unknown."""
    return keys[0] if len(set(keys)) == 1 else None


def inherited_copy(parents: Iterable[ShardState], common: CommonKey = same_key) -> CopyState | None:
    """Return the copy that remains for a shard that takes over keys of `parents`; None: nothing remains.

    Parents that are completely copied do not count: the rows of one table and one parent are in the child in
    the same order. A table without a common key is copied from its start: its rows are sent again.
    """
    copies = [parent.copy for parent in parents if parent.copy is not None]
    if not copies:
        return None
    tables = sorted({table for copy in copies for table in copy.keys})
    found = {table: common([copy.keys.get(table) for copy in copies]) for table in tables}
    keys = {table: key for table, key in found.items() if key is not None}
    done = frozenset(keys).intersection(*(copy.done for copy in copies))
    return CopyState(keys, done, any(copy.is_again for copy in copies))
