"""Expressions: values, columns, errors, and what an expression can't do."""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
import pickle
import subprocess
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.decode.values.json_texts import are_json
from tailrace.decode.values.texts import texts_of
from tailrace.expressions import database
from tailrace.expressions.computing import Expression, NoColumnError
from tailrace.expressions.language import FUNCTIONS, TYPES, ExpressionError, require_type
from tailrace.transforms.groups.values import cast

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

    def texts(self, parts: tuple[str, ...]) -> pa.Array:
        return texts_of(self.column(parts))

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
        ("cast('-9223372036854775808' as bigint) % -1", 0),
        ("cast('-9223372036854775808' as bigint) % (1 - 2)", 0),
        ("7.5 % -2", Decimal("1.5")),
        ("5 + 7 % (" * 30 + "8" + ")" * 30, 12),
        ("7.0 / 2", 3.5),
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
        ("'[1, 2.50 , {}]' -> 1", "2.5"),
        ("'[12345678901234567890123]' -> 0", "12345678901234567890123"),
        ("'[1, 2]' -> -1", "2"),
        ('\'{"$a": 1, "b/c": 2, "*": 3, "": 4}\' ->> \'$a\'', "1"),
        ('\'{"$a": 1, "b/c": 2, "*": 3, "": 4}\' ->> \'b/c\'', "2"),
        ('\'{"$a": 1, "b/c": 2, "*": 3, "": 4}\' ->> \'*\'', "3"),
        ('\'{"$a": 1, "b/c": 2, "*": 3, "": 4}\' ->> \'\'', "4"),
        ("'{\"a\": \"x\"}' -> 'a' = '\"x\"' and '{\"a\": \"x\"}' ->> 'a' = 'x'", True),
        ("'->' || ('{\"->\": 1}' -> '->')", "->1"),
        ("substring('abc', -1, 3) || substring('abc', -1)", "aabc"),
        ("trim('\u00a0 x\t ') || ltrim(' \u00a0') || rtrim('\t ')", "\u00a0 x\t\u00a0\t"),
        ("'a_c' like 'a\\_c' and not 'abc' like 'a\\_c'", True),
        ("'{\"a\": null}' -> 'a'", "null"),
        ("'{\"a\": null}' ->> 'a'", None),
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
def test_a_value_equals_postgresqls(text: str, expected: Any) -> None:
    assert value(text) == expected
    assert value(f"({text})") == expected


def test_real_has_32_bits_and_float_has_64() -> None:
    names = ["real", "REAL", "float4", "float", "float8", "double precision"]
    assert [require_type(name) for name in names] == ["FLOAT"] * 3 + ["DOUBLE"] * 3
    third = pa.array([1 / 3])
    assert value("'é' || after.x::real", x=third) == "é0.33333334"
    assert value("'é' || after.x::float", x=third) == "é0.3333333333333333"
    with pytest.raises(ExpressionError, match="out of range"):
        value("after.x::real", x=pa.array([1e300]))


@pytest.mark.parametrize("text", ["after.n * after.n", "after.n * 99999999.99", "(after.n + 0) * after.n"])
def test_a_product_of_decimals_is_exact(text: str) -> None:
    price = Decimal("99999999.99")
    assert value(text, n=pa.array([price], pa.decimal128(10, 2))) == price * price


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("coalesce(after.none, after.m)", "0.005"),
        ("coalesce(after.none, 0.00005)", "0.00005"),
        ("coalesce(after.none, '0.00005')", "0.00005"),
        ("greatest(after.m, after.none)", "0.005"),
        ("least(after.big, after.m, 7)", "0.005"),
        ("case when after.big > 1 then after.m else after.big end", "0.005"),
        ("case 1 when 2 then after.m else coalesce(after.none, coalesce(after.none, after.m)) end", "0.005"),
        ("coalesce(after.none, case when true then coalesce(after.none, after.m) end, after.big)", "0.005"),
        ("coalesce(after.none, after.fine, 3)", "1E-30"),
        ("after.big % after.m", "0"),
        ("(after.big + 0.01) % (2 * after.m - 0.003)", "0.002"),
    ],
)
def test_decimals_that_together_have_many_digits_are_not_rounded(text: str, expected: str) -> None:
    columns = {
        "big": pa.array([Decimal("12345678901234567890.00")], pa.decimal128(38, 2)),
        "none": pa.array([None], pa.decimal128(38, 2)),
        "m": pa.array([Decimal("0.005")], pa.decimal128(12, 3)),
        "fine": pa.array([Decimal("1E-30")], pa.decimal128(38, 30)),
    }
    assert value(text, **columns) == Decimal(expected)
    columns["big"] = pa.array([Decimal(10**36 - 1)], pa.decimal128(38, 2))
    with pytest.raises(ExpressionError, match="out of range"):
        value("coalesce(after.big, after.m)", **columns)
    assert value("coalesce(after.big, 0.01)", **columns) == 10**36 - 1


