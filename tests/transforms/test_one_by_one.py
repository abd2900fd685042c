"""Transformations of single records give the same as the vectorised ones, and keep the rest unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.converters.debezium import JsonConverter
from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tailrace.records.record import Record
from tests.support.decode.wire import UNCHANGED, delete, insert, update
from tests.support.transforms.groups import applied, orders, places, plain, rows, topics

Change = Callable[[Record], Record | None]


class Each:
    """Applies a function to each record."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def apply_record(self, record: Record) -> Record | None:
        return self._change(record)

    def close(self) -> None:
        pass


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 9), st.sampled_from(["a", "b", None])).map(
            lambda row: insert(str(row[0]), row[1], "5.00")
        ),
        st.integers(0, 9).map(lambda n: update(str(n), "u", "7.00")),
        st.integers(0, 9).map(lambda n: update(str(n), UNCHANGED, "7.00")),
        st.integers(0, 9).map(lambda n: delete(str(n), None, None)),
    ),
    min_size=1,
    max_size=8,
)


@given(CHANGES)
def test_filter_and_route_give_the_same_record_by_record(changes: list[bytes]) -> None:
    def route(record: Record) -> Record | None:
        if record.op == "d":
            return None
        note = (record.after or {}).get("note")
        return record if note is None else record.replace(topic=f"by-{note}")

    group = orders(*changes)
    vectorised = applied(
        group,
        {"type": "filter", "where": "op <> 'd'"},
        {"type": "route", "topic": "'by-' || after.note"},
    )
    single = applied(group, Each(route))
    assert topics(single) == topics(vectorised)
    assert rows(single) == rows(vectorised)
    assert all(part.wire is not None for part in single)


@given(CHANGES)
def test_edits_give_the_same_record_by_record(changes: list[bytes]) -> None:
    def edit(record: Record) -> Record | None:
        if record.after is None:
            return record.replace(value=None, headers={"op": record.op})
        after: dict[str, Any] = {
            name: None if name in record.unchanged else value for name, value in record.after.items()
        }
        note = after["note"]
        value = {"number": after["id"], "remark": note and note[:1], "double": after["price"] * 2, "one": 1}
        return record.replace(value=value, headers={"op": record.op})

    vectorised = applied(
        orders(*changes),
        {"type": "set_headers", "headers": {"op": "op"}},
        {"type": "mask", "fields": ["note"], "method": "truncate", "length": 1},
        {"type": "add_fields", "computed": {"double": "after.price * 2"}, "static": {"one": 1}},
        {"type": "drop_fields", "fields": ["price"]},
        {"type": "flatten", "unavailable": "null"},
        {"type": "rename", "fields": {"note": "remark", "id": "number"}, "apply_to": "row"},
    )
    single = applied(orders(*changes), Each(edit))
    names = ("op", "key", "value", "headers")
    assert _sorted(rows(single, *names)) == _sorted(rows(vectorised, *names))


def _sorted(found: dict[int, dict[str, object]]) -> dict[int, dict[str, object]]:
    # Fields by name: their order differs.
    return {
        place: {n: sorted(v.items()) if isinstance(v, dict) else v for n, v in row.items()}
        for place, row in found.items()
    }


def test_replaced_rows_and_headers_keep_their_types() -> None:
    def edit(record: Record) -> Record | None:
        if record.after is None:
            return record
        after = {**record.after, "note": "new", "extra": record.place * 1.5}
        return record.replace(after=after, headers={"place": str(record.place)})

    before, found = rows([orders()]), applied(orders(), Each(edit))
    after = rows(found)
    assert places(found) == [0, 1, 2, 3, 4]
    assert after[4] == before[4]
    assert after[2]["after"] == {"id": 1, "note": "new", "price": Decimal("7.50"), "extra": 3.0}
    assert (before[2]["unchanged"], after[2]["unchanged"]) == (["note"], [])
    assert after[1]["special"] == before[1]["special"] == [("after.price", "NaN")]
    assert after[0]["headers"] == {"place": "0"}
    changed = next(group for group in found if group.wire is None)
    assert changed.column("after").type.field("id").type == orders().column("after").type.field("id").type


