r"""Frames for a source that has rows as text: what a type of source of your own writes into the log.

Values are PostgreSQL's text of the column's type (`2024-02-29 12:00:00+00`, `{1,2}`, `\\x00ff`), so that all
that reads a log reads them as it reads PostgreSQL's; None is NULL. Rows of a table are described by
`TableShape`, which is written before the first change of the table, and again whenever it changed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.decode.postgres_types import OIDS
from tailrace.errors import Kind, TailraceError
from tailrace.model import POSTGRES_EPOCH_US, Column, Relation, ReplicaIdentity
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.protocol.frames import Bytes
from tailrace.protocol.pgoutput import relation_message

_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


class _Unchanged:
    """The value of a column that was not sent with an update."""

    def __repr__(self) -> str:
        return "UNCHANGED"


#: In the new row of an update: the value is as it was, and was not sent.
UNCHANGED = _Unchanged()

Row = Sequence[str | _Unchanged | None]


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """A column. `type` is a type of PostgreSQL without a length: `int8`, `text`, `timestamptz`.

    `number` stays when the column is renamed, and is no other's, also after it was dropped; from 1.
    `modifier` is PostgreSQL's (`atttypmod`), -1: none. `declared` is the type as the source writes it.
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
    """A table. `relation` identifies it for ever, also after it was renamed; from 1 to 2^32 - 1.

    :param key: names of the columns that tell rows apart; empty: none do, and `update` and `delete` get the
        whole old row.
    :param version: counts the shapes that the table has had, from 1.
    :param numbered: the highest number that a column of it has ever had; 0: not told.
    :param read_from: as in `protocol.facts`, as `left_out` is.
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


class RowFrames:
    """Collects the frames of whole transactions and snapshots; `take` hands them over."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._position = 0
        self._time_us = 0
        self._read = 0

    def take(self) -> Bytes:
        """Return the frames that were added since the last call."""
        collected = np.frombuffer(b"".join(self._parts), np.uint8)
        self._parts = []
        return collected

    def describe(self, shape: TableShape) -> None:
        """Describe a table, from here on. May stand anywhere before a change of it.

        :raises TailraceError: `CONFIG_INVALID` if a type is not known.
        """
        is_full = not shape.key
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
        identity = ReplicaIdentity.FULL if is_full else ReplicaIdentity.DEFAULT
        columns = tuple(
            Column(column.name, _oid(column), column.modifier, is_full or column.name in shape.key)
            for column in shape.columns
        )
        self._parts.append(frames.control_frame(frames.FACTS, self._position, 0, facts.as_json()))
        self._message(
            relation_message(Relation(shape.relation, shape.schema, shape.table, identity, columns))
        )

    def begin(self, position: int, time_us: int, transaction: int = 0) -> None:
        """Begin a transaction.

        :param position: of its commit; the log's position becomes `position` + 1. Larger than every one
            before.
        :param time_us: of its commit, microseconds since 1970.
        :param transaction: its number, for people; from 0 to 2^32 - 1.
        """
        self._position, self._time_us = position, time_us
        self._message(struct.pack("!cQqI", b"B", position, time_us - POSTGRES_EPOCH_US, transaction))

    def insert(self, shape: TableShape, row: Row) -> None:
        """Add an insert; `row` in the order of the table's columns.

        :raises TailraceError: here and below, `RECORD_INVALID` if a row has not a value for each column.
        """
        self._message(struct.pack("!cI", b"I", shape.relation) + b"N" + _tuple(shape, row))

    def update(self, shape: TableShape, row: Row, old: Row | None = None) -> None:
        """Add an update.

        :param old: the whole old row, where the key changed or the table has none.
        """
        before = b"" if old is None else _old(shape, old)
        self._message(struct.pack("!cI", b"U", shape.relation) + before + b"N" + _tuple(shape, row))

    def delete(self, shape: TableShape, old: Row) -> None:
        """Add a delete; of `old`, the whole old row, a table with a key needs only the key."""
        self._message(struct.pack("!cI", b"D", shape.relation) + _old(shape, old))

    def truncate(self, shape: TableShape) -> None:
        """Add that the table was emptied."""
        self._message(struct.pack("!cIbI", b"T", 1, 0, shape.relation))

    def shard(self, name: str, state: dict[str, Any]) -> None:
        """Say, inside a transaction, how far a shard is when the transaction is in the log."""
        self._parts.append(frames.shard_frame(name, state))

    def commit(self) -> None:
        """End the transaction."""
        end = self._position + 1
        time_us = self._time_us - POSTGRES_EPOCH_US
        self._message(struct.pack("!cbQQq", b"C", 0, self._position, end, time_us))

    def progress(self, position: int, time_us: int) -> None:
        """Say that the source has nothing before `position` that is not in the log."""
        self._parts.append(frames.control_frame(frames.PROGRESS, position, time_us, {}))

    def begin_snapshot(self, position: int, time_us: int) -> None:
        """Begin rows that are as of `position`: every transaction before it is in them, none after it."""
        self._position, self._time_us, self._read = position, time_us, 0
        self._parts.append(frames.control_frame(frames.SNAPSHOT_BEGIN, position, time_us, {}))

    def rows(self, shape: TableShape, rows: Sequence[Row]) -> None:
        """Add rows of a snapshot."""
        text = "".join("\t".join(map(_copied, _whole(shape, row))) + "\n" for row in rows)
        self._parts.append(frames.snapshot_frame(shape.relation, self._read, len(rows), text.encode()))
        self._read += len(rows)

    def end_snapshot(self) -> None:
        """End the snapshot."""
        self._parts.append(frames.control_frame(frames.SNAPSHOT_END, self._position, self._time_us, {}))

    def _message(self, message: bytes) -> None:
        self._parts.append(frames.xlog_frame(self._position, self._position, 0, message))


def _old(shape: TableShape, old: Row) -> bytes:
    if not shape.key:
        return b"O" + _tuple(shape, old)
    cells = zip(shape.columns, _whole(shape, old), strict=True)
    return b"K" + _tuple(shape, [value if column.name in shape.key else None for column, value in cells])


def _oid(column: ColumnShape) -> int:
    try:
        return OIDS[column.type]
    except KeyError:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"describe the column {column.name!r}: {column.type!r} is no built-in type of PostgreSQL",
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


def _whole(shape: TableShape, row: Row) -> Row:
    """Return `row`, which has a value for each column. Another could never be read from a log.

    :raises TailraceError: `RECORD_INVALID`.
    """
    if len(row) != len(shape.columns):
        raise TailraceError(
            Kind.RECORD_INVALID,
            f"write a row to the log: it has {len(row)} values, and its table {len(shape.columns)} columns",
            "give a value for each column of its TableShape, and describe the table again when they change",
            {"table": f"{shape.schema}.{shape.table}"},
        )
    return row


def _tuple(shape: TableShape, row: Row) -> bytes:
    return struct.pack("!H", len(row)) + b"".join(map(_cell, _whole(shape, row)))


def _cell(value: str | _Unchanged | None) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, _Unchanged):
        return b"u"
    text = value.encode()
    return b"t" + struct.pack("!I", len(text)) + text


def _copied(value: str | _Unchanged | None) -> str:
    if isinstance(value, _Unchanged):
        raise ValueError("a row of a snapshot has all its values")
    return "\\N" if value is None else value.translate(_ESCAPES)