def test_columns_of_every_type_are_compared_with_quoted_texts() -> None:
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
    "text",
    [
        r"after.raw = '\x6162'",
        r"'\x6162' = after.raw",
        r"after.raw in ('\xDEADBEEF', '\x6162')",
        r"after.raw <> '\x01' and after.raw <> '\x61'",
        r"after.raw between '\x6161' and '\x6163'",
        r"nullif(after.raw, '\x6162') is null",
        r"case after.raw when '\x6162' then true else false end",
        "after.raw = 'ab'",
        r"after.nothing = '\x' and after.nothing < '\x00'",
        "after.n > '1.4999' and after.n < '1.501' and after.n <> '1.501'",
        "after.n in ('1.5', '-2') and after.n between '1.499' and '1.501'",
        "after.wide > '12345678901234567890.1'",
        r"coalesce(nullif(after.raw, after.raw), '\x6162') = after.raw",
        r"case when after.n is null then after.raw else '\x6162' end = after.raw",
        "after.r = '0.1' and after.r in ('0.1') and '0.1' >= after.r and after.r <> 0.1 and after.r <> '0.5'",
    ],
)
def test_a_quoted_literal_is_read_as_in_postgresql(text: str) -> None:
    columns = {
        "raw": pa.array([b"ab"]),
        "nothing": pa.array([b""]),
        "n": pa.array([Decimal("1.50")], pa.decimal128(12, 2)),
        "wide": pa.array([Decimal("12345678901234567890.2")], pa.decimal128(38, 10)),
        "r": pa.array([0.1], pa.float32()),
    }
    assert value(text, **columns) is True


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("after.i = after.s", 0, "a number and text can't be compared"),
        ("after.i > 0 and after.s in (1, 2)", 27, "text and a number can't be compared"),
        ("after.i", 0, "must be true or false"),
        ("1 and true", 0, "must be true or false"),
        ("not after.s", 4, "this is text, and must be true or false"),
        ("case when after.i then 1 end = 1", 10, "must be true or false"),
        ("after.s + 1 > 0", 8, r"'\+\(TEXT, INTEGER\)'. You might need to add explicit type casts"),
        ("after.i like 'x'", 8, r"like_escape\(BIGINT, TEXT, TEXT\)"),
        ("lower(after.i) = 'x'", 0, r"lower\(BIGINT\)"),
        ("cast(after.i as date) is null", 0, "can't be converted"),
        ("9223372036854775807 + after.i > 0", 20, "out of range"),
        ("cast(after.s as integer) > 0", 0, "can't be converted"),
        ("true and (after.i = 1 and cast(after.s as integer) > 0)", 26, "can't be converted"),
        ("7 / (after.i - 1) > 0", 0, "division by zero"),
        ("7.0 / 0 > after.i", 0, "division by zero"),
        ("after.s -> 'a' is null", 0, "a text is not JSON"),
        ("after.s || 7 / (after.i - 1) = 'x'", 11, "division by zero"),
        ("concat(after.s, cast(after.s as integer)) = 'x'", 16, "can't be converted"),
        ("after.none = 1", 0, "no column none"),
        ("2 - after.none > 1", 4, "no column none"),
        ("lower(after.none) || 'x' = 'x'", 6, "no column none"),
        ("after.s ~ '('", 10, "RE2"),
        ("after.s ~ after.s", 10, "must be a text literal"),
        ("after.s -> after.s is null", 0, "takes a literal"),
        ("after.i > '1x'", 0, "can't be converted"),
        ("after.l || 'x' = 'x'", 0, "after.l can't be cast to text"),
        ("substring(after.s, 2, -1) = 'e'", 0, "out of range"),
        ("nullif(after.s, 1) is null", 0, "text and a number can't be compared"),
        (r"after.raw = '\x6'", 12, "bytes are written in hexadecimal digits"),
        (r"after.raw in ('a', 'a\001')", 19, "bytes are written in hexadecimal digits"),
    ],
)
def test_a_value_that_does_not_fit_is_reported_with_its_place_and_without_the_value(
    text: str, at: int, words: str
) -> None:
    columns = Columns(
        i=pa.array([1]),
        s=pa.array(["secret"]),
        l=pa.array([{"a": 1}]),
        raw=pa.array([b"secret"]),
    )
    with pytest.raises(ExpressionError, match=words) as caught:
        Expression(text, ("after",)).chosen(columns)
    assert caught.value.at == at
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("", 0, "is empty"),
        ("after.a >", 9, "syntax error at the end"),
        ("after.a = 1 = 2", 15, "Chained comparisons"),
        ("lowr(after.a)", 0, "did you mean 'lower'"),
        ("'é' || lowr(after.a)", 7, "did you mean 'lower'"),
        ("'open", 0, "unterminated"),
        ("a.b", 0, "but after"),
        ("length(1, 2)", 0, "takes 1 arguments, not 2"),
        ("cast(1 as money)", 0, "no type 'money'"),
        ("cast(1 as numeric(39))", 0, "1 to 38 digits"),
        ("case 1 end", 7, "syntax error"),
        ("1 not 2", 6, "syntax error"),
        ("import os", 7, "syntax error at 'os'"),
        ("(" * 3000 + "1" + ")" * 3000, 100, "levels deep"),
        ("'(' = '(' and " + "(" * 3000, 114, "levels deep"),
        ("not " * 200 + "true", 0, "levels deep"),
        ("1" + " + 1" * 200, 398, "levels deep"),
        ("case when true then " * 400 + "1" + " end" * 400, 0, "nests too deep"),
        ("after.a in (" + "1, " * 1000 + "1)", 11, "more than 1000 values"),
        ("'" + "x" * 10_000, 10_000, "longer than"),
        ("1 ; 2", 2, "syntax error"),
    ],
)
def test_an_expression_that_cannot_be_parsed_is_reported_with_its_place(
    text: str, at: int, words: str
) -> None:
    with pytest.raises(ExpressionError, match=words) as caught:
        Expression(text, ("after",))
    assert caught.value.at == at
    assert pickle.loads(pickle.dumps(caught.value)).at == at  # noqa: S301