def test_no_value_is_truncated_to_the_former_type_of_its_column() -> None:
    columns = [("id", 23, -1), ("made", 1082, -1), ("at", 1184, -1), ("numbers", 1007, -1)]
    group = orders(insert("1", "2024-02-29", None, "{1,2}"), columns=columns)
    new = {"id": 1.5, "made": datetime(2024, 2, 29, 10, tzinfo=UTC), "at": 7, "numbers": [1, Decimal("2.5")]}
    [found] = applied(group, Each(lambda record: record.replace(after=new)))
    assert rows([found])[0]["after"] == new
    [flat] = applied(group, {"type": "flatten"}, Each(lambda record: record.replace(value=new)))
    assert rows([flat])[0]["value"] == new
    [kept] = applied(group, Each(lambda record: record.replace(after={"id": 2, "made": None, "numbers": []})))
    types = {field.name: field.type for field in group.column("after").type}
    assert all(field.type == types[field.name] for field in kept.column("after").type)
    odd = orders(insert("1", "infinity", None, None), insert("2", "2024-02-29", None, None), columns=columns)
    with pytest.raises(TailraceError, match="one column can't hold all of its values for 'made'"):
        applied(odd, Each(lambda r: r.replace(after={**(r.after or {}), "id": 3} if not r.place else new)))


def test_the_special_text_of_a_replaced_value_is_removed() -> None:
    found = applied(orders(), Each(lambda r: r.replace(after={**(r.after or {}), "price": Decimal(1)})))
    assert rows(found)[1]["special"] is None


def test_replacing_only_headers_does_not_decode_the_change() -> None:
    [found] = applied(orders(), Each(lambda record: record.replace(headers={"op": record.op})))
    assert found.wire is not None
    assert [row["headers"] for row in rows([found]).values()] == [{"op": op} for op in "ccuud"]


def test_a_change_with_a_new_value_is_no_longer_a_change() -> None:
    found = applied(orders(), Each(lambda record: record.replace(value={"id": record.place}, key=None)))
    [group] = found
    assert not group.is_change
    assert rows(found)[3] == {
        "op": "u",
        "key": None,
        "source": rows([orders()])[3]["source"],
        "value": {"id": 3},
    }
    [again] = applied(group, Each(lambda record: record.replace(value=None, topic="t")))
    assert rows([again])[0]["value"] is None


def test_plain_values_may_change_their_type() -> None:
    group = plain([{"n": 1}, {"n": 2}])
    [found] = applied(group, Each(lambda record: record.replace(value={"n": "x", "m": [record.value["n"]]})))
    assert rows([found])[1]["value"] == {"n": "x", "m": [2]}


@pytest.mark.parametrize(
    "change",
    [
        lambda _: "text",
        lambda record: Record(record.group, 0, {}),
        lambda record: record.replace(value="x" if record.place else 1),
        lambda record: record.replace(topic=""),
        lambda record: record.replace(topic=5),
        lambda record: record.replace(topic=None),
        lambda record: record.replace(after=["secret"]),
        lambda record: record.replace(headers=None),
    ],
)
def test_invalid_results_are_refused_without_showing_a_value(change: Change) -> None:
    with pytest.raises(TailraceError) as caught:
        applied(orders(), Each(change))
    assert caught.value.kind is Kind.TRANSFORM_FAILED
    with pytest.raises(TypeError, match="no lsn"):
        next(iter([Record(orders(), 0, {}).replace(lsn=1)]))


STAMPED = [
    ("id", 23, -1),
    ("made", 1082, -1),
    ("at", 1184, -1),
    ("price", 1700, ((12 << 16) | 2) + 4),
    ("note", 25, -1),
]
ODD = ("infinity", "4713-01-01 00:00:00+00 BC", "NaN", "infinity")
USUAL = ("2024-02-29", "2024-02-29 12:00:00+00", "1.50", "x")


def stamped() -> Group:
    return orders(insert("1", *USUAL), insert("2", *ODD), insert("3", *USUAL), columns=STAMPED)


def documents(groups: list[Group]) -> list[dict[str, Any]]:
    found = [JsonConverter(schemas_enable=False).convert(group).values.to_pylist() for group in groups]
    return [json.loads(text) for texts in found for text in texts]


