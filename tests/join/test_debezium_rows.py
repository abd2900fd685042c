"""Debezium's documents as rows of tables: the types that a schema determines, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from decimal import Context, Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.converters import RegistryAddress
from tailrace.converters.debezium import JsonConverter
from tailrace.converters.with_registry import AvroConverter
from tailrace.errors import Kind, TailraceError
from tailrace.join.avro import AvroDocuments
from tailrace.join.debezium_rows import DebeziumTables, json_document
from tailrace.join.debezium_values import Placeholder
from tailrace.protocol import metadata_frames
from tailrace.sources.row_frames import UNCHANGED, Row, RowFrames, TableShape
from tests.support.converters.registry import FakeRegistry
from tests.support.converters.types import MODES, TYPES, groups_in, numeric
from tests.support.decode.wire import UNCHANGED as UNSENT
from tests.support.decode.wire import delete, insert, relation, transaction, update
from tests.support.examples import examples

PLACEHOLDER = "__debezium_unavailable_value"
TIME = "io.debezium.time."
CONNECT = "org.apache.kafka.connect.data."


def encoded(number: int) -> str:
    size = (number + (number < 0)).bit_length() // 8 + 1
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


def field(kind: str, name: str = "", **more: Any) -> dict[str, Any]:
    return {"type": kind, "optional": True, **({"name": name} if name else {}), **more}


@pytest.mark.parametrize(
    ("schema", "value", "kind", "text"),
    [
        (field("int16"), -7, "int2", "-7"),
        (field("int64"), 1 << 60, "int8", str(1 << 60)),
        (field("double"), 0.1, "float8", "0.1"),
        (field("boolean"), True, "bool", "t"),
        (field("string"), 'a"\n', "text", 'a"\n'),
        (field("bytes"), base64.b64encode(b"\0\xff").decode(), "bytea", "\\x00ff"),
        (field("int32", f"{TIME}Date"), -1, "date", "1969-12-31"),
        (field("int64", f"{TIME}MicroTimestamp"), 1_500_000, "timestamp", "1970-01-01 00:00:01.5"),
        (field("int64", f"{TIME}Timestamp"), -1, "timestamp", "1969-12-31 23:59:59.999"),
        (field("int64", f"{TIME}MicroTime"), 86_400_000_000, "time", "24:00:00"),
        (field("string", f"{TIME}ZonedTimestamp"), "2024-02-29T12:00:00.5Z", "timestamptz",
         "2024-02-29 12:00:00.5+00"),
        (field("bytes", f"{CONNECT}Decimal", parameters={"scale": "3"}), encoded(-1), "numeric", "-0.001"),
        (field("bytes", f"{CONNECT}Decimal", parameters={"scale": "0"}), encoded(10**40), "numeric",
         str(10**40)),
        (field("bytes", f"{CONNECT}Decimal", parameters={"scale": "-2"}), encoded(5), "numeric", "500"),
        (field("struct", "io.debezium.data.VariableScaleDecimal"), {"scale": 2, "value": encoded(12345)},
         "numeric", "123.45"),
        (field("string", "io.debezium.data.Json"), '{"a": 1}', "json", '{"a": 1}'),
        (field("bytes", "io.debezium.data.Bits", parameters={"length": "9"}),
         base64.b64encode(b"\x05\x01").decode(), "varbit", "100000101"),
        (field("array", items={"type": "int32"}), [1, None], "jsonb", "[1,null]"),
        ({}, 1.5, "text", "1.5"),
        ({}, {"a": [True]}, "text", '{"a":[true]}'),
    ],
)  # fmt: skip
def test_a_schema_determines_the_type_of_a_column(
    schema: dict[str, Any], value: Any, kind: str, text: str
) -> None:
    frames = RowFrames()
    tables = DebeziumTables({}, PLACEHOLDER)
    frames.begin(10, 0)
    tables.write(frames, b'{"id": 1}', change("c", {"id": 1, "value": value}, schema))
    frames.commit()
    written = frames.take().tobytes()
    assert written.count(len(text.encode()).to_bytes(4, "big") + text.encode()) >= 1
    (facts,) = [json.loads(frame[frame.index(b"{") :]) for key, frame in kept(written) if key[0] == "F"]
    assert [column["type"] for column in facts["columns"]][1] == kind
    assert facts["primary_key"] == ["id"]


def kept(written: bytes) -> list[tuple[str, bytes]]:
    import numpy as np

    return metadata_frames.kept_frames(np.frombuffer(written, np.uint8))


def change(
    op: str, after: Any, schema: dict[str, Any] | None = None, before: Any = None, **more: Any
) -> bytes:
    source = {"schema": "public", "table": "things"}
    payload = {"before": before, "after": after, "source": source, "op": op, **more}
    if not schema:
        return json.dumps(payload).encode()
    row = [{"field": "id", "type": "int32"}, {"field": "value", **schema}]
    fields = [{"field": name, "type": "struct", "fields": row} for name in ("before", "after")]
    return json.dumps({"schema": {"fields": fields}, "payload": payload}).encode()


def test_a_changed_table_is_described_again_also_after_a_restart() -> None:
    frames, tables = RowFrames(), DebeziumTables({}, PLACEHOLDER)
    frames.begin(10, 0)
    tables.write(frames, b'{"id": 1}', change("c", {"id": "1", "a": "x"}))
    tables.write(frames, b'{"id": 1}', change("u", {"id": "1", "a": PLACEHOLDER}))
    tables.write(frames, b'{"id": 1}', change("u", {"id": "1", "b": "y"}))
    state = tables.state()
    assert state == {"1": 3}
    frames.shard("tables", state)
    tables.write(frames, b'{"id": 1}', change("d", None, before={"id": "1"}))
    assert tables.state() is None
    frames.commit()
    in_force = dict(kept(frames.take().tobytes()))
    again, more = DebeziumTables(in_force, PLACEHOLDER), RowFrames()
    more.begin(20, 0)
    again.write(more, b'{"id": 1}', change("c", {"id": "1", "b": "y", "c": "z"}))
    (facts,) = [json.loads(f[f.index(b"{") :]) for key, f in kept(more.take().tobytes()) if key[0] == "F"]
    assert (facts["relation"], facts["version"]) == (1, 3)
    assert [(each["name"], each["number"]) for each in facts["columns"]] == [("id", 1), ("b", 3), ("c", 4)]


@pytest.mark.parametrize("schema", [None, field("string")])
def test_a_changed_key_alone_changes_the_table(schema: dict[str, Any] | None) -> None:
    frames, tables = RowFrames(), DebeziumTables({}, PLACEHOLDER)
    frames.begin(10, 0)
    row = change("c", {"id": 1, "value": "x"}, schema)
    keys: list[list[str] | None] = []
    for key, rows in [("id", False), ("value", True), ("value", False), ("value", False), ("id", True)]:
        tables.write(frames, json.dumps({key: 1}).encode(), row, rows=rows)
        written = kept(frames.take().tobytes())
        described = [json.loads(frame[frame.index(b"{") :]) for of, frame in written if of[0] == "F"]
        keys += [facts["primary_key"] for facts in described] or [None]
    # A row without a transaction may be from before or after the change.
    assert keys == [["id"], None, ["value"], None, None]


@pytest.mark.parametrize("name", ["payload", "schema"])
def test_a_key_column_may_have_the_name_of_a_part_of_a_document_with_a_schema(name: str) -> None:
    frames, tables = RowFrames(), DebeziumTables({}, PLACEHOLDER)
    frames.begin(10, 0)
    tables.write(frames, json.dumps({name: 1}).encode(), change("c", {name: 1, "a": "x"}))
    frames.commit()
    (facts,) = [json.loads(f[f.index(b"{") :]) for key, f in kept(frames.take().tobytes()) if key[0] == "F"]
    assert facts["primary_key"] == [name]


@pytest.mark.parametrize(
    ("key", "value", "rows", "said"),
    [
        (b"{}", b"no JSON", False, "no change as Debezium writes it"),
        (b"[1", change("c", {"id": 1}), False, "its key is no object"),
        (b'"id"', change("c", {"id": 1, "i": 2, "d": 3}), False, "its key is no object"),
        (b'{"id": 1}', change("u", {"id": 1, "x": PLACEHOLDER}), True,
         "'u' of public.things that lacks an unchanged value names no transaction"),
        (b'{"id": 1}', change("c", {"id": 1, "value": "Inf"}, field("double")), False, "not of its column's"),
        (None, change("u", {"id": 1}), False, "has no key, lacks the old row"),
        (b'{"id": 1}', change("c", None), False, "has no row"),
        (b'{"id": 1}', change("d", None, before={"id": 1}), True, "names no transaction"),
        (b'{"id": 1}', change("c", {"id": 1, "value": "x"}, field("int32", f"{TIME}Date")), False,
         "not of its column's type"),
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_read_is_an_error_without_the_rows_content(
    key: bytes | None, value: bytes, rows: bool, said: str
) -> None:
    with pytest.raises(TailraceError, match=said) as caught:
        DebeziumTables({}, PLACEHOLDER).write(RowFrames(), key, value, rows=rows)
    assert caught.value.kind is Kind.DECODE_FAILED


class Collected(RowFrames):
    """Collects frames and the rows in them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Row] = []

    def insert(self, shape: TableShape, row: Row) -> None:
        super().insert(shape, row)
        self.found.append(row)

    def update(self, shape: TableShape, row: Row, old: Row | None = None) -> None:
        super().update(shape, row, old)
        self.found += [row] if old is None else [old, row]

    def delete(self, shape: TableShape, old: Row) -> None:
        super().delete(shape, old)
        self.found.append(old)


