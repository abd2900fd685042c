"""The mapping of MySQL's types to PostgreSQL's, and the conversion of each type's values.

`Field.column_type` decides if it is set: a text column whose collation ends in `_bin` is sent with a binary
type. A type that is not listed is refused by name.

Source: `query.proto` of Vitess for the numbers of types; MySQL manual, "Data Types".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tailrace.config.source.column_policy import ColumnRoles
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.rows import charsets
from tailrace.sources.vitess.rows.layout import (
    BITS,
    DOUBLE_BYTES,
    FLOAT4,
    FLOAT8,
    HEX,
    NUMBER,
    PADDED_HEX,
    PLAIN,
    SINGLE_BYTES,
    UTC,
    UTF16,
    UTF16LE,
    UTF32,
)

# Bits of a field's flags.
NOT_NULL, PRIMARY_KEY, NO_DEFAULT = 1, 2, 4096

#: The value for a type without a modifier.
NO_MODIFIER = -1

# The number that PostgreSQL adds to the modifiers of `varchar` and `numeric`.
_MODIFIER_HEADER = 4

_FRACTION_DIGITS_MAX = 6


class Refused(Exception):  # noqa: N818 - the caller knows the table
    """A column can't be transcoded; `args` are the reason and the hint."""


class Unnamed(Refused):
    """The server no longer knows the column's name."""


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """A column of a shard's table: its type in PostgreSQL, and the conversion of its values.

    `parameter`: for `PADDED_HEX` the number of bytes, for `BITS` that of bits. `charset` is set if a table of
    code points is needed. `may_lack`: inserted rows lack the value if it is NULL and `binlog_row_image` is
    NOBLOB. `implicit`: the value in rows older than the column if it is NOT NULL without a default; None: it
    is not known.
    """

    name: str
    type: str
    modifier: int
    declared: str  # as MySQL writes it
    code: int
    parameter: int = 0
    charset: str = ""
    in_key: bool = False
    not_null: bool = False
    is_json: bool = False
    may_lack: bool = False
    flags: int = 0
    implicit: str | None = None


#: MySQL's names of types by their numbers in VStream, for fields without `column_type`.
_NAMES = {
    257: "tinyint", 770: "tinyint unsigned", 259: "smallint", 772: "smallint unsigned",
    261: "mediumint", 774: "mediumint unsigned", 263: "int", 776: "int unsigned",
    265: "bigint", 778: "bigint unsigned", 1035: "float", 1036: "double", 2061: "timestamp",
    2062: "date", 2063: "time", 2064: "datetime", 785: "year", 18: "decimal", 6163: "text", 10260: "blob",
    6165: "varchar", 10262: "varbinary", 6167: "char", 10264: "varbinary", 2073: "bit", 2074: "enum",
    2075: "set", 2077: "geometry", 2078: "json", 2083: "vector",
}  # fmt: skip

#: Types whose only default is NULL, and whose values binary logs may omit.
_LARGE = re.compile(
    r"(tiny|medium|long)?(text|blob)|json|geom|(multi)?(point|linestring|polygon)|vector", re.IGNORECASE
)

_DECLARED = re.compile(r"\s*([a-z_0-9]+)\s*(?:\((.*)\))?(.*)", re.DOTALL)

# MySQL's own limits.
_DIGITS_MAX, _BITS_MAX, _BINARY_MAX, _CHARACTERS_MAX = 65, 64, 255, 65_535

_LEAVE_OUT = "leave the table out of the source's tables"

_Make = Callable[[pb.Field, str, bool, str], ColumnPlan]


def plan_of(field: pb.Field, *, has_labels: bool) -> ColumnPlan:
    """Return the plan of a column.

    :param has_labels: whether values of ENUM and SET are labels.
    :raises Refused: if the column can't be transcoded; `Unnamed`.
    """
    if is_unnamed(field):
        raise Unnamed(
            "Vitess does not know its name: the table was altered after this change",
            "start vttablet with --track_schema_versions, or take the table's rows with a new snapshot",
        )
    if not field.name or "\0" in field.name:
        raise Refused("it has no name that can be written", _LEAVE_OUT)
    declared = field.column_type or _NAMES.get(field.type, "")
    found = _DECLARED.fullmatch(declared.lower())
    base = found.group(1) if found else ""
    if not found or base not in _MAKERS:
        raise Refused(
            f"its type {declared or field.type!r} is not supported",
            _LEAVE_OUT + ", or use a newer version of Tailrace",
        )
    if base in ("enum", "set") and not has_labels:
        raise Refused(
            "the server sends the numbers of its labels, not the labels",
            f"use Vitess 20 or later, or {_LEAVE_OUT}",
        )
    return _MAKERS[base](field, base, "unsigned" in found.group(3), found.group(2) or "")


