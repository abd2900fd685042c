r"""Log frames for a source whose rows are text; custom types of source write their changes with it.

Values are PostgreSQL's text of the column's type (`2024-02-29 12:00:00+00`, `{1,2}`, `\\x00ff`), so that
every reader of a log reads them as it reads PostgreSQL's; None is NULL. A `TableShape` describes the rows of
a table. It is written before the first change of the table, and again whenever it changes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from tailrace.decode.postgres_types import OIDS
from tailrace.errors import Kind, TailraceError
from tailrace.model import POSTGRES_EPOCH_US, Column, Relation, ReplicaIdentity
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.protocol.frames import Bytes
from tailrace.protocol.pgoutput import COLUMNS_MAX, parse_relation, relation_message

_TYPE_NAMES = {oid: name for name, oid in OIDS.items()}
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


class _Unchanged:
    """The value of a column that was not sent with an update."""

    def __repr__(self) -> str:
        return "UNCHANGED"


#: In the new row of an update: the value is unchanged and was not sent.
UNCHANGED = _Unchanged()

Row = Sequence[str | _Unchanged | None]

#: Errors of a value that is no text, or has characters that UTF-8 has not.
_NO_TEXT = (AttributeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """A column. `type` is a type of PostgreSQL without a length: `int8`, `text`, `timestamptz`.

    `number`, from 1, stays the same when the column is renamed and is not used again after it was dropped.
    `modifier` is PostgreSQL's `atttypmod`; -1: none. `declared` is the type as the source writes it.
    `missing` and `unknown`: as in `protocol.facts`.
    """

    name: str
    type: str
    number: int
    not_null: bool = False
    modifier: int = -1
    declared: str = ""
    missing: str | None = None
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table. `relation`, from 1 to 2^32 - 1, identifies it permanently, also after it was renamed.

    :param key: names of the columns that identify rows; empty: none do, and `update` and `delete` get the
        whole old row.
    :param version: counts the shapes that the table has had, from 1.
    :param numbered: the highest number that any column of it has ever had; 0: unknown.
    :param read_from: as in `protocol.facts`, like `left_out`.
    """

    relation: int
    schema: str
    table: str
    columns: tuple[ColumnShape, ...]
    key: tuple[str, ...]
    version: int = 1
    numbered: int = 0
    read_from: int = 0
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, facts: Facts) -> TableShape:
        """Return the shape from which `RowFrames.describe` wrote these facts."""
        columns = (
            ColumnShape(
                column.name,
                _TYPE_NAMES[column.type_oid],
                column.number,
                column.not_null,
                column.type_modifier,
                column.type,
                column.missing,
                column.unknown,
            )
            for column in facts.columns
        )
        return cls(
            facts.relation,
            facts.schema,
            facts.table,
            tuple(columns),
            facts.primary_key,
            facts.version,
            facts.numbered,
            facts.read_from,
            facts.left_out,
        )


