"""Debezium's handling modes: their results in JSON and in typed columns."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.config.source.postgres import PostgresSource
from tailrace.decode.changes import decode_block
from tailrace.model import ValueModes
from tests.support.decode.wire import SOURCE, UNCHANGED, insert, relation, transaction, update, xlog

BYTEA, NUMERIC, MONEY, DATE, TIME, TIMETZ, TIMESTAMP, TIMESTAMPTZ, INTERVAL = (
    17, 1700, 790, 1082, 1083, 1266, 1114, 1184, 1186,
)  # fmt: skip
HSTORE = 20_000
HSTORE_TYPE = xlog(b"Y" + HSTORE.to_bytes(4, "big") + b"public\0hstore\0")


def numeric(precision: int, scale: int) -> int:
    return ((precision << 16) | (scale & 0x7FF)) + 4


def given_as(
    modes: ValueModes, kind: int, values: list[str | None], modifier: int = -1
) -> tuple[list[Any], pa.Array, list[str | None]]:
    """Return the JSON values, the typed column, and `_special`."""
    shape = relation(columns=[("v", kind, modifier)], key=())
    data = HSTORE_TYPE + transaction(shape, *(insert(value) for value in values))
    [changes] = decode_block(np.frombuffer(data, np.uint8), 0, None, (), modes=modes)
    rows = changes.rows()
    rows.validate(full=True)
    lines = [json.loads(line)["after"]["v"] for line in changes.json_lines("0", SOURCE).to_pylist()]
    special = [dict(entry)["v"] if entry else None for entry in rows.column("_special").to_pylist()]
    return lines, rows.column("v"), special


def decoded(value: str) -> int:
    return int.from_bytes(base64.b64decode(value, validate=True), "big", signed=True)


# numeric, money


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ("0.00", "AA=="),
        ("1.27", "fw=="),
        ("1.28", "AIA="),
        ("-1.28", "gA=="),
        ("-1.29", "/38="),
        ("123.45", "MDk="),
    ],
)
def test_a_precise_decimal_is_its_unscaled_bytes(value: str, encoded: str) -> None:
    lines, typed, _ = given_as(ValueModes(decimal="precise"), NUMERIC, [value], numeric(12, 2))
    assert lines == [encoded]
    assert typed.to_pylist() == [Decimal(value)]


def test_a_precise_decimal_without_a_declared_scale_has_its_own() -> None:
    lines, typed, special = given_as(
        ValueModes(decimal="precise"), NUMERIC, ["123.456", "-7", "NaN", "Infinity", None]
    )
    assert lines == [{"scale": 3, "value": "AeJA"}, {"scale": 0, "value": "+Q=="}, "NaN", "Infinity", None]
    assert typed.to_pylist() == ["123.456", "-7", "NaN", "Infinity", None]
    assert not any(special)


@given(st.integers(), st.integers(0, 40))
def test_any_decimal_is_read_back_from_its_bytes(unscaled: int, scale: int) -> None:
    with decimal.localcontext(prec=10_000):
        text = format(Decimal(unscaled).scaleb(-scale), "f")
    [line], _, _ = given_as(ValueModes(decimal="precise"), NUMERIC, [text])
    while scale and unscaled % 10 == 0:
        unscaled, scale = unscaled // 10, scale - 1  # zeros at the end of the fraction are removed
    assert (decoded(line["value"]), line["scale"]) == (unscaled, scale)
    assert line["value"] == base64.b64encode(_shortest(unscaled)).decode()


def _shortest(number: int) -> bytes:
    size = 1
    while not -(1 << (8 * size - 1)) <= number < 1 << (8 * size - 1):
        size += 1
    return number.to_bytes(size, "big", signed=True)


def test_a_long_decimal_is_complete() -> None:
    digits = "7" * 20_000
    [line], _, _ = given_as(ValueModes(decimal="precise"), NUMERIC, [f"-{digits}.5"])
    value, power = decoded(line["value"]), 10**20_001
    assert value == -(7 * (power // 10 - 1) // 9) * 10 - 5


def test_decimals_as_doubles_have_a_point() -> None:
    lines, typed, special = given_as(
        ValueModes(decimal="double"), NUMERIC, ["1.50", "5", "-0.1", "NaN", "1" * 20]
    )
    assert lines[:3] == [1.5, 5.0, -0.1]
    assert isinstance(lines[1], float)
    assert lines[3:] == ["NaN", float("1" * 20)]
    assert typed.type == pa.float64()
    assert typed.drop_null().to_pylist()[:3] == [1.5, 5.0, -0.1]
    assert typed[4].as_py() == float("1" * 20)
    assert math.isnan(typed[3].as_py())
    assert not any(special)


def test_decimals_as_text_are_text_also_in_typed_columns() -> None:
    lines, typed, special = given_as(ValueModes(decimal="string"), NUMERIC, ["1.50", "NaN"], numeric(12, 2))
    assert lines == typed.to_pylist() == ["1.50", "NaN"]
    assert not any(special)


@pytest.mark.parametrize(
    ("text", "digits", "amount"),
    [
        ("$1,234.56", 2, "1234.56"),
        ("-$0.01", 2, "-0.01"),
        ("($0.01)", 2, "-0.01"),
        ("1.234,56 €", 2, "1234.56"),
        ("¥1,234", 2, "1234.00"),
        ("¥1,234", 0, "1234"),
        ("KD 1,234.567", 3, "1234.567"),
        ("$1,234.56", 3, "1234.560"),
        ("$1,234.56", 1, "1234.6"),
        ("$9.99", 0, "10"),
        ("-$0.40", 0, "0"),
        ("Rs.1,234.50", 2, "1234.50"),
        ("\u22125,00\u00a0kr.", 2, "-5.00"),
        ("$92,233,720,368,547,758.07", 2, "92233720368547758.07"),
    ],
)
def test_money_is_a_number_in_any_locale(text: str, digits: int, amount: str) -> None:
    def both(mode: str) -> tuple[Any, Any]:
        lines, typed, _ = given_as(ValueModes(decimal=mode, money_fraction_digits=digits), MONEY, [text])
        return lines[0], typed[0].as_py()

    assert both("string") == (amount, amount)
    assert both("double") == (float(amount), float(amount))
    line, value = both("precise")
    assert (decoded(line), value) == (int(amount.replace(".", "")), Decimal(amount))


def test_money_is_text_without_a_mode() -> None:
    lines, typed, _ = given_as(ValueModes(), MONEY, ["$1.00"])
    assert lines == typed.to_pylist() == ["$1.00"]


# dates and times

STAMP = "2018-06-20 15:13:16.945104"
INFINITY = 9_223_372_036_825_200_000


@pytest.mark.parametrize(
    ("mode", "modifier", "expected"),
    [
        (None, -1, [1529507596945104, "infinity", "-infinity"]),
        ("adaptive", -1, [1529507596945104, INFINITY, -9_223_372_036_832_400_000]),
        ("adaptive", 3, [1529507596945, 9_223_372_036_825_200, -9_223_372_036_832_400]),
        ("adaptive_time_microseconds", 3, [1529507596945, 9_223_372_036_825_200, -9_223_372_036_832_400]),
        ("connect", 6, [1529507596945, 9_223_372_036_825_200, -9_223_372_036_832_400]),
        ("microseconds", 3, [1529507596945104, INFINITY, -9_223_372_036_832_400_000]),
        ("nanoseconds", -1, [1529507596945104000, 2**63 - 1, -(2**63)]),
        ("isostring", -1, ["2018-06-20T15:13:16.945104Z", "infinity", "-infinity"]),
    ],
)
def test_timestamps(mode: str | None, modifier: int, expected: list[Any]) -> None:
    values: list[str | None] = [STAMP, "infinity", "-infinity"]
    lines, typed, special = given_as(ValueModes(time=mode), TIMESTAMP, values, modifier)
    assert lines == expected
    assert typed.type == pa.timestamp("us")
    assert typed.cast(pa.int64()).to_pylist() == [1529507596945104, 2**63 - 1, -(2**63)]
    assert special == [None, "infinity", "-infinity"]


def test_a_timestamp_outside_nanoseconds_is_text() -> None:
    lines, _, _ = given_as(
        ValueModes(time="nanoseconds"), TIMESTAMP, ["9999-12-31 00:00:00", "1969-12-31 23:59:59"]
    )
    assert lines == ["9999-12-31 00:00:00", -1_000_000_000]


def test_milliseconds_before_1970_are_rounded_down() -> None:
    assert given_as(ValueModes(time="connect"), TIMESTAMP, ["1969-12-31 23:59:59.9999"])[0] == [-1]


@pytest.mark.parametrize(
    ("mode", "modifier", "expected", "arrow"),
    [
        (None, -1, ["04:05:11.789", "24:00:00"], pa.string()),
        ("adaptive", -1, [14_711_789_000, 86_400_000_000], pa.int64()),
        ("adaptive", 3, [14_711_789, 86_400_000], pa.int32()),
        ("adaptive_time_microseconds", 3, [14_711_789_000, 86_400_000_000], pa.int64()),
        ("connect", -1, [14_711_789, 86_400_000], pa.int32()),
        ("microseconds", 0, [14_711_789_000, 86_400_000_000], pa.int64()),
        ("nanoseconds", -1, [14_711_789_000_000, 86_400_000_000_000], pa.int64()),
        ("isostring", -1, ["04:05:11.789Z", "24:00:00Z"], pa.string()),
    ],
)
def test_times(mode: str | None, modifier: int, expected: list[Any], arrow: pa.DataType) -> None:
    lines, typed, special = given_as(ValueModes(time=mode), TIME, ["04:05:11.789", "24:00:00"], modifier)
    assert lines == typed.to_pylist() == expected
    assert typed.type == arrow
    assert not any(special)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12:00:00+05:30", "06:30:00Z"),
        ("01:00:00.5+02", "23:00:00.5Z"),
        ("24:00:00+00", "24:00:00Z"),
        ("24:00:00-15:59:59", "15:59:59Z"),
    ],
)
def test_times_with_zone_are_in_utc_under_any_mode(text: str, expected: str) -> None:
    assert given_as(ValueModes(time="adaptive"), TIMETZ, [text])[0] == [expected]
    assert given_as(ValueModes(), TIMETZ, [text])[0] == [text]


def test_dates() -> None:
    values = ["2017-09-15", "infinity", "0044-03-15 BC", "12024-01-01"]
    lines, typed, _ = given_as(ValueModes(time="isostring"), DATE, [*values])
    assert lines == ["2017-09-15Z", "infinity", "-0043-03-15Z", "+12024-01-01Z"]
    assert typed[0].as_py() == dt.date(2017, 9, 15)
    assert given_as(ValueModes(time="connect"), DATE, ["1970-01-02"])[0] == [1]


@pytest.mark.parametrize(
    ("text", "iso", "microseconds"),
    [
        ("1 year 2 mons 3 days 04:05:06.78", "P1Y2M3DT4H5M6.78S", 37_091_106_780_000),
        ("00:00:00", "P0Y0M0DT0H0M0S", 0),
        ("1 mon", "P0Y1M0DT0H0M0S", 2_629_800_000_000),
        ("-1 years -2 mons +3 days -04:05:06", "P-1Y-2M3DT-4H-5M-6S", -36_572_706_000_000),
        ("-00:00:00.000001", "P0Y0M0DT0H0M-0.000001S", -1),
        ("-3 days", "P0Y0M-3DT0H0M0S", -259_200_000_000),
        ("100:00:30", "P0Y0M0DT100H0M30S", 360_030_000_000),
        ("178000000 years", "P178000000Y0M0DT0H0M0S", None),
        ("-2562047788:00:54.775808", "P0Y0M0DT-2562047788H0M-54.775808S", None),
        ("infinity", None, None),
    ],
)
def test_intervals(text: str, iso: str | None, microseconds: int | None) -> None:
    for mode, expected in (("string", iso), ("numeric", microseconds), (None, text)):
        lines, typed, special = given_as(ValueModes(interval=mode), INTERVAL, [text])
        assert lines == [text if expected is None else expected]
        assert typed.to_pylist() == [expected]
        assert special == [text if expected is None else None]


@given(st.integers(-(10**6), 10**6), st.integers(-(10**5), 10**5), st.integers(-(10**15), 10**15))
def test_the_parts_of_any_interval_add_up(months: int, days: int, us: int) -> None:
    years, rest = divmod(abs(months), 12)
    sign = "-" if months < 0 else ""
    seconds, fraction = divmod(abs(us), 1_000_000)
    text = f"{sign}{years} years {sign}{rest} mons {days} days "
    text += (
        f"{'-' if us < 0 else ''}{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{fraction:06}"
    )
    [line], _, _ = given_as(ValueModes(interval="numeric"), INTERVAL, [text])
    assert line == months * 2_629_800_000_000 + days * 86_400_000_000 + us


# bytea, hstore, unchanged values


@given(st.binary(max_size=80))
def test_bytes(value: bytes) -> None:
    def both(mode: str | None) -> tuple[Any, Any]:
        lines, typed, _ = given_as(ValueModes(binary=mode), BYTEA, ["\\x" + value.hex()])
        return lines[0], typed[0].as_py()

    plain, url = base64.b64encode(value).decode(), base64.urlsafe_b64encode(value).decode()
    assert both(None) == both("bytes") == (plain, value)
    assert both("base64") == (plain, plain)
    assert both("base64-url-safe") == (url, url)
    assert both("hex") == (value.hex(), value.hex())


def hstore_text(pairs: dict[str, str | None]) -> str:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return ", ".join(f"{quoted(k)}=>{'NULL' if v is None else quoted(v)}" for k, v in pairs.items())


@given(st.lists(st.dictionaries(st.text(), st.text() | st.none(), max_size=4), min_size=1, max_size=4))
def test_hstores_are_documents_or_maps(rows: list[dict[str, str | None]]) -> None:
    texts: list[str | None] = [hstore_text(row) for row in rows]
    lines, typed, special = given_as(ValueModes(hstore="map"), HSTORE, texts)
    assert lines == rows
    assert [dict(row) for row in typed.to_pylist()] == rows
    assert not any(special)
    lines, typed, _ = given_as(ValueModes(hstore="json"), HSTORE, texts)
    assert lines == typed.to_pylist()
    assert [json.loads(line) for line in lines] == rows
    assert given_as(ValueModes(), HSTORE, texts)[0] == texts


@pytest.mark.parametrize(
    "text", ["x", '"a"', '"a"=>', '"a"=>1', '"a"=>"b",', '"a"=>"b", ', '"a"=>NULLx', '"a"=>NULx', '"a']
)
def test_an_invalid_hstore_stays_text(text: str) -> None:
    lines, typed, special = given_as(ValueModes(hstore="map"), HSTORE, [text])
    assert (lines, typed.to_pylist(), special) == ([text], [None], [text])


@given(
    st.sampled_from(
        [BYTEA, NUMERIC, MONEY, DATE, TIME, TIMETZ, TIMESTAMP, TIMESTAMPTZ, INTERVAL, HSTORE, 1231, 1187]
    ),
    st.sampled_from(["precise", "double"]),
    st.sampled_from(["isostring", "nanoseconds", "connect"]),
    st.sampled_from(["numeric", "string"]),
    st.lists(st.text('{}[],"\\x0123456789-+.:yearsmondNULaifBC=> $(\t', max_size=40), min_size=1),
)
@example(NUMERIC, "double", "isostring", "numeric", ["0e0"])
def test_a_value_in_another_form_than_its_types_is_text(
    kind: int, decimals: str, times: str, intervals: str, values: list[str]
) -> None:
    modes = ValueModes(decimals, times, intervals, "base64", "json")
    lines, typed, special = given_as(modes, kind, list(values))
    assert len(lines) == len(typed) == len(values)
    for value, typed_value, said in zip(values, typed, special, strict=True):
        assert said in {None, value}
        assert typed_value.is_valid or said == value


def test_items_of_arrays_follow_the_modes() -> None:
    modes = ValueModes("precise", "connect", "numeric", "hex", "map")
    assert given_as(modes, 1231, ["{1.27,NULL}"], numeric(12, 2))[0] == [["fw==", None]]
    assert given_as(modes, 1183, ["{{00:00:01},{24:00:00}}"])[0] == [[[1000], [86_400_000]]]
    lines, typed, _ = given_as(modes, 1187, ['{"1 day",NULL}', '{"1 mon 00:00:01"}'])
    assert lines == typed.to_pylist() == [[86_400_000_000, None], [2_629_801_000_000]]


def test_an_unchanged_value_has_the_configured_placeholder() -> None:
    source = PostgresSource(dbname="x", unavailable_value_placeholder='é"\n')
    data = relation() + transaction(insert("1", "a", "1.00"), update("1", UNCHANGED, "1.00"))
    [changes] = decode_block(np.frombuffer(data, np.uint8), 0, None, (), modes=source.value_modes)
    assert json.loads(changes.json_lines("0", SOURCE)[1].as_py())["after"]["note"] == 'é"\n'
    long = ValueModes(unavailable_placeholder="x" * 1000)
    [changes] = decode_block(np.frombuffer(data, np.uint8), 0, None, (), modes=long)
    assert json.loads(changes.json_lines("0", SOURCE)[1].as_py())["after"]["note"] == "x" * 1000


def test_the_sources_options_set_the_modes() -> None:
    source = PostgresSource(
        dbname="x", decimal_handling_mode="double", time_precision_mode="connect",
        interval_handling_mode="string", binary_handling_mode="base64-url-safe",
        hstore_handling_mode="map", money_fraction_digits=3,
    )  # fmt: skip
    assert source.value_modes == ValueModes("double", "connect", "string", "base64-url-safe", "map", 3)
    assert PostgresSource(dbname="x").value_modes == ValueModes()
    with pytest.raises(ValueError, match="hex"):
        PostgresSource(dbname="x", unavailable_value_placeholder="hex:zz")
