"""Conversion of values and files to another column type, without a sink."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.sinks.delta import rewrite
from tailrace.sinks.delta.rewrite import RewriteTask, conform
from tailrace.sinks.delta.shapes import ShapeStep, Unfit, cast_exactly, reshaped


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (pa.array([b"\xff\x00a", b"", None]), ["\\xff0061", "\\x", None]),
        (pa.array([[1, None], [], None, [3]]), ["{1,NULL}", "{}", None, "{3}"]),
        (
            pa.array([["plain", "a,b", "", "null", 'q"\\', "two words", None]]),
            ['{plain,"a,b","","null","q\\"\\\\","two words",NULL}'],
        ),
        (pa.array([[b"\x01"]]), ['{"\\\\x01"}']),
        (pa.array([[1], [2, 3], [4]]).slice(1), ["{2,3}", "{4}"]),
        (pa.array([True, None]), ["true", None]),
    ],
)
def test_values_converted_to_text_lose_nothing(values: Any, texts: list[str | None]) -> None:
    assert cast_exactly(values, pa.string(), "c", lenient=True).to_pylist() == texts
    assert cast_exactly(pa.chunked_array([values]), pa.string(), "c", lenient=True).to_pylist() == texts


def test_a_value_that_does_not_fit_is_refused_unless_it_may_be_null() -> None:
    values = pa.array(["1", "one", None])
    with pytest.raises(Unfit):
        cast_exactly(values, pa.int32(), "c")
    assert cast_exactly(values, pa.int32(), "c", lenient=True).to_pylist() == [1, None, None]


def test_integers_become_a_decimal_of_fewer_digits_if_they_fit() -> None:
    values = pa.chunked_array([pa.array([9999, -1, None], pa.int32())])
    assert cast_exactly(values, pa.decimal128(5, 1), "c").to_pylist() == [
        Decimal("9999.0"),
        Decimal(-1),
        None,
    ]
    with pytest.raises(Unfit):
        cast_exactly(pa.array([10000], pa.int32()), pa.decimal128(5, 1), "c")


def test_infinite_dates_become_infinite_timestamps() -> None:
    days = pa.array([2**31 - 1, 0, None, -(2**31), 1], pa.int32()).cast(pa.date32())
    for lenient in (False, True):
        moments = cast_exactly(pa.chunked_array([days]), pa.timestamp("us"), "c", lenient=lenient)
        assert moments.cast(pa.int64()).to_pylist() == [2**63 - 1, 0, None, -(2**63), 86_400_000_000]
    with pytest.raises(Unfit):
        cast_exactly(pa.array([2**31 - 2], pa.int32()).cast(pa.date32()), pa.timestamp("us"), "c")


def test_files_that_a_user_had_spark_rewrite_keep_their_times(tmp_path: Path) -> None:
    kind = pa.timestamp("us", tz="UTC")
    held = [2**63 - 1, 253402214400000000, 1577836800000000, None]  # infinity, 9999-12-31, 2020-01-01
    path, out = str(tmp_path / "optimised.parquet"), str(tmp_path / "out.parquet")
    rows = pa.table({"id": pa.array(range(4)), "at": pa.array(held, kind)})
    pq.write_table(rows, path, use_deprecated_int96_timestamps=True)  # as Spark does by default
    steps = (ShapeStep(pa.field("at", kind), "at"), ShapeStep(pa.field("id", pa.int32()), "id"))
    conform(RewriteTask((path,), steps, (), out, ()))
    assert pq.read_table(out)["at"].cast(pa.int64()).to_pylist() == held


def test_large_rows_are_rewritten_in_smaller_batches(tmp_path: Path, monkeypatch) -> None:
    sizes: list[int] = []

    def noted(rows: pa.Table, *others: Any) -> pa.Table:
        sizes.append(rows.nbytes)
        return reshaped(rows, *others)

    monkeypatch.setattr(rewrite, "BUFFERED_BYTES_MAX", 64 << 10)
    monkeypatch.setattr(rewrite, "reshaped", noted)
    path, out = str(tmp_path / "large.parquet"), str(tmp_path / "out.parquet")
    rows = pa.table({"id": range(40), "note": [f"{number}" * (8 << 10) for number in range(40)]})
    pq.write_table(rows, path)
    conform(RewriteTask((path,), (ShapeStep(pa.field("note", pa.string()), "note"),), (), out, ()))
    assert max(sizes) < 128 << 10
    assert pq.read_table(out)["note"].equals(rows["note"])
