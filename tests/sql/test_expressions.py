"""What SQLite does not have or does otherwise: casts, decimals, times, JSON, patterns, messages."""

from __future__ import annotations

import datetime as dt
import json
import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.sql.computing import NoColumnError
from tailrace.sql.expression import Expression
from tailrace.sql.json_members import are_json, member_of
from tailrace.sql.tokens import ExpressionError

UTC = dt.UTC
MIDNIGHT = dt.datetime(2024, 2, 29)  # noqa: DTZ001 - a timestamp without a zone


class Columns:
    """Rows given column by column, under `after`."""

    def __init__(self, **columns: pa.Array) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 1

    def column(self, parts: tuple[str, ...]) -> pa.Array:
        if parts[1] not in self.columns:
            raise NoColumnError(f"no column {parts[1]}")
        return self.columns[parts[1]]

    def was_sent(self, parts: tuple[str, ...]) -> pa.Array:
        return pa.array([True] * len(self))


def value(text: str, **columns: pa.Array) -> Any:
    [found] = Expression(text, ("after",)).values(Columns(**columns)).to_pylist()
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3 - -4", 11),
        ("7 / 2", 3),
        ("-7 / 2", -3),
        ("-7 % 3", -1),
        ("7 / 0", None),
        ("7.0 / 0", None),
        ("1.5 + 1", Decimal("2.5")),
        ("0.1 + 0.2 = 0.3", True),
        ("1e0 + 0.5", 1.5),
        ("1.25 * 1.25", Decimal("1.5625")),
        ("9223372036854775807 + 0.5", Decimal("9223372036854775807.5")),
        ("99999999999999999999 > 1", True),
        ("'a' || 1 || true", "a1true"),
        ("concat('a', null, 2)", "a2"),
        ("'a' || null is null", True),
        ("round(2.5)", Decimal(3)),
        ("round(-2.5)", Decimal(-3)),
        ("round(2.345, 2)", Decimal("2.350")),
        ("round(1234, -2)", 1200),
        ("floor(-1.5) + ceil(1.2)", Decimal(0)),
        ("greatest(1, null, 3.5)", Decimal("3.5")),
        ("least('b', 'a')", "a"),
        ("left('abc', 2) || right('abc', 1) || left('abc', -1) || right('abc', -2)", "abcabc"),
        ("substring('abcdef' from 2 for 3)", "bcd"),
        ("substring('abc', 0, 2)", "a"),
        ("upper('ä') || lower('Ä')", "Ää"),
        ("length('€é')", 2),
        ("starts_with('abc', 'ab') and ends_with('abc', 'bc')", True),
        ("'Abc' ilike 'a_C'", True),
        ("'a%c' like 'a!%c' escape '!'", True),
        ("'abc' ~ '^a.c$' and 'ABC' ~* 'b' and 'x' !~ 'y'", True),
        ("cast('12' as integer) + '3'::bigint", 15),
        ("cast(2.5 as integer)", 3),
        ("cast(2.5e0 as integer)", 2),
        ("cast(' 1.005 ' as numeric(5, 2))", Decimal("1.01")),
        ("cast(0.00000001 as text)", "0.00000001"),
        ("cast('yes' as boolean) and not cast('0' as boolean)", True),
        ("cast(true as text) || cast(1 as boolean)::text", "truetrue"),
        ("date '2024-02-29'::timestamp", MIDNIGHT),
        ("cast('2024-02-29 12:30:00.5' as timestamp)::text", "2024-02-29 12:30:00.5"),
        ("timestamptz '2024-02-29 12:30:00+02'::text", "2024-02-29 10:30:00+00"),
        ("timestamptz '2024-02-29' = timestamptz '2024-02-29T00:00:00Z'", True),
        ("timestamp '1969-12-31 23:59:59'::date", dt.date(1969, 12, 31)),
        ("date '2024-01-01' < timestamp '2024-01-01 00:00:01'", True),
        ("'{\"a\": {\"b\": [1, \"x\\u00e9\\n\", null]}}' -> 'a' -> 'b' ->> 1", "xé\n"),
        ("'[1, 2.50 , {}]' -> 1", "2.50"),
        ("'{\"a\": null}' -> 'a'", "null"),
        ("'{\"a\": null}' ->> 'a'", None),
        ("'{\"a\": 1' -> 'a'", None),
        ("null is not distinct from null", True),
        ("null and false", False),
        ("null or false", None),
        ("case 2 when 1 then 'a' when 2 then 'b' end", "b"),
        ("case when false then 1 else 2.5 end", Decimal("2.5")),
        ("cast(2 as numeric) * cast(3 as numeric) * cast(4 as numeric)", Decimal(24)),
        ("1 in (2, null)", None),
        ("not true = false", True),
        ("TRUE AND -- a remark\n NOT False", True),
    ],
)
def test_a_value_is_what_postgresql_would_make_it(text: str, expected: Any) -> None:
    assert value(text) == expected
    assert value(f"({text})") == expected