class RowFrames:
    """Collects the frames of whole transactions and snapshots; `take` returns them.

    :param in_force: the descriptions in force in the log that they continue (`LogWriter.schema_in_force`): a
        row of a table that was described otherwise is refused.
    """

    def __init__(self, in_force: Mapping[str, bytes] | None = None) -> None:
        self._in_force = in_force or {}
        self._parts: list[bytes] = []
        self._described: dict[int, Relation] = {}  # by relation
        self._fitting: dict[int, TableShape] = {}  # the last shape that fits the description
        self._position = 0
        self._time_us = 0
        self._read = 0

    def take(self) -> Bytes:
        """Return the frames that were added since the last call."""
        collected = np.frombuffer(b"".join(self._parts), np.uint8)
        self._parts = []
        return collected

    def describe(self, shape: TableShape) -> None:
        """Describe a table for all changes that follow; allowed at any point before a change of it.

        :raises TailraceError: `CONFIG_INVALID` if a type is unknown, or the shape is none that a table has.
        """
        _require_sound(shape)
        facts = Facts(
            shape.relation,
            shape.schema,
            shape.table,
            shape.key,
            tuple(_facts(column) for column in shape.columns),
            shape.version,
            read_from=shape.read_from,
            numbered=shape.numbered,
            left_out=shape.left_out,
        )
        relation = _relation(shape)
        self._parts.append(frames.control_frame(frames.FACTS, self._position, 0, facts.as_json()))
        self._message(relation_message(relation))
        self._described[shape.relation] = relation
        self._fitting.pop(shape.relation, None)

    def begin(self, position: int, time_us: int, transaction: int = 0) -> None:
        """Begin a transaction.

        :param position: of its commit, larger than all previous ones; the log's position becomes
            `position` + 1.
        :param time_us: of its commit, in microseconds since 1970.
        :param transaction: its number, for display only; from 0 to 2^32 - 1.
        :raises TailraceError: `RECORD_INVALID` if one of them is no whole number, or out of range.
        """
        _require_in_range(position, time_us, transaction)
        self._position, self._time_us = position, time_us
        self._message(struct.pack("!cQqI", b"B", position, time_us - POSTGRES_EPOCH_US, transaction))

    def insert(self, shape: TableShape, row: Row) -> None:
        """Add an insert; `row` in the order of the table's columns.

        :raises TailraceError: here and below, `RECORD_INVALID` if a row lacks a value for a column or has one
            that is not text, or if the table was described otherwise.
        """
        self._message(struct.pack("!cI", b"I", shape.relation) + b"N" + self._tuple(shape, row))

    def update(self, shape: TableShape, row: Row, old: Row | None = None) -> None:
        """Add an update.

        :param old: the whole old row, if the key changed or the table has none.
        """
        if old is None and not shape.key:
            raise _refused(shape, "its table has no key, and the update lacks the old row")
        before = b"" if old is None else self._old(shape, old)
        after = self._tuple(shape, row, of_update=True)
        self._message(struct.pack("!cI", b"U", shape.relation) + before + b"N" + after)

    def delete(self, shape: TableShape, old: Row) -> None:
        """Add a delete; `old` is the whole old row, of which a table with a key needs only the key."""
        self._message(struct.pack("!cI", b"D", shape.relation) + self._old(shape, old))

    def truncate(self, shape: TableShape) -> None:
        """Add a truncate of the table."""
        self._message(struct.pack("!cIbI", b"T", 1, 0, shape.relation))

    def shard(self, name: str, state: dict[str, Any]) -> None:
        """Add, inside a transaction, the state of a shard after that transaction."""
        self._parts.append(frames.shard_frame(name, state))

    def commit(self) -> None:
        """End the transaction."""
        end = self._position + 1
        time_us = self._time_us - POSTGRES_EPOCH_US
        self._message(struct.pack("!cbQQq", b"C", 0, self._position, end, time_us))

    def progress(self, position: int, time_us: int) -> None:
        """Add that all changes of the source before `position` are in the log."""
        _require_in_range(position, time_us)
        self._parts.append(frames.control_frame(frames.PROGRESS, position, time_us, {}))

    def begin_snapshot(self, position: int, time_us: int) -> None:
        """Begin a snapshot as of `position`: it contains every transaction before it and none after it."""
        _require_in_range(position, time_us)
        self._position, self._time_us, self._read = position, time_us, 0
        self._parts.append(frames.control_frame(frames.SNAPSHOT_BEGIN, position, time_us, {}))

    def rows(self, shape: TableShape, rows: Sequence[Row]) -> None:
        """Add rows of a snapshot."""
        try:
            text = "".join("\t".join(map(_copied, self._whole(shape, row))) + "\n" for row in rows).encode()
        except _NO_TEXT:
            raise _refused(shape, "a value is neither text nor None") from None
        self._parts.append(frames.snapshot_frame(shape.relation, self._read, len(rows), text))
        self._read += len(rows)

    def end_snapshot(self) -> None:
        """End the snapshot."""
        self._parts.append(frames.control_frame(frames.SNAPSHOT_END, self._position, self._time_us, {}))

    def _message(self, message: bytes) -> None:
        self._parts.append(frames.xlog_frame(self._position, self._position, 0, message))

    def _old(self, shape: TableShape, old: Row) -> bytes:
        if not shape.key:
            return b"O" + self._tuple(shape, old)
        cells = zip(shape.columns, self._whole(shape, old), strict=True)
        key = [value if column.name in shape.key else None for column, value in cells]
        return b"K" + self._tuple(shape, key)

    def _tuple(self, shape: TableShape, row: Row, *, of_update: bool = False) -> bytes:
        try:
            cells = b"".join(map(_new_cell if of_update else _cell, self._whole(shape, row)))
        except _NO_TEXT:
            raise _refused(shape, "a value is neither text nor None") from None
        return struct.pack("!H", len(row)) + cells

    def _whole(self, shape: TableShape, row: Row) -> Row:
        """Return `row` after checking that it has a value for each column, as readers expect it.

        :raises TailraceError: `RECORD_INVALID`.
        """
        if len(row) != len(shape.columns):
            raise _refused(shape, f"it has {len(row)} values, but its table {len(shape.columns)} columns")
        if self._fitting.get(shape.relation) is not shape:
            described = self._described.get(shape.relation)
            if described is None and (frame := self._in_force.get(f"R{shape.relation}")) is not None:
                described = parse_relation(frame[frames.XLOG_PAYLOAD_AT :])
            if described is not None and described != _relation(shape):
                raise _refused(shape, "its table was described with other columns, types, name or key")
            self._fitting[shape.relation] = shape
        return row


