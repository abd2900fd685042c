"""The values that every layer speaks of. Frozen, without behaviour that needs a process.

Positions. An LSN is a 64-bit byte address in PostgreSQL's write-ahead log, held here as an
`int` and shown as PostgreSQL shows it, `16/B374D848`. A *log offset* is a byte address in one
task's change log: it counts uncompressed frame bytes from 0, only grows, and is what readers
and sinks keep. Ranges are half open: `[start, end)`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

#: PostgreSQL counts microseconds from 2000-01-01; everything here counts from 1970-01-01.
POSTGRES_EPOCH_US = 946_684_800_000_000

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def format_lsn(lsn: int) -> str:
    """Return `lsn` as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Return the LSN that PostgreSQL's notation `X/X` stands for.

    :raises ValueError: if `text` is not two hexadecimal numbers of 32 bits.
    """
    found = _LSN.fullmatch(text)
    if found is None:  # `int` alone takes signs, spaces and underscores, too
        raise ValueError(f"not an LSN: {text!r}")
    return (int(found[1], 16) << 32) | int(found[2], 16)


class Op(enum.StrEnum):
    """What a change did to its row or table; Debezium's letters."""

    READ = "r"
    CREATE = "c"
    UPDATE = "u"
    DELETE = "d"
    TRUNCATE = "t"
    MESSAGE = "m"


class ReplicaIdentity(enum.StrEnum):
    """What an update or delete sends of the old row: `pg_class.relreplident`."""

    DEFAULT = "d"
    NOTHING = "n"
    FULL = "f"
    INDEX = "i"


@dataclass(frozen=True, slots=True)
class ValueType:
    """What is known of how a column's values are written, domains resolved.

    `oid` and `modifier` (-1: none) are those of the type under all domains. `name` is that
    type's if it is not built in. `item` and `delimiter` are set for arrays that are not built in.
    `kind` is `pg_type.typtype`, empty where the log does not tell. `parts` are, of an enumeration, its
    labels by their oid; of a composite, its attributes' types by their number.
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
    """Debezium's handling modes: how values are given where there is a choice.

    None, for a mode, is Tailrace's own form (see `decode.types`). The values are Debezium's.
    """

    decimal: str | None = None  # precise, double, string
    time: str | None = None  # adaptive, adaptive_time_microseconds, connect, isostring, microseconds, …
    interval: str | None = None  # numeric, string
    binary: str | None = None  # bytes, base64, base64-url-safe, hex
    hstore: str | None = None  # json, map
    money_fraction_digits: int = 2
    unavailable_placeholder: str = "__debezium_unavailable_value"


#: No mode is chosen: every value in Tailrace's own form.
OWN_FORMS = ValueModes()


@dataclass(frozen=True, slots=True)
class Column:
    """A column as a Relation message describes it, and what the facts beside it tell.

    `in_identity` is the message's flag: part of the replica identity, hence true for every
    column under `ReplicaIdentity.FULL`. `number` is `pg_attribute.attnum`, 0 if it is not known:
    it stays when the column is renamed. `missing`, `unknown` and `may_be_key`: see `protocol.facts`.
    `value_type` says what the log knows beyond the message of a type that is not built in.
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
    """One version of a table's shape, in force from the Relation message on.

    `primary_key` comes from the catalogue, not from the stream, and is empty where it is not
    known; it is used only where the replica identity can't tell the key. `version` counts the
    shapes that the log has had under the table's name; 0: not known. `replaced` is the relation
    that had the name before, and `replaced_name` what that was called soon after, if it was there.
    `modes` are the reader's choice of how values are given to it.
    `chosen_key` is the configuration's and comes before both. `pending`: capture has yet to learn from the
    catalogue what the message does not tell.
    """

    oid: int
    schema: str
    table: str
    identity: ReplicaIdentity
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    version: int = 0
    replaced: int = 0
    replaced_name: tuple[str, str] | None = None
    modes: ValueModes = OWN_FORMS
    chosen_key: tuple[str, ...] = ()
    pending: bool = False

    @property
    def qualified_name(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the columns that identify a row; empty if nothing does.

        Those that the configuration chose; else those of the replica identity; the primary key
        where that is the whole row, or nothing.
        """
        if self.chosen_key:
            return self.chosen_key
        if self.identity is ReplicaIdentity.FULL:
            return self.primary_key
        return tuple(column.name for column in self.columns if column.in_identity) or self.primary_key


@dataclass(frozen=True, slots=True)
class SourceFingerprint:
    """Which stream of which database a log belongs to. Compared whole at every start."""

    type: str  # "postgresql"
    system_identifier: str
    database: str
    slot: str


@dataclass(frozen=True, slots=True)
class LogRange:
    """A stretch of one task's log, `[start, end)`; both ends have no transaction open."""

    task: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Pacing:
    """How much a batch holds, and how often there is one.

    :param rows_max: rows at most; a single transaction of the source may have more.
    :param bytes_max: bytes of the log at most, likewise.
    :param interval_s: least seconds from batch to batch while less than a batch waits.
    :param within_s: with a backlog, a batch is what can be written in about so many seconds; None: as
        much as the limits allow.
    :param begins_full: whether the first one has as much as the limits allow.
    """

    rows_max: int
    bytes_max: int
    interval_s: float
    within_s: float | None = None
    begins_full: bool = False
