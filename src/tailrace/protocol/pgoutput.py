"""The messages of pgoutput: constants for kernels; parsers and writers of Relation and Type messages.

Changes are not parsed here, but by kernels, which use the constants below.

Source: PostgreSQL manual, "Logical Replication Message Formats", protocol version 1.
"""

from __future__ import annotations

import struct
from typing import NoReturn

from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, Relation, ReplicaIdentity

# Types of messages.
BEGIN, COMMIT, ORIGIN, RELATION, TYPE, INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE = map(ord, "BCORYIUDTM")

# Offsets of fields in a message, from its type on; sizes are the least size of a message of its type.
BEGIN_LSN_AT, BEGIN_TIME_AT, BEGIN_XID_AT, BEGIN_SIZE = 1, 9, 17, 21
COMMIT_LSN_AT, COMMIT_END_AT, COMMIT_SIZE = 2, 10, 26
RELATION_AT = 1  # the relation's oid in a change or a Relation; in a Type, the type's oid
TUPLES_AT, CHANGE_SIZE_MIN = 5, 8
TRUNCATE_COUNT_AT, TRUNCATED_AT, RELATION_SIZE = 1, 6, 4
MESSAGE_FLAGS_AT, MESSAGE_LSN_AT, PREFIX_AT, MESSAGE_SIZE_MIN = 1, 2, 10, 11
TRANSACTIONAL = 1  # among a Message's flags

# The byte before a tuple: it is the old key, the old row, the new row.
OLD_KEY, OLD_ROW, NEW_ROW = map(ord, "KON")

# The byte before a column in a tuple; TEXT is followed by the text's size.
NULL, UNCHANGED, TEXT = map(ord, "nut")

#: PostgreSQL's MaxTupleAttributeNumber: no row has more columns.
COLUMNS_MAX = 1664

#: The schema for which pgoutput sends an empty name.
_PG_CATALOG = "pg_catalog"

_KEY_FLAG = 1


class Cursor:
    """A reader of one message, from its first byte on, that never reads past its end."""

    def __init__(self, message: bytes, what: str) -> None:
        self._message = message
        self._at = 0
        self._what = what

    def u8(self) -> int:
        return self._take(1)[0]

    def i16(self) -> int:
        return int(struct.unpack("!h", self._take(2))[0])

    def i32(self) -> int:
        return int(struct.unpack("!i", self._take(4))[0])

    def u32(self) -> int:
        return int(struct.unpack("!I", self._take(4))[0])

    def text(self) -> str:
        """Return the text up to the next zero byte, and skip that byte."""
        end = self._message.find(b"\0", self._at)
        if end < 0:
            self.refuse("a name has no end")
        raw = self._message[self._at : end]
        self._at = end + 1
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.refuse("a name is not UTF-8")

    def end(self) -> None:
        """Check that the whole message was read."""
        if self._at != len(self._message):
            self.refuse("bytes are left over")

    def refuse(self, found: str) -> NoReturn:
        """Raise the error for a malformed message."""
        raise TailraceError(
            Kind.PROTOCOL_VIOLATION,
            f"parsed a {self._what} message: {found}",
            "please report it with the server's version",
            {"byte": self._at},
        )

    def _take(self, size: int) -> bytes:
        if size > len(self._message) - self._at:
            self.refuse("it is cut short")
        taken = self._message[self._at : self._at + size]
        self._at += size
        return taken


def parse_relation(message: bytes) -> Relation:
    """Return the relation that a message ('R' and after) describes; its primary key is not known.

    :raises TailraceError: `PROTOCOL_VIOLATION` if the message is not one.
    """
    cursor = Cursor(message, "Relation")
    if cursor.u8() != RELATION:
        cursor.refuse("it is of another type")
    oid = cursor.u32()
    schema = cursor.text() or _PG_CATALOG
    table = cursor.text()
    letter = chr(cursor.u8())
    if letter not in list(ReplicaIdentity):
        cursor.refuse("its replica identity is unknown")
    count = cursor.i16()
    if not 0 <= count <= COLUMNS_MAX:
        cursor.refuse("its number of columns is impossible")
    columns = []
    for _ in range(count):
        flags = cursor.u8()
        name = cursor.text()
        type_oid = cursor.u32()
        columns.append(Column(name, type_oid, cursor.i32(), bool(flags & _KEY_FLAG)))
    cursor.end()
    if len({column.name for column in columns}) != count:
        cursor.refuse("two columns have one name")
    return Relation(oid, schema, table, ReplicaIdentity(letter), tuple(columns))


def parse_type(message: bytes) -> tuple[int, str, str]:
    """Return the content of a Type message ('Y' and after): oid, schema and name.

    :raises TailraceError: `PROTOCOL_VIOLATION` if the message is not one.
    """
    cursor = Cursor(message, "Type")
    if cursor.u8() != TYPE:
        cursor.refuse("it is of another type")
    oid, schema, name = cursor.u32(), cursor.text(), cursor.text()
    cursor.end()
    return oid, schema, name


def relation_message(relation: Relation) -> bytes:
    """Return the Relation message that describes `relation`."""
    schema = "" if relation.schema == _PG_CATALOG else relation.schema
    return (
        struct.pack("!BI", RELATION, relation.oid)
        + _text(schema)
        + _text(relation.table)
        + relation.identity.encode()
        + struct.pack("!H", len(relation.columns))
        + b"".join(
            struct.pack("!B", column.in_identity)
            + _text(column.name)
            + struct.pack("!Ii", column.type_oid, column.type_modifier)
            for column in relation.columns
        )
    )


def type_message(oid: int, schema: str, name: str) -> bytes:
    """Return the Type message of a type."""
    return struct.pack("!BI", TYPE, oid) + _text(schema) + _text(name)


def _text(text: str) -> bytes:
    return text.encode() + b"\0"
