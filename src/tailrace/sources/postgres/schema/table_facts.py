"""Combines a Relation message with catalogue rows to the facts of a table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tailrace.model import Column
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.protocol.frames import control_json
from tailrace.sources.postgres.schema.column_matching import CatalogColumn, aligned

#: Maximum size, in bytes, of a default in the facts; a larger one's values in earlier rows are unknown.
MISSING_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table's present catalogue rows, with its dropped columns and the xids of the rows."""

    oid: int
    schema: str
    table: str
    xid: int
    filenode: int
    columns: tuple[dict[str, Any], ...]
    key_numbers: tuple[int, ...]
    key_xid: int
    next_xid: int

    def later(self, xid: int, than: int | None) -> bool:
        """Return whether transaction `xid` began at or after `than`; xids wrap around."""
        if than is None or xid < 3:
            return False
        return (self.next_xid - xid) % (1 << 32) <= (self.next_xid - than) % (1 << 32)


@dataclass(frozen=True, slots=True)
class CatalogTables:
    """Catalogue rows of some tables, as of one snapshot: the tables that exist, by oid."""

    by_oid: Mapping[int, CatalogTable]
    next_xid: int
    running: frozenset[int] = frozenset()

    def get(self, oid: int) -> CatalogTable | None:
        """Return a table; None if it was dropped, or its creation is not visible yet."""
        return self.by_oid.get(oid)

    def sees(self, xid: int) -> bool:
        """Return whether the catalogue was read after the end of transaction `xid` had become visible.

        A commit is streamed as soon as it is on disk, but becomes visible to others slightly later
        (`RecordTransactionCommit`, then `ProcArrayEndTransaction`); if commits wait for a
        synchronous standby, much later.
        """
        begun = 0 < (self.next_xid - xid) % (1 << 32) < 1 << 31
        return begun and xid not in self.running


def facts_of(
    sent: Sequence[Column],
    name: tuple[str, str],
    table: CatalogTable | None,
    before: Facts | None,
    *,
    relation: int,
    xid: int | None,
) -> Facts:
    """Return the facts of a table that a Relation message describes.

    :param sent: the message's columns.
    :param table: the present catalogue rows; None: the table was dropped.
    :param before: the facts of the same relation that were in force.
    :param xid: the transaction that sent the message; None: the catalogue is as of the same moment.
    """
    known = {} if before is None else {column.name: column.number for column in before.columns}
    if table is None:
        # Dropped since: only what was known before of columns with these names is left.
        columns = tuple(
            _unseen(column, None if before is None else before.column(known.get(column.name, 0)))
            for column in sent
        )
        key = () if before is None else before.primary_key
        return Facts(
            relation, *name, _within(key, columns), columns, filenode=before.filenode if before else 0
        )
    catalog = [
        CatalogColumn(
            each["number"], each["name"], each["dropped"], each["type_oid"], each["type_modifier"],
            table.later(each["xid"], xid), not_sent=bool(each["generated"]), own=each["xid"] == xid,
        )
        for each in table.columns
    ]  # fmt: skip
    numbers = aligned(sent, catalog, known)
    states = {column.number: column for column in catalog}
    by_number = {each["number"]: each for each in table.columns}
    written = before is not None and before.filenode != table.filenode
    columns = tuple(
        _column(column, by_number.get(number), before, written=written, state=states.get(number))
        for column, number in zip(sent, numbers, strict=True)
    )
    if before is not None:
        columns = _doubted(columns, before)
    key = _key(table, columns)
    if before is not None and not (before.primary_key or before.pending) and table.later(table.key_xid, xid):
        key = ()  # rows from before the key, also in the transaction that adds it, have only their values
    elif before is not None and before.primary_key and table.later(table.key_xid, xid):
        # The catalogue's key may be newer than the message, so the key is still the known one. Or it may be
        # older: the transaction itself, a subtransaction, or one that ended meanwhile may have changed it.
        held = {column.number: column.name for column in columns}
        kept = tuple(held.get(known.get(column, 0), "") for column in before.primary_key)
        if all(kept):
            may_be = set(key).difference(kept)
            columns = tuple(replace(column, may_be_key=column.name in may_be) for column in columns)
            key = kept
    # A file that a later transaction created does not belong to this version: with it, the rewrite
    # would not be noticed in the next version.
    ahead = before is not None and before.filenode and table.later(table.xid, xid)
    filenode = before.filenode if before is not None and ahead else table.filenode
    return Facts(relation, *name, key, columns, filenode=filenode)


