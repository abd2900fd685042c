"""Headers from columns and back, and keys made of columns."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.connect_schemas import Schema
from tailrace.converters.debezium import JsonConverter
from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tailrace.records.record import Record
from tailrace.transforms.changed_keys import split
from tests.support.decode.wire import UNCHANGED, delete, insert, truncate, update
from tests.support.transforms.groups import applied, messages, only, orders, plain, rows


def test_expressions_set_headers_and_frames_stay_as_they_are() -> None:
    group = orders()
    headers = {"type": "set_headers", "headers": {"table": "source.table", "by": "'me'", "kind": "op"}}
    found = only(applied(group, headers))
    assert found.wire is not None
    assert "columns" not in vars(group)
    assert found.headers.to_pylist()[4] == {"table": "orders", "by": "me", "kind": "d"}
    more = only(applied(found, {"type": "set_headers", "headers": {"by": "after.note"}}))
    assert [row["by"] for row in more.headers.to_pylist()] == ["first", "second", None, "moved", None]
    kept = only(applied(more, {"type": "drop_headers", "headers": ["table", "none"]}))
    assert kept.wire is not None
    assert kept.headers.to_pylist()[0] == {"by": "first", "kind": "c"}
    assert (
        rows(applied(kept, {"type": "filter", "where": "headers.by = 'moved'"}))[3]["headers"]["kind"] == "u"
    )


def test_columns_are_moved_into_headers_and_back() -> None:
    move = {"type": "set_headers", "headers": {"remark": "after.note"}, "operation": "move"}
    found = only(applied(orders(), move))
    assert set(rows([found])[0]["after"]) == {"id", "price"}
    assert found.headers.to_pylist()[0] == {"remark": "first"}
    back = {"type": "fields_from_headers", "fields": {"note": "remark", "other": "none"}, "operation": "move"}
    again = rows(applied(found, back))
    assert again[0]["after"] == {
        "id": 1,
        "price": rows([orders()])[0]["after"]["price"],
        "note": "first",
        "other": None,
    }
    assert again[0]["headers"] in ({}, None)
    keyless = only(applied(orders(insert("1", "a", "2"), key=()), {**move, "headers": {"of": "after.note"}}))
    keyed = applied(keyless, {**back, "fields": {"of": "of"}, "apply_to": "key"})
    assert rows(keyed)[0]["key"] == {"of": "a"}
    with pytest.raises(TailraceError, match="moves only columns"):
        applied(orders(), {**move, "headers": {"x": "upper(after.note)"}})


def test_a_key_is_made_of_columns_also_for_deletes() -> None:
    full = orders(
        insert("1", "a", "1.00"),
        update("1", "b", "1.00", old=("1", "a", "1.00")),
        delete("1", "b", "1.00", mark=b"O"),
        identity="f",
        key=("id", "note", "price"),
    )
    found = rows(applied(full, {"type": "value_to_key", "fields": ["note", "id"]}))
    assert [row["key"] for row in found.values()] == [
        {"note": "a", "id": 1},
        {"note": "b", "id": 1},
        {"note": "b", "id": 1},
    ]
    partial = orders(insert("1", "a", "1.00"), delete("1", None, None))
    with pytest.raises(TailraceError, match="deletes don't send 'note'"):
        applied(partial, {"type": "value_to_key", "fields": ["note"]})
    found = rows(applied(partial, {"type": "value_to_key", "fields": ["id"]}))
    assert [row["key"] for row in found.values()] == [{"id": 1}, {"id": 1}]
    with pytest.raises(TailraceError, match="no column 'nothing'"):
        applied(partial, {"type": "value_to_key", "fields": ["nothing"]})
    flat = {"type": "flatten", "deletes": "rewrite", "add_fields": ["op"]}
    with pytest.raises(TailraceError, match="deletes don't send 'note'"):
        applied(partial, flat, {"type": "value_to_key", "fields": ["note"]})
    found = rows(applied(partial, flat, {"type": "value_to_key", "fields": ["id", "__op"]}))
    assert [row["key"] for row in found.values()] == [{"id": 1, "__op": "c"}, {"id": 1, "__op": "d"}]
    found = rows(applied(full, flat, {"type": "value_to_key", "fields": ["note"]}))
    assert [row["key"] for row in found.values()] == [{"note": "a"}, {"note": "b"}, {"note": "b"}]
    with pytest.raises(TailraceError, match="the value of a delete is null"):
        applied(partial, {"type": "flatten"}, {"type": "value_to_key", "fields": ["id"]})
    found = rows(applied(partial, {"type": "value_to_key", "fields": ["id"]}, {"type": "flatten"}))
    assert [row["key"] for row in found.values()] == [{"id": 1}, {"id": 1}]
    audit = messages(b"x")
    assert only(applied(audit, {"type": "value_to_key", "fields": ["id"]})) is audit


def test_a_key_is_made_of_columns_of_a_connector_without_tables() -> None:
    rows_of = pa.RecordBatch.from_pydict(
        {"op": ["c", "d"], "after": [{"n": 1}, None], "before": [None, {"n": 2}]}
    )
    group = Group.of_columns("lines", np.arange(2), rows_of)
    found = only(applied(group, {"type": "value_to_key", "fields": ["n"]}))
    assert found.column("key").to_pylist() == [{"n": 1}, {"n": 2}]


def test_a_key_of_an_unchanged_value_is_refused() -> None:
    to_key = {"type": "value_to_key", "fields": ["id", "note"]}
    group = orders(insert("1", "a", "1.00"), update("1", UNCHANGED, "2.00"))
    for steps in ([to_key], [{"type": "flatten"}, to_key]):
        with pytest.raises(TailraceError, match="an update did not send 'note'") as caught:
            applied(group, *steps)
        assert caught.value.kind is Kind.TRANSFORM_FAILED
    assert len(only(applied(group, {"type": "value_to_key", "fields": ["id"]}))) == 2


def test_keys_and_values_of_one_field() -> None:
    found = only(applied(orders(), {"type": "extract_field", "field": "id"}))
    assert found.column("key").to_pylist() == [1, 2, 1, 3, 1]
    back = only(applied(found, {"type": "hoist_field", "field": "number"}))
    assert back.column("key").to_pylist()[0] == {"number": 1}
    group = plain([{"a": 1, "b": 2}, None], key=pa.array([{"k": 1}, None]))
    value = {"field": "a", "apply_to": "row"}
    single = only(applied(group, {"type": "extract_field", **value}))
    assert single.column("value").to_pylist() == [1, None]
    assert only(applied(single, {"type": "hoist_field", **value})).column("value").to_pylist() == [
        {"a": 1},
        None,
    ]
    with pytest.raises(TailraceError, match="flatten it first"):
        applied(orders(), {"type": "extract_field", **value})
    with pytest.raises(TailraceError, match="has no field 'z'"):
        applied(orders(), {"type": "extract_field", "field": "z"})
    by_place = rows(applied(group, {"type": "value_to_key", "fields": ["b"]}))
    assert [row["key"] for row in by_place.values()] == [{"b": 2}, None]


@pytest.mark.parametrize(("oid", "text"), [(1700, "NaN"), (1231, "{1.50,NaN}"), (1231, "{{NaN}}")])
def test_a_value_that_its_type_cannot_hold_is_not_lost_when_its_field_is_moved(oid: int, text: str) -> None:
    columns = [("id", 23, -1), ("note", 25, -1), ("price", oid, ((12 << 16) | 2) + 4)]
    group = orders(insert("1", "a", text), columns=columns)
    priced = [{"type": "value_to_key", "fields": ["price"]}, {"type": "extract_field", "field": "price"}]
    flat = [{"type": "flatten"}, {"type": "extract_field", "field": "price", "apply_to": "row"}]
    hoist = {"type": "hoist_field", "field": "of"}
    for steps in (priced, flat, [flat[0], hoist | {"apply_to": "row"}], [priced[0], hoist]):
        with pytest.raises(TailraceError, match="'price' has a value that its type can't hold") as caught:
            applied(group, *steps)
        assert caught.value.hint == "cast it to text first: {type: cast, fields: {price: text}}"
        as_text = {"type": "cast", "fields": {"price": "text"}}
        [made] = applied(group, as_text, *steps)
        assert "NaN" in str(made.column("key" if steps[0] is priced[0] else "value").to_pylist())
    move = {"type": "set_headers", "headers": {"of": "after.price"}, "operation": "move"}
    with pytest.raises(TailraceError, match="'price' has a value that its type can't hold"):
        applied(group, move)
    assert only(applied(group, as_text, move)).headers.to_pylist() == [{"of": text}]


#: Types whose columns have another form in events than their Arrow type by itself, and a text of each.
OF_FORM = {
    "numeric": (1700, -1, "12.50"),
    "time": (1083, 3, "04:05:11.789"),
    "timestamp": (1114, 3, "2018-06-20 15:13:16.945"),
    "interval": (1186, -1, "1 day"),
    "bit": (1560, 3, "101"),
    "uuid": (2950, -1, "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
}


@pytest.mark.parametrize(("kind", "modifier", "text"), OF_FORM.values(), ids=OF_FORM)
def test_a_column_has_its_form_whatever_became_of_the_other_part(kind: int, modifier: int, text: str) -> None:
    columns = [("k", kind, modifier), ("v", 25, -1)]

    def made(*steps: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        group = only(applied(orders(insert(text, "a"), columns=columns, key=("k",)), *steps))
        found = JsonConverter(schemas_enable=True).convert(group)
        assert found.keys is not None
        value = found.values[0].as_py().replace('"optional":false', '"optional":true')  # by the key's names
        return json.loads(found.keys[0].as_py()), json.loads(value)

    key, value = made()
    edits: list[dict[str, Any]] = [
        {"type": "drop_fields", "fields": ["k"]},
        {"type": "rename", "fields": {"k": "l"}},
        {"type": "mask", "fields": ["k"]},
        {"type": "cast", "fields": {"k": "text"}},
        {"type": "add_fields", "static": {"k": "x"}},
    ]
    for edit in edits:
        assert made({**edit, "apply_to": "row"})[0] == key
        assert made({**edit, "apply_to": "key"})[1] == value
    as_text = {"type": "cast", "fields": {"k": "text"}}
    assert made({**as_text, "apply_to": "row"})[1]["payload"]["after"]["k"] == text
    assert made({**as_text, "apply_to": "key"})[0]["payload"] == {"k": text}
    hoisted = made({"type": "hoist_field", "field": "of"})[0]
    assert hoisted["payload"] == {"of": key["payload"]}
    [of] = hoisted["schema"]["fields"]
    assert [{**each, "optional": False} for each in of["fields"]] == key["schema"]["fields"]
    extract, hoist = {"type": "extract_field", "field": "k"}, {"type": "hoist_field", "field": "k"}
    single, _ = made(extract)
    [field] = key["schema"]["fields"]
    assert single == {
        "schema": {n: v for n, v in field.items() if n != "field"},
        "payload": key["payload"]["k"],
    }
    back, _ = made(extract, hoist)
    assert back["payload"] == key["payload"]
    flat = applied(orders(insert(text, "a"), columns=columns, key=("k",)), {"type": "flatten"})
    as_data = json.loads(CloudEventsConverter().convert(only(flat)).values[0].as_py())["data"]
    assert as_data == value["payload"]["after"]


class Numbered:
    """Gives each record a number as its key, as `extract_field` does."""

    def apply_record(self, record: Record) -> Record:
        return record.replace(key=record.key["id"] if record.key else None)


@pytest.mark.parametrize("step", [{"type": "extract_field", "field": "id"}, Numbered()])
def test_a_change_may_have_a_single_value_as_its_key(step: Any) -> None:
    changes = insert("1", "a", "1.00"), update("2", "b", "1.00"), delete("3", None, None), truncate(16385)
    group = only(applied(orders(*changes), step))
    keys = ["1", "2", "3", "3", None]
    assert group.is_change
    for converter in (JsonConverter(), CloudEventsConverter()):
        found = converter.convert(group)
        assert found.keys is not None
        assert found.keys.to_pylist() == keys
    with_schema = JsonConverter(schemas_enable=True).convert(group).keys
    assert with_schema is not None
    schema = Schema("int32" if isinstance(step, dict) else "int64")
    assert json.loads(with_schema.to_pylist()[3]) == {"schema": schema.document(), "payload": 3}
    assert with_schema.to_pylist()[-1] is None
    columns, schemas = JsonConverter().columns(group, with_keys=True)
    assert isinstance(columns.keys, pa.Array)
    assert columns.keys.to_pylist() == [None if key is None else int(key) for key in keys]
    assert schemas.key == schema
    assert JsonConverter().keys(group).keys.to_pylist() == keys


@pytest.mark.parametrize(
    ("step", "keys"),
    [
        ({"type": "cast", "fields": {"id": "bigint"}}, [2, 2, 3]),
        ({"type": "mask", "fields": ["id"], "value": 0}, [3]),
        ({"type": "add_fields", "computed": {"id": "after.id + 1"}}, [3]),
        ({"type": "cast", "fields": {"id": "text"}}, [3]),
    ],
)
def test_the_old_key_of_an_update_is_deleted_only_if_records_have_it(
    step: dict[str, Any], keys: list[int]
) -> None:
    moved = orders(update("3", "moved", "9.00", key=("2", None, None)), insert("1", "a", "1.00"))
    found = JsonConverter().convert(only(applied(moved, {**step, "apply_to": "row"}))).keys
    assert found is not None
    assert [json.loads(key)["id"] for key in found.to_pylist()] == [*keys, 1]


#: Steps that leave rows or keys alone, and the key after them.
APART = (
    ({"type": "rename", "fields": {"id": "k"}, "apply_to": "key"}, {"k": "NaN"}),
    ({"type": "rename", "fields": {"id": "k"}, "apply_to": "row"}, {"id": "NaN"}),
    ({"type": "drop_fields", "fields": ["id"]}, {"id": "NaN"}),
    ({"type": "mask", "fields": ["id"], "method": "fixed", "apply_to": "row"}, {"id": "NaN"}),
    ({"type": "mask", "fields": ["id"], "method": "truncate", "length": 1, "apply_to": "key"}, {"id": "N"}),
    ({"type": "cast", "fields": {"id": "text"}, "apply_to": "key"}, {"id": "NaN"}),
    ({"type": "value_to_key", "fields": ["price"]}, {"price": "NaN"}),
)


@pytest.mark.parametrize(("step", "key"), APART)
@pytest.mark.parametrize("flat", [False, True])
def test_a_key_has_its_special_value_although_its_column_cannot_hold_it(
    step: dict[str, Any], key: dict[str, Any], flat: bool
) -> None:
    numeric = ((12 << 16) | 2) + 4
    columns = [("id", 1700, numeric), ("note", 25, -1), ("price", 1700, numeric)]
    group = orders(insert("1.00", "a", "1.00"), insert("NaN", "b", "NaN"), columns=columns)
    found = only(applied(group, step, *([{"type": "flatten"}] if flat else [])))
    assert Record(found, 1, {}).key == key
    assert json.loads(JsonConverter().convert(found).keys[1].as_py()) == key


def test_both_keys_of_an_update_have_their_values() -> None:
    columns = [("id", 1700, ((12 << 16) | 2) + 4), ("note", 25, -1)]
    changes = [update("1.00", "a", key=("NaN", None)), update("NaN", "b", key=("1.00", None))]
    found = applied(split(orders(*changes, columns=columns)), {"type": "flatten", "deletes": "tombstone"})
    keys = [json.loads(key)["id"] for each in found for key in JsonConverter().convert(each).keys.to_pylist()]
    assert keys == ["NaN", "ZA==", "ZA==", "NaN"]