def is_rewritten(old: str, new: str) -> bool:
    """Return whether MySQL gives older rows other values than the log's types tell when a column's type is
    changed from `old` to `new`.
    """
    was, (base, size) = _base_and_size(old), _base_and_size(new)
    was_whole = was[0] in {*_INTEGERS, "year"}
    if base == "binary":
        return was[0] != "binary" or was[1] < size  # zero bytes are appended
    if base == "time":
        return was[0] == "time" and was[1] > size  # it is rounded
    if base in ("enum", "set"):
        return was_whole  # a number is that of a label
    if base == "year":
        return was_whole and was[0] != "year"  # 70 becomes 1970
    if base in ("float", "double"):
        return was[0] in ("float", "double") and old != new and "(" in new  # it is rounded
    return "zerofill" in old.lower() and _MAKERS[base] is _text


def _base_and_size(declared: str) -> tuple[str, int]:
    found = _DECLARED.fullmatch(declared.lower())
    assert found is not None, "a column with another type is refused"
    return found[1], int(found[2]) if (found[2] or "").isdigit() else 0


def passed_over(field: pb.Field) -> ColumnPlan:
    """Return the plan of a column whose values are skipped, whatever its type: it has no name, so that it
    matches no column of the log. `is_json` is kept, because the bit map of partial JSON counts documents.
    """
    declared = field.column_type or _NAMES.get(field.type, "")
    is_json = declared.lower() == "json"
    return ColumnPlan("", "bytea", NO_MODIFIER, declared, PLAIN, is_json=is_json, may_lack=True)


def is_unnamed(field: pb.Field) -> bool:
    """Return whether the server no longer knows the name of a column, and sends its number."""
    return field.name.startswith("@") and field.name[1:].isdigit()


def is_in_key(field: pb.Field) -> bool:
    """Return whether a column belongs to its table's primary key."""
    return bool(field.flags & PRIMARY_KEY)


def roles_of(fields: Sequence[pb.Field]) -> ColumnRoles:
    """Return the columns of a table as the column policy needs them."""
    key = frozenset(field.name for field in fields if is_in_key(field))
    return ColumnRoles(tuple(field.name for field in fields), key, not key, key)


def _require(fits: bool, field: pb.Field) -> None:
    if not fits:
        raise Refused(f"its type {field.column_type!r} is beyond MySQL's limits", _LEAVE_OUT)


def _column(
    field: pb.Field, type_: str, code: int, modifier: int = NO_MODIFIER, **more: object
) -> ColumnPlan:
    return ColumnPlan(
        field.name,
        type_,
        modifier,
        field.column_type or type_,
        code,
        in_key=is_in_key(field),
        not_null=bool(field.flags & NOT_NULL),
        may_lack=bool(_LARGE.match(field.column_type.lower())) and not field.flags & NOT_NULL,
        flags=field.flags,
        **more,  # type: ignore[arg-type]
    )


def _always(type_: str, code: int, implicit: str, *, is_json: bool = False) -> _Make:
    """Return the maker for a type of MySQL that has no variants."""
    return lambda field, _base, _unsigned, _arguments: _column(
        field, type_, code, is_json=is_json, implicit=implicit
    )


_INTEGERS = {
    "tinyint": ("int2", "int2"),
    "smallint": ("int2", "int4"),
    "mediumint": ("int4", "int4"),
    "int": ("int4", "int8"),
    "integer": ("int4", "int8"),
    "bigint": ("int8", "numeric"),
}


def _integer(field: pb.Field, base: str, unsigned: bool, _arguments: str) -> ColumnPlan:
    type_ = _INTEGERS[base][unsigned]
    modifier = _numeric_modifier(20, 0) if type_ == "numeric" else NO_MODIFIER
    return _column(field, type_, NUMBER, modifier, implicit="0")


def _decimal(field: pb.Field, _base: str, unsigned: bool, arguments: str) -> ColumnPlan:
    try:
        digits = [int(part) for part in arguments.split(",")]
    except ValueError:
        # Without a declaration: the length includes the sign and the point.
        digits = [max(1, field.column_length - (field.decimals > 0) - (not unsigned)), field.decimals]
    precision, scale = digits[0], digits[1] if len(digits) > 1 else 0
    _require(0 < precision <= _DIGITS_MAX and 0 <= scale <= precision, field)
    zero = "0." + "0" * scale if scale else "0"
    return _column(field, "numeric", NUMBER, _numeric_modifier(precision, scale), implicit=zero)


