"""The expression language: parses texts with DuckDB, and checks that the tree has only allowed nodes."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tailrace.expressions.database import database, run

#: Largest length of an expression, in characters; users write them by hand.
TEXT_LENGTH_MAX = 10_000

#: Limits: levels of the tree; values in one `in (…)` or branches in one `case`.
DEPTH_MAX = 100
ITEMS_MAX = 1000

#: By function: smallest and largest number of arguments; -1: no limit.
FUNCTIONS = {
    **dict.fromkeys(("abs", "ceil", "floor", "length", "lower", "ltrim", "rtrim", "trim", "upper"), (1, 1)),
    **dict.fromkeys(("ends_with", "left", "nullif", "right", "starts_with"), (2, 2)),
    **dict.fromkeys(("coalesce", "concat", "greatest", "least"), (1, -1)),
    "replace": (3, 3),
    "round": (1, 2),
    "substring": (2, 3),
    "was_sent": (1, 1),
}
_ALSO = {"char_length": "length", "substr": "substring", "ceiling": "ceil"}

#: Pattern operators by the parser's names: DuckDB's function, and whether it gets PostgreSQL's escape.
PATTERNS = {
    "~~": ("like_escape", True),
    "~~*": ("ilike_escape", True),
    "!~~": ("not_like_escape", True),
    "!~~*": ("not_ilike_escape", True),
    "like_escape": ("like_escape", False),
    "ilike_escape": ("ilike_escape", False),
    "regexp_matches": ("regexp_matches", False),
}
INFIX = {"+", "-", "*", "/", "//", "%", "||", "->", "->>"}
COMPARISONS = {
    "COMPARE_EQUAL": "=",
    "COMPARE_NOTEQUAL": "<>",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
    "COMPARE_DISTINCT_FROM": "IS DISTINCT FROM",
    "COMPARE_NOT_DISTINCT_FROM": "IS NOT DISTINCT FROM",
}
_OPERATORS = {"OPERATOR_NOT", "OPERATOR_IS_NULL", "OPERATOR_IS_NOT_NULL", "OPERATOR_COALESCE", "COMPARE_IN"}
_LITERALS = {"INTEGER", "NUMERIC", "STRING", "BOOLEAN", "NULL_LITERAL"}

#: DuckDB's type, by the name of the type in a cast.
TYPES = {
    **dict.fromkeys(("bool", "boolean"), "BOOLEAN"),
    **dict.fromkeys(("smallint", "int2"), "SMALLINT"),
    **dict.fromkeys(("int", "integer", "int4"), "INTEGER"),
    **dict.fromkeys(("bigint", "int8"), "BIGINT"),
    **dict.fromkeys(("real", "float4"), "FLOAT"),
    **dict.fromkeys(("float", "float8", "double", "double precision"), "DOUBLE"),
    **dict.fromkeys(("numeric", "decimal"), "DECIMAL"),
    **dict.fromkeys(("text", "string", "varchar"), "VARCHAR"),
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    **dict.fromkeys(("timestamptz", "timestamp with time zone"), "TIMESTAMPTZ"),
}

#: `numeric` without precision and scale.
_NUMERIC = "DECIMAL(38, 10)"

_HEAD, _TAIL = "SELECT (\n", "\n)"

Node = dict[str, Any]
Path = tuple[str, ...]


class ExpressionError(ValueError):
    """An expression that can't be parsed, or does not fit the columns that it is applied to.

    :param at: the place in the text, in characters from 0.
    """

    def __init__(self, message: str, text: str, at: int) -> None:
        super().__init__(message, text, at)
        self.message = message
        self.at = at
        before = text[:at]
        self.line = before.count("\n") + 1
        self.column = at - (before.rfind("\n") + 1) + 1

    def __str__(self) -> str:
        where = f"line {self.line}, column {self.column}" if self.line > 1 else f"character {self.column}"
        return f"at {where} of the expression: {self.message}"


def require_type(text: str) -> str:
    """Return DuckDB's name of the type `text`, which is written as in a cast.

    :raises ExpressionError: if there is no such type.
    """
    before = "cast(null as "
    try:
        node = parsed(f"{before}{text})", ())
    except ExpressionError as error:
        raise ExpressionError(error.message, text, max(error.at - len(before), 0)) from None
    if node["class"] != "CAST" or node["child"]["class"] != "CONSTANT":
        raise ExpressionError("this is not a type", text, 0)
    return type_sql(node)


@functools.lru_cache(maxsize=1024)
def parsed(text: str, roots: tuple[str, ...]) -> Node:
    """Return the tree of an expression; all of its nodes are allowed in expressions.

    :raises ExpressionError: if it can't be parsed, or has other nodes; with the place.
    """
    import duckdb

    asked = _HEAD + _marked(text) + _TAIL
    try:
        [(answer,)] = database().execute("SELECT json_serialize_sql(?::VARCHAR)", [asked]).fetchall()
        found = json.loads(answer)
    except (duckdb.Error, RecursionError):
        raise ExpressionError("it nests too deep", text, 0) from None
    if found["error"]:
        # After "at or near" the message may quote a text literal with any content.
        place = found.get("position")
        at = len(text) if place is None else min(_characters(asked, int(place)), len(text))
        shown = re.search(r'at or near "([^\'"]{1,30})"', found["error_message"])
        near = f" at {shown[1]!r}" if shown and at < len(text) else " at the end" if at == len(text) else ""
        said = found["error_message"].partition(" at or near")[0]
        raise ExpressionError("it nests too deep" if "depth" in said else said + near, text, at)
    node = found["statements"][0]["node"]
    if len(found["statements"]) != 1 or node["type"] != "SELECT_NODE" or len(node["select_list"]) != 1:
        raise ExpressionError("it is more than one expression", text, 0)
    return _Reader(text, asked, roots).checked(node["select_list"][0], 0, 1)


_WORDS = re.compile(
    r"""
      (?P<odd>\^ | \$ | /\* | \0 | (?<!\w)(?:[eEbBxXnN]|[uU]&)['"])
    | '(?:[^']|'')*' | "(?:[^"]|"")+" | --[^\n]*
    | (?P<arrow>->(?!>))
    | (?P<opens>[(\[{]) | (?P<closes>[)\]}])
    """,
    re.VERBOSE,
)


def _marked(text: str) -> str:
    """Return the text with `^@` for `->`, which DuckDB parses as a lambda, with the lowest precedence.

    :raises ExpressionError: if the text is empty, too long, has tokens that are not in the language, or so
        many brackets in one another that DuckDB would parse it for minutes.
    """
    if len(text) > TEXT_LENGTH_MAX:
        raise ExpressionError(f"it is longer than {TEXT_LENGTH_MAX} characters", text, TEXT_LENGTH_MAX)
    if not text.strip():
        raise ExpressionError("it is empty", text, 0)
    marked, depth = list(text), 0
    for word in _WORDS.finditer(text):
        depth += (word["opens"] is not None) - (word["closes"] is not None)
        if depth > DEPTH_MAX:
            raise ExpressionError(f"it goes more than {DEPTH_MAX} levels deep", text, word.start())
        if word["odd"]:
            raise ExpressionError(f"{word[0]!r} is not part of the language", text, word.start())
        if word["arrow"]:
            marked[word.start() : word.end()] = "^@"
    return "".join(marked)


def _characters(asked: str, place: int) -> int:
    """Convert a place in the query, in bytes, to one in the expression, in characters."""
    return max(len(asked.encode()[:place].decode(errors="ignore")) - len(_HEAD), 0)


class _Reader:
    """Checks a tree from its root, and sets `at` in each node: its place in the text."""

    def __init__(self, text: str, asked: str, roots: tuple[str, ...]) -> None:
        self._text = text
        self._asked = asked
        self._roots = roots

    def checked(self, node: Node, above: int, depth: int) -> Node:
        """Return the node, checked with all nodes below it.

        :param above: the place of the parent, which a node without a place of its own gets.
        """
        at, place = above, node["query_location"]
        if place <= len(self._asked.encode()):
            at = _characters(self._asked, place)
        if depth > DEPTH_MAX:
            raise self._error(f"it goes more than {DEPTH_MAX} levels deep", at)
        node = with_parts({**node, "at": at}, lambda part: self.checked(part, at, depth + 1))
        if len(node.get("children", ())) > ITEMS_MAX or len(node.get("case_checks", ())) > ITEMS_MAX:
            raise self._error(f"more than {ITEMS_MAX} values", at)
        match node["class"]:
            case "COLUMN_REF":
                self._require_root(node)
            case "CAST" if not node["try_cast"]:
                node["type_expr"] = self._as_written(node["type_expr"])
                self._require_type(node["type_expr"], at)
            case "FUNCTION":
                return self._function(node)
            case "COMPARISON" if node["type"] in COMPARISONS:
                pass
            case "CONSTANT" if node["literal"]["kind"] in _LITERALS:
                pass
            case "OPERATOR" if node["type"] in _OPERATORS:
                pass
            case "BETWEEN" | "CASE" | "CONJUNCTION":
                pass
            case _:
                raise self._error("this is not part of the language", at)
        return node

    def _error(self, message: str, at: int) -> ExpressionError:
        return ExpressionError(message, self._text, at)

    def _require_root(self, node: Node) -> None:
        name, known = node["column_names"][0], ", ".join(self._roots)
        if name in self._roots:
            return
        near = difflib.get_close_matches(name.lower(), self._roots, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else f"a column is after.{name}, a text is 'in quotes'"
        raise self._error(f"there is no {name!r}, but {known}; {hint}", node["at"])

    def _as_written(self, found: Node) -> Node:
        # `real` and `float` are one type in DuckDB's parser, but two in PostgreSQL.
        first, length = found["query_location"], found["query_location_length"]
        written = self._asked.encode()[first : first + length]
        is_real = found["type_name"] == "FLOAT" and written.lower() == b"real"
        return {**found, "type_name": "real"} if is_real else found

    def _require_type(self, found: Node, at: int) -> None:
        name = found["type_name"].lower()
        if name not in TYPES or found["class"] != "TYPE":
            raise self._error(f"there is no type {found['type_name']!r}{_near(name, TYPES)}", at)
        numbers = [part.get("literal", {}).get("text", "") for part in found["children"]]
        if not numbers:
            return
        if TYPES[name] != "DECIMAL":
            raise self._error(f"the type {name} takes no numbers in parentheses", at)
        shape = [int(number) if number.isdigit() else -1 for number in [*numbers, "0"]][:2]
        if len(numbers) > 2 or not 1 <= shape[0] <= 38 or not 0 <= shape[1] <= shape[0]:
            raise self._error("numeric has 1 to 38 digits, and at most that many after the point", at)

    def _function(self, node: Node) -> Node:
        written, at = node["function_name"], node["at"]
        name = _ALSO.get(written.lower(), written.lower())
        name = "->" if name == "^@" else name
        arguments = [argument["expression"] for argument in node["arguments"]]
        odd = node["distinct"] or node["filter"] or node["schema"] or node["order_bys"]["orders"]
        if odd or any(argument["name"] for argument in node["arguments"]):
            raise self._error("this is not part of the language", at)
        if name in ("->", "->>"):
            if not is_literal(arguments[1], "STRING", "INTEGER"):
                raise self._error(f"{name} takes a literal: a member's name, or an index from 0", at)
        elif name == "regexp_matches":
            self._require_pattern(arguments[1])
        elif name not in PATTERNS and name not in INFIX:
            self._require_arguments(name, written, arguments, at)
        return {**node, "function_name": name}

    def _require_pattern(self, pattern: Node) -> None:
        import duckdb

        if not is_literal(pattern, "STRING"):
            raise self._error("a regular expression must be a text literal", pattern["at"])
        try:
            run(f"regexp_matches('', {quoted(pattern['literal']['text'])})", pa.table({"c0": [None]}))
        except duckdb.Error:
            message = "this is not a regular expression that RE2 supports"
            raise self._error(message, pattern["at"]) from None

    def _require_arguments(self, name: str, written: str, arguments: list[Node], at: int) -> None:
        if name not in FUNCTIONS:
            raise self._error(f"there is no function {written!r}{_near(name, FUNCTIONS)}", at)
        least, most = FUNCTIONS[name]
        if len(arguments) < least or (most >= 0 and len(arguments) > most):
            wanted = f"{least}" if least == most else f"{least} or more" if most < 0 else f"{least} to {most}"
            raise self._error(f"{name} takes {wanted} arguments, not {len(arguments)}", at)
        if name == "was_sent" and arguments[0]["class"] != "COLUMN_REF":
            raise self._error("was_sent takes a column, such as after.note", at)


def _near(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def with_parts(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return the node with `change` applied to each of its child nodes, in the order of the text."""
    new = dict(node)
    for name in ("left", "right", "input", "lower", "upper", "child"):
        if isinstance(node.get(name), dict):
            new[name] = change(node[name])
    if node["class"] != "TYPE" and "children" in node:
        new["children"] = [change(part) for part in node["children"]]
    if "case_checks" in node:
        new["case_checks"] = [
            {name: change(part) for name, part in branch.items()} for branch in node["case_checks"]
        ]
        new["else_expr"] = change(node["else_expr"])
    if "arguments" in node:
        new["arguments"] = [
            {**argument, "expression": change(argument["expression"])} for argument in node["arguments"]
        ]
    return new


def parts_of(node: Node) -> list[Node]:
    """Return the child nodes, in the order of the text."""
    found: list[Node] = []

    def seen(part: Node) -> Node:
        found.append(part)
        return part

    with_parts(node, seen)
    return found


def place_of(node: Node) -> int:
    """Return the place in the text at which the node begins, in characters from 0."""
    return int(node["at"])


def is_literal(node: Node, *kinds: str) -> bool:
    """Return whether the node is a literal of one of these kinds, which are DuckDB's."""
    return node["class"] == "CONSTANT" and node["literal"]["kind"] in kinds


def quoted(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def type_sql(node: Node) -> str:
    """Return DuckDB's name of a cast's target type."""
    found = node["type_expr"]
    name = TYPES[found["type_name"].lower()]
    if name != "DECIMAL":
        return name
    numbers = [part["literal"]["text"] for part in found["children"]]
    return f"DECIMAL({', '.join([*numbers, '0'][:2])})" if numbers else _NUMERIC
