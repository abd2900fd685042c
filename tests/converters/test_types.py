"""Every type gives the same bytes from frames and from columns, under all modes; Debezium's forms."""

from __future__ import annotations

import base64
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.converters.avro.encoder import encoded
from tailrace.converters.avro.schema import ADJUSTMENTS, avro_schema
from tailrace.converters.cells.connect_values import of_array
from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.debezium import JsonConverter
from tailrace.converters.debezium_types import arrow_mapping
from tailrace.errors import Kind, TailraceError
from tailrace.join.debezium_values import Placeholder
from tailrace.model import ValueModes
from tailrace.records.group import Group
from tests.support.converters.avro import as_python, decoded
from tests.support.converters.customers import as_columns
from tests.support.converters.fitting import require_fit
from tests.support.converters.types import HSTORE, HSTORE_TYPE, MODES, TYPES, groups_in, numeric
from tests.support.decode.wire import UNCHANGED, delete, insert, relation, transaction, update, vector
from tests.support.examples import examples


def require_same(group: Group, **options: Any) -> list[Any]:
    """Check that columns give the same bytes as frames; return the documents."""
    found = []
    for make in (JsonConverter, CloudEventsConverter):
        converter = make(now_ns=lambda: 10**18, **options)
        wire, columns = converter.convert(group), converter.convert(as_columns(group))
        assert wire.values.to_pylist() == columns.values.to_pylist()
        assert (wire.keys is None) == (columns.keys is None)
        assert wire.keys is None or wire.keys.to_pylist() == columns.keys.to_pylist()
        assert (wire.headers is None) == (columns.headers is None)
        assert wire.headers is None or wire.headers.to_pylist() == columns.headers.to_pylist()
        wire.values.validate(full=True)
        found.append([json.loads(text) for text in wire.values.to_pylist() if text is not None])
    return found[0]


def avro_of(group: Group) -> tuple[list[Any], list[Any]] | Kind:
    """Return values and keys in Avro, or the kind of the error if Avro can't hold a value."""
    try:
        columns, schemas = JsonConverter(now_ns=lambda: 10**18).columns(group, with_keys=True)
        values = encoded(columns.values, schemas.value.document(), 1).to_pylist()
        if columns.keys is None or schemas.key is None:
            return values, []
        return values, encoded(columns.keys, schemas.key.document(), 1).to_pylist()
    except TailraceError as error:
        return error.kind


def require_same_in_avro(group: Group) -> None:
    """Check that Avro means the same as JSON, from frames and from columns, or that both refuse."""
    events, schemas = JsonConverter(now_ns=lambda: 10**18).payloads(group)
    document = schemas.value.document()
    found = avro_of(group)
    assert found == avro_of(as_columns(group))
    if isinstance(found, Kind):
        assert found is Kind.CONVERSION_FAILED
        return
    parsed = fastavro.parse_schema(
        without_logical_types(avro_schema(document, ADJUSTMENTS["avro"], logical_types=False))
    )
    for text, value in zip(events.values.to_pylist(), found[0], strict=True):
        assert (text is None) == (value is None)
        if text is not None:
            assert repr(decoded(value, parsed)) == repr(as_python(json.loads(text), document))


