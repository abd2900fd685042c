"""Which table of the source each folder of a mirror has the rows of, though tables change their names.

A folder goes by a name; its rows belong to a relation, which keeps its oid when it is renamed. A table
that is dropped and created again is another relation of the same name. A mirror moves no folder: a
relation whose rows lie under another name than the one it has now is *displaced*, and its rows must come
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tailrace.protocol.facts import Facts
from tailrace.sinks.write_job import StagedFile


@dataclass(frozen=True, slots=True)
class Holder:
    """The relation whose rows a folder has, and the log offset up to which it has them."""

    relation: int
    committed: int


@dataclass(frozen=True, slots=True)
class Displaced:
    """A relation whose rows must come again, all of them at the log offset `since` or later.

    `before` is the name, or the folder, under which it had rows.
    """

    before: str
    since: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The files of a range by the folder that they go into, and displaced relations by oid."""

    tables: list[tuple[str, tuple[StagedFile, ...]]]
    displaced: dict[int, Displaced]


def home_folders(holders: Mapping[str, Holder]) -> dict[int, str]:
    """Return the folder of each relation: of several that have rows of it, the one that is furthest."""
    ordered = sorted(holders.items(), key=lambda item: item[1].committed)
    return {holder.relation: directory for directory, holder in ordered}


def place(files: Sequence[StagedFile], holders: Mapping[str, Holder], have: int) -> Placement:
    """Return which folder each relation's files go into: that of the last name which it has in the range.

    Files of a relation whose name another has by the end of the range go nowhere.

    :param files: in any order.
    :param holders: by folder, where it is known.
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
                continue  # it lost the name in a part of the range that was written before
            displaced.setdefault(holder.relation, Displaced(goal, have))
        if homes.get(oid, goal) != goal:
            displaced.setdefault(oid, Displaced(homes[oid], have))
        tables.append((goal, tuple(own)))
    return Placement(tables, displaced)


def name_now(own: Facts, facts: Iterable[Facts]) -> tuple[str, str] | None:
    """Return a relation's name according to the log; None if it is gone.

    :param own: the last that are known of it.
    :param facts: those of all relations.
    """
    after = [
        each
        for each in facts
        if each.replaced == own.relation
        and each.qualified_name == own.qualified_name
        and each.version > own.version
    ]
    if not after:
        return own.schema, own.table
    return next((each.replaced_name for each in after if each.replaced_name is not None), None)
