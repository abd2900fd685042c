"""Value types that all layers use: positions, columns, relations, ranges. Frozen, without I/O.

Positions. An LSN is a 64-bit byte address in PostgreSQL's write-ahead log, an `int` here, shown
as PostgreSQL shows it: `16/B374D848`. A *log offset* is a byte address in one task's change log:
it counts uncompressed frame bytes from 0 and only increases; readers and sinks commit log
offsets. Ranges are half open: `[start, end)`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

#: PostgreSQL's epoch, 2000-01-01, in microseconds since 1970-01-01. All times here count from 1970-01-01.
POSTGRES_EPOCH_US = 946_684_800_000_000

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def format_lsn(lsn: int) -> str:
    """Return `lsn` as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Return the LSN of `text`, PostgreSQL's notation `X/X`.

    :raises ValueError: if `text` is not two hexadecimal numbers of 32 bits.
    """
    found = _LSN.fullmatch(text)
    if found is None:  # `int` alone would accept signs, spaces and underscores, too
        raise ValueError(f"not an LSN: {text!r}")
    return (int(found[1], 16) << 32) | int(found[2], 16)


class Op(enum.StrEnum):
    """The operation of a change, with Debezium's letters."""

    READ = "r"
    CREATE = "c"
    UPDATE = "u"
    DELETE = "d"
    TRUNCATE = "t"
    MESSAGE = "m"


class ReplicaIdentity(enum.StrEnum):
    """The part of the old row that an update or delete sends: `pg_class.relreplident`."""

    DEFAULT = "d"
    NOTHING = "n"
    FULL = "f"
    INDEX = "i"


@dataclass(frozen=True, slots=True)
class ValueType:
    """A column's type as far as it is needed to read the text of its values, with domains resolved.

    `oid` and `modifier` (-1: none) are those of the base type of all domains. `name` is that type's
    if it is not built in. `item` and `delimiter` are set for arrays that are not built in.
    `kind` is `pg_type.typtype`, empty if the log does not have it. `parts` are an enumeration's labels by
    their oid, or the types of a composite's attributes by their number.
    """

    oid: int
    modifier: int = -1
    name: str = ""
    item: ValueType | None = None
    delimiter: str = ","
    kind: str = ""
    parts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ValueModes:
    """Debezium's handling modes: the forms of values of some types.

    The values are Debezium's. None means Tailrace's own form (see `decode.types`).
    """

    decimal: str | None = None  # precise, double, string
    time: str | None = None  # adaptive, adaptive_time_microseconds, connect, isostring, microseconds, …
    interval: str | None = None  # numeric, string
    binary: str | None = None  # bytes, base64, base64-url-safe, hex
    hstore: str | None = None  # json, map
    money_fraction_digits: int = 2
    unavailable_placeholder: str = "__debezium_unavailable_value"


#: Without any mode: every value in Tailrace's own form.
OWN_FORMS = ValueModes()


@dataclass(frozen=True, slots=True)
class Column:
    """A column as a Relation message describes it, with its catalogue facts.

    `in_identity` is the message's flag: part of the replica identity, hence true for every
    column under `ReplicaIdentity.FULL`. `number` is `pg_attribute.attnum`, 0 if it is not known:
    it stays when the column is renamed. `missing`, `unknown` and `may_be_key`: see `protocol.facts`.
    `value_type` describes a type that is not built in, as far as the log has its catalogue facts.
    `not_null` is the catalogue's, which may be of a later time than a change.
    """

    name: str
    type_oid: int
    type_modifier: int  # -1: none
    in_identity: bool
    number: int = 0
    missing: str | None = None
    unknown: bool = False
    value_type: ValueType | None = None
    not_null: bool = False
    may_be_key: bool = False


@dataclass(frozen=True, slots=True)
class Relation:
    """One version of a table's schema, in force from the Relation message on.

    `primary_key` comes from the catalogue, not from the stream, and is empty if it is not known; it is used
    only if the replica identity does not identify the key. `version` counts the schemas that the log has had
    under the table's name; 0: not known. `modes` are the forms of values that the reader chose. `chosen_key`
    is from the configuration and takes precedence over both keys. `pending`: capture does not have the
    catalogue facts yet.
    """

    oid: int
    schema: str
    table: str
    identity: ReplicaIdentity
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    version: int = 0
    modes: ValueModes = OWN_FORMS
    chosen_key: tuple[str, ...] = ()
    pending: bool = False

    @property
    def qualified_name(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the columns that identify a row; empty if there are none.

        The columns that the configuration chose; otherwise those of the replica identity, or the
        primary key if the replica identity is the whole row or nothing.
        """
        if self.chosen_key:
            return self.chosen_key
        if self.identity is ReplicaIdentity.FULL:
            return self.primary_key
        return tuple(column.name for column in self.columns if column.in_identity) or self.primary_key


@dataclass(frozen=True, slots=True)
class SourceFingerprint:
    """Identifies the stream and database that a log belongs to. All fields are compared at every start."""

    type: str  # "postgresql"
    system_identifier: str
    database: str
    slot: str


@dataclass(frozen=True, slots=True)
class LogRange:
    """A range of one task's log, `[start, end)`, between two boundaries."""

    task: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Pacing:
    """Limits for the size and frequency of batches.

    :param rows_max: most rows of a batch; a single transaction of the source may have more.
    :param bytes_max: most bytes of the log in a batch, likewise.
    :param interval_s: least time from batch to batch while less than a batch waits, in seconds.
    :param within_s: with a backlog, the time in which a batch should be written, in seconds; None: a batch
        has as much as the limits allow.
    :param begins_full: whether the first batch has as much as the limits allow.
    """

    rows_max: int
    bytes_max: int
    interval_s: float
    within_s: float | None = None
    begins_full: bool = False
