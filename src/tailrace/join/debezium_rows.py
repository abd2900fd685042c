"""Debezium's documents as rows of tables, for the change log: JSON, with schemas or without, or Avro. Pure.

A schema tells the types of columns; without one each column is text. A table's description is written before
its first change, and again when its columns or their types have changed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from typing import Any

from tailrace.errors import Kind, TailraceError
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import control_json
from tailrace.sources.row_frames import UNCHANGED, ColumnShape, Row, RowFrames, TableShape

#: The state in the log that says which numbers columns have had, by table.
TABLES = "tables"

#: A document's column: its name, and its type's schema, if there is one.
_Field = tuple[str, Mapping[str, Any]]

_DAY_0 = date(1970, 1, 1)
_TIME_0 = datetime(1970, 1, 1)  # noqa: DTZ001 - a timestamp without a zone


def _timestamp(per_s: int) -> Callable[[Any, Mapping[str, Any]], str]:
    def text(value: Any, _schema: Mapping[str, Any]) -> str:
        return str(_TIME_0 + timedelta(microseconds=int(value) * 1_000_000 // per_s))

    return text


def _time(per_s: int) -> Callable[[Any, Mapping[str, Any]], str]:
    def text(value: Any, _schema: Mapping[str, Any]) -> str:
        seconds, us = divmod(int(value) * 1_000_000 // per_s, 1_000_000)
        return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{us:06}"

    return text


def _zoned(value: Any, _schema: Mapping[str, Any]) -> str:
    text = str(value).replace("T", " ")
    return f"{text[:-1]}+00" if text.endswith("Z") else text


def _decimal(value: Any, schema: Mapping[str, Any]) -> str:
    if isinstance(value, dict):  # VariableScaleDecimal
        scale, text = int(value["scale"]), value["value"]
    else:
        scale, text = int(schema.get("parameters", {}).get("scale", 0)), value
    unscaled = int.from_bytes(_raw(text), "big", signed=True)
    sign, digits = "-" if unscaled < 0 else "", str(abs(unscaled)).zfill(max(scale, 0) + 1)
    whole = len(digits) - max(scale, 0)
    return f"{sign}{digits[:whole]}.{digits[whole:]}" if scale > 0 else f"{sign}{digits}{'0' * -scale}"


def _raw(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else base64.b64decode(value)


def _bits(value: Any, schema: Mapping[str, Any]) -> str:
    number = int.from_bytes(_raw(value), "little")
    return f"{number:b}".zfill(int(schema.get("parameters", {}).get("length", 1)))


def _plain(value: Any, _schema: Mapping[str, Any]) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return value if isinstance(value, str) else repr(value)


def _json(value: Any, _schema: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_base64)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _text(value: Any, _schema: Mapping[str, Any]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else _json(value, _schema)


_Writer = Callable[[Any, Mapping[str, Any]], str]

#: By the name of a logical type: PostgreSQL's type, and what writes a value as its text.
_LOGICAL: dict[str, tuple[str, _Writer]] = {
    "io.debezium.time.Date": ("date", lambda value, _: str(_DAY_0 + timedelta(days=value))),
    "org.apache.kafka.connect.data.Date": ("date", lambda value, _: str(_DAY_0 + timedelta(days=value))),
    "io.debezium.time.Timestamp": ("timestamp", _timestamp(1_000)),
    "org.apache.kafka.connect.data.Timestamp": ("timestamp", _timestamp(1_000)),
    "io.debezium.time.MicroTimestamp": ("timestamp", _timestamp(1_000_000)),
    "io.debezium.time.NanoTimestamp": ("timestamp", _timestamp(1_000_000_000)),
    "io.debezium.time.ZonedTimestamp": ("timestamptz", _zoned),
    "io.debezium.time.Time": ("time", _time(1_000)),
    "org.apache.kafka.connect.data.Time": ("time", _time(1_000)),
    "io.debezium.time.MicroTime": ("time", _time(1_000_000)),
    "io.debezium.time.NanoTime": ("time", _time(1_000_000_000)),
    "io.debezium.time.ZonedTime": ("timetz", _zoned),
    "org.apache.kafka.connect.data.Decimal": ("numeric", _decimal),
    "io.debezium.data.VariableScaleDecimal": ("numeric", _decimal),
    "io.debezium.data.Json": ("json", _plain),
    "io.debezium.data.Uuid": ("uuid", _plain),
    "io.debezium.data.Xml": ("xml", _plain),
    "io.debezium.data.Bits": ("varbit", _bits),
}
#: By Connect's type.
_TYPES: dict[str, tuple[str, _Writer]] = {
    "boolean": ("bool", _plain),
    "int8": ("int2", _plain),
    "int16": ("int2", _plain),
    "int32": ("int4", _plain),
    "int64": ("int8", _plain),
    "float": ("float4", _plain),
    "float32": ("float4", _plain),
    "double": ("float8", _plain),
    "float64": ("float8", _plain),
    "string": ("text", _plain),
    "bytes": ("bytea", lambda value, _: "\\x" + _raw(value).hex()),
}
_UNKNOWN: tuple[str, _Writer] = ("text", _text)
_NESTED: tuple[str, _Writer] = ("jsonb", _json)


def _of(schema: Mapping[str, Any]) -> tuple[str, _Writer]:
    if not schema:
        return _UNKNOWN
    logical = _LOGICAL.get(schema.get("name") or "")
    return logical or _TYPES.get(schema.get("type", ""), _NESTED)


@dataclass(slots=True)
class _Table:
    shape: TableShape
    highest: int  # number that a column has had
    fields: Sequence[_Field] = ()
    writers: Sequence[tuple[str, _Writer, Mapping[str, Any]]] = ()


def json_document(message: bytes) -> tuple[Mapping[str, Any], Any]:
    """Return a message's schema, empty if it has none, and its payload.

    :raises ValueError: it is no JSON.
    """
    document = json.loads(message)
    if isinstance(document, dict) and "payload" in document:
        return document.get("schema") or {}, document["payload"]
    return {}, document


class DebeziumTables:
    """The tables that documents speak of, as the log describes them.

    :param in_force: what the log keeps in force.
    :param placeholder: what a document has for a value that was not sent.
    :param document: a message's schema and payload, as `json_document`.
    """

    def __init__(
        self,
        in_force: Mapping[str, bytes],
        placeholder: str,
        document: Callable[[bytes], tuple[Mapping[str, Any], Any]] = json_document,
    ) -> None:
        self._document = document
        raw = placeholder.encode()
        self._placeholders = {placeholder, raw, _base64(raw)}
        self._tables: dict[tuple[str, str], _Table] = {}
        highest: dict[str, int] = {}
        if (state := in_force.get(f"S{TABLES}")) is not None:
            highest = control_json(state)["state"]
        for key, frame in in_force.items():
            if key.startswith("F"):
                facts = Facts.from_json(control_json(frame))
                shape = _shape_of(facts)
                number = max([highest.get(str(facts.relation), 0), *(each.number for each in shape.columns)])
                self._tables[facts.schema, facts.table] = _Table(shape, number)
        self._is_new = False

    def state(self) -> dict[str, int] | None:
        """Return what `TABLES` says, if that has changed since this was last asked."""
        if not self._is_new:
            return None
        self._is_new = False
        return {str(table.shape.relation): table.highest for table in self._tables.values()}

    def write(self, frames: RowFrames, key: bytes | None, value: bytes, *, rows: bool = False) -> None:
        """Write a change, inside a transaction, or, with `rows`, inside a snapshot.

        :raises TailraceError: `DECODE_FAILED`.
        """
        try:
            schema, event = self._document(value)
            source = event["source"]
            name = str(source.get("schema") or source.get("db") or "public"), str(source["table"])
            op = event["op"]
            image = event.get("after") if op != "d" else event.get("before")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _undecodable("it is no change as Debezium writes it") from None
        if rows and op in ("d", "t"):
            raise _undecodable(
                f"a change {op!r} of {name[0]}.{name[1]} names no transaction; "
                "provide.transaction.metadata was off"
            )
        if op == "t":
            if (known := self._tables.get(name)) is not None:
                frames.truncate(known.shape)
            return
        if op not in _OPS:
            return
        if not isinstance(image, dict):
            raise _undecodable(f"a change {op!r} of {name[0]}.{name[1]} has no row")
        fields = _fields(schema, "after" if op != "d" else "before", image)
        table = self._described(frames, name, fields, self._key_names(key), may_change=op != "d")
        try:
            self._change(frames, table, op, event, image, rows=rows)
        except TailraceError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError, ArithmeticError):
            raise _undecodable(f"a value of {name[0]}.{name[1]} is not of its column's type") from None

    def _change(
        self,
        frames: RowFrames,
        table: _Table,
        op: str,
        event: Mapping[str, Any],
        image: Mapping[str, Any],
        *,
        rows: bool,
    ) -> None:
        shape, row = table.shape, self._row(table, image)
        if rows:
            frames.rows(shape, [row])
        elif op == "u":
            frames.update(shape, row, None if shape.key else self._old(table, event))
        elif op == "d":
            frames.delete(shape, row)
        else:
            frames.insert(shape, row)

    def _old(self, table: _Table, event: Mapping[str, Any]) -> Row:
        if not isinstance(event.get("before"), dict):
            raise _undecodable(
                f"an update of {table.shape.schema}.{table.shape.table}, which has no key, lacks the old row"
            )
        return self._row(table, event["before"])

    def _row(self, table: _Table, image: Mapping[str, Any]) -> Row:
        return [
            None
            if (value := image.get(name)) is None
            else UNCHANGED
            if isinstance(value, str | bytes) and value in self._placeholders
            else write(value, schema)
            for name, write, schema in table.writers
        ]

    def _key_names(self, key: bytes | None) -> tuple[str, ...]:
        if key is None:
            return ()
        try:
            _, members = self._document(key)
            return tuple(members)
        except (ValueError, TypeError):
            raise _undecodable("its key is no object, in the form of the values") from None

    def _described(
        self,
        frames: RowFrames,
        name: tuple[str, str],
        fields: Sequence[_Field],
        key: tuple[str, ...],
        *,
        may_change: bool,
    ) -> _Table:
        table = self._tables.get(name)
        if table is not None and (table.fields == fields or (table.fields and not may_change)):
            return table
        types = [(column, *_of(schema), schema) for column, schema in fields]
        before = {} if table is None else {column.name: column.number for column in table.shape.columns}
        highest = 0 if table is None else table.highest
        columns = []
        for column, of_type, _, _ in types:
            if column not in before:
                highest += 1
            columns.append(ColumnShape(column, of_type, before.get(column, highest)))
        key = tuple(column for column in key if any(column == each.name for each in columns))
        writers = [(column, write, schema) for column, _, write, schema in types]
        if table is None:
            relation = 1 + max((each.shape.relation for each in self._tables.values()), default=0)
            shape = TableShape(relation, *name, tuple(columns), key)
        else:
            shape = replace(table.shape, columns=tuple(columns), key=key)
        if table is None or shape != table.shape:
            shape = shape if table is None else replace(shape, version=shape.version + 1)
            frames.describe(shape)
            self._is_new = True
        found = self._tables[name] = _Table(shape, highest, fields, writers)
        return found


_OPS = ("c", "r", "u", "d")


def _fields(schema: Mapping[str, Any], image: str, row: Mapping[str, Any]) -> Sequence[_Field]:
    for member in schema.get("fields", ()):
        if member.get("field") == image:
            return [(field["field"], field) for field in member.get("fields", ())]
    return [(name, {}) for name in row]


def _shape_of(facts: Facts) -> TableShape:
    columns = tuple(
        ColumnShape(column.name, column.type, column.number, column.not_null) for column in facts.columns
    )
    return TableShape(facts.relation, facts.schema, facts.table, columns, facts.primary_key, facts.version)


def _undecodable(found: str) -> TailraceError:
    return TailraceError(
        Kind.DECODE_FAILED,
        f"take a message into the change log: {found}",
        "see that the data topics hold Debezium's changes, with their whole rows, in JSON, or in Avro with "
        "`registry`",
    )