#: Types whose values Debezium's events keep completely, under modes that lose nothing.
KEPT = (
    "bool", "int8", "int2", "float8", "numeric_12_2", "numeric_38_38", "numeric_39_2", "numeric",
    "numeric_negative", "text", "bytea", "date", "time", "timestamp", "timestamptz", "json", "uuid", "bits",
    "varbit",
)  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
@examples(20)
@given(data=st.data())
def test_events_of_our_own_converter_become_postgresqls_text_again(kind: str, data: st.DataObject) -> None:
    oid, modifier, texts = TYPES[kind]
    values = data.draw(st.lists(texts | st.none(), min_size=1, max_size=8))
    modes = replace(MODES[data.draw(st.sampled_from(["debezium", "nano"]))], binary="bytes")
    shape = relation(columns=[("id", 23, -1), ("v", oid, modifier)], key=("id",))
    [group] = groups_in(shape + transaction(*(insert(str(n), text) for n, text in enumerate(values))), modes)
    frames, tables = Collected(), DebeziumTables({}, PLACEHOLDER)
    for event in JsonConverter(schemas_enable=True).convert(group).values.to_pylist():
        tables.write(frames, b'{"id":1}', event.encode())
    assert [meant(kind, row[1]) for row in frames.found] == [meant(kind, text) for text in values]


