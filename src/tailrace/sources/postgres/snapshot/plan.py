"""Snapshot plans: which chunks of which tables are still to be read. Pure values, stored with the log.

A *snapshot* is requested once: by the first start, because changes were lost, or by the user.
It has tables, a table has chunks, and a chunk is done when its unit is in the log and durable.
The log itself records that: each unit begins with a control frame that names its chunk. The plans
have what is to be read, and the log offset up to which units of the log are noted in them;
later units are found by searching the log.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: Number of finished snapshots that are kept, for `tailrace snapshot --list`.
FINISHED_KEPT = 20


class Origin(enum.StrEnum):
    """Why a snapshot is taken."""

    INITIAL = "initial"
    REQUESTED = "requested"
    NEEDED = "needed"  # changes were lost, and `snapshot: when_needed`


class SnapshotOutcome(enum.StrEnum):
    """State of a snapshot."""

    OPEN = "open"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True)
class TableSnapshotPlan:
    """The plan of one table's snapshot.

    `whole`: it has no key by which rows that were read at different times could be matched, so all
    of its chunks are one unit of the log, read in one window.
    `fresh`: its changes are left out of the log until its first chunk is there.
    `generation` counts how often it was planned; chunks of earlier generations are ignored.
    `moved`: while only some chunks were in the log, a row changed its key, perhaps from a missing
    chunk to a finished one, and was not sent completely. So the rows written since it was planned,
    by transactions from `since_xid` on, are read again when all chunks are done.
    `since_offset`: the log's offset when it was planned, if the log is to record when all was read.
    """

    number: int
    oid: int
    schema: str
    name: str
    fresh: bool
    rows_estimated: int = 0
    whole: bool = False
    generation: int = 0
    facts: str = ""  # a digest; when it changes, the table is planned again
    chunks: int | None = None  # None: not planned
    done: set[int] = field(default_factory=set)
    rows: int = 0
    gone: bool = False  # dropped or no longer published
    since_xid: int = 0
    moved: bool = False
    read_again: bool = False
    since_offset: int = 0

    @property
    def qualified_name(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def is_done(self) -> bool:
        """Whether nothing of it remains to be read."""
        return self.gone or (self.chunks_done and (self.read_again or not self.moved))

    @property
    def chunks_done(self) -> bool:
        """Whether every chunk is in the log."""
        return self.chunks is not None and len(self.done) == self.chunks

    @property
    def is_awaited(self) -> bool:
        """Whether its changes are left out of the log until its rows are read."""
        return self.fresh and not self.done and not self.is_done

    def missing(self) -> Iterator[int]:
        """Yield the numbers of the chunks that are not done, in order."""
        return (number for number in range(self.chunks or 0) if number not in self.done)

    def plan(
        self,
        chunks: int,
        *,
        whole: bool,
        facts: str,
        rows_estimated: int,
        since_xid: int = 0,
        since_offset: int = 0,
    ) -> None:
        """Begin a new generation, of which no chunk is done."""
        self.forget_plan()
        self.generation += 1
        self.chunks, self.whole, self.facts = chunks, whole, facts
        self.rows_estimated, self.since_xid, self.since_offset = rows_estimated, since_xid, since_offset

    def forget_plan(self) -> None:
        """Discard the chunks: the table is planned again before more of it is read."""
        # Rows that are in the log stay there, so their changes must not be left out again.
        self.fresh = self.fresh and not self.done
        self.chunks = None
        self.done, self.rows = set(), 0
        self.moved = self.read_again = False

    def as_json(self) -> dict[str, Any]:
        content = {name: getattr(self, name) for name in self.__slots__}
        return {**content, "done": [list(run) for run in _runs(self.done)]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TableSnapshotPlan:
        done = {number for first, end in content["done"] for number in range(first, end)}
        return cls(**{**content, "done": done})


@dataclass(slots=True)
class SnapshotPlan:
    """One snapshot: its tables in the order in which they are read."""

    id: str
    origin: Origin
    tables: list[TableSnapshotPlan]
    where: str = ""  # SQL condition; empty: all rows
    outcome: SnapshotOutcome = SnapshotOutcome.OPEN
    error: dict[str, Any] | None = None
    requested_us: int = 0
    finished_us: int = 0

    @property
    def may_fail(self) -> bool:
        """Whether streaming continues if it fails."""
        return self.origin not in (Origin.INITIAL, Origin.NEEDED)

    @property
    def replaces(self) -> bool:
        """Whether the rows that it reads replace all earlier rows of its tables."""
        return self.origin in (Origin.REQUESTED, Origin.NEEDED) and not self.where

    @property
    def all_read(self) -> bool:
        """Whether every table is done."""
        return all(table.is_done for table in self.tables)

    def put_off(self, oid: int, *, plan_again: bool) -> None:
        """Note that chunks of the table with this oid could not be read.

        :param plan_again: the table was altered since it was planned: its finished chunks are read again.
        """
        for table in self.tables:
            if table.oid == oid and (plan_again or not table.done):
                table.forget_plan()

    def as_json(self) -> dict[str, Any]:
        content = {name: getattr(self, name) for name in self.__slots__}
        return {**content, "tables": [table.as_json() for table in self.tables]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> SnapshotPlan:
        return cls(
            **{
                **content,
                "origin": Origin(content["origin"]),
                "outcome": SnapshotOutcome(content["outcome"]),
                "tables": [TableSnapshotPlan.from_json(table) for table in content["tables"]],
            }
        )


@dataclass(slots=True)
class SnapshotPlans:
    """All open snapshots of a task, in order, and the last finished ones.

    `log_offset`: units that end at or before it are noted.
    `paused`: nothing more is read until the user resumes snapshots.
    """

    open: list[SnapshotPlan] = field(default_factory=list)
    finished: list[SnapshotPlan] = field(default_factory=list)
    log_offset: int = 0
    paused: bool = False

    def find(self, id_: str) -> SnapshotPlan | None:
        """Return the snapshot with this id, open or finished; None if there is none."""
        return next((each for each in (*self.open, *self.finished) if each.id == id_), None)

    def finish(
        self,
        snapshot: SnapshotPlan,
        outcome: SnapshotOutcome,
        now_us: int,
        error: dict[str, Any] | None = None,
    ) -> None:
        """Move a snapshot to the finished ones."""
        snapshot.outcome, snapshot.error, snapshot.finished_us = outcome, error, now_us
        self.open = [each for each in self.open if each is not snapshot]
        self.finished = [*self.finished, snapshot][-FINISHED_KEPT:]

    def awaiting(self) -> frozenset[int]:
        """Return the oids of tables whose changes are left out of the log until their rows are read."""
        return frozenset(table.oid for snapshot in self.open for table in snapshot.tables if table.is_awaited)

    def in_parts(self) -> frozenset[int]:
        """Return the oids of tables of which some chunks, but not all, are in the log."""
        return frozenset(
            table.oid
            for snapshot in self.open
            for table in snapshot.tables
            if table.done and not table.whole and not table.is_done
        )

    def take_moves(self, oids: Iterable[int]) -> None:
        """Note that rows of tables may have moved between chunks."""
        moved = frozenset(oids)
        for snapshot in self.open:
            for table in snapshot.tables:
                among = table.oid in moved and table.chunks is not None and not table.whole
                table.moved = table.moved or among

    def take_unit(self, begin: dict[str, Any], rows: int) -> None:
        """Note that the unit which began with `begin` is in the log, with `rows` rows.

        Units of finished snapshots, of earlier generations, and units that were already noted
        are ignored.
        """
        for snapshot in self.open:
            if snapshot.id != begin.get("snapshot"):
                continue
            if "table" not in begin:
                for table in snapshot.tables:
                    table.chunks = table.chunks or 0
                    table.done = set(range(table.chunks))
                continue
            table = snapshot.tables[begin["table"]]
            if table.generation == begin.get("generation"):
                _take_chunk(table, begin.get("chunk"), rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "open": [snapshot.as_json() for snapshot in self.open],
            "finished": [snapshot.as_json() for snapshot in self.finished],
            "log_offset": self.log_offset,
            "paused": self.paused,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> SnapshotPlans:
        return cls(
            [SnapshotPlan.from_json(each) for each in content["open"]],
            [SnapshotPlan.from_json(each) for each in content["finished"]],
            int(content["log_offset"]),
            bool(content.get("paused", False)),
        )


#: In place of a chunk's number: the rows written since the table was planned.
AGAIN = "again"


def unit_name(snapshot: SnapshotPlan, table: TableSnapshotPlan, chunk: int | str | None) -> dict[str, Any]:
    """Return the content of the unit's first frame.

    :param chunk: its number, or `AGAIN`. None: the unit has all chunks of the table.
    """
    return {
        "tables": [table.qualified_name],
        "snapshot": snapshot.id,
        "table": table.number,
        "generation": table.generation,
        "chunk": chunk,
    }


def numbers_of(table: TableSnapshotPlan, chunk: int | str | None) -> set[int]:
    """Return the numbers of a unit's chunks; `chunk` as in `unit_name`."""
    if isinstance(chunk, int):
        return {chunk}
    return set() if isinstance(chunk, str) else set(range(table.chunks or 0))


def whole_name(snapshot: SnapshotPlan) -> dict[str, Any]:
    """Return the content of the first frame of a unit that has all tables of the snapshot."""
    return {"tables": [table.qualified_name for table in snapshot.tables], "snapshot": snapshot.id}


def _take_chunk(table: TableSnapshotPlan, chunk: int | str | None, rows: int) -> None:
    if isinstance(chunk, str):
        table.read_again = True
        return
    numbers = numbers_of(table, chunk)
    if numbers - table.done:
        table.done |= numbers
        table.rows += rows


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