def _key(table: CatalogTable, columns: Sequence[ColumnFacts]) -> tuple[str, ...]:
    names = {column.number: column.name for column in columns}
    key = tuple(names.get(number, "") for number in table.key_numbers)
    return key if all(key) else ()


def _within(key: tuple[str, ...], columns: Sequence[ColumnFacts]) -> tuple[str, ...]:
    return key if set(key) <= {column.name for column in columns} else ()


def _unseen(column: Column, before: ColumnFacts | None) -> ColumnFacts:
    facts = before or ColumnFacts(column.name)
    return replace(facts, name=column.name, type_oid=column.type_oid, type_modifier=column.type_modifier)


def _column(
    column: Column,
    held: dict[str, Any] | None,
    before: Facts | None,
    *,
    written: bool,
    state: CatalogColumn | None,
) -> ColumnFacts:
    if held is None or state is None:
        return _unseen(column, None)
    old = None if before is None else before.column(held["number"])
    if held["dropped"]:
        return replace(_unseen(column, old), number=held["number"])
    missing, unknown = held["missing"], False
    if missing is not None and len(missing.encode()) > MISSING_BYTES_MAX:
        missing, unknown = None, True
    not_null = held["not_null"]
    if state.later and (old is not None or not state.own):
        # The rows of a column that was added as nullable and is NOT NULL by now may have NULL.
        not_null = old is not None and old.not_null
    if old is not None:
        # The value in rows older than the column was determined when the column was added.
        missing, unknown = old.missing if old.missing is not None else missing, old.unknown
    elif before is not None and missing is None and held["filled"] and written:
        unknown = True
    same = (held["type_oid"], held["type_modifier"]) == (column.type_oid, column.type_modifier)
    base_oid, base_modifier = column.type_oid, column.type_modifier
    types: dict[str, Any] = {}
    if same:
        base_oid, base_modifier, *_ = held["base"]
        types = held["types"] or {}
    elif old is not None and (old.type_oid, old.type_modifier) == (column.type_oid, column.type_modifier):
        # The catalogue is newer and has another type; this one's facts were known before.
        (base_oid, base_modifier), types = (old.base_oid, old.base_modifier), old.types
    return ColumnFacts(
        name=column.name,
        number=held["number"],
        type=held["type"] if same else (old.type if old is not None else ""),
        type_oid=column.type_oid,
        type_modifier=column.type_modifier,
        base_oid=base_oid,
        base_modifier=base_modifier,
        not_null=not_null,
        missing=missing,
        unknown=unknown,
        types=types,
    )


def _doubted(columns: tuple[ColumnFacts, ...], before: Facts) -> tuple[ColumnFacts, ...]:
    """Return the columns, marked as unknown if older rows may have values of another column in them.

    These are columns whose number is unknown, until a later message resolves it; and, if such a column is no
    longer sent, each new column, which may be the same one with another name.
    """
    names = {column.name for column in columns}
    # Pending facts have no numbers yet; their columns are not in doubt because of that.
    numberless = {c.name: c for c in before.columns if not c.number and not before.pending}
    lost = any(column.unknown and name not in names for name, column in numberless.items())

    def is_doubtful(column: ColumnFacts) -> bool:
        if before.column(column.number) is not None:
            return False  # it stays as it was, known or unknown
        if column.name in numberless:
            return numberless[column.name].unknown
        return lost or not column.number

    return tuple(replace(column, unknown=True) if is_doubtful(column) else column for column in columns)