#: A column of each type, and a value; in another row it is not sent.
MANY = {
    "small": (21, -1, "-7"), "whole": (1700, numeric(5, -2), "1200"),
    "exact": (1700, numeric(10, 2), "-12.30"), "any": (1700, -1, "-0.0100"), "real": (700, -1, "0.1"),
    "double": (701, -1, "1e300"), "flag": (16, -1, "t"), "bits": (1560, 3, "101"), "raw": (17, -1, "\\x00ff"),
    "doc": (3802, -1, '{"a": 1}'), "xml": (142, -1, "<a/>"),
    "uid": (2950, -1, "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"), "money": (790, -1, "$1.00"),
    "day": (1082, -1, "0001-01-01"), "at": (1114, -1, "2020-01-01 00:00:00.123456"),
    "gap": (1186, -1, "1 day"), "at_ms": (1114, 3, "2020-01-01 00:00:00.123"),
    "since": (1184, -1, "2020-01-01 00:00:00.5+00"), "time": (1083, -1, "24:00:00"),
    "time_ms": (1083, 3, "23:59:59.123"), "timetz": (1266, -1, "12:00:00+02"),
    "reals": (1021, -1, "{0.1,NaN,-Infinity,1e+20,NULL}"), "doubles": (1022, -1, "{0.1,NaN,Infinity,5}"),
    "texts": (1009, -1, '{a,NULL,"b ö"}'), "flags": (1000, -1, "{t,f,NULL}"),
    "raws": (1001, -1, '{"\\\\x00ff"}'), "exacts": (1231, numeric(10, 2), "{1.10,NULL}"),
    "anys": (1231, -1, "{1.100,-5}"), "days": (1182, -1, "{2020-01-01}"),
}  # fmt: skip


