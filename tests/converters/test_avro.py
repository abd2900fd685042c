"""Avro's binary encoding compared with fastavro's, and Avro schemas."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.converters.avro.encoder import encoded
from tailrace.converters.avro.schema import ADJUSTMENTS, avro_schema
from tailrace.converters.connect_schemas import STRING, Document, Schema, array, json_schema, mapping, struct
from tailrace.converters.debezium import JsonConverter
from tailrace.errors import Kind, TailraceError
from tests.support.converters.avro import as_python, decoded
from tests.support.converters.customers import CASES, as_columns, groups, groups_of, transaction
from tests.support.decode.wire import insert, relation
from tests.support.examples import examples

AVRO = ADJUSTMENTS["avro"]


def as_avro(document: Document, *, logical_types: bool = False) -> Any:
    return fastavro.parse_schema(avro_schema(document, AVRO, logical_types=logical_types))


# For any schema the bytes equal fastavro's.

_SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(),
    "float": st.floats(width=32),
    "string": st.text(st.characters(exclude_categories=["Cs"])),
    "bytes": st.binary(),
}


def _schemas(depth: int = 2) -> st.SearchStrategy[Schema]:
    scalars = st.sampled_from(sorted(_SCALARS)).map(Schema)
    if depth == 0:
        return scalars
    parts = st.tuples(_schemas(depth - 1), st.booleans())
    return st.one_of(
        scalars,
        parts.map(lambda part: array(part[0].document(optional=part[1]))),
        parts.map(lambda part: mapping(STRING.document(), part[0].document(optional=part[1]))),
        st.lists(parts, max_size=4).map(
            lambda fields: struct(
                [one.document(optional=null, field=f"ö{n}") for n, (one, null) in enumerate(fields)]
            )
        ),
    )


def _values(schema: Document) -> st.SearchStrategy[Any]:
    kind = schema["type"]
    if kind == "struct":
        found: st.SearchStrategy[Any] = st.fixed_dictionaries(
            {field["field"]: _values(field) for field in schema["fields"]}
        ).map(lambda value: {field["field"]: value[field["field"]] for field in schema["fields"]})
    elif kind == "array":
        found = st.lists(_values(schema["items"]), max_size=3)
    elif kind == "map":
        found = st.dictionaries(_SCALARS["string"], _values(schema["values"]), max_size=3)
    else:
        found = _SCALARS[kind]
    return st.none() | found if schema["optional"] else found


_ARROW = {
    "boolean": pa.bool_(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "double": pa.float64(), "float": pa.float32(), "string": pa.string(), "bytes": pa.binary(),
}  # fmt: skip


def _arrow(schema: Document) -> pa.DataType:
    """Return the Arrow type of a schema's values."""
    kind = schema["type"]
    if kind == "struct":
        return pa.struct([pa.field(field["field"], _arrow(field)) for field in schema["fields"]])
    if kind == "array":
        return pa.list_(_arrow(schema["items"]))
    if kind == "map":
        return pa.map_(pa.string(), _arrow(schema["values"]))
    return _ARROW[kind]


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # NaN is NaN, and 0.0 is not -0.0


@examples(100)
@given(st.data())
def test_every_value_has_the_same_bytes_as_with_fastavro(data: st.DataObject) -> None:
    document = data.draw(_schemas()).document()
    values = data.draw(st.lists(st.none() | _values(document), min_size=1, max_size=4))
    parsed = as_avro(document)
    # A slice of more values, so that the buffers also have others' bytes.
    columns = pa.array([None, *values, values[0]], _arrow(document))[1:-1]
    for value, found in zip(values, encoded(columns, document, 258).to_pylist(), strict=True):
        if value is None:
            assert found is None
            continue
        expected = io.BytesIO()
        fastavro.schemaless_writer(expected, parsed, _named(value))
        assert found[:5] == b"\x00\x00\x00\x01\x02"
        assert _same(decoded(found, parsed), decoded(found[:5] + expected.getvalue(), parsed))
        assert found[5:] == expected.getvalue() or "nan" in repr(value)


