"""The tables of a keyspace in the log: one shape for all shards, whatever shape each shard has.

DDL reaches shards one after the other, so a table has several shapes for a while. The log has one at a time,
with every column that any shard has: a mirror could not follow a table that alternates with each row. A
shard's updates leave a column unchanged that the shard lacks. The column is removed when no live shard has
it; if types differ, the wider one is used. Columns are matched by name: a renamed column is a new one.

For one thread: the one that appends to the log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tailrace.errors import Kind, TailraceError
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import control_json
from tailrace.protocol.pgoutput import COLUMNS_MAX
from tailrace.sources.row_frames import ColumnShape, TableShape
from tailrace.sources.vitess.rows.column_defaults import UNKNOWN, ColumnDefault, DefaultOf, default_of_added
from tailrace.sources.vitess.rows.types import ColumnPlan, is_rewritten


@dataclass(slots=True)
class _Table:
    """A table of the log, and the shapes that shards have described since this process started."""

    shape: TableShape
    shards: dict[str, tuple[ColumnPlan, ...]] = field(default_factory=dict)


class LogTables:
    """All tables of one log.

    :param in_force: the frames that are in force at the log's end, by their keys.
    :param default_of: called for each column that is added to a table; without it the value in older rows is
        unknown, and a mirror stops there.
    :param shard_column: a column that is added to each table, with the shard's name; empty: none.
    """

    def __init__(
        self,
        in_force: Mapping[str, bytes],
        default_of: DefaultOf | None = None,
        shard_column: str = "",
    ) -> None:
        self._default_of = default_of
        self.shard_column = shard_column
        self._live: frozenset[str] = frozenset()
        self._tables: dict[tuple[str, str], _Table] = {}
        self._relations = 0
        #: Number of changes of shapes: users of shapes compare it to notice that theirs are outdated.
        self.generation = 0
        self._load(in_force)

    def _load(self, in_force: Mapping[str, bytes]) -> None:
        for key, frame in in_force.items():
            if key[0] == "F":
                facts = Facts.from_json(control_json(frame))
                self._tables[facts.schema, facts.table] = _Table(TableShape.of(facts))
                self._relations = max(self._relations, facts.relation)

    def keep_shards(self, shards: Collection[str]) -> None:
        """Set the live shards: the next description drops the columns that only other shards had."""
        self._live = frozenset(shards)

    def shape(self, keyspace: str, table: str) -> TableShape:
        """Return the shape that a table has in the log.

        :raises KeyError: if it was never described.
        """
        return self._tables[keyspace, table].shape

    def read_again(self, keyspace: str, table: str, log_offset: int) -> TableShape | None:
        """Note that the log has all rows of a table from `log_offset` on.

        Returns the shape to write; None if the table was never described: it has no rows.
        """
        known = self._tables.get((keyspace, table))
        if known is None:
            return None
        known.shape = dataclasses.replace(known.shape, read_from=max(log_offset, known.shape.read_from))
        return known.shape

    def names(self, keyspace: str) -> list[str]:
        """Return the tables of a keyspace that were described."""
        return sorted(table for schema, table in self._tables if schema == keyspace)

    def describe(
        self,
        keyspace: str,
        table: str,
        shard: str,
        columns: tuple[ColumnPlan, ...],
        left_out: Collection[str] = (),
    ) -> TableShape | None:
        """Process a shard's description of a table; return the shape to write to the log, if it changed.

        :param left_out: further columns of the shard, which are not written to the log.
        :raises TailraceError: `DECODE_FAILED` if two columns have one name; `SCHEMA_CHANGED` if the names are
            not those that the columns had.
        """
        if len({column.name for column in columns}) != len(columns):
            raise TailraceError(
                Kind.DECODE_FAILED,
                f"describe the table {keyspace}.{table}: two columns have one name",
                "rename one of them, or leave the table out of the source's tables",
                {"table": f"{keyspace}.{table}", "shard": f"{keyspace}/{shard}"},
            )
        if any(column.name == self.shard_column for column in columns):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"describe the table {keyspace}.{table}: it has a column {self.shard_column!r} itself",
                "give source.shard_column another name",
                {"table": f"{keyspace}.{table}", "shard": f"{keyspace}/{shard}"},
            )
        known = self._tables.get((keyspace, table))
        if known is None:
            self._relations += 1
            known = _Table(TableShape(self._relations, keyspace, table, (), (), 0))
            self._tables[keyspace, table] = known
        if known.shards.get(shard) != columns:
            self._refuse_misnamed(known.shape, shard, {column.name for column in columns}, left_out)
        is_altered = known.shards.pop(shard, columns) != columns
        known.shards[shard] = columns  # the last one is the latest
        for gone in [name for name in known.shards if self._live and name not in self._live]:
            if gone != shard:
                del known.shards[gone]
        shape = self._merged(known, columns, shard, is_altered=is_altered)
        # Columns that were left out before, and are not now, have values in older rows that were not sent.
        kept_out = {*known.shape.left_out, *left_out} - {column.name for column in shape.columns}
        shape = dataclasses.replace(shape, left_out=tuple(sorted(kept_out)))
        if len(shape.columns) > COLUMNS_MAX:
            raise TailraceError(
                Kind.DECODE_FAILED,
                f"describe the table {keyspace}.{table}: it has more than {COLUMNS_MAX} columns",
                "leave the table out of the source's tables",
                {"table": f"{keyspace}.{table}", "shard": f"{keyspace}/{shard}"},
            )
        if shape == known.shape:
            return None
        known.shape = dataclasses.replace(shape, version=known.shape.version + 1)
        self.generation += 1
        return known.shape

    def _refuse_misnamed(
        self, before: TableShape, shard: str, names: Collection[str], left_out: Collection[str]
    ) -> None:
        """Refuse column names that a table got after these changes.

        Vitess names the columns of older rows by the table's current columns, from left to right. If a column
        was added in between, the last ones seem to be missing, although they are older than one that is
        present, and the table still has them. Every shard is altered in the same order.
        """
        numbers = {column.name: column.number for column in before.columns}
        latest = max((numbers.get(name, before.numbered + 1) for name in names), default=0)
        for name in numbers.keys() - {*names, *left_out, self.shard_column}:
            if numbers[name] > latest or self._default_of is None:
                continue
            if self._default_of(shard, before.table, name) is not None:
                raise TailraceError(
                    Kind.SCHEMA_CHANGED,
                    f"describe the table {before.schema}.{before.table} on the shard {shard!r}: its columns "
                    "have other names than these changes had, because it was altered after them",
                    "start vttablet with --track_schema_versions, or take the table's rows with a new "
                    "snapshot",
                    {"table": f"{before.schema}.{before.table}", "shard": f"{before.schema}/{shard}"},
                )

    def _merged(
        self, known: _Table, latest: tuple[ColumnPlan, ...], shard: str, *, is_altered: bool
    ) -> TableShape:
        before = known.shape
        # The shape in the log stands for the shards that have not described the table yet.
        is_waiting = not self._live or bool(self._live - known.shards.keys())
        plans = {column.name: column for shape in known.shards.values() for column in shape}
        own = self.shard_column
        kept = [
            column for column in before.columns if is_waiting or column.name in plans or column.name == own
        ]
        kept_names = {column.name for column in kept}
        added = [column for column in latest if column.name not in kept_names]
        numbered = max((before.numbered, *(column.number for column in before.columns)))
        columns = [
            _merged(old, _types_of(known.shards.values(), old.name), is_waiting=is_waiting) for old in kept
        ]
        for place, (old, new) in enumerate(zip(kept, columns, strict=True)):
            if old.name in plans and is_rewritten(old.declared, new.declared):
                # Like a column that is dropped and added: its older values are not known.
                numbered += 1
                columns[place] = dataclasses.replace(new, number=numbered, missing=None, unknown=True)
        for number, plan in enumerate(added, numbered + 1):
            columns.append(self._added(before, plan, number, shard))
        numbered += len(added)
        if own and own not in kept_names:
            numbered += 1
            columns.append(ColumnShape(own, "text", numbered))
        key = _key_of(latest)
        if before.columns and not is_altered and not self._agree(known, key, is_waiting=is_waiting):
            key = before.key  # a shard that describes the table for the first time may be behind
        return dataclasses.replace(
            before,
            columns=tuple(columns),
            key=key,
            numbered=numbered,
        )

    def _agree(self, known: _Table, key: tuple[str, ...], *, is_waiting: bool) -> bool:
        return not is_waiting and all(set(_key_of(each)) == set(key) for each in known.shards.values())

    def _added(self, before: TableShape, plan: ColumnPlan, number: int, shard: str) -> ColumnShape:
        default = ColumnDefault()
        if plan.name in before.left_out:
            default = UNKNOWN
        elif before.columns:  # else no row is older
            ask = self._default_of
            default = UNKNOWN if ask is None else default_of_added(plan, ask(shard, before.table, plan.name))
        return ColumnShape(
            plan.name,
            plan.type,
            number,
            plan.not_null,
            plan.modifier,
            plan.declared,
            default.text,
            not default.is_known,
        )


def _merged(old: ColumnShape, plans: Sequence[ColumnPlan], *, is_waiting: bool) -> ColumnShape:
    if not plans:
        return old
    found = (old.type, old.modifier, old.declared)
    types = [(plan.type, plan.modifier, plan.declared) for plan in plans]
    if not is_waiting:
        found = types[0]
    for each in types:
        found = _wider(found, each)
    not_null = all(plan.not_null for plan in plans) and (old.not_null or not is_waiting)
    return dataclasses.replace(old, type=found[0], modifier=found[1], declared=found[2], not_null=not_null)


def _key_of(columns: tuple[ColumnPlan, ...]) -> tuple[str, ...]:
    return tuple(column.name for column in columns if column.in_key)


def _types_of(shapes: Iterable[tuple[ColumnPlan, ...]], name: str) -> list[ColumnPlan]:
    return [column for shape in shapes for column in shape if column.name == name]


_Type = tuple[str, int, str]

_INTEGER_DIGITS = {"int2": 5, "int4": 10, "int8": 19}
_MORE_DIGITS = frozenset({"timestamp", "timestamptz", "varchar", "bit"})


def _wider(one: _Type, other: _Type) -> _Type:
    """Return a type that holds the values of both types; `other` if there is none."""
    if one[:2] == other[:2]:
        return other
    if one[0] == other[0] and one[0] in _MORE_DIGITS:
        return max(one, other, key=lambda each: each[1])
    names = {one[0], other[0]}
    if names <= _INTEGER_DIGITS.keys():
        return max(one, other, key=lambda each: _INTEGER_DIGITS[each[0]])
    if names <= _INTEGER_DIGITS.keys() | {"numeric"}:
        digits = [_digits(each) for each in (one, other)]
        scale = max(scale for _, scale in digits)
        whole = max(precision - scale for precision, scale in digits)
        for each, (precision, own) in zip((other, one), reversed(digits), strict=True):
            if (precision - own, own) == (whole, scale) and each[0] == "numeric":
                return each
        modifier = (whole + scale << 16 | scale) + 4
        return ("numeric", modifier, f"decimal({whole + scale},{scale})")
    if names == {"float4", "float8"}:
        return one if one[0] == "float8" else other
    if names == {"varchar", "text"}:
        return one if one[0] == "text" else other
    return other


def _digits(type_: _Type) -> tuple[int, int]:
    if type_[0] in _INTEGER_DIGITS:
        return _INTEGER_DIGITS[type_[0]], 0
    return (type_[1] - 4) >> 16, (type_[1] - 4) & 0x7FF