@pytest.mark.parametrize("logical_types", ["connect", "avro"])
@pytest.mark.parametrize("modes", ["debezium", "nano", "double"])
def test_rows_are_the_same_by_avro_as_by_json(modes: str, logical_types: str) -> None:
    columns = [("id", 23, -1), *((name, oid, modifier) for name, (oid, modifier, _) in MANY.items())]
    values = [value for *_, value in MANY.values()]
    unsent = [
        UNSENT if oid in (17, 142, 1000, 1009, 1231, 3802) else value for oid, _, value in MANY.values()
    ]
    changes = [insert("1", *values), update("1", *unsent), update("1", *(None for _ in values))]
    changes += [
        update("2", *unsent, key=("1", *(None for _ in values))),
        delete("2", *(None for _ in values)),
    ]
    shape = relation(columns=columns, key=("id",))
    [group] = groups_in(shape + transaction(*changes), MODES[modes])
    with FakeRegistry() as registry:
        forms = (
            (JsonConverter(schemas_enable=True), json_document),
            (
                AvroConverter(registry_url=registry.url, logical_types=logical_types),
                AvroDocuments(RegistryAddress(registry_url=registry.url)),
            ),
        )
        found = []
        for converter, document in forms:
            frames, tables = RowFrames(), DebeziumTables({}, PLACEHOLDER, document)
            frames.begin(10, 0)
            events = converter.convert(group)
            for key, value in zip(events.keys.to_pylist(), events.values.to_pylist(), strict=True):
                if value is not None:
                    tables.write(frames, key, value)
            tables.write_rest(frames)
            frames.commit()
            found.append(frames.take().tobytes())
    assert found[0] == found[1]
    assert b'[0.1,"NaN","-Infinity",1e+20,null]' in found[0]


def meant(kind: str, text: Any) -> Any:
    """Return the meaning of a text, where Debezium's form does not keep its notation."""
    if text is None:
        return None
    if kind == "float8":
        return repr(float(text))
    if kind.startswith("numeric"):
        return repr(Decimal(text).normalize(Context(prec=200)))
    if kind == "varbit":
        return int(text or "0", 2)
    if kind == "time" and "." in text:  # as Python writes them, with zeros
        return text.rstrip("0")
    return text.replace("+00", "") if kind == "timestamptz" else text


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (field("string"), PLACEHOLDER),
        (field("bytes"), base64.b64encode(PLACEHOLDER.encode()).decode()),
        (field("array", items={"type": "string"}), [PLACEHOLDER]),
        (field("array", items={"type": "bytes"}), [base64.b64encode(PLACEHOLDER.encode()).decode()]),
        (field("array", items={"type": "int64"}), list(PLACEHOLDER.encode())),
        (field("map"), {PLACEHOLDER: PLACEHOLDER}),
        (field("struct", "io.debezium.data.VariableScaleDecimal"),
         {"scale": 0, "value": base64.b64encode(PLACEHOLDER.encode()).decode()}),
    ],
)  # fmt: skip
def test_the_placeholder_of_every_type_is_an_unchanged_value(schema: dict[str, Any], value: Any) -> None:
    for of_value in (schema, None):
        frames, tables = Collected(), DebeziumTables({}, PLACEHOLDER)
        tables.write(frames, b'{"id": 1}', change("u", {"id": 1, "value": value}, of_value))
        assert frames.found[0][1] is UNCHANGED