@given(st.text(max_size=60))
def test_any_text_computes_or_fails_and_does_nothing_else(text: str) -> None:
    at = 0
    try:
        Expression(text, ("after",)).values(Columns(a=pa.array(["x", None])))
    except ExpressionError as error:
        at = error.at
    assert 0 <= at <= len(text)


def test_the_other_operand_is_not_evaluated_if_the_first_decides() -> None:
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


@given(st.lists(st.text('{}[]",:\\u0e9tfn -.+x', max_size=12) | JSON.map(json.dumps), max_size=5))
def test_texts_count_as_json_if_a_strict_parser_accepts_them(texts: list[str]) -> None:
    def refuse(word: str) -> None:
        raise ValueError(word)

    def is_json(text: str) -> bool:
        try:
            json.loads(text, parse_constant=refuse)
        except ValueError:
            return False
        return True

    assert are_json(pa.array(texts, pa.string())).tolist() == [is_json(text) for text in texts]


def test_infinite_and_far_dates_keep_postgresqls_form_through_casts() -> None:
    days = pa.array([2**31 - 1, -(2**31), -735_160, 3_672_148, None], pa.int32()).cast(pa.date32())
    texts = ["infinity", "-infinity", "0044-03-15 BC", "12024-01-01", None]
    assert cast(days, "VARCHAR").to_pylist() == texts
    for kind, zone in (("TIMESTAMP", ""), ("TIMESTAMPTZ", "+00")):
        stamps = cast(days, kind)
        expected = [
            *texts[:2], f"0044-03-15 00:00:00{zone} BC", f"12024-01-01 00:00:00{zone}", None
        ]  # fmt: skip
        assert cast(stamps, "VARCHAR").to_pylist() == expected
        assert cast(stamps, "DATE").equals(days)
    written = Expression("'on ' || after.d", ("after",)).values(Columns(d=days))
    assert written.to_pylist() == [text and "on " + text for text in texts]
    later = Expression("after.d > '2024-01-01' or after.d = '-infinity'", ("after",))
    assert later.chosen(Columns(d=days)).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("depth", [499, 500, 501, 50_000])
def test_a_document_may_be_nested_as_deeply_as_in_the_server(depth: int) -> None:
    text = '{"a":' + "[" * depth + "]" * depth + "}"
    assert are_json(pa.array([text, text[:-2]])).tolist() == [True, False]


def test_slices_of_arrays_are_read_at_their_offset() -> None:
    texts = pa.array(['{"a": 1}', None, '{"a": 2}', "[x"]).slice(1)
    assert are_json(texts).tolist() == [False, True, False]
    member = Expression("case when after.t like '{%' then after.t ->> 'a' end", ("after",))
    assert member.values(Columns(t=texts)).to_pylist() == [None, "2", None]