def test_a_value_that_python_cannot_hold_stays_unchanged() -> None:
    edited = applied(stamped(), Each(lambda r: r.replace(after={**(r.after or {}), "extra": r.place})))
    before, after = documents([stamped()]), documents(edited)
    assert [{**each["after"], "extra": n} for n, each in enumerate(before)] == [
        each["after"] for each in after
    ]
    assert [Record(edited[0], 1, {}).after[name] for name in ("made", "at", "price", "note")] == list(ODD)
    [was], [now] = [stamped()], edited
    for name in ("made", "at", "price", "note"):
        assert now.column("after").field(name).equals(was.column("after").field(name))


def test_a_value_that_python_cannot_hold_may_be_moved() -> None:
    def moved(record: Record) -> Record:
        after = record.after or {}
        return record.replace(after={"id": after["id"], "created": after["made"], "price": after["price"]})

    [found] = applied(stamped(), Each(moved))
    created = [Record(found, row, {}).after["created"] for row in range(3)]
    assert created == [date(2024, 2, 29), "infinity", date(2024, 2, 29)]
    assert documents([found])[1]["after"]["created"] == "infinity"
    values = applied(stamped(), Each(lambda r: r.replace(value={**(r.after or {})})))
    assert [Record(values[0], row, {}).value["made"] for row in range(3)] == created
    assert documents(values)[1]["made"] == "infinity"


def test_a_value_that_python_cannot_hold_may_be_replaced_in_a_flat_record() -> None:
    new = date(2024, 3, 1)
    found = applied(stamped(), {"type": "flatten"}, Each(lambda r: r.replace(value={**r.value, "made": new})))
    assert [each["made"] for each in documents(found)] == [19_783] * 3
    assert Record(found[0], 1, {}).value["price"] == "NaN"


def test_a_value_that_python_cannot_hold_may_be_only_in_the_key_of_a_flat_record() -> None:
    group = orders(insert("1", *USUAL), insert("2", *ODD), columns=STAMPED, key=("id", "made", "price"))
    [flat] = applied(group, {"type": "flatten"}, {"type": "drop_fields", "fields": ["made", "price"]})
    [found] = applied(flat, Each(lambda record: record.replace(key=dict(record.key))))
    assert found.column("key").equals(flat.column("key"))
    assert Record(found, 1, {}).key == {"id": 2, "made": "infinity", "price": "NaN"}


ARRAYS = [("id", 23, -1), ("texts", 1009, -1), ("numbers", 1007, -1)]


def arrays() -> Group:
    return orders(insert("1", "{a,b}", "{1}"), insert("2", "{{a},{b}}", "{{1},{2}}"), columns=ARRAYS)


def test_an_array_of_more_dimensions_stays_unchanged_beside_others() -> None:
    edited = applied(arrays(), Each(lambda r: r.replace(after={**(r.after or {})})))
    assert [each["after"] for each in documents(edited)] == [each["after"] for each in documents([arrays()])]
    assert documents(edited)[1]["after"] == {"id": 2, "texts": [["a"], ["b"]], "numbers": [[1], [2]]}


def test_an_array_of_more_dimensions_becomes_text_when_moved() -> None:
    def moved(record: Record) -> Record:
        after = record.after or {}
        return record.replace(after={"t": after["texts"], "n": after["numbers"]})

    found = documents(applied(arrays(), Each(moved)))
    wanted = [{"t": ["a", "b"], "n": [1]}, {"t": "{{a},{b}}", "n": "{{1},{2}}"}]
    assert [each["after"] for each in found] == wanted


@pytest.mark.parametrize("to", ["string", "unix_ms", "time"])
def test_an_infinity_is_text_in_a_type_that_lacks_it(to: str) -> None:
    columns = [("id", 23, -1), ("at", 1184, -1)]
    group = orders(insert("1", USUAL[1]), insert("2", "infinity"), columns=columns)
    [found] = applied(group, {"type": "timestamps", "fields": ["at"], "to": to})
    assert documents([found])[1]["after"]["at"] == "infinity"
    assert Record(found, 1, {}).after["at"] == "infinity"
    assert documents([found])[0]["after"]["at"] != "infinity"


@pytest.mark.parametrize("to", ["date", "timestamp"])
def test_an_infinity_stays_one_in_another_timestamp_type(to: str) -> None:
    columns = [("id", 23, -1), ("at", 1082, -1)]
    group = orders(insert("1", USUAL[0]), insert("2", "-infinity"), columns=columns)
    [found] = applied(group, {"type": "timestamps", "fields": ["at"], "to": to})
    assert Record(found, 1, {}).after["at"] == "-infinity"