def test_a_changed_key_with_an_unchanged_value_is_an_update_and_not_a_create_without_that_value() -> None:
    frames, tables = Collected(), DebeziumTables({}, PLACEHOLDER)
    tables.write(frames, b'{"id": 1}', change("c", {"id": 1, "x": "large", "y": "a"}))
    deleted, created = change("d", None, before={"id": 1}), change("c", {"id": 2, "x": PLACEHOLDER, "y": "b"})
    tables.write(frames, b'{"id": 1}', deleted)
    tables.write(frames, b'{"id": 2}', created)
    assert frames.found[1:] == [["1", None, None], ["2", UNCHANGED, "b"]]
    # A create that has all of its values is no part of the update before it.
    tables.write(frames, b'{"id": 2}', change("d", None, before={"id": 2}))
    tables.write(frames, b'{"id": 4}', change("c", {"id": 4, "x": "new", "y": "c"}))
    tables.write(frames, b'{"id": 4}', change("d", None, before={"id": 4}))
    tables.write_rest(frames)
    assert frames.found[3:] == [["2", None, None], ["4", "new", "c"], ["4", None, None]]
    with pytest.raises(TailraceError, match="the delete of its former key is not before it"):
        tables.write(frames, b'{"id": 2}', created)


@pytest.mark.parametrize("kind", ["Decimal", "Variable"])
def test_infinity_is_a_number_only_in_a_type_that_has_it(kind: str) -> None:
    schema = {
        "Decimal": field("bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}),
        "Variable": field("struct", "io.debezium.data.VariableScaleDecimal"),
    }[kind]
    frames, tables = Collected(), DebeziumTables({}, PLACEHOLDER)
    tables.write(frames, b'{"id": 1}', change("c", {"id": 1, "value": "Infinity"}, schema))
    # The letters are also the base64 of a decimal with a scale, which PostgreSQL never has infinite.
    assert frames.found[0][1] == ("378982984692.34" if kind == "Decimal" else "Infinity")


def test_a_delete_with_only_the_key_removes_no_column_after_a_restart() -> None:
    frames, tables = RowFrames(), DebeziumTables({}, PLACEHOLDER)
    frames.begin(10, 0)
    tables.write(frames, b'{"id": 1}', change("c", {"id": 1, "x": "1"}))
    frames.shard("tables", tables.state() or {})
    frames.commit()
    again = DebeziumTables(dict(kept(frames.take().tobytes())), PLACEHOLDER)
    more = RowFrames()
    more.begin(20, 0)
    again.write(more, b'{"id": 1}', change("d", None, before={"id": 1}))
    again.write(more, b'{"id": 2}', change("c", {"id": 2, "x": "2"}))
    assert again.state() is None
    assert "F1" not in dict(kept(more.take().tobytes()))


def test_a_snapshot_row_that_is_older_than_a_column_does_not_remove_it() -> None:
    frames, tables = RowFrames(), DebeziumTables({}, PLACEHOLDER)
    frames.begin(10, 0)
    tables.write(frames, b'{"id": 1}', change("c", {"id": 1, "x": "1", "y": "1"}))
    assert tables.state() == {"1": 3}
    for number in (2, 3):
        tables.write(frames, b'{"id": 2}', change("r", {"id": number, "x": "2"}), rows=True)
    assert tables.state() is None
    tables.write(frames, b'{"id": 4}', change("r", {"id": 4, "z": "4"}), rows=True)
    assert tables.state() == {"1": 4}
    rows = frames.take().tobytes()
    assert b"2\t2\t\\N\n" in rows
    assert b"4\t\\N\t\\N\t4\n" in rows
    # Within a transaction, a row has the table's present columns.
    tables.write(frames, b'{"id": 5}', change("c", {"id": 5, "x": "2"}))
    [facts] = [json.loads(f[f.index(b"{") :]) for name, f in kept(frames.take().tobytes()) if name[0] == "F"]
    assert [(each["name"], each["number"]) for each in facts["columns"]] == [("id", 1), ("x", 2)]


def test_a_schema_in_avro_means_the_same_as_in_json() -> None:
    row = {
        "type": "record", "name": "Value", "namespace": "shop.orders", "fields": [
            {"name": "id", "type": "int"},
            {"name": "small", "type": ["null", {"type": "int", "connect.type": "int16"}]},
            {"name": "day", "type": ["null", {"type": "int", "connect.name": f"{TIME}Date"}]},
            {"name": "price", "type": ["null", {
                "type": "bytes", "logicalType": "decimal", "scale": 3, "precision": 64,
                "connect.name": f"{CONNECT}Decimal", "connect.parameters": {"scale": "3"}}]},
            {"name": "raw", "type": ["null", "bytes"]},
            {"name": "long", "type": ["null", "bytes"]},
            {"name": "tags", "type": ["null", {"type": "array", "items": ["null", "string"]}]},
        ],
    }  # fmt: skip
    source = {"type": "record", "name": "Source", "namespace": "shop.orders", "fields": [
        {"name": "schema", "type": "string"}, {"name": "table", "type": "string"}]}  # fmt: skip
    envelope = {
        "type": "record", "name": "Envelope", "namespace": "shop.orders", "fields": [
            {"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Value"]},
            {"name": "source", "type": source}, {"name": "op", "type": "string"},
        ],
    }  # fmt: skip
    key = {"type": "record", "name": "Key", "namespace": "shop.orders", "fields": [
        {"name": "id", "type": "int"}]}  # fmt: skip
    image = {
        "id": 1, "small": -7, "day": -1, "price": Decimal("-0.001"), "raw": b"\0\xff",
        "long": PLACEHOLDER.encode(), "tags": ["a", None],
    }  # fmt: skip
    event = {"before": None, "after": image, "source": {"schema": "public", "table": "orders"}, "op": "u"}
    with FakeRegistry() as registry:
        # As the registry numbers them, from 1 on.
        registry.schemas += [("AVRO", json.dumps(envelope)), ("AVRO", json.dumps(key)), ("JSON", "{}")]
        document = AvroDocuments(RegistryAddress(registry_url=registry.url))
        frames, tables = RowFrames(), DebeziumTables({}, PLACEHOLDER, document)
        frames.begin(10, 0)
        tables.write(frames, in_avro(2, key, {"id": 1}), in_avro(1, envelope, event))
        for message in (b"{}", in_avro(1, envelope, event)[:-9], b"\0\0\0\0\1"):
            with pytest.raises(TailraceError, match="no change as Debezium writes it"):
                tables.write(frames, None, message)
        with pytest.raises(TailraceError, match="is JSON, not AVRO"):
            tables.write(frames, None, b"\0\0\0\0\3{}")
    frames.commit()
    text = frames.take().tobytes()
    (facts,) = [json.loads(f[f.index(b"{") :]) for name, f in kept(text) if name[0] == "F"]
    assert [each["type"] for each in facts["columns"]] == [
        "int4", "int2", "date", "numeric", "bytea", "bytea", "jsonb",
    ]  # fmt: skip
    assert facts["primary_key"] == ["id"]
    for value in (b"-7", b"1969-12-31", b"-0.001", b"\\x00ff", b'["a",null]'):
        assert value in text
    assert PLACEHOLDER.encode() not in text


def in_avro(number: int, schema: dict[str, Any], record: dict[str, Any]) -> bytes:
    written = io.BytesIO()
    fastavro.schemaless_writer(written, fastavro.parse_schema(schema), record)
    return b"\0" + number.to_bytes(4, "big") + written.getvalue()


def test_the_placeholder_of_an_unchanged_array_of_uuids_or_booleans_is_recognised() -> None:
    placeholder = Placeholder(PLACEHOLDER)
    # Java's UUID.nameUUIDFromBytes, which Debezium 3.7 writes in place of a `uuid[]`.
    assert placeholder.stands_for(["b68a35a7-17ad-35b3-af2a-ae46edb4545a"])
    bits = [bit == "1" for letter in PLACEHOLDER.encode() for bit in f"{letter:08b}"]
    assert placeholder.stands_for(bits)
    assert not placeholder.stands_for(bits[1:])
