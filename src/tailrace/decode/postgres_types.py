"""PostgreSQL's built-in types by oid, and the descriptions of other types in the log.

A type that is not built in is described twice: by a Type message, before the table's Relation
message, and by the facts frame, if capture wrote one. The message has only the name of the type
under all domains; the facts also have the domain's modifier and the type of an array's items.
Neither depends on the position in the log: they hold for as long as the type has its oid.

Source: pg_type.dat (oids never change); PostgreSQL manual, "Logical Replication Message Formats".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.errors import REPORT_LOG, Kind, TailraceError
from tailrace.model import ValueType

#: First oid of the types that have a Type message.
FIRST_NOT_BUILT_IN = 10_000

#: The types of PostgreSQL 15 to 18 that a column can have: oid, name, oid of the array of it.
BUILT_IN = (
    (16, "bool", 1000),
    (17, "bytea", 1001),
    (18, "char", 1002),
    (19, "name", 1003),
    (20, "int8", 1016),
    (21, "int2", 1005),
    (22, "int2vector", 1006),
    (23, "int4", 1007),
    (24, "regproc", 1008),
    (25, "text", 1009),
    (26, "oid", 1028),
    (27, "tid", 1010),
    (28, "xid", 1011),
    (29, "cid", 1012),
    (30, "oidvector", 1013),
    (114, "json", 199),
    (142, "xml", 143),
    (600, "point", 1017),
    (601, "lseg", 1018),
    (602, "path", 1019),
    (603, "box", 1020),
    (604, "polygon", 1027),
    (628, "line", 629),
    (650, "cidr", 651),
    (700, "float4", 1021),
    (701, "float8", 1022),
    (718, "circle", 719),
    (774, "macaddr8", 775),
    (790, "money", 791),
    (829, "macaddr", 1040),
    (869, "inet", 1041),
    (1033, "aclitem", 1034),
    (1042, "bpchar", 1014),
    (1043, "varchar", 1015),
    (1082, "date", 1182),
    (1083, "time", 1183),
    (1114, "timestamp", 1115),
    (1184, "timestamptz", 1185),
    (1186, "interval", 1187),
    (1266, "timetz", 1270),
    (1560, "bit", 1561),
    (1562, "varbit", 1563),
    (1700, "numeric", 1231),
    (1790, "refcursor", 2201),
    (2202, "regprocedure", 2207),
    (2203, "regoper", 2208),
    (2204, "regoperator", 2209),
    (2205, "regclass", 2210),
    (2206, "regtype", 2211),
    (2950, "uuid", 2951),
    (2970, "txid_snapshot", 2949),
    (3220, "pg_lsn", 3221),
    (3614, "tsvector", 3643),
    (3615, "tsquery", 3645),
    (3734, "regconfig", 3735),
    (3769, "regdictionary", 3770),
    (3802, "jsonb", 3807),
    (3904, "int4range", 3905),
    (3906, "numrange", 3907),
    (3908, "tsrange", 3909),
    (3910, "tstzrange", 3911),
    (3912, "daterange", 3913),
    (3926, "int8range", 3927),
    (4072, "jsonpath", 4073),
    (4089, "regnamespace", 4090),
    (4096, "regrole", 4097),
    (4191, "regcollation", 4192),
    (4451, "int4multirange", 6150),
    (4532, "nummultirange", 6151),
    (4533, "tsmultirange", 6152),
    (4534, "tstzmultirange", 6153),
    (4535, "datemultirange", 6155),
    (4536, "int8multirange", 6157),
    (5038, "pg_snapshot", 5039),
    (5069, "xid8", 271),
)

#: The type of an array's items, by the array's type.
ITEMS = {array: oid for oid, _, array in BUILT_IN}

#: A name in pg_catalog to its oid; `_x` is the array of `x`.
OIDS = {name: oid for oid, name, _ in BUILT_IN} | {f"_{name}": array for _, name, array in BUILT_IN}

# Types whose arrays have another delimiter than the comma: PostgreSQL's box[] (oid), and PostGIS' types.
_BOXES = 1020
_DELIMITERS = {"geometry": ":", "geography": ":"}

#: Limit of the depth of domains over domains and arrays of domains over arrays; real types are not as deep.
_DEPTH_MAX = 32


def item_of(value: ValueType) -> tuple[ValueType, str] | None:
    """Return the type of an array's items and their delimiter; None if the type is not an array."""
    if value.item is not None:
        return value.item, value.delimiter
    if value.oid in ITEMS:
        return ValueType(ITEMS[value.oid], value.modifier), ";" if value.oid == _BOXES else ","
    return None


def from_message(oid: int, schema: str, name: str) -> ValueType:
    """Return the type `oid` as its Type message describes it; the schema is empty for pg_catalog."""
    if schema in {"", "pg_catalog"}:
        return ValueType(OIDS.get(name, oid))
    if name.startswith("_") and len(name) > 1:
        # PostgreSQL names the array of `x` like this. Only facts identify another type with such a name;
        # without them its values do not parse as arrays, and are kept as text.
        return ValueType(oid, item=ValueType(0, name=name[1:]), delimiter=_DELIMITERS.get(name[1:], ","))
    return ValueType(oid, name=name)


def from_facts(oid: int, modifier: int, types: Mapping[str, Any], depth: int = 0) -> ValueType:
    """Return the type `oid` as the facts frame's `types` describe it.

    :raises TailraceError: `PROTOCOL_VIOLATION` if its description is malformed.
    """
    fact = types.get(str(oid))
    if fact is None:
        return ValueType(oid, modifier)
    try:
        if depth < _DEPTH_MAX and "base" in fact:
            return from_facts(int(fact["base"]), int(fact["modifier"]), types, depth + 1)
        if depth < _DEPTH_MAX and "item" in fact:
            item = from_facts(int(fact["item"]), modifier, types, depth + 1)
            return ValueType(oid, item=item, delimiter=_one_letter(fact["delimiter"]))
        parts = tuple((str(key), str(text)) for key, text in (fact.get("parts") or {}).items())
        return ValueType(oid, modifier, name=str(fact["name"]), kind=str(fact.get("kind", "")), parts=parts)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise TailraceError(
            Kind.PROTOCOL_VIOLATION, f"read a table's facts: type {oid} is malformed", REPORT_LOG
        ) from None


def _one_letter(delimiter: str) -> str:
    if len(delimiter.encode()) != 1:
        raise ValueError(delimiter)
    return delimiter
