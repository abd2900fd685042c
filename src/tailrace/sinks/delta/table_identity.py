"""Maps folders of a mirror to the source's relations, whose names may change.

A folder has a table's name; its rows belong to a relation, which keeps its oid when it is renamed. A table
that is dropped and created again is another relation with the same name. A mirror does not move folders: a
relation whose rows are in a folder with another name than its current one is *displaced*, and its rows must
be read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.changelog.reader import LogReader
from tailrace.config.patterns import matches_any
from tailrace.model import LogRange
from tailrace.protocol import frames
from tailrace.protocol.facts import Facts
from tailrace.sinks.write_job import StagedFile


@dataclass(frozen=True, slots=True)
class Holder:
    """The relation whose rows a folder has, and the log offset up to which it has them."""

    relation: int
    committed: int


@dataclass(frozen=True, slots=True)
class Displaced:
    """A relation whose rows must all be read again, at the log offset `since` or later.

    `before` is the name or the folder under which it had rows.
    """

    before: str
    since: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The files of a range by their target folder, and displaced relations by oid."""

    tables: list[tuple[str, tuple[StagedFile, ...]]]
    displaced: dict[int, Displaced]


def home_folders(holders: Mapping[str, Holder]) -> dict[int, str]:
    """Return the folder of each relation: of several with its rows, the one with the highest offset."""
    ordered = sorted(holders.items(), key=lambda item: item[1].committed)
    return {holder.relation: directory for directory, holder in ordered}


def place(files: Sequence[StagedFile], holders: Mapping[str, Holder], have: int) -> Placement:
    """Return the target folder of each relation's files: that of its last name in the range.

    Files of a relation whose name belongs to another relation at the end of the range are left out.

    :param files: in any order.
    :param holders: the relations of folders, as far as they are known.
    :param have: the log offset at which the range begins.
    """
    homes = home_folders(holders)
    ordered = sorted(files, key=lambda file: file.first)
    last = {file.directory: file for file in ordered}
    by_relation: dict[int, list[StagedFile]] = {}
    for file in ordered:
        by_relation.setdefault(file.relation.oid, []).append(file)
    tables, displaced = [], dict[int, Displaced]()
    for oid, own in by_relation.items():
        goal = own[-1].directory
        holder = holders.get(goal)
        if last[goal].relation.oid != oid:
            displaced[oid] = Displaced(goal, last[goal].first)
            continue
        if holder is not None and holder.relation != oid and homes[holder.relation] == goal:
            if holder.committed > own[-1].first:
                continue  # the relation lost its name in a part of the range that was written before
            displaced.setdefault(holder.relation, Displaced(goal, have))
        if homes.get(oid, goal) != goal:
            # A snapshot that found no row made no folder of the new name.
            displaced.setdefault(oid, Displaced(homes[oid], min(have, holders[homes[oid]].committed)))
        tables.append((goal, tuple(own)))
    return Placement(tables, displaced)


def name_now(own: Facts, facts: Sequence[Facts]) -> tuple[str, str] | None:
    """Return a relation's current name according to the log; None if the relation no longer exists, or if its
    last name is another relation's by now.

    :param own: the last known facts of the relation.
    :param facts: the facts of all relations, in order.
    """
    after = [
        at
        for at, each in enumerate(facts)
        if each.replaced == own.relation
        and each.qualified_name == own.qualified_name
        and each.version > own.version
    ]
    if not after:
        return own.schema, own.table
    for at in after:
        if (name := facts[at].replaced_name) is not None:
            since = {each.relation: each for each in facts[at:]}
            return None if any((each.schema, each.table) == name for each in since.values()) else name
    return None


def read_from(log: Path, span: LogRange, tables: tuple[str, ...] | None) -> dict[int, int]:
    """Return, by oid, the log offset from which on the log has all rows of a table, as of the range's end,
    for tables that a snapshot has read again as a whole.

    :param tables: patterns of the tables that the sink gets; None: all.
    :raises TailraceError: `LOG_CORRUPT`, `LOG_RANGE_GONE`.
    """
    facts = facts_within(log, LogRange(span.task, span.end, span.end))
    return {
        each.relation: each.read_from
        for each in facts
        if each.read_from and (tables is None or matches_any(tables, each.schema, each.table))
    }


def facts_within(log: Path, span: LogRange) -> list[Facts]:
    """Return the facts in force at a range's start, followed by those in it, in order.

    :raises TailraceError: `LOG_CORRUPT`, `LOG_RANGE_GONE`.
    """
    with LogReader.open(log, span.task) as reader:
        known = reader.all_schema_frames(span.start, span.end)
    return [Facts.from_json(frames.control_json(each)) for each in known if each[frames.KIND_AT] == ord("x")]
