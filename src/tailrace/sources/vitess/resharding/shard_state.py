"""What the log keeps of a shard: one JSON object, written whenever it changes, and read after a restart.
Pure.

    {"v": 1, "gtid": "MySQL56/…"}                        a shard that is streamed: some 100 bytes
    "epoch", "from"                                      of a shard that came of a reshard
    "copy": {"keys": {table: …}, "done": [table, …]}     while the shard is copied
    "journal": {…}                                       the shard is at its journal
    "to"                                                 the shard is retired: what came of it
    "lost"                                               it can't be gone on with: why
    "begun"                                              not yet seen to serve since it was begun

A state is written inside the transaction that leads to it, so that the state of all shards is known at every
boundary of the log, and only that of the shards that changed is written. No task is named in it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.resharding.gtid_sets import TO_COPY, is_read

VERSION = 1


class Begun(enum.StrEnum):
    """How a shard was begun of which it is not known yet whether it served then."""

    CONFIRMED = ""  # it did, or it was begun at a journal
    COPY = "copy"
    POSITION = "position"  # at the newest one


@dataclass(frozen=True, slots=True)
class CopyState:
    """How far the copy of a shard's tables is.

    A stream's VGTIDs name only the tables that are being copied. From them alone, a position between two
    tables looks like the end of the copy, and one inside a table like a copy that has yet to read the
    tables before. So the last primary key of finished tables is kept, too, and sent again: the server then
    finds nothing more to read of them.

    :param keys: table → the primary key up to which it is copied, as text that the wire's side made and
        reads.
    :param done: tables that are finished.
    :param is_again: the shard had been captured before and was lost: what is not read now is not there any
        more.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    done: frozenset[str] = frozenset()
    is_again: bool = False

    def after(self, last_keys: Mapping[str, str]) -> CopyState:
        """Return the state after a VGTID that names `last_keys`: tables that it does not name any more are
        finished.
        """
        return replace(
            self, keys={**self.keys, **last_keys}, done=frozenset(self.keys.keys() - last_keys.keys())
        )

    def __hash__(self) -> int:
        return hash((frozenset(self.keys.items()), self.done, self.is_again))


@dataclass(frozen=True, slots=True)
class Journal:
    """What a switch of traffic wrote on each source shard. Its `id` alone is not unique: a second switch in
    the same direction may have it again.

    :param participants: the source shards, sorted.
    :param targets: the shards that serve from now on, each with the position from which on it does; sorted.
    """

    id: int
    participants: tuple[str, ...]
    targets: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, number: int, participants: Iterable[str], targets: Mapping[str, str]) -> Journal:
        """Return the journal with its parts in order."""
        return cls(number, tuple(sorted(participants)), tuple(sorted(targets.items())))

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "participants": list(self.participants), "targets": dict(self.targets)}


@dataclass(frozen=True, slots=True)
class ShardState:
    """See the module.

    :param gtid: everything up to here is in the log; `TO_COPY`, `CURRENT`: nothing is yet.
    :param epoch: rises with each reshard and each new copy: positions order transactions of one epoch.
    :param parents: the shards whose keys it took over; empty: it was there at the start.
    :param children: the shards that took over; it is retired.
    :param lost: why its stream can't be gone on with.
    :param begun: not empty: its journal may lie before `gtid`.
    """

    gtid: str = TO_COPY
    epoch: int = 0
    parents: tuple[str, ...] = ()
    copy: CopyState | None = None
    journal: Journal | None = None
    children: tuple[str, ...] = ()
    lost: str = ""
    begun: Begun = Begun.CONFIRMED

    @property
    def is_read(self) -> bool:
        """Whether anything of the shard was read."""
        return is_read(self.gtid)

    @property
    def request(self) -> tuple[str, Mapping[str, str]]:
        """The position and the primary keys from which on a stream is asked for.

        A copy of which no key is known begins again: with a position alone, the server would take it for
        done.
        """
        if self.copy is None:
            return self.gtid, {}
        return (self.gtid, self.copy.keys) if self.copy.keys else (TO_COPY, {})

    def as_json(self) -> dict[str, Any]:
        """Return what is written into the log."""
        found: dict[str, Any] = {"v": VERSION, "gtid": self.gtid}
        if self.epoch:
            found["epoch"] = self.epoch
        if self.parents:
            found["from"] = list(self.parents)
        if self.copy is not None:
            found["copy"] = {"keys": dict(self.copy.keys), "done": sorted(self.copy.done)}
            if self.copy.is_again:
                found["copy"]["again"] = True
        if self.journal is not None:
            found["journal"] = self.journal.as_json()
        if self.children:
            found["to"] = list(self.children)
        if self.lost:
            found["lost"] = self.lost
        if self.begun:
            found["begun"] = self.begun.value
        return found

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ShardState:
        """Return what `as_json` wrote.

        :raises TailraceError: `LOG_FORMAT_UNKNOWN` if a later version wrote it.
        """
        if content.get("v") != VERSION:
            raise TailraceError(
                Kind.LOG_FORMAT_UNKNOWN,
                f"read a shard's state from the log: it is of version {content.get('v')}, this is {VERSION}",
                "run the version of Tailrace that wrote the log, or a later one",
            )
        copy, journal = content.get("copy"), content.get("journal")
        return cls(
            gtid=content["gtid"],
            epoch=content.get("epoch", 0),
            parents=tuple(content.get("from", ())),
            copy=None
            if copy is None
            else CopyState(copy["keys"], frozenset(copy["done"]), copy.get("again", False)),
            journal=None
            if journal is None
            else Journal.of(journal["id"], journal["participants"], journal["targets"]),
            children=tuple(content.get("to", ())),
            lost=content.get("lost", ""),
            begun=Begun(content.get("begun", "")),
        )


#: Given the keys that parents have for one table, None where it was not begun: the one behind which a shard
#: that takes over copies it; None: as if nothing had been read.
CommonKey = Callable[[Sequence[str | None]], str | None]


def same_key(keys: Sequence[str | None]) -> str | None:
    """Return the key of all parents, if it is one: nothing is known of the order of others."""
    return keys[0] if len(set(keys)) == 1 else None


def inherited_copy(parents: Iterable[ShardState], common: CommonKey = same_key) -> CopyState | None:
    """Return what is left to copy of a shard that takes over keys of `parents`; None: nothing.

    Parents that are copied whole do not count: the rows of one table and one parent are in the child in the
    same order. A table that has no common key is copied from its start: its rows come again.
    """
    copies = [parent.copy for parent in parents if parent.copy is not None]
    if not copies:
        return None
    tables = sorted({table for copy in copies for table in copy.keys})
    found = {table: common([copy.keys.get(table) for copy in copies]) for table in tables}
    keys = {table: key for table, key in found.items() if key is not None}
    done = frozenset(keys).intersection(*(copy.done for copy in copies))
    return CopyState(keys, done, any(copy.is_again for copy in copies))
