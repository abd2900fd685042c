"""Values read from whole columns equal those that pyarrow returns one by one."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

from tailrace.records.values import python_values

UTC = dt.UTC
NUMBERS = ["0.00", "-0.01", "1.25", "-99999999.99", "99999999.99"]
MOMENTS = [
    dt.datetime(1, 1, 1, tzinfo=UTC),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    dt.datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=UTC),
    dt.datetime(2024, 2, 29, 12, 0, 0, 100, tzinfo=UTC),
]
COLUMNS = {
    "number": pa.array([*map(Decimal, NUMBERS), None], pa.decimal128(12, 2)),
    "whole": pa.array([Decimal(0), None, Decimal(-7), Decimal(10**37)], pa.decimal128(38, 0)),
    "small": pa.array([Decimal("1e-18"), Decimal("0e-18"), None], pa.decimal128(38, 18)),
    "large": pa.array([Decimal("1e60"), None], pa.decimal256(76, 2)),
    "hundreds": pa.array([Decimal(1200), None], pa.decimal128(5, -2)),
    "naive": pa.array([*(moment.replace(tzinfo=None) for moment in MOMENTS), None], pa.timestamp("us")),
    "utc": pa.array([*MOMENTS, None], pa.timestamp("us", "UTC")),
    "elsewhere": pa.array([1_700_000_000_000_000, None], pa.timestamp("us", "Europe/Berlin")),
    "seconds": pa.array([1_700_000_000, None], pa.timestamp("s", "UTC")),
    "no moments": pa.nulls(3, pa.timestamp("us", "UTC")),
    "day": pa.array([dt.date(2024, 2, 29), None]),
    "text": pa.array(["x", "", None]),
    "lists": pa.array([[Decimal("1.10"), None], None, []], pa.list_(pa.decimal128(5, 2))),
    "nothing": pa.nulls(2),
    "empty": pa.array([], pa.timestamp("us", "UTC")),
    "structs": pa.array(
        [{"a": 1, "b": {"c": MOMENTS[3]}}, None, {"a": None, "b": None}],
        pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.timestamp("us", "UTC"))]))]),
    ),
    "no fields": pa.array([{}, None], pa.struct([])),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_gives_the_same_values_as_pyarrow(name: str) -> None:
    column = COLUMNS[name]
    for part in (column, column.slice(1), column.slice(0, 1), column.slice(1, 2)):
        found, wanted = python_values(part), part.to_pylist()
        assert found == wanted
        # Digits, time zones and types are the same, too.
        assert repr(found) == repr(wanted)