def test_columns_of_every_kind_are_compared_with_texts_in_quotes() -> None:
    moment = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    columns = {
        "d": pa.array([dt.date(2024, 1, 2)]),
        "t": pa.array([moment], pa.timestamp("us", tz="UTC")),
        "n": pa.array([Decimal("12.50")], pa.decimal128(12, 2)),
        "i": pa.array([7], pa.int16()),
        "f": pa.array([0.5], pa.float32()),
        "b": pa.array([True]),
        "c": pa.array(["x"]).dictionary_encode(),
    }
    text = (
        "after.d = '2024-01-02' and after.t > '2024-01-02 03:04:04+00' and after.n = '12.5' and "
        "after.i in ('7', '8') and '0.5' = after.f and after.b = 't' and after.c = 'x' and "
        "after.n between 12 and 13 and after.i < 7.5 and after.n in (1, 12.5, 2e0)"
    )
    assert value(text, **columns) is True


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("after.i = after.s", 8, "integer and text don't go together"),
        ("after.i", 0, "must be true or false"),
        ("1 and true", 0, "must be true or false"),
        ("after.s + 1 > 0", 8, "takes numbers, not text"),
        ("after.i like 'x'", 8, "a pattern is for text"),
        ("lower(after.i) = 'x'", 0, "takes text, not integer"),
        ("after.t = after.z", 8, "timestamp and timestamptz don't go together"),
        ("cast(after.i as date) is null", 0, "no cast from integer"),
        ("9223372036854775807 + after.i > 0", 20, "out of range"),
        ("cast(after.s as integer) > 0", 0, "not of that form"),
        ("after.none = 1", 0, "no column none"),
        ("after.s ~ '('", 8, "RE2"),
        ("after.s -> after.s is null", 8, "as it stands"),
        ("after.i > '1x'", 10, "not of that form"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place_and_no_value(text: str, at: int, words: str) -> None:
    columns = Columns(
        i=pa.array([1]),
        s=pa.array(["secret"]),
        t=pa.array([MIDNIGHT]),
        z=pa.array([dt.datetime(2024, 1, 1, tzinfo=UTC)]),
    )
    with pytest.raises(ExpressionError, match=words) as caught:
        Expression(text, ("after",)).chosen(columns)
    assert caught.value.at == at
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("", 0, "found the end"),
        ("after.a >", 9, "expected a value"),
        ("after.a = 1 = 2", 12, "can't be chained"),
        ("lowr(after.a)", 0, "did you mean 'lower'"),
        ("'open", 0, "does not end"),
        ("a.b", 0, "but after"),
        ("length(1, 2)", 0, "takes 1 arguments, not 2"),
        ("cast(1 as money)", 10, "no type 'money'"),
        ("after.a in ()", 12, "expected a value"),
        ("case 1 end", 7, "expected 'when'"),
        ("1 not 2", 6, "expected 'in', 'between' or 'like'"),
        ("import os", 7, "expected an operator or the end"),
        ("(" * 100 + "1", 40, "levels deep"),
        ("not " * 200 + "true", 400, "levels deep"),
        ("1" + " + 1" * 200, 404, "levels deep"),
        ("'" + "x" * 10_000, 10_000, "longer than"),
        ("1 ; 2", 2, "no part of the language"),
    ],
)
def test_what_can_not_be_read_is_said_with_its_place(text: str, at: int, words: str) -> None:
    with pytest.raises(ExpressionError, match=words) as caught:
        Expression(text, ("after",))
    assert caught.value.at == at
    assert pickle.loads(pickle.dumps(caught.value)).at == at  # noqa: S301


