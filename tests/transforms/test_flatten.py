"""Rows instead of changes, as Debezium's new record state extraction returns them."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.debezium import JsonConverter
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tailrace.records.record import Record
from tests.support.converters.fitting import require_fit
from tests.support.decode.wire import UNCHANGED, delete, insert, truncate, update
from tests.support.transforms.groups import COMMIT_US, applied, messages, only, orders, places, rows

PLACEHOLDER = "__debezium_unavailable_value"


def values(groups: list[Group]) -> list[Any]:
    return [row["value"] for _, row in sorted(rows(groups, "value").items())]


def test_a_change_becomes_the_row_after_it_and_a_delete_a_tombstone() -> None:
    found = only(applied(orders(), {"type": "flatten"}))
    assert not found.is_change
    assert values([found]) == [
        {"id": 1, "note": "first", "price": Decimal("5.00")},
        {"id": 2, "note": "second", "price": None},
        {"id": 1, "note": PLACEHOLDER, "price": Decimal("7.50")},
        {"id": 3, "note": "moved", "price": Decimal("9.00")},
        None,
    ]
    assert found.column("key").to_pylist()[4] == {"id": 1}
    assert found.column("special").to_pylist()[1] == [("value.price", "NaN")]
    assert found.column("unchanged").to_pylist()[2] == ["note"]
    assert places(applied(found, {"type": "drop", "predicate": "t"}, t={"type": "tombstone"})) == [0, 1, 2, 3]


def test_deletes_are_dropped_or_keep_their_old_row() -> None:
    assert places(applied(orders(), {"type": "flatten", "deletes": "drop"})) == [0, 1, 2, 3]
    found = values(applied(orders(), {"type": "flatten", "deletes": "rewrite"}))
    assert found[4] == {"id": 1, "note": None, "price": None, "__deleted": "true"}
    assert found[0] == {"id": 1, "note": "first", "price": Decimal("5.00"), "__deleted": "false"}
    full = orders(
        insert("1", "a", "1.00"),
        delete("1", "a", "NaN", mark=b"O"),
        identity="f",
        key=("id", "note", "price"),
    )
    group = only(applied(full, {"type": "flatten", "deletes": "rewrite"}))
    assert values([group])[1] == {"id": 1, "note": "a", "price": None, "__deleted": "true"}
    assert group.column("special").to_pylist() == [None, [("value.price", "NaN")]]


def test_rows_before_and_after_may_have_different_columns() -> None:
    class Marked:
        def apply_record(self, record: Record) -> Record:
            if record.after is None:
                return record
            after = {"id": record.after["id"] + 0.5, "price": record.after["price"], "mark": record.op}
            return record.replace(after=after)

    found = applied(orders(), Marked(), {"type": "flatten", "deletes": "rewrite"})
    assert values(found)[3] == {
        "id": 3.5,
        "price": Decimal("9.00"),
        "mark": "u",
        "note": None,
        "__deleted": "false",
    }
    assert values(found)[0]["id"] == 1.5
    full = orders(update("2", "b", "1.00", old=("1", "a", "1.00")), delete("1", "a", "1.00", mark=b"O"))

    class Broken:
        def apply_record(self, record: Record) -> Record:
            return record.replace(after=record.after and {"id": "two"}, before={"id": 1})

    with pytest.raises(TailraceError, match="has another type in the row before"):
        applied(full, Broken(), {"type": "flatten", "deletes": "rewrite"})


def test_metadata_become_fields_and_headers_under_debeziums_names() -> None:
    group = replace(orders(), origin=SourceInfo("shop", "db", "9"))
    flatten = {
        "type": "flatten",
        "deletes": "rewrite",
        "add_fields": ["op", "table", "lsn", "source.ts_ms", "db", "txId:transaction"],
        "add_headers": ["op", "schema", "log_offset:offset"],
        "add_headers_prefix": "h.",
    }
    found = only(applied(group, flatten))
    assert values([found])[4] == {
        "id": 1,
        "note": None,
        "price": None,
        "__deleted": "true",
        "__op": "d",
        "__table": "orders",
        "__lsn": 100,
        "__source_ts_ms": COMMIT_US // 1000,
        "__db": "db",
        "__transaction": 7,
    }
    headers = found.column("headers").to_pylist()[0]
    assert headers == {
        "h.op": "c",
        "h.schema": "public",
        "h.offset": group.columns.column("source")[0]["log_offset"].as_py(),
    }


@pytest.mark.parametrize("mask", [{}, {"method": "truncate", "length": 2}, {"method": "null"}])
def test_the_placeholder_of_an_unchanged_value_is_not_masked(mask: dict[str, Any]) -> None:
    found = applied(orders(), {"type": "flatten"}, {"type": "mask", "fields": ["note"], **mask})
    assert values(found)[2]["note"] == PLACEHOLDER
    assert values(found)[0]["note"] != "first"

    class Told:
        def apply_record(self, record: Record) -> Record:
            return record.replace(value={**record.value, "note": "told"} if record.value else None)

    told = applied(orders(), {"type": "flatten"}, Told(), {"type": "mask", "fields": ["note"], **mask})
    assert all(value["note"] != "told" for value in values(told) if value)
    sent = orders(insert("1", PLACEHOLDER, "1.00"))
    found = applied(sent, {"type": "flatten"}, {"type": "mask", "fields": ["note"], **mask})
    assert values(found)[0]["note"] != PLACEHOLDER


def test_an_unchanged_value_may_become_null() -> None:
    found = values(applied(orders(), {"type": "flatten", "unavailable": "null"}))
    assert found[2]["note"] is None
    columns = [("id", 23, -1), ("n", 1700, ((12 << 16) | 2) + 4), ("b", 17, -1)]
    group = orders(update("1", UNCHANGED, UNCHANGED), columns=columns)
    assert values(applied(group, {"type": "flatten"})) == [{"id": 1, "n": None, "b": PLACEHOLDER.encode()}]


def test_placeholders_of_unchanged_numbers_and_bits_fit_their_schema() -> None:
    columns = [("id", 23, -1), ("n", 1700, -1), ("v", 1562, -1), ("t", 25, -1)]
    group = orders(update("1", UNCHANGED, UNCHANGED, UNCHANGED), columns=columns)
    flat = only(applied(group, {"type": "flatten"}))
    found = json.loads(JsonConverter(schemas_enable=True).convert(flat).values[0].as_py())
    assert found["payload"] == {"id": 1, "n": None, "v": None, "t": PLACEHOLDER}
    require_fit(found["schema"], found["payload"])


def test_truncates_are_dropped_and_messages_stay() -> None:
    group = orders(insert("1", "x", "1.00"), truncate(16385))
    assert places(applied(group, {"type": "flatten"})) == [0]
    with pytest.raises(TailraceError, match="was truncated") as caught:
        applied(group, {"type": "flatten", "truncates": "error"})
    assert caught.value.kind is Kind.TRANSFORM_FAILED
    audit = messages(b"x")
    assert only(applied(audit, {"type": "flatten"})) is audit
    flat = only(applied(group, {"type": "flatten"}))
    assert only(applied(flat, {"type": "flatten"})) is flat


def test_all_other_transformations_accept_flat_records() -> None:
    found = applied(
        orders(),
        {"type": "flatten", "deletes": "rewrite", "add_fields": ["op"]},
        {"type": "rename", "fields": {"note": "remark"}},
        {"type": "filter", "where": "value.remark is not null and was_sent(value.remark)"},
        {"type": "cast", "fields": {"price": "integer"}, "apply_to": "row"},
        {"type": "drop_fields", "fields": ["__deleted"]},
        {"type": "route", "topic": "'flat.' || value.__op"},
    )
    assert {place: row["value"] for place, row in rows(found).items()} == {
        0: {"id": 1, "remark": "first", "price": 5, "__op": "c"},
        1: {"id": 2, "remark": "second", "price": None, "__op": "c"},
        3: {"id": 3, "remark": "moved", "price": 9, "__op": "u"},
    }
    assert {group.topic for group in found} == {"flat.c", "flat.u"}


def test_the_json_converter_writes_special_and_unchanged_values_of_flat_columns() -> None:
    for step in ({"type": "flatten"}, {"type": "flatten", "deletes": "rewrite"}):
        flat = JsonConverter().convert(
            only(applied(orders(), step, {"type": "rename", "fields": {"price": "cost"}}))
        )
        texts = flat.values.to_pylist()
        assert json.loads(texts[1])["cost"] == "NaN"
        event = CloudEventsConverter().convert(only(applied(orders(), step))).values[1].as_py()
        assert json.loads(event)["data"]["price"] == "NaN"
        assert json.loads(texts[2])["note"] == PLACEHOLDER