def _named(value: Any) -> Any:
    # `ö0` can't be a name in Avro; members of maps may have any name.
    if isinstance(value, dict) and value and all(name.startswith("ö") and len(name) == 2 for name in value):
        return {name.replace("ö", "_"): _named(one) for name, one in value.items()} | {
            name: _named(one) for name, one in value.items()
        }
    if isinstance(value, dict):
        return {name: _named(one) for name, one in value.items()}
    return [_named(one) for one in value] if isinstance(value, list) else value


def test_a_null_that_the_schema_excludes_is_reported() -> None:
    fields = [array(Schema("int32").document()).document(field="d", optional=True)]
    document = struct(fields, "x.Y").document()
    rows = pa.array([{"d": [1]}, {"d": None}, {"d": [2, None]}], _arrow(document))
    with pytest.raises(TailraceError, match="its d is not") as caught:
        encoded(rows, document, 1)
    assert caught.value.context == {"member": "d", "row": 2}
    large = pa.array([1, None, 2**63], pa.uint64())
    with pytest.raises(TailraceError, match="value is not") as caught:
        encoded(large, Schema("int64").document(), 1)
    assert caught.value.context["row"] == 2


# Events


@pytest.mark.parametrize("case", CASES)
def test_events_mean_the_same_in_avro_and_in_json(case: str) -> None:
    converter = JsonConverter(provide_transaction_metadata=True, now_ns=lambda: 5)
    for group in groups_of(case):
        for same in (group, as_columns(group)):
            events, schemas = converter.payloads(same)
            columns, _ = converter.columns(same, with_keys=True)
            for texts, values, schema in (
                (events.values, columns.values, schemas.value),
                (events.keys, columns.keys, schemas.key),
            ):
                if texts is None or values is None or schema is None:
                    assert texts is values
                    continue
                document = schema.document()
                written = encoded(values, document, 3).to_pylist()
                for text, found in zip(texts.to_pylist(), written, strict=True):
                    assert (text is None) == (found is None)
                    if text is not None:
                        expected = as_python(json.loads(text), document)
                        assert decoded(found, as_avro(document)) == expected
                        require_valid(json_schema(document), json.loads(text))


COLUMNS = [
    ("id", 23, -1), ("price", 1700, (10 << 16 | 2) + 4), ("free", 1700, -1), ("on", 1082, -1),
    ("at", 1114, -1), ("at_ms", 1114, 3), ("since", 1184, -1), ("of day", 1083, -1), ("uid", 2950, -1),
    ("data", 17, -1), ("tags", 1009, -1), ("bits", 1560, 3), ("r", 700, -1), ("f", 701, -1), ("1st", 21, -1),
]  # fmt: skip
ROW = (
    "7", "-12.34", "0.001", "2024-02-29", "2024-02-29 12:00:00.123456", "2024-02-29 12:00:00.5",
    "2024-02-29 12:00:00+02", "23:59:59.999999", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "\\x00ff",
    '{a,"b ö",NULL}', "101", "0.1", "1e300", "3",
)  # fmt: skip


def test_types_have_their_schemas_and_values() -> None:
    [group] = groups(transaction(insert(*ROW)), [relation(16385, "customers", COLUMNS, ("id",))])
    events, _ = JsonConverter().payloads(group)
    columns, schemas = JsonConverter().columns(group, with_keys=True)
    document = schemas.value.document()
    found = encoded(columns.values, document, 3).to_pylist()
    after = decoded(found[0], as_avro(document))["after"]
    assert str(after["price"]) == "-12.34"
    assert after["free"] == {"scale": 3, "value": b"\x01"}
    assert (after["on"], after["at"], after["at_ms"]) == (19782, 1709208000123456, 1709208000500)
    assert (after["of_day"], after["_1st"], after["data"], after["tags"]) == (
        86399999999, 3, b"\x00\xff", ["a", "b ö", None],
    )  # fmt: skip
    assert (after["r"], after["f"]) == (pytest.approx(0.1), 1e300)
    row = next(field for field in avro_schema(document, AVRO, logical_types=False)["fields"])["type"][1]
    kinds = {field["name"]: field["type"][1] for field in row["fields"] if isinstance(field["type"], list)}
    assert kinds["price"] == {
        "type": "bytes", "scale": 2, "precision": 10, "logicalType": "decimal", "connect.version": 1,
        "connect.parameters": {"scale": "2", "connect.decimal.precision": "10"},
        "connect.name": "org.apache.kafka.connect.data.Decimal",
    }  # fmt: skip
    assert kinds["on"] == {"type": "int", "connect.version": 1, "connect.name": "io.debezium.time.Date"}
    assert kinds["_1st"] == {"type": "int", "connect.type": "int16"}
    assert row["connect.name"] == "PostgreSQL_server.public.customers.Value"
    told = decoded(found[0], as_avro(document, logical_types=True))["after"]
    assert (str(told["on"]), str(told["at"]), str(told["of_day"])) == (
        "2024-02-29", "2024-02-29 12:00:00.123456", "23:59:59.999999",
    )  # fmt: skip
    assert str(told["uid"]) == ROW[8]
    require_valid(json_schema(document), json.loads(events.values[0].as_py()))


