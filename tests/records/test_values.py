"""A value that Python's type can't hold has a special form, and the other values stay readable."""

from __future__ import annotations

import datetime as dt
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.converters.native import ArrowConverter, PythonConverter
from tailrace.decode.values.stamps import stamp_texts
from tailrace.records.batch import Batch
from tailrace.records.events import Events
from tailrace.records.group import Group
from tailrace.records.record import Record
from tailrace.records.values import python_values
from tests.support.decode.wire import delete, insert, only, relation, transaction

#: Types with values that no Python type, or not the column's, can hold: oid, modifier, PostgreSQL's text.
ODD = [
    (1082, -1, "infinity"), (1082, -1, "-infinity"), (1082, -1, "0001-12-31 BC"), (1082, -1, "10000-01-01"),
    (1082, -1, "5874897-12-31"), (1082, -1, "4714-11-24 BC"),
    (1114, -1, "infinity"), (1114, -1, "-infinity"), (1114, -1, "0001-12-31 23:59:59.999999 BC"),
    (1114, -1, "10000-01-01 00:00:00"), (1114, -1, "294276-12-31 23:59:59.999999"),
    (1184, -1, "infinity"), (1184, -1, "4714-11-24 00:00:00+00 BC"), (1184, -1, "10000-01-01 00:00:00+00"),
    (1700, ((12 << 16) | 2) + 4, "NaN"), (1007, -1, "{{1},{2}}"), (1007, -1, "[0:1]={1,2}"),
    (1182, -1, "{infinity}"), (1231, ((12 << 16) | 2) + 4, "{1.50,NaN}"), (5069, -1, "18446744073709551615"),
]  # fmt: skip

#: Those that have Python's own form, or are texts in all rows.
USUAL = [
    (1082, -1, "0001-01-01", dt.date(1, 1, 1)), (1082, -1, "9999-12-31", dt.date.max),
    (1114, -1, "9999-12-31 23:59:59.999999", dt.datetime.max),  # noqa: DTZ901
    (1114, -1, "0001-01-01 00:00:00", dt.datetime.min),  # noqa: DTZ901
    (1184, -1, "9999-12-31 23:59:59.999999+00", dt.datetime.max.replace(tzinfo=dt.UTC)),
    (1083, -1, "24:00:00", "24:00:00"), (1186, -1, "infinity", "infinity"),
    (1700, -1, "Infinity", "Infinity"),
    (3904, -1, "empty", "empty"), (701, -1, "-Infinity", float("-inf")),
]  # fmt: skip


def group_of(kind: int, modifier: int, texts: list[str], key: tuple[str, ...] = ("id",)) -> Group:
    shape = relation(columns=[("id", 23, -1), ("v", kind, modifier)], key=key)
    changes = only(transaction(shape, *(insert(str(n), text) for n, text in enumerate(texts))))
    return Group.of_changes("t", np.arange(len(changes)), changes)


@pytest.mark.parametrize(("kind", "modifier", "text"), ODD)
def test_an_unusual_value_is_its_text_and_other_values_are_readable(
    kind: int, modifier: int, text: str
) -> None:
    usual = {1082: "2024-01-01", 1114: "2024-01-01 00:00:00", 1184: "2024-01-01 00:00:00+00"}.get(kind)
    texts = [usual] * 3 + [text] + [usual] * 2000 if usual else [text]
    group = group_of(kind, modifier, texts)
    records = [Record(group, row, {}) for row in range(len(group))]
    found = [record.after for record in records]
    assert [value["v"] for value in found if value is not None and isinstance(value["v"], str)] == [text]
    assert [value["id"] for value in found if value is not None] == list(range(len(texts)))
    assert Record(group_of(kind, modifier, [text]), 0, {}).value["after"]["v"] == text  # alone, too


@pytest.mark.parametrize(("kind", "modifier", "text", "value"), USUAL)
def test_a_value_at_the_limit_is_pythons_own(kind: int, modifier: int, text: str, value: Any) -> None:
    assert Record(group_of(kind, modifier, [text]), 0, {}).after == {"id": 0, "v": value}


