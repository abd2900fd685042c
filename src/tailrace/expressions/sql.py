"""Writes the trees of expressions as SQL for DuckDB."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping

from tailrace.expressions.language import (
    COMPARISONS,
    INFIX,
    PATTERNS,
    Node,
    Path,
    is_literal,
    parsed,
    parts_of,
    place_of,
    quoted,
    type_sql,
)

#: Largest length of an expression's SQL, in characters: conditions that guard others are written twice.
_SQL_LENGTH_MAX = 200_000

#: Largest number of digits of a decimal in DuckDB.
DIGITS_MAX = 38

#: Functions and operators that can't fail on any row, so that no earlier condition has to guard them.
_SAFE = {
    *PATTERNS,
    "lower",
    "upper",
    "length",
    "starts_with",
    "ends_with",
    "was_sent",
    "nullif",
    "||",
    "concat",
}

#: Prefix of the error for reading a column that does not exist; the column's place follows.
MISSING = "tailrace: no column "
_LACKING = f"error('{MISSING}"


@functools.lru_cache(maxsize=1024)
def inputs_of(text: str, roots: tuple[str, ...]) -> tuple[tuple[str, Path, int], ...]:
    """Return the inputs of an expression: the method of `Rows`, the path, and the place of the first use."""
    found: dict[tuple[str, Path], int] = {}

    def note(node: Node, kind: str) -> None:
        if node["class"] == "COLUMN_REF":
            found.setdefault((kind, tuple(node["column_names"])), place_of(node))
            return
        for part in parts_of(node):
            note(part, kind_below(node))

    note(parsed(text, roots), "column")
    return tuple((kind, path, at) for (kind, path), at in found.items())


def kind_below(node: Node) -> str:
    """Return the method of `Rows` by which a column directly below `node` is read."""
    # A column that is cast to text has PostgreSQL's text, from which DuckDB's differs for some types.
    kind = "column"
    if node["class"] == "FUNCTION":
        kind = {"||": "texts", "concat": "texts", "was_sent": "was_sent"}.get(node["function_name"], kind)
    elif node["class"] == "CAST" and type_sql(node) == "VARCHAR":
        kind = "texts"
    return kind


class SqlWriter:
    """Writes an expression's tree, and parts of it, as DuckDB's SQL over columns `c0`, `c1`, ….

    The columns are in the order of `inputs_of`.

    :param missing: places of columns that do not exist: computing a value of them is an error.
    """

    def __init__(self, text: str, roots: tuple[str, ...], missing: frozenset[int]) -> None:
        self.tree = parsed(text, roots)
        self._places = {(kind, path): n for n, (kind, path, _) in enumerate(inputs_of(text, roots))}
        self._missing = missing
        self._known: dict[tuple[int, str], str] = {}
        self._literals: Mapping[int, str] = {}
        self._scales: Mapping[int, int] = {}

    def with_literals(self, literals: Mapping[int, str]) -> SqlWriter:
        """Return the writer with the SQL of some quoted literals, by the `id` of their node."""
        found = copy.copy(self)
        vars(found).update(_known={}, _literals=literals)
        return found

    def with_scales(self, scales: Mapping[int, int]) -> SqlWriter:
        """Return the writer that casts some more nodes, by their `id`, to decimals with this scale."""
        found = copy.copy(self)
        vars(found).update(_known={}, _scales={**self._scales, **scales})
        return found

    def sql(self, node: Node, kind: str = "column") -> str:
        """Return the SQL of a node.

        :param kind: the method of `Rows` by which a column is read.
        :raises OverflowError: if the SQL becomes too long.
        """
        key = (id(node), kind)
        if key not in self._known:
            found = self._written(node, kind)
            if (scale := self._scales.get(id(node))) is not None:
                found = f"CAST({found} AS DECIMAL({DIGITS_MAX}, {scale}))"
            if len(found) > _SQL_LENGTH_MAX:
                raise OverflowError("its conditions or substrings are within one another on too many levels")
            self._known[key] = found
        return self._known[key]

    def _written(self, node: Node, kind: str) -> str:
        parts = [self.sql(part, kind_below(node)) for part in parts_of(node)]
        match node["class"]:
            case "COLUMN_REF":
                place = self._places[kind, tuple(node["column_names"])]
                return f"{_LACKING}{place}')" if place in self._missing else f"c{place}"
            case "CONSTANT":
                literal = node["literal"]
                if literal["kind"] == "NULL_LITERAL":
                    return "NULL"
                if literal["kind"] != "STRING":
                    return f"({literal['text']})"
                return self._literals.get(id(node)) or quoted(literal["text"])
            case "COMPARISON":
                return f"({parts[0]} {COMPARISONS[node['type']]} {parts[1]})"
            case "BETWEEN":
                return f"({parts[0]} BETWEEN {parts[1]} AND {parts[2]})"
            case "CAST":
                return f"CAST({parts[0]} AS {type_sql(node)})"
            case "CASE":
                *branches, otherwise = parts
                pairs = zip(branches[::2], branches[1::2], strict=True)
                whens = " ".join(f"WHEN {when} THEN {then}" for when, then in pairs)
                return f"CASE {whens} ELSE {otherwise} END"
            case "CONJUNCTION":
                return self._conjunction(node, parts)
            case "OPERATOR":
                first, rest = parts[0], ", ".join(parts[1:])
                return {
                    "OPERATOR_NOT": f"(NOT {first})",
                    "OPERATOR_IS_NULL": f"({first} IS NULL)",
                    "OPERATOR_IS_NOT_NULL": f"({first} IS NOT NULL)",
                    "OPERATOR_COALESCE": f"coalesce({', '.join(parts)})",
                    "COMPARE_IN": f"({first} IN ({rest}))",
                }[node["type"]]
        # DuckDB takes `error` for a NULL, and does not call it for the result of most functions.
        lacking = next((part for part in parts if part.startswith(_LACKING)), None)
        return lacking or self._call(node, parts)

    def _conjunction(self, node: Node, parts: list[str]) -> str:
        # DuckDB computes all operands for all rows. One that may fail is guarded by those before it.
        is_and = node["type"] == "CONJUNCTION_AND"
        word, stops, decided = ("AND", "NOT ", "false") if is_and else ("OR", "", "true")
        found, fails = parts[-1], self._may_fail(node["children"][-1])
        for part, left in zip(reversed(node["children"][:-1]), reversed(parts[:-1]), strict=True):
            both = f"({left} {word} {found})"
            found = f"CASE WHEN {stops}{left} THEN {decided} ELSE {both} END" if fails else both
            if len(found) > _SQL_LENGTH_MAX:
                raise OverflowError("its conditions guard each other on too many levels")
            fails = fails or self._may_fail(part)
        return found

    def _may_fail(self, node: Node) -> bool:
        if node["class"] == "CAST" or (node["class"] == "FUNCTION" and node["function_name"] not in _SAFE):
            return True
        if node["class"] == "COLUMN_REF":
            path = tuple(node["column_names"])
            return any(known[1] == path and place in self._missing for known, place in self._places.items())
        return any(self._may_fail(part) for part in parts_of(node))

    def _call(self, node: Node, parts: list[str]) -> str:
        name = node["function_name"]
        if name in PATTERNS:
            name, escaped = PATTERNS[name]
            return f"{name}({', '.join([*parts, *([quoted(chr(92))] if escaped else [])])})"
        if name in ("->", "->>"):
            key = node["arguments"][1]["expression"]["literal"]
            written = key["text"] if key["kind"] == "INTEGER" else quoted(_pointer(key["text"]))
            return f"CAST(({parts[0]} {name} {written}) AS VARCHAR)"
        if name == "%" and "%" not in parts[1] and _may_be_negative(parts_of(node)[1]):
            # In PostgreSQL the lowest `bigint` divided by -1 leaves 0; in DuckDB this overflows. Not for a
            # divisor with a % of its own: the SQL would become three times as long with each level.
            divisor = f"CASE WHEN {parts[1]} = -1 THEN -({parts[1]}) ELSE {parts[1]} END"
            return f"({parts[0]} % {divisor})"
        if name in INFIX:
            return f"({parts[0]} {name} {parts[1]})" if len(parts) == 2 else f"({name}({parts[0]}))"
        if name == "was_sent":
            return parts[0]
        if name == "substring":
            # In PostgreSQL, positions before the first character count; in DuckDB, they count from the end.
            text, first, *count = parts
            left = f", greatest({count[0]} + {first} - 1, 0)" if count else ""
            refused = f"WHEN {count[0]} < 0 THEN error('a negative length') " if count else ""
            whole = f"substring({', '.join(parts)})"
            return f"CASE {refused}WHEN {first} < 1 THEN substring({text}, 1{left}) ELSE {whole} END"
        if name in ("trim", "ltrim", "rtrim"):
            return f"{name}({parts[0]}, ' ')"  # without ' ', DuckDB would trim other white space as well
        return f"{name}({', '.join(parts)})"


def _may_be_negative(node: Node) -> bool:
    is_number = is_literal(node, "INTEGER", "NUMERIC")
    return node["class"] != "CONSTANT" or (is_number and node["literal"]["text"].startswith("-"))


def _pointer(name: str) -> str:
    # Returns a JSON pointer for a name that DuckDB would read as a path or as a pattern of names.
    return name if re.fullmatch(r"\w+", name) else "/" + name.replace("~", "~0").replace("/", "~1")