class KnownFacts:
    """Facts in force, by relation and by name.

    :param frames: schema frames in force, by key.
    :param base: facts for relations that have none here; it is not changed.
    :raises TailraceError: `PROTOCOL_VIOLATION` if a frame is invalid.
    """

    def __init__(self, frames: Mapping[str, bytes] | None = None, *, base: KnownFacts | None = None) -> None:
        self._base = base
        self._by_relation: dict[int, Facts] = {}
        self._by_name: dict[tuple[str, str], set[int]] = {}
        for key, frame in (frames or {}).items():
            self.take(key, frame)

    def take(self, key: str, frame: bytes) -> None:
        """Put the facts of a schema frame in force, if it is a facts frame."""
        if key.startswith("F"):
            self.put(Facts.from_json(control_json(frame)))

    def put(self, facts: Facts) -> None:
        """Put `facts` in force for their relation."""
        if (before := self._by_relation.get(facts.relation)) is not None:
            self._by_name[before.schema, before.table].discard(facts.relation)
        self._by_relation[facts.relation] = facts
        self._by_name.setdefault((facts.schema, facts.table), set()).add(facts.relation)

    def get(self, relation: int) -> Facts | None:
        """Return the facts of a relation; None if there are none."""
        found = self._by_relation.get(relation)
        return self._base.get(relation) if found is None and self._base is not None else found

    def namesakes(self, facts: Facts) -> list[Facts]:
        """Return the facts in force of other relations with the same name, which may be dropped by now."""
        found = [self._by_relation[oid] for oid in sorted(self._by_name.get((facts.schema, facts.table), ()))]
        if self._base is not None:
            of_base = self._base.namesakes(facts)
            found = [other for other in of_base if other.relation not in self._by_relation] + found
        return [other for other in found if other.relation != facts.relation]


def versioned(
    facts: Facts,
    known: KnownFacts,
    *,
    reshaped: bool,
    name_of: Callable[[int], tuple[str, str] | None] = lambda _: None,
) -> Facts:
    """Return `facts` with their version, and the relation that they replace, given the facts in force.

    :param reshaped: the Relation message itself differs from the one in force.
    :param name_of: returns a relation's present name; None if it was dropped.
    """
    before = known.get(facts.relation)
    if before is not None:
        facts = replace(facts, read_from=max(facts.read_from, before.read_from))
    namesakes = known.namesakes(facts)
    newest = max((other.version for other in (*namesakes, *([before] if before else []))), default=0)
    if before is not None and before.qualified_name == facts.qualified_name:
        carried = replace(
            facts, version=before.version, filenode=before.filenode,
            replaced=before.replaced, replaced_name=before.replaced_name,
        )  # fmt: skip
        if carried == before and not reshaped:
            return replace(carried, filenode=facts.filenode)
        return replace(carried, version=newest + 1, filenode=facts.filenode)
    replaced = max(namesakes, key=lambda other: other.version, default=None)
    if replaced is None:
        return replace(facts, version=newest + 1, replaced=0)
    oid = replaced.relation
    return replace(facts, version=newest + 1, replaced=oid, replaced_name=name_of(oid))


def missing_columns(
    sent: Sequence[Column], facts: Facts, table: CatalogTable | None, before: Facts | None, *, xid: int
) -> tuple[ColumnFacts, ...]:
    """Return the columns of `before` that `sent` lacks although `table` still has them.

    A column that was changed since `xid` counts only if its name is unchanged.

    :param facts: the facts made from `sent`.
    """
    if before is None or table is None:
        return ()
    names = {column.name for column in sent}
    numbers = {column.number for column in facts.columns}
    there = {each["number"]: each for each in table.columns if not each["dropped"] and not each["generated"]}
    return tuple(
        column
        for column in before.columns
        if column.number in there
        and column.number not in numbers
        and (held := there[column.number])["name"] not in names
        and (held["name"] == column.name or not table.later(held["xid"], xid))
    )