def without_logical_types(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: without_logical_types(part) for name, part in schema.items() if name != "logicalType"}
    return [without_logical_types(part) for part in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("kind", TYPES)
@examples(6)
@given(data=st.data())
def test_a_type_gives_the_same_from_frames_and_from_columns(kind: str, data: st.DataObject) -> None:
    oid, modifier, texts = TYPES[kind]
    values = data.draw(st.lists(texts | st.none(), min_size=1, max_size=8))
    modes = MODES[data.draw(st.sampled_from(sorted(MODES)))]
    identity = data.draw(st.sampled_from("dfi"))
    key = {"d": ("id",), "f": ("id", "v"), "i": ("v",)}[identity]
    shape = relation(columns=[("id", 23, -1), ("v", oid, modifier)], key=key, identity=identity)
    changes = []
    for n, value in enumerate(values):
        other = values[n - 1]
        row, old = (str(n), value), (str(n), other)
        changes += [insert(*row), update(*row, old=old) if identity == "f" else update(*row)]
        if identity == "i" and value is not None and other is not None:
            changes += [update(*row, key=(None, other))]
        mark, gone = (
            (b"O", row) if identity == "f" else (b"K", (row[0], None) if identity == "d" else (None, value))
        )
        changes.append(delete(*gone, mark=mark))
    frames = HSTORE_TYPE + shape + transaction(*changes)
    for group in groups_in(frames, modes):
        require_same(group, schemas_enable=data.draw(st.booleans()), provide_transaction_metadata=True)
        require_same_in_avro(group)


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", [pytest.param("types", marks=pytest.mark.slow), "updates", "ddl"])
def test_recorded_streams_give_the_same_from_frames_and_from_columns(name: str, modes: ValueModes) -> None:
    for group in groups_in(bytes.fromhex(vector(name)["frames"]), modes):
        for options in ({}, {"schemas_enable": True}, {"rows_in_part": "filled"}):
            require_same(group, **options)
        require_same_in_avro(group)


PLAIN_VALUES = {
    "bool": "t", "int8": "7", "int2": "-7", "float8": "1e+23", "numeric_12_2": "1.27", "numeric": "123.456",
    "money": "$1,234.56", "text": "x", "bytea": "\\x00ff", "date": "2024-01-01", "time": "00:00:01",
    "time_3": "00:00:01", "timetz": "00:00:01+00", "timestamp": "2024-01-01 00:00:00",
    "timestamp_3": "2024-01-01 00:00:00", "timestamptz": "2024-01-01 00:00:00+00", "interval": "1 day",
    "json": "{}", "uuid": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "bit": "1", "bits": "101000000001",
    "varbit": "1", "hstore": '"a"=>"1"', "int4[]": "{1,NULL}", "float8[]": "{1,0.5}", "numeric[]": "{1.27}",
    "text[]": "{a}", "date[]": "{2024-01-01}", "bytea[]": '{"\\\\x00ff"}', "bit[]": "{1,0}",
    "time[]": "{00:00:01}",
}  # fmt: skip


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
def test_schemas_describe_the_values_of_every_type(modes: ValueModes) -> None:
    columns = [(name, *TYPES[name][:2]) for name in PLAIN_VALUES]
    shape = relation(columns=[("id", 23, -1), *columns])
    frames = (
        HSTORE_TYPE
        + shape
        + transaction(insert("1", *PLAIN_VALUES.values()), delete("1", *[None] * len(columns)))
    )
    [group] = groups_in(frames, modes)
    for document in require_same(group, schemas_enable=True):
        require_fit(document["schema"], document["payload"])


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
def test_the_placeholder_of_an_unchanged_value_has_the_columns_type(modes: ValueModes) -> None:
    kinds = {
        "text": (25, -1), "bytea": (17, -1), "varbit": (1562, -1), "hstore": (HSTORE, -1),
        "texts": (1009, -1), "byteas": (1001, -1), "reals": (1021, -1), "doubles": (1022, -1),
        "bigints": (1016, -1), "dates": (1182, -1), "numerics": (1231, -1),
        "numerics_12_2": (1231, numeric(12, 2)), "moneys": (791, -1), "booleans": (1000, -1),
        "bits_1": (1561, 1), "varbits_1": (1563, 1), "uuids": (2951, -1), "ranges": (3905, -1),
    }  # fmt: skip
    shape = relation(columns=[("id", 23, -1), *((name, *kind) for name, kind in kinds.items())])
    frames = HSTORE_TYPE + shape + transaction(update("1", *[UNCHANGED] * len(kinds)))
    [group] = groups_in(frames, modes)
    [document] = require_same(group, schemas_enable=True)
    require_fit(document["schema"], document["payload"])
    require_same_in_avro(group)
    assert not isinstance(avro_of(group), Kind)
    placeholder = Placeholder(modes.unavailable_placeholder)
    after = document["payload"]["after"]
    assert [name for name in kinds if not placeholder.stands_for(after[name])] == []


def test_key_columns_with_dots_in_their_names_have_the_right_values() -> None:
    shape = relation(columns=[("d", 1082, -1), ("after.d", 1082, -1)], key=("d", "after.d"))
    [group] = groups_in(shape + transaction(insert("infinity", "2024-01-01")), ValueModes())
    require_same(group)


def test_a_number_has_javas_digits_if_postgresql_writes_more() -> None:
    shape = relation(columns=[("v", 701, -1), ("w", 1022, -1)], key=())
    text = "9.999999999999999e+22"
    [group] = groups_in(shape + transaction(insert(text, "{" + text + "}")), ValueModes())
    assert '"after":{"v":1.0E23,"w":[1.0E23]}' in JsonConverter().convert(group).values[0].as_py()


def test_values_and_semantic_types_equal_debeziums() -> None:
    columns = [(name, *TYPES[name][:2]) for name in PLAIN_VALUES]
    shape = relation(columns=[("id", 23, -1), *columns])
    [group] = groups_in(HSTORE_TYPE + shape + transaction(insert("1", *PLAIN_VALUES.values())), ValueModes())
    [document] = require_same(group, schemas_enable=True)
    after = document["payload"]["after"]
    row = {field["field"]: field for field in document["schema"]["fields"][1]["fields"]}
    expected = {
        "bool": (True, None), "int8": (7, None), "float8": (1e23, None),
        "time_3": (1000, "io.debezium.time.Time"),
        "numeric_12_2": ("fw==", "org.apache.kafka.connect.data.Decimal"),
        "numeric": ({"scale": 3, "value": "AeJA"}, "io.debezium.data.VariableScaleDecimal"),
        "money": ("AeJA", "org.apache.kafka.connect.data.Decimal"), "bytea": ("AP8=", None),
        "date": (19_723, "io.debezium.time.Date"), "time": (1_000_000, "io.debezium.time.MicroTime"),
        "timetz": ("00:00:01Z", "io.debezium.time.ZonedTime"),
        "timestamp": (1_704_067_200_000_000, "io.debezium.time.MicroTimestamp"),
        "timestamp_3": (1_704_067_200_000, "io.debezium.time.Timestamp"),
        "timestamptz": ("2024-01-01T00:00:00.000000Z", "io.debezium.time.ZonedTimestamp"),
        "interval": (86_400_000_000, "io.debezium.time.MicroDuration"),
        "json": ("{}", "io.debezium.data.Json"),
        "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "io.debezium.data.Uuid"), "bit": (True, None),
        "bits": (base64.b64encode(bytes([0b00000001, 0b1010])).decode(), "io.debezium.data.Bits"),
        "hstore": ('{"a":"1"}', "io.debezium.data.Json"), "int4[]": ([1, None], None),
        "float8[]": ([1.0, 0.5], None),
        "numeric[]": (["fw=="], None), "date[]": ([19_723], None), "bytea[]": (["AP8="], None),
        "bit[]": ([True, False], None),
    }  # fmt: skip
    assert {name: (after[name], row[name].get("name")) for name in expected} == expected
    assert row["numeric_12_2"]["parameters"] == {"scale": "2", "connect.decimal.precision": "12"}
    assert row["bits"]["parameters"] == {"length": "12"}
    assert row["date[]"]["items"] == {
        "type": "int32", "optional": True, "name": "io.debezium.time.Date", "version": 1,
    }  # fmt: skip


@pytest.mark.parametrize("scale", [0, 38, 45, 46, 100])
def test_decimals_of_any_scale_are_written_completely(scale: int) -> None:
    """Arrow's decimals of 128 bits may have a scale beyond their digits; records of other sources may have
    such.
    """
    values = [Decimal(1).scaleb(-scale), Decimal(-(10**37)).scaleb(-scale), None]
    words = b"".join(
        (int(v.scaleb(scale)) if v is not None else 0).to_bytes(16, "little", signed=True) for v in values
    )
    array = pa.Array.from_buffers(pa.decimal128(38, scale), 3, [pa.py_buffer(b"\x03"), pa.py_buffer(words)])
    modes = ValueModes("string", "adaptive", "numeric", "bytes", "json")
    texts = of_array(array, arrow_mapping(array.type, modes)).array.to_pylist()
    assert [Decimal(text) for text in texts[:2]] == values[:2]
    assert "E" not in texts[0]