def _refused(shape: TableShape, found: str) -> TailraceError:
    return TailraceError(
        Kind.RECORD_INVALID,
        f"write a row to the log: {found}",
        "give a text or None for each column of its TableShape (UNCHANGED only in the new row of an update), "
        "and describe the table again when its TableShape changes",
        {"table": f"{shape.schema}.{shape.table}"},
    )


def _require_in_range(position: int, time_us: int, transaction: int = 0) -> None:
    """Check that a frame can hold these numbers.

    :raises TailraceError: `RECORD_INVALID`.
    """
    is_held = (
        all(isinstance(number, Integral) for number in (position, time_us, transaction))
        and 0 <= position < (1 << 63) - 1
        and POSTGRES_EPOCH_US - (1 << 63) <= time_us < 1 << 63
        and 0 <= transaction < 1 << 32
    )
    if not is_held:
        raise TailraceError(
            Kind.RECORD_INVALID,
            "begin a transaction, a snapshot or progress in the log: a number is not whole, or out of range",
            "give a position from 0 to 2^63 - 2, a time in microseconds since 1970, and a number of a "
            "transaction from 0 to 2^32 - 1",
        )


def _require_sound(shape: TableShape) -> None:
    """Check that a table can have this shape: readers could not read the rows of any other.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    names = [column.name for column in shape.columns]
    numbers = [column.number for column in shape.columns]
    wrong = {
        "its relation is not from 1 to 2^32 - 1": not 0 < shape.relation < 1 << 32,
        "a name is empty or has a zero character": any(
            not name or "\0" in name for name in (shape.schema, shape.table, *names)
        ),
        f"it has more than {COLUMNS_MAX} columns": len(names) > COLUMNS_MAX,
        "two columns have one name": len(set(names)) < len(names),
        "its key has a name twice, or one that is no column's": len(set(shape.key)) < len(shape.key)
        or not set(shape.key) <= set(names),
        "its columns don't have different numbers, from 1": len(set(numbers)) < len(numbers)
        or min(numbers, default=1) < 1,
        "`numbered` is lower than a column's number": 0 < shape.numbered < max(numbers, default=0),
    }
    if found := next((problem for problem, is_so in wrong.items() if is_so), None):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"describe the table {shape.schema}.{shape.table}: {found}",
            "correct its TableShape",
            {"table": f"{shape.schema}.{shape.table}"},
        )


def _oid(column: ColumnShape) -> int:
    try:
        return OIDS[column.type]
    except KeyError:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"describe the column {column.name!r}: {column.type!r} is not a built-in type of PostgreSQL",
            "name one without its length, such as int8, numeric, text or timestamptz",
        ) from None


def _facts(column: ColumnShape) -> ColumnFacts:
    oid = _oid(column)
    return ColumnFacts(
        column.name,
        column.number,
        column.declared or column.type,
        oid,
        column.modifier,
        oid,
        column.modifier,
        column.not_null,
        column.missing,
        column.unknown,
    )


def _relation(shape: TableShape) -> Relation:
    """Return the description of a table as the log has it."""
    is_full = not shape.key
    columns = tuple(
        Column(column.name, _oid(column), column.modifier, is_full or column.name in shape.key)
        for column in shape.columns
    )
    identity = ReplicaIdentity.FULL if is_full else ReplicaIdentity.DEFAULT
    return Relation(shape.relation, shape.schema, shape.table, identity, columns)


def _new_cell(value: str | _Unchanged | None) -> bytes:
    return b"u" if isinstance(value, _Unchanged) else _cell(value)


def _cell(value: str | _Unchanged | None) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, _Unchanged):
        raise ValueError("only the new row of an update can have unchanged values")
    text = value.encode()
    return b"t" + struct.pack("!I", len(text)) + text


def _copied(value: str | _Unchanged | None) -> str:
    if isinstance(value, _Unchanged):
        raise ValueError("a row of a snapshot can't have unchanged values")
    return "\\N" if value is None else value.translate(_ESCAPES)
