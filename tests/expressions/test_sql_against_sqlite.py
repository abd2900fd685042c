"""Random expressions over random rows give the same as in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.expressions.computing import Expression
from tests.support.examples import examples

INTEGERS, TEXTS = ("after.i", "after.j"), ("after.s", "after.t")
COLUMNS = {"i": pa.int32(), "j": pa.int64(), "s": pa.string(), "t": pa.string()}

Row = dict[str, int | str | None]


class Table:
    """Rows of one table, all columns under `after`."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, parts: tuple[str, ...]) -> pa.Array:
        name = parts[1]
        return pa.array([row[name] for row in self.rows], COLUMNS[name])

    def texts(self, parts: tuple[str, ...]) -> pa.Array:
        return self.column(parts).cast(pa.string())

    def was_sent(self, parts: tuple[str, ...]) -> pa.Array:
        return pa.array([True] * len(self.rows))


WORDS = st.text("abAB%_\\ é€", max_size=5)
NUMBERS = st.integers(-20, 20)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "i": NUMBERS | st.none(),
            "j": NUMBERS | st.none(),
            "s": WORDS | st.none(),
            "t": WORDS | st.none(),
        }
    ),
    max_size=6,
)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def joined(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(lambda found: form.format(*found))


def integers(depth: int) -> st.SearchStrategy[str]:
    plain = st.sampled_from(INTEGERS) | NUMBERS.map(str) | st.just("null")
    if depth == 0:
        return plain
    inner = integers(depth - 1)
    return st.one_of(
        plain,
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda f: f"({f[0]} {f[1]} {f[2]})"),
        # Division by zero is an error, as in PostgreSQL; in SQLite it is null.
        st.tuples(inner, st.sampled_from("/%"), inner).map(lambda f: f"({f[0]} {f[1]} nullif({f[2]}, 0))"),
        joined("(- {})", inner),
        joined("abs({})", inner),
        joined("length({})", texts(depth - 1)),
        joined("coalesce({}, {})", inner, inner),
        joined("nullif({}, {})", inner, inner),
        joined("case when {} then {} else {} end", truths(depth - 1), inner, inner),
        joined("case {} when {} then {} end", inner, inner, inner),
    )


def texts(depth: int) -> st.SearchStrategy[str]:
    plain = st.sampled_from(TEXTS) | WORDS.map(quoted)
    if depth == 0:
        return plain
    inner = texts(depth - 1)
    places = st.integers(1, 4).map(str), st.integers(0, 4).map(str)
    return st.one_of(
        plain,
        joined("({} || {})", inner, inner),
        joined("coalesce({}, {})", inner, inner),
        joined("trim({})", inner),
        joined("ltrim({})", inner),
        joined("replace({}, {}, {})", inner, WORDS.map(quoted), WORDS.map(quoted)),
        joined("substr({}, {}, {})", inner, *places),
        joined("substr({}, {})", inner, places[0]),
        joined("case when {} then {} else {} end", truths(depth - 1), inner, inner),
        joined("cast({} as text)", integers(depth - 1)),
    )


def truths(depth: int) -> st.SearchStrategy[str]:
    operators = st.sampled_from(("=", "<>", "!=", "<", "<=", ">", ">="))
    values = integers(max(depth - 1, 0)), texts(max(depth - 1, 0))
    compared = st.one_of(
        *(st.tuples(v, operators, v).map(lambda f: f"({f[0]} {f[1]} {f[2]})") for v in values),
        *(joined("({} is distinct from {})", v, v) for v in values),
        *(joined("({} is null)", v) for v in values),
        *(joined("({} between {} and {})", v, v, v) for v in values),
        *(joined("({} in ({}, {}, {}))", v, v, v, v) for v in values),
        *(joined("({} not in ({}, {}))", v, v, v) for v in values),
        joined("({} in (1, 2, null))", values[0]),
        joined("({} not in (1, 2, 3))", values[0]),
        joined("({} like {} escape '\\')", values[1], st.text("abAB%_é", max_size=4).map(quoted)),
        joined("({} not like {} escape 'A')", values[1], st.text("ab%_é\\", max_size=4).map(quoted)),
    )
    if depth == 0:
        return compared
    inner = truths(depth - 1)
    return st.one_of(
        compared,
        joined("({} and {})", inner, inner),
        joined("({} or {})", inner, inner),
        joined("(not {})", inner),
        joined("({} is true)", inner),
        joined("({} is not false)", inner),
        joined("({} and {} or {} and not {})", inner, inner, inner, inner),
    )


def by_sqlite(text: str, rows: list[Row]) -> list[object]:
    database = sqlite3.connect(":memory:")
    try:
        database.execute("pragma case_sensitive_like = on")
        database.execute("create table after (n integer, i integer, j integer, s text, t text)")
        values = [(n, row["i"], row["j"], row["s"], row["t"]) for n, row in enumerate(rows)]
        database.executemany("insert into after values (?, ?, ?, ?, ?)", values)
        return [found for (found,) in database.execute(f"select {text} from after order by n")]
    finally:
        database.close()


@examples(250)
@given(text=truths(2) | integers(3) | texts(3), rows=ROWS)
@example(text="(after.i % -1)", rows=[{"i": -5, "j": 0, "s": "", "t": None}])
@example(text="(after.i in (1, 2, null))", rows=[{"i": 1, "j": 0, "s": "", "t": None}])
def test_an_expression_gives_the_same_as_sqlite(text: str, rows: list[Row]) -> None:
    found = Expression(text, ("after",)).values(Table(rows)).to_pylist()
    assert found == by_sqlite(text, rows), text
