"""Values at the limits of the types, by hand: the typed column and `_special`."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.config import ColumnPolicy
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.schemas import Catalog
from tailrace.decode.types import numeric_shape, row_schema
from tailrace.errors import TailraceError
from tests.support.decode.wire import (
    column,
    decode,
    delete,
    insert,
    json_of,
    only,
    relation,
    transaction,
    typed,
    update,
)

DATE, TIMESTAMP, TIMESTAMPTZ = 1082, 1114, 1184
NUMERIC_12_2 = ((12 << 16) | 2) + 4


@given(st.lists(st.datetimes() | st.none(), max_size=20))
def test_timestamps_equal_pythons(values: list[dt.datetime | None]) -> None:
    texts = [None if v is None else v.isoformat(" ") for v in values]
    found, specials = typed(TIMESTAMP, texts) if texts else (None, [])
    assert found is None or found.to_pylist() == values
    assert not any(specials)


@given(st.lists(st.dates(), min_size=1, max_size=20))
def test_dates_equal_pythons(values: list[dt.date]) -> None:
    found, specials = typed(DATE, [value.isoformat() for value in values])
    assert found.to_pylist() == values
    assert not any(specials)


@pytest.mark.parametrize(
    ("text", "microseconds", "special"),
    [
        ("1970-01-01 00:00:00+00", 0, False),
        ("1970-01-01 05:30:00+05:30", 0, False),
        ("1969-12-31 16:00:00-08", 0, False),
        ("1970-01-01 00:19:32.13+00:19:32", 130_000, False),
        ("infinity", 2**63 - 1, True),
        ("-infinity", -(2**63), True),
        ("4713-01-01 00:00:00+00 BC", -210_863_520_000_000_000, False),
        ("294276-12-31 23:59:59.999999+00", None, True),
        ("1970-01-01 00:00:00", None, True),
        ("1970-13-01 00:00:00+00", None, True),
        ("1970-01-01 00:00:00+0", None, True),
        ("1970-01-01 00:00:00.1234567+00", None, True),
        ("", None, True),
        (" BC", None, True),
        ("i", None, True),
    ],
)
def test_timestamps_with_zone(text: str, microseconds: int | None, special: bool) -> None:
    found, specials = typed(TIMESTAMPTZ, [text])
    assert found.cast(pa.int64()).to_pylist() == [microseconds]
    assert specials == [text if special else None]


@pytest.mark.parametrize(
    ("text", "days", "special"),
    [
        ("5874897-12-31", 2_145_042_905, False),
        ("0001-01-01", -719_162, False),
        ("0001-12-31 BC", -719_163, False),
        ("infinity", 2**31 - 1, True),
        ("-infinity", -(2**31), True),
        ("999999999-01-01", None, True),
        ("2024-01-1", None, True),
    ],
)
def test_dates(text: str, days: int | None, special: bool) -> None:
    found, specials = typed(DATE, [text])
    assert found.cast(pa.int32()).to_pylist() == [days]
    assert specials == [text if special else None]


@given(
    st.lists(
        st.none()
        | st.sampled_from(["NaN", "Infinity"])
        | st.decimals(min_value=-9999999999, max_value=9999999999, places=2),
        min_size=1,
        max_size=40,
    )
)
def test_numerics_keep_every_digit_and_nan_is_special(values: list[Decimal | str | None]) -> None:
    found, specials = typed(1700, [None if v is None else str(v) for v in values], NUMERIC_12_2)
    odd = [v if isinstance(v, str) else None for v in values]
    assert specials == odd
    assert found.to_pylist() == [None if isinstance(v, str) else v for v in values]


def test_a_number_that_does_not_fit_its_type_is_kept_as_text() -> None:
    found, specials = typed(23, ["1", "2147483648", "x", "", None, "-5"])
    assert found.to_pylist() == [1, None, None, None, None, -5]
    assert specials == [None, "2147483648", "x", "", None, None]


def test_the_modifier_of_numeric_gives_precision_and_signed_scale() -> None:
    assert numeric_shape(NUMERIC_12_2) == (12, 2)
    assert numeric_shape(((2 << 16) | (-3 & 0x7FF)) + 4) == (2, -3)
    assert numeric_shape(-1) is None


def test_arrays_with_special_items_are_special_for_the_row() -> None:
    values = ["{1.50,NaN}", "{}", "{NULL}", None, "{{1.00}}", "[2:3]={1.00,2.00}", "{1.25}"]
    found, specials = typed(1231, values, NUMERIC_12_2)
    one = Decimal("1.50")
    assert found.to_pylist() == [[one, None], [], [None], None, None, None, [Decimal("1.25")]]
    assert specials == ["{1.50,NaN}", None, None, None, "{{1.00}}", "[2:3]={1.00,2.00}", None]


@pytest.mark.parametrize(
    "text", ["", "{", "}", "{,}", "{a,}", '{"a}', '{"a\\', '{"a"b}', "{a}b", '{a"b}', "{a}}", "a"]
)
def test_malformed_arrays_are_kept_as_text(text: str) -> None:
    found, specials = typed(1009, [text])
    assert found.to_pylist() == [None]
    assert specials == [text]
    assert json_of(column(1009, [text]))[0]["after"]["v"] == text


def array_literal(items: list[str | None]) -> str:
    def item(value: str | None) -> str:
        if value is None:
            return "NULL"
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "{" + ",".join(map(item, items)) + "}"


@given(st.lists(st.lists(st.text() | st.none(), max_size=5), min_size=1, max_size=5))
def test_text_arrays_are_read_item_by_item(rows: list[list[str | None]]) -> None:
    texts = [array_literal(items) for items in rows]
    found, specials = typed(1009, texts)
    assert found.to_pylist() == rows
    assert not any(specials)
    assert [line["after"]["v"] for line in json_of(column(1009, texts))] == rows


@given(st.lists(st.binary() | st.none(), min_size=1))
def test_bytea_is_read_byte_by_byte(values: list[bytes | None]) -> None:
    found, specials = typed(17, [None if v is None else "\\x" + v.hex() for v in values])
    assert found.to_pylist() == values
    assert not any(specials)


@pytest.mark.parametrize("text", ["", "\\x0", "\\xzz", "abc", "\\", "\\000"])
def test_bytea_in_another_form_is_kept_as_text(text: str) -> None:
    found, specials = typed(17, [text])
    assert found.to_pylist() == [None]
    assert specials == [text]


ODD, GIVEN = b"caf\xe9", "\\x636166e9"


def test_a_text_that_is_not_utf8_is_returned_in_the_form_of_bytea() -> None:
    changes = column(25, ["fine", ODD, "caf\u00e9", None])
    texts = ["fine", GIVEN, "caf\u00e9", None]
    assert changes.rows().column("v").to_pylist() == texts
    assert [dict(row)["v"] for row in changes.envelope("0").column("after").to_pylist()] == texts
    assert [row["after"]["v"] for row in json_of(changes)] == texts
    assert changes.images().column("after").field("v").to_pylist() == texts
    assert changes.image_column("after", "v").to_pylist() == texts


def test_a_text_of_another_type_that_is_not_utf8_is_special() -> None:
    for kind in (23, 1082, 1009, 16):
        found, specials = typed(kind, [ODD])
        assert (found.to_pylist(), specials) == ([None], [GIVEN])


def test_keys_and_old_rows_have_the_same_form() -> None:
    columns = [("a", 25, -1), ("b", 25, -1)]
    by_key = only(
        transaction(
            relation(columns=columns, key=("a",)), update("new", "x", key=(ODD, None)), delete(ODD, None)
        )
    )
    assert by_key.old_keys().column("a").to_pylist() == [GIVEN]
    assert by_key.image("key")[0].field("a").to_pylist() == ["new", GIVEN]
    whole = relation(columns=columns, key=("a", "b"), identity="f")
    changes = only(transaction(whole, update("new", "x", old=(ODD, "x")), delete(ODD, ODD, mark=b"O")))
    assert changes.old_rows().column("a").to_pylist() == [GIVEN]
    assert [row["before"]["a"] for row in json_of(changes)] == [GIVEN, GIVEN]


@pytest.mark.parametrize("rows", [255, 256, 25_600])
def test_any_number_of_texts_may_be_not_utf8(rows: int) -> None:
    assert column(25, [ODD] * rows).rows().column("v").to_pylist() == [GIVEN] * rows


def test_masks_apply_to_the_form_of_a_text_that_is_not_utf8() -> None:
    shape = relation(columns=[("id", 23, -1), ("note", 25, -1)])
    mask = {"columns": ["public.orders.note"], "method": "truncate", "length": 4}
    rules = ColumnPolicy.model_validate({"masks": [mask]})
    [changes] = decode(transaction(shape, insert("1", ODD)), table_policy=TablePolicy.of(rules))
    assert changes.rows().column("note").to_pylist() == [GIVEN[:4]]


def test_a_character_cut_by_a_cells_end_is_not_utf8() -> None:
    shape = relation(columns=[("a", 25, -1), ("b", 25, -1)], key=())
    rows = only(transaction(shape, insert(b"\xc3", b"\xa9"))).envelope("0")
    assert dict(rows.column("after")[0].as_py()) == {"a": "\\xc3", "b": "\\xa9"}


@given(st.lists(st.binary(max_size=12), max_size=4))
@example([b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xe0\x9f\xbf", b"abcdefghi\xc3"])
def test_the_same_texts_are_utf8_as_in_python(texts: list[bytes]) -> None:
    def form(text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "\\x" + text.hex()

    if texts:
        assert column(25, texts).rows().column("v").to_pylist() == [form(text) for text in texts]


def test_a_column_with_a_reserved_name_is_refused_only_in_rows() -> None:
    shape = relation(columns=[("_op", 25, -1), ("A", 23, -1), ("a", 23, -1)], key=())
    changes = only(transaction(shape, insert("x", "1", "2")))
    with pytest.raises(TailraceError, match="reserved name"):
        changes.rows()
    assert dict(changes.envelope("0").column("after")[0].as_py()) == {"_op": "x", "A": "1", "a": "2"}


def test_columns_that_differ_only_in_case_are_two() -> None:
    shape = relation(columns=[("A", 23, -1), ("a", 23, -1)], key=())
    schema = row_schema(Catalog([shape]).relation(16385))
    assert schema.names[:2] == ["A", "a"]