@pytest.mark.parametrize(("kind", "modifier", "text"), ODD[:14])
def test_keys_and_rows_before_have_the_same_form(kind: int, modifier: int, text: str) -> None:
    shape = relation(columns=[("id", 23, -1), ("v", kind, modifier)], key=("v",), identity="f")
    changes = only(transaction(shape, insert("1", text), delete("1", text, mark=b"O")))
    group = Group.of_changes("t", np.arange(2), changes)
    inserted, deleted = Record(group, 0, {}), Record(group, 1, {})
    assert inserted.key == deleted.key
    if kind != 1700:
        assert deleted.before == {"id": 1, "v": text}


@pytest.mark.parametrize("converter", [ArrowConverter, PythonConverter])
def test_events_of_records_with_unusual_values_are_readable(converter: Any) -> None:
    group = group_of(1184, -1, ["infinity", "2024-01-01 00:00:00+00", "4713-01-01 00:00:00+00 BC"], ("v",))
    batch = Batch({}, (group,), len(group), [{}] * len(group))
    events = list(Events(batch, (converter().convert(group),)))
    texts = ["infinity", dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "4713-01-01 00:00:00+00 BC"]
    assert [event.value["after"]["v"] for event in events] == texts
    assert [event.key["v"] for event in events] == texts


@given(st.lists(st.none() | st.fixed_dictionaries({"d": st.none() | st.dates(), "n": st.lists(st.dates())})))
def test_values_that_python_can_hold_equal_arrows(rows: list[Any]) -> None:
    array = pa.array(rows, pa.struct([("d", pa.date32()), ("n", pa.list_(pa.date32()))]))
    assert python_values(array) == array.to_pylist() == rows
    assert python_values(array.slice(1)) == rows[1:]


def test_decimals_stay_decimals_beside_an_unusual_one() -> None:
    group = group_of(1700, ((12 << 16) | 2) + 4, ["1.50", "NaN"])
    assert [Record(group, row, {}).after for row in range(2)] == [
        {"id": 0, "v": Decimal("1.50")},
        {"id": 1, "v": "NaN"},
    ]


@given(
    st.integers(0, 38).flatmap(
        lambda scale: st.tuples(
            st.just(scale), st.lists(st.none() | st.integers(-(10**38) + 1, 10**38 - 1) | st.integers())
        )
    )
)
def test_decimals_have_every_digit_whatever_the_precision_of_the_thread(
    given_: tuple[int, list[Any]],
) -> None:
    scale, numbers = given_
    exact = [
        None if n is None else Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -scale))
        for n in numbers
        if n is None or abs(n) < 10**38
    ]
    array = pa.array(exact, pa.decimal128(38, scale))
    with localcontext(Context(prec=2)):
        for part, wanted in ((array, exact), (array.slice(1), exact[1:])):
            found = python_values(part)
            assert [n and n.as_tuple() for n in found] == [n and n.as_tuple() for n in wanted]


@pytest.mark.parametrize("columns", [1, 2, 32, 33, 300])
def test_rows_are_dictionaries_whatever_the_names_of_the_columns(columns: int) -> None:
    names = ["a'b\"\\{}\n", "é ", "", "v0", "rows", *(f"c{n}" for n in range(columns))][:columns]
    rows = [{name: n * at for at, name in enumerate(names)} for n in range(5)] + [None]
    array = pa.array(rows, pa.struct([pa.field(name, pa.int64()) for name in names]))
    assert python_values(array) == array.to_pylist() == rows
    assert [list(row) for row in python_values(array)[:5]] == [names] * 5


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_nanoseconds_are_rounded_down_to_a_datetime(zone: str | None) -> None:
    stamps = pa.array([1_999, None, -1], pa.timestamp("ns", zone))
    zero = dt.datetime(1970, 1, 1, tzinfo=dt.UTC if zone else None)
    us = dt.timedelta(microseconds=1)
    assert python_values(stamps) == [zero + us, None, zero - us]
    assert stamp_texts(stamps).to_pylist()[2][:26] == "1969-12-31 23:59:59.999999"