def test_a_value_that_the_schema_cannot_hold_is_reported() -> None:
    for place, odd in ((1, "NaN"), (2, "Infinity"), (3, "infinity")):
        row = [*ROW[:place], odd, *ROW[place + 1 :]]
        shape = [relation(16385, "customers", COLUMNS, ("id",))]
        [group] = groups(transaction(insert(*ROW), insert(*row)), shape)
        with pytest.raises(TailraceError, match=f"after.{COLUMNS[place][0]}") as caught:
            JsonConverter().columns(group, with_keys=True)
        assert caught.value.kind is Kind.CONVERSION_FAILED
        assert caught.value.context["row"] == 1
        assert odd not in caught.value.message


def test_names_that_avro_does_not_allow_are_adjusted_as_by_debezium() -> None:
    names = ["1st", "of day", "über", "ok_1", "a.b"]
    assert [AVRO(name) for name in names] == ["_1st", "of_day", "_ber", "ok_1", "a_b"]
    assert [ADJUSTMENTS["avro_unicode"](name) for name in names] == [
        "_u0031st", "of_u0020day", "_u00fcber", "ok_u005f1", "a_u002eb",
    ]  # fmt: skip
    # A character beyond 16 bits is two of Java's.
    assert AVRO("a\U0001f600") == "a__"
    assert ADJUSTMENTS["avro_unicode"]("\U0001f600") == "_ud83d_ude00"
    assert ADJUSTMENTS["avro_unicode"]("\u1f600") == "_u1f600"
    with pytest.raises(TailraceError, match="1st"):
        ADJUSTMENTS["none"]("1st")
    columns = [("a b", 23, -1), ("a_b", 23, -1)]
    [group] = groups(transaction(insert("1", "2")), [relation(16385, "customers", columns, ())])
    document = JsonConverter().payloads(group)[1].value.document()
    with pytest.raises(TailraceError, match="two columns would be the field 'a_b'"):
        avro_schema(document, AVRO, logical_types=False)
    unicode = avro_schema(document, ADJUSTMENTS["avro_unicode"], logical_types=False)
    fields = [field["name"] for field in unicode["fields"]]
    assert fields == ["before", "after", "source", "transaction", "op", "ts_ms", "ts_us", "ts_ns"]
    assert [field["name"] for field in unicode["fields"][0]["type"][1]["fields"]] == [
        "a_u0020b", "a_u005fb",
    ]  # fmt: skip


_JSON_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "object": (dict,),
    "array": (list,), "null": (type(None),),
}  # fmt: skip


def require_valid(schema: Any, value: Any) -> None:
    """Check a value against a schema, as far as ours go."""
    if "oneOf" in schema:
        return require_valid(schema["oneOf"][0 if value is None else 1], value)
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert any(type(value) in _JSON_KINDS[kind] for kind in kinds), (schema, value)
    if isinstance(value, dict) and "properties" in schema:
        assert set(schema.get("required", ())) <= set(value) <= set(schema["properties"])
        for name, member in value.items():
            require_valid(schema["properties"][name], member)
        assert [one["connect.index"] for one in schema["properties"].values()] == list(range(len(value)))
    elif isinstance(value, dict):
        for member in value.values():
            require_valid(schema["additionalProperties"], member)
    elif isinstance(value, list):
        for item in value:
            require_valid(schema["items"], item)
    return None
