"""The kernels for numbers and timestamps, compared with Arrow's casts, Python, and their own general path."""

from __future__ import annotations

import datetime as dt
import struct
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.decode import columns
from tailrace.decode.gather import Cells, gather
from tailrace.decode.kernel import NULL, TEXT
from tailrace.decode.values import literals

#: Texts that resemble numbers but are none, or numbers that not every type holds.
ODD = ["", "-", "--1", "+1", "1-", ".", "1.", ".5", "-.5", "1.5", "1,5", "NaN", "Infinity", "-Infinity",
       "0x10", "1e5", "1e", "e5", "1e+", "1e+5", "1e+400", "1e-400", "5e-324", "1/2", "1:2", " 1", "1 ",
       "007", "-0", "18446744073709551616", "9223372036854775807", "9223372036854775808",
       "-9223372036854775808", "-9223372036854775809", "12345678", "123456789", "1234567890123456",
       "12345678901234567", "99999999.99", "00000000000000000000001", "0.00", "-0.00", "0.000",
       "1.7976931348623157e+308"]  # fmt: skip

TYPES = [pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
         pa.decimal128(5, 0), pa.decimal128(12, 2), pa.decimal128(18, 18), pa.decimal128(38, 10),
         pa.decimal128(38, 20)]  # fmt: skip


def cells_of(texts: list[str | None], before: int) -> Cells:
    """Cells whose texts are adjacent, after `before` other bytes and with none after them."""
    encoded = [(text or "").encode() for text in texts]
    raw = np.frombuffer(b"7" * before + b"".join(encoded), np.uint8)
    length = np.array([len(text) for text in encoded], np.int32)
    start = (before + np.cumsum(length) - length).astype(np.int32)
    return Cells(raw, start, length, np.array([NULL if text is None else TEXT for text in texts], np.uint8))


def same(one: object, other: object) -> bool:
    """Equal; floating-point numbers bit by bit."""
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return one == other


numerals = st.from_regex(r"-?[0-9]{1,21}(\.[0-9]{1,20})?(e[+-][0-9]{1,3})?", fullmatch=True)
plain = st.integers(-(2**64), 2**64).map(str) | st.decimals(-(10**10), 10**10, places=2).map(str)


@pytest.mark.parametrize("arrow", TYPES, ids=str)
@given(
    st.lists(st.none() | st.sampled_from(ODD) | numerals | plain, min_size=1, max_size=4),
    st.integers(0, 40),
)
@example(ODD, 0)
def test_numbers_equal_arrows(arrow: pa.DataType, texts: list[str | None], before: int) -> None:
    cells = cells_of(texts, before)
    found, expected = columns.number(arrow, 0).read(cells), columns._cast(gather(cells), arrow)
    found.values.validate(full=True)
    assert all(map(same, found.values.to_pylist(), expected.values.to_pylist())), found.values
    assert found.special_rows.tolist() == expected.special_rows.tolist()


def written(value: float) -> str:
    """A double as PostgreSQL writes it: the shortest text that reads back, with an exponent from 1e+15 on."""
    shortest = repr(value)
    sign = "-" if shortest.startswith("-") else ""
    digits_, exponent = Decimal(shortest).normalize().as_tuple()[1:]
    text = "".join(map(str, digits_))
    place = len(text) + int(exponent) - 1
    if -5 <= place < 15:
        return sign + format(abs(Decimal(shortest)), "f").removesuffix(".0")
    return f"{sign}{text[0]}{'.' * (len(text) > 1)}{text[1:]}e{'-' if place < 0 else '+'}{abs(place):02d}"


doubles = (
    st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(-1000, 1000)
    | st.integers(-(10**17), 10**17).map(float)
)

EDGES = [0.0, -0.0, 1e15, 123456789012345.67, 0.00012345678901234567, 2.2250738585072014e-308, 2.0**53]


@given(st.lists(doubles, min_size=1, max_size=20), st.integers(0, 40))
@example(EDGES, 0)
def test_doubles_are_exact_to_the_bit(values: list[float], before: int) -> None:
    texts = [written(value) for value in values]
    found = columns.number(pa.float64(), 0).read(cells_of([*texts], before)).values.to_pylist()
    assert all(map(same, found, values)), (texts, found)


@given(st.lists(st.tuples(st.integers(1, 10**19 - 1), st.integers(-320, 300)), min_size=1, max_size=20))
@example([(9007199254740993, 0), (90071992547409930000, -4), (1 << 53 | 1, 20), (5, -1), (2**63 + 2**10, 0)])
def test_digits_beyond_a_double_are_rounded_to_the_nearest(numbers: list[tuple[int, int]]) -> None:
    texts = [f"{number}e{exponent:+03d}" for number, exponent in numbers]
    found = columns.number(pa.float64(), 0).read(cells_of([*texts], 0)).values.to_pylist()
    assert found == [float(text) for text in texts]


stamps = st.datetimes().map(lambda stamp: stamp.isoformat(" "))
zones = st.sampled_from(["", "+00", "-00", "+05:30", "-08", "+00:19:32", " BC", "+00 BC", "Z", "+0"])
letters = st.sampled_from(["", "0", "9", " ", ":", "/", "\x00", "-"])


def bent(stamp: str, zone: str, at: int, letter: str) -> str:
    """A timestamp with another letter at one place, or with one place removed."""
    text = stamp + zone
    return text[:at] + letter + text[at + 1 :]


EDGE_STAMPS = ["2024-02-30 23:59:60.000001+00", "0000-01-01", "2024-00-01", "2024-12-31 24:00:00",
               "2024-01-01 00:00:00."]  # fmt: skip


@pytest.mark.parametrize("flavour", [literals.DATE, literals.TIMESTAMP, literals.TIMESTAMPTZ])
@given(
    st.lists(
        st.none()
        | st.tuples(stamps, zones).map("".join)
        | st.dates().map(dt.date.isoformat)
        | st.builds(bent, stamps, zones, st.integers(0, 30), letters),
        min_size=1,
        max_size=5,
    )
)
@example(EDGE_STAMPS)
def test_the_fast_path_for_timestamps_equals_the_general_one(flavour: int, texts: list[str | None]) -> None:
    cells = cells_of([*texts], 0)
    values, outcome = np.empty(len(texts), np.int64), np.empty(len(texts), np.uint8)
    literals.read_temporals(cells.buffer, cells.start, cells.length, cells.kind, flavour, values, outcome)
    for r, text in enumerate(texts):
        expected = (0, literals.PLAIN)
        if text is not None:
            expected = literals.read_temporal(cells.buffer, int(cells.start[r]), len(text), flavour)
        assert (values[r], outcome[r]) == expected, text