@given(st.text(max_size=60))
def test_no_text_does_anything_but_compute_or_fail(text: str) -> None:
    at = 0
    try:
        Expression(text, ("after",)).values(Columns(a=pa.array(["x", None])))
    except ExpressionError as error:
        at = error.at
    assert 0 <= at <= len(text)


def test_a_side_that_decides_keeps_the_other_from_being_asked() -> None:
    assert value("after.a = 2 and after.none = 1", a=pa.array([1])) is False
    assert value("after.a = 1 or after.none = 1", a=pa.array([1])) is True
    assert value("case when after.a = 1 then 'x' else after.none end", a=pa.array([1])) == "x"
    text = "case when after.a = 1 then 'x' when after.none = 1 then after.none else after.none end"
    assert value(text, a=pa.array([1])) == "x"
    typed = Expression("case when after.a > 1 then 'x' else null end", ("after",))
    assert typed.values(Columns(a=pa.array([1]))).type == pa.string()
    failing = "case when after.s ~ '^\\d+$' then cast(after.s as integer) end"
    found = Expression(failing, ("after",)).values(Columns(s=pa.array(["1", "a", None, "2"])))
    assert found.to_pylist() == [1, None, None, 2]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(JSON, st.booleans()), max_size=4), st.text(max_size=3) | st.integers(0, 3))
def test_members_of_json_are_those_that_json_has(documents: list[tuple[Any, bool]], key: str | int) -> None:
    texts = pa.array([json.dumps(found, ensure_ascii=plain) for found, plain in documents], pa.string())
    found = member_of(texts, key, as_text=False).to_pylist()
    as_text = member_of(texts, key, as_text=True).to_pylist()
    for (document, _), member, text in zip(documents, found, as_text, strict=True):
        has = isinstance(document, dict) if isinstance(key, str) else isinstance(document, list)
        try:
            expected = document[key] if has else None
        except LookupError:
            has = False
        if not has:
            assert member is text is None
            continue
        assert json.loads(member) == expected
        lone = isinstance(expected, str) and any(0xD800 <= ord(c) < 0xE000 for c in expected)
        if isinstance(expected, str) and not lone:
            assert text == expected
        elif not isinstance(expected, str):
            assert text == (None if expected is None else member)


@given(st.lists(st.text('{}[]",:\\u0e9tfn -.+x', max_size=12) | JSON.map(json.dumps), max_size=5))
def test_what_counts_as_json_is_what_a_strict_reader_takes(texts: list[str]) -> None:
    def refuse(word: str) -> None:
        raise ValueError(word)

    def is_json(text: str) -> bool:
        try:
            json.loads(text, parse_constant=refuse)
        except ValueError:
            return False
        return True

    assert are_json(pa.array(texts, pa.string())).tolist() == [is_json(text) for text in texts]


def test_slices_of_arrays_are_read_at_their_place() -> None:
    texts = pa.array(['{"a": 1}', None, '{"a": 2}', "x"]).slice(1)
    assert member_of(texts, "a", as_text=True).to_pylist() == [None, "2", None]
    assert are_json(texts).tolist() == [False, True, False]