@pytest.mark.parametrize(
    "text",
    [
        "(select 1)", "1), (2", "1) from after union (select 2", "exists (select 1)", "after.a[1]",
        "array[1]", "random()", "now()", "sum(1)", "sum(1) over ()", "count(*)", "*", "after.*", "columns(*)",
        "getenv('HOME')", "read_text('/etc/passwd')", "current_setting('threads')", "row(1, 2)", "(1, 2)",
        "{'a': 1}", "lambda x: x", "x -> x", "e'a'", "$$a$$", "$1", "?", "#1", "x'00'", "2 ^@ 'a'",
        "1 /* a */",
        "try_cast(after.a as date)", "after.a::text[]", "interval '1 day'", "after.a collate nocase",
        "length(distinct 'a')", "s.length('a')", "length(a := 'b')",
    ],
)  # fmt: skip
def test_an_expression_can_do_nothing_but_compute(text: str) -> None:
    with pytest.raises(ExpressionError):
        Expression(text, ("after",))


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM read_csv('/etc/passwd')", "COPY (SELECT 1) TO '/tmp/tailrace.csv'",
        "ATTACH '/tmp/tailrace.duckdb'", "INSTALL httpfs", "LOAD httpfs", "SET threads = 8",
        "SET enable_external_access = true", "SET lock_configuration = false", "SELECT * FROM statement",
    ],
)  # fmt: skip
def test_the_database_reaches_no_file_network_or_setting(statement: str) -> None:
    with pytest.raises(duckdb.Error):
        database.database().execute(statement).fetchall()


@pytest.mark.slow
def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "DEADLINE_S", 0.05)
    many = Columns(s=pa.array(["ab" * 500] * 200_000))
    with pytest.raises(ExpressionError, match="longer than 0\\.05 s"):
        Expression("length(replace(upper(after.s), 'A', 'bcd')) > 1", ("after",)).values(many)
    monkeypatch.undo()
    assert value("after.a + 1", a=pa.array([1])) == 2


def test_an_expression_can_be_pickled_and_works_in_threads_and_forks() -> None:
    expression = Expression("after.a * 2 > 3", ("after",))
    rows = Columns(a=pa.array([1, 2]))
    assert expression.chosen(rows).tolist() == [False, True]
    again = pickle.loads(pickle.dumps(expression))  # noqa: S301
    with ThreadPoolExecutor(4) as pool:
        assert {tuple(found) for found in pool.map(again.chosen, [rows] * 40)} == {(False, True)}
    child = multiprocessing.get_context("fork").Process(target=again.chosen, args=(rows,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_thread_may_fork_while_another_has_a_database() -> None:
    """As when Spark's Java is started after the main thread has parsed expressions of a file."""
    assert value("after.a + 1", a=pa.array([1])) == 2

    def forks() -> int:
        # With a function to call in the child before exec, as PySpark gives it: otherwise no fork hook runs.
        return subprocess.run(["true"], check=False, preexec_fn=lambda: None).returncode

    def forked_again() -> None:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(forks).result(60) == 0
        assert value("after.a + 1", a=pa.array([1])) == 2
        assert forks() == 0

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(forks).result(60) == 0
    child = multiprocessing.get_context("fork").Process(target=forked_again)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_columns_compared_with_literals_need_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Columns(a=pa.array(["c", "d", None]), n=pa.array([1, 2, 3]))

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("tailrace.expressions.computing.run", refuse)
    for text, expected in {
        "after.a = 'd'": [False, True, None],
        "after.a <> 'd'": [True, False, None],
        "after.a in ('x', 'c') or after.a = 'd'": [True, True, None],
        "after.a not in ('x', 'c')": [False, True, None],
        "after.n > 1 and after.n <= 3": [False, True, True],
        "after.n <> 2": [True, False, True],
        "after.n in (-1, 3)": [False, False, True],
        "not after.a <> 'd' and after.a in ('c', 'd')": [False, True, None],
    }.items():
        assert Expression(text, ("after",)).values(rows).to_pylist() == expected, text
    # A condition that decides all rows keeps the others from being evaluated.
    some = Columns(a=pa.array(["c", "d"]))
    assert Expression("after.a = 'x' and after.none > 1", ("after",)).values(some).to_pylist() == [False] * 2


def test_all_documented_functions_and_types_exist_in_duckdb() -> None:
    for name, (least, _) in FUNCTIONS.items():
        arguments = ", ".join(["after.a"] * least)
        Expression(f"{name}({arguments})", ("after",))
    for name in TYPES:
        to = require_type(name)
        assert cast(pa.nulls(1), to).null_count == 1 or to == "VARCHAR"
    with pytest.raises(ExpressionError) as caught:
        require_type("monye")
    assert caught.value.at == 0
    with pytest.raises(ExpressionError):
        require_type("text) is null or (true")
