"""Debezium's JSON (its bytes are compared in `test_peer`): the same from frames and from columns."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.converters.avro.encoder import encoded
from tailrace.converters.debezium import JsonConverter
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tailrace.protocol.facts import Facts
from tailrace.records.batch import Batch
from tailrace.records.group import Group
from tailrace.records.making import SourceRecord
from tailrace.transforms.factory import build
from tests.support.converters.customers import CASES, FACTS, as_columns, groups, groups_of, shape, transaction
from tests.support.converters.fitting import require_fit
from tests.support.converters.golden import CONVERTERS, KEPT, path_of, text_of
from tests.support.decode import wire
from tests.support.decode.wire import UNCHANGED, delete, insert, relation, update
from tests.support.transforms.groups import orders


def documents(group: Group, **options: Any) -> list[Any]:
    values = JsonConverter(**options).convert(group).values.to_pylist()
    return [None if value is None else json.loads(value) for value in values]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", KEPT)
def test_events_equal_the_golden_files(way: str, case: str) -> None:
    assert text_of(CONVERTERS[way], groups_of(case)) == path_of(way, case).read_text()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", CONVERTERS)
def test_columns_give_the_same_bytes_as_frames(way: str, case: str) -> None:
    transformed = [as_columns(group) for group in groups_of(case)]
    assert text_of(CONVERTERS[way], transformed) == text_of(CONVERTERS[way], groups_of(case))


def test_members_have_debeziums_order() -> None:
    [event] = documents(groups_of("create")[0])
    assert list(event) == ["before", "after", "source", "transaction", "op", "ts_ms", "ts_us", "ts_ns"]
    assert list(event["source"]) == [
        "version", "connector", "name", "ts_ms", "snapshot", "db", "sequence", "ts_us", "ts_ns", "schema",
        "table", "txId", "lsn", "xmin", "origin", "origin_lsn",
    ]  # fmt: skip


def test_a_schema_describes_its_payload() -> None:
    for case in CASES:
        for group in groups_of(case):
            found = JsonConverter(schemas_enable=True).convert(group)
            for text in [*(found.keys or []), *found.values]:
                if text is not None and text.as_py() is not None:
                    document = json.loads(text.as_py())
                    require_fit(document["schema"], document["payload"])


def test_a_key_has_the_columns_in_the_order_of_the_primary_key() -> None:
    columns = [("a", 23, -1), ("b", 25, -1), ("c", 25, -1)]
    facts = Facts(16385, "public", "customers", ("c", "a"))
    schema = [
        frames.control_frame(frames.FACTS, 0, 0, facts.as_json()),
        relation(16385, "customers", columns, ("a", "c")),
    ]
    for group in groups(transaction(insert("1", "x", "é")), schema):
        for same in (group, as_columns(group)):
            assert JsonConverter().convert(same).keys.to_pylist() == ['{"c":"é","a":1}']


def test_events_of_a_table_without_a_key_have_none_but_have_tombstones() -> None:
    schema = [relation(16385, "customers", [("a", 23, -1), ("b", 25, -1)], ("a", "b"), "f")]
    data = transaction(
        insert("1", "x"), update("2", "x", old=("1", "x")), delete("2", "x", mark=b"O"),
    )  # fmt: skip
    for group in groups(data, schema):
        for same in (group, as_columns(group)):
            found = JsonConverter().convert(same)
            assert found.keys is None
            assert found.rows is not None
            assert found.rows.tolist() == [0, 1, 2, 2]
            *values, tombstone = found.values.to_pylist()
            assert [json.loads(value)["op"] for value in values] == ["c", "u", "d"]
            assert tombstone is None
            without = JsonConverter(tombstones_on_delete=False).convert(same)
            assert (without.keys, without.rows, len(without)) == (None, None, 3)


def test_unchanged_values_have_debeziums_placeholder() -> None:
    columns = [
        ("id", 23, -1),
        ("t", 25, -1),
        ("b", 17, -1),
        ("l", 1009, -1),
        ("n", 1007, -1),
        ("j", 3802, -1),
    ]
    schema = [relation(16385, "customers", columns, ("id",))]
    data = transaction(update("1", *[UNCHANGED] * 5))
    for group in groups(data, schema):
        for same in (group, as_columns(group)):
            after = documents(same)[0]["after"]
            text = "__debezium_unavailable_value"
            assert after == {
                "id": 1, "t": text, "b": "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==", "l": [text],
                "n": list(text.encode()), "j": text,
            }  # fmt: skip


def test_changes_are_numbered_in_the_transaction_and_in_the_table() -> None:
    two = [*shape(), relation(16386, "others", [("id", 23, -1)])]
    first = wire.transaction(
        insert("1", "a", "b", "c"), insert("1", oid=16386), insert("2", "a", "b", "c"), lsn=1000, xid=8
    )
    data = first + wire.transaction(insert("3", "a", "b", "c"), lsn=2000, xid=9)
    blocks = [
        event["transaction"]
        for group in groups(data, two)
        for event in documents(group, provide_transaction_metadata=True)
    ]
    orders = [(block["id"], block["total_order"], block["data_collection_order"]) for block in blocks]
    assert orders == [("8:100", 1, 1), ("8:100", 3, 2), ("9:100", 1, 1), ("8:100", 2, 1)]


def test_headers_of_records_are_kept_with_those_of_changed_keys() -> None:
    [group] = groups_of("key_change")
    marked = group.with_headers(pa.array([{"trace": "t1"}]))
    found = JsonConverter().convert(marked)
    assert found.headers.to_pylist() == [
        {"trace": "t1", "__debezium.newkey": '{"id":2}', "__debezium.oldkey": None},
        {"trace": "t1", "__debezium.newkey": '{"id":2}', "__debezium.oldkey": None},
        {"trace": "t1", "__debezium.newkey": None, "__debezium.oldkey": '{"id":1}'},
    ]
    assert marked.wire is not None


def test_records_that_are_no_changes_are_converted_by_their_type() -> None:
    value = pa.array([{"id": 1, "tags": ["a", None], "price": 1.0}, None])
    columns = pa.record_batch({"key": pa.array(["k", None]), "value": value})
    group = Group.of_columns("orders.events", np.arange(2), columns, origin=FACTS)
    found = JsonConverter().convert(group)
    assert found.keys.to_pylist() == ['"k"', None]
    assert found.values.to_pylist() == ['{"id":1,"tags":["a",null],"price":1.0}', None]
    described = json.loads(JsonConverter(schemas_enable=True).convert(group).values[0].as_py())
    assert described["schema"]["name"] == "PostgreSQL_server.orders.events.Value"
    require_fit(described["schema"], described["payload"])


def test_changes_of_other_sources_keep_their_source_block() -> None:
    columns = pa.record_batch(
        {
            "op": ["c", "d"],
            "key": pa.array([{"id": 1}, {"id": 2}]),
            "before": pa.array([None, {"id": 2, "at": 1.5}]),
            "after": pa.array(
                [{"id": 1, "at": None}, None], pa.struct([("id", pa.int64()), ("at", pa.float64())])
            ),
            "source": pa.array([{"file": "x", "ts_ms": 7}, {"file": "y", "ts_ms": 8}]),
        }
    )
    group = Group.of_columns("db.items", np.arange(2), columns)
    first, second, tombstone = documents(group)
    assert (first["source"], first["ts_us"], second["before"]) == (
        {"file": "x", "ts_ms": 7}, 7000, {"id": 2, "at": 1.5},
    )  # fmt: skip
    assert tombstone is None


def in_avro(group: Group) -> tuple[list[Any], list[Any]]:
    columns, schemas = JsonConverter().columns(group, with_keys=True)
    values = encoded(columns.values, schemas.value.document(), 1).to_pylist()
    assert schemas.key is not None
    return values, encoded(columns.keys, schemas.key.document(), 1).to_pylist()


def test_a_change_may_have_no_key_and_no_source() -> None:
    keys = {"id": 1}, None
    made = [SourceRecord(topic="t", offset={}, op="c", key=key, after={"a": 1}) for key in keys]
    [group] = Batch.of_records(made).groups
    found = JsonConverter(schemas_enable=True).convert(group)
    assert found.keys is not None
    first, second = found.keys.to_pylist()
    assert (json.loads(first)["payload"], second) == ({"id": 1}, None)
    event = json.loads(found.values[0].as_py())
    require_fit(event["schema"], event["payload"])
    assert event["payload"]["source"] is None
    values, keys_in_avro = in_avro(group)
    assert None not in values
    assert [key is None for key in keys_in_avro] == [False, True]
    hoist = build([{"type": "hoist_field", "field": "of"}])
    assert JsonConverter().convert(hoist.apply(group.slice(1, 2))[0]).keys[0].as_py() is None


@pytest.mark.parametrize(
    "step",
    [
        {"type": "add_fields", "computed": {"note": "nullif(after.note, 'first')"}},
        {"type": "add_fields", "computed": {"id": "nullif(after.id, 1)"}},
        {"type": "fields_from_headers", "fields": {"note": "none"}},
        {"type": "value_to_key", "fields": ["note"]},
    ],
)
def test_a_column_that_a_transformation_made_may_be_null(step: dict[str, Any]) -> None:
    is_note = step["type"] != "value_to_key"
    group = orders(insert("1", "first", "5"), insert("2", "x" if is_note else None, "5"))
    assert group.wire is not None
    assert group.relation is not None
    named = [
        replace(c, not_null=c.name == "id" or (c.name == "note" and is_note)) for c in group.relation.columns
    ]
    group = group.with_wire(group.wire.named(replace(group.relation, columns=tuple(named))))
    [made] = build([step]).apply(group)
    found = JsonConverter(schemas_enable=True).convert(made)
    assert found.keys is not None
    for text in (found.values[0].as_py(), *found.keys.to_pylist()):
        document = json.loads(text)
        require_fit(document["schema"], document["payload"])
    in_avro(made)


@given(st.lists(st.floats(), min_size=1), st.lists(st.floats(width=32), min_size=1))
def test_floating_point_numbers_are_exact_and_never_written_as_integers(
    doubles: list[float], floats: list[float]
) -> None:
    for kind, values, arrow in ((701, doubles, pa.float64()), (700, floats, pa.float32())):
        texts = [postgres_text(value, arrow) for value in values]
        schema = [relation(16385, "customers", [("v", kind, -1)], ())]
        [group] = groups(transaction(*(insert(text) for text in texts)), schema)
        wire, columns = documents(group), documents(as_columns(group))
        assert [repr(event) for event in wire] == [repr(event) for event in columns]
        for event, value in zip(wire, values, strict=True):
            found = event["after"]["v"]
            if isinstance(found, str):
                assert found in {"NaN", "Infinity", "-Infinity"}
            else:
                assert isinstance(found, float)
                assert pa.array([found], arrow)[0].as_py() == value


def postgres_text(value: float, arrow: pa.DataType) -> str:
    text = pa.array([value], arrow).cast(pa.string())[0].as_py()
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)


def test_a_wrong_option_is_refused_with_its_name() -> None:
    with pytest.raises(TailraceError, match="schema_enable") as caught:
        JsonConverter(schema_enable=True)
    assert caught.value.kind is Kind.CONFIG_INVALID


def test_a_converter_can_be_pickled() -> None:
    [group] = groups_of("create")
    converter = pickle.loads(pickle.dumps(JsonConverter(schemas_enable=True)))  # noqa: S301 - its own
    assert converter.convert(group).values.equals(JsonConverter(schemas_enable=True).convert(group).values)