def _numeric_modifier(precision: int, scale: int) -> int:
    return (precision << 16 | scale) + _MODIFIER_HEADER


def _bit(field: pb.Field, _base: str, _unsigned: bool, arguments: str) -> ColumnPlan:
    bits = int(arguments) if arguments.isdigit() else field.column_length or 1
    _require(1 <= bits <= _BITS_MAX, field)
    return _column(field, "bit", BITS, bits, parameter=bits, implicit="0" * bits)


def _stamp(field: pb.Field, base: str, _unsigned: bool, arguments: str) -> ColumnPlan:
    digits = int(arguments) if arguments.isdigit() else 0 if field.column_type else field.decimals
    digits = min(digits, _FRACTION_DIGITS_MAX)
    if base == "timestamp":
        return _column(field, "timestamptz", UTC, digits, implicit="0000-00-00 00:00:00+00")
    return _column(field, "timestamp", PLAIN, digits, implicit="0000-00-00 00:00:00")


def _text(field: pb.Field, base: str, _unsigned: bool, arguments: str) -> ColumnPlan:
    if base in ("char", "varchar") and arguments.isdigit():
        _require(int(arguments) <= _CHARACTERS_MAX, field)
        return _characters(field, "varchar", int(arguments) + _MODIFIER_HEADER)
    return _characters(field, "text", NO_MODIFIER)


_UNITS = {"ucs2": UTF16, "utf16": UTF16, "utf16le": UTF16LE, "utf32": UTF32}


def _characters(field: pb.Field, type_: str, modifier: int) -> ColumnPlan:
    charset = charsets.charset_of(field.charset)
    if charset is None:
        raise Refused(
            f"the character set of its collation, number {field.charset}, can't be read"
            if field.charset
            else "its collation is one that Vitess does not know",
            f"convert the column to utf8mb4, or {_LEAVE_OUT}",
        )
    if charset in charsets.UTF8:
        return _column(field, type_, PLAIN, modifier, implicit="")
    if charset in _UNITS:
        return _column(field, type_, _UNITS[charset], modifier, implicit="")
    code = SINGLE_BYTES if len(charsets.points(charset)) == 256 else DOUBLE_BYTES
    return _column(field, type_, code, modifier, charset=charset, implicit="")


def _label(field: pb.Field, _base: str, _unsigned: bool, _arguments: str) -> ColumnPlan:
    # Streams have labels in UTF-8. A copy has them in the column's character set: ASCII labels are the same,
    # except in character sets with several bytes for each letter.
    charset = charsets.charset_of(field.charset)
    if charset in _UNITS or (charset not in charsets.UTF8 and not field.column_type.isascii()):
        raise Refused(
            "its labels, as its character set has them, are not ASCII, and it is another one than utf8mb4",
            f"convert the column to utf8mb4, or {_LEAVE_OUT}",
        )
    return _column(field, "text", PLAIN)


def _bytes(field: pb.Field, base: str, _unsigned: bool, arguments: str) -> ColumnPlan:
    if base == "binary":
        size = int(arguments) if arguments.isdigit() else field.column_length
        _require(size <= _BINARY_MAX, field)
        return _column(field, "bytea", PADDED_HEX, parameter=size, implicit="\\x" + "00" * size)
    return _column(field, "bytea", HEX, implicit="\\x")


_MAKERS: dict[str, _Make] = {
    **dict.fromkeys(_INTEGERS, _integer),
    "year": _always("int4", NUMBER, "0"),
    "decimal": _decimal,
    "numeric": _decimal,
    "float": _always("float4", FLOAT4, "0"),
    "double": _always("float8", FLOAT8, "0"),
    "bit": _bit,
    "date": _always("date", PLAIN, "0000-00-00"),
    # PostgreSQL's `time` ends at 24 hours; MySQL's has 838 of them, and negative ones.
    "time": _always("interval", PLAIN, "00:00:00"),
    "datetime": _stamp,
    "timestamp": _stamp,
    **dict.fromkeys(("char", "varchar", "tinytext", "text", "mediumtext", "longtext"), _text),
    **dict.fromkeys(("enum", "set"), _label),
    **dict.fromkeys(
        (
            "binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob", "geometry", "point",
            "linestring", "polygon", "multipoint", "multilinestring", "multipolygon", "geomcollection",
            "geometrycollection", "vector",
        ),
        _bytes,
    ),
    "json": _always("json", PLAIN, "null", is_json=True),
}  # fmt: skip
