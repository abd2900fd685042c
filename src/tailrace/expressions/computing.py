"""Computes the values of expressions over rows."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.expressions.database import database, reason, run
from tailrace.expressions.language import (
    ExpressionError,
    Node,
    Path,
    is_literal,
    parsed,
    parts_of,
    place_of,
    quoted,
)
from tailrace.expressions.sql import DIGITS_MAX, MISSING, SqlWriter, inputs_of, kind_below

if TYPE_CHECKING:
    import duckdb


class NoColumnError(LookupError):
    """There is no such column; the message says why, or suggests a similar one."""


class Rows(Protocol):
    """Rows that an expression is computed over. The methods raise `NoColumnError` if a column is missing."""

    def __len__(self) -> int: ...

    def column(self, parts: Path) -> pa.Array:
        """Return the column at a path."""
        ...

    def texts(self, parts: Path) -> pa.StringArray:
        """Return the column's values as PostgreSQL writes them."""
        ...

    def was_sent(self, parts: Path) -> pa.Array:
        """Return in which rows the source sent the column's value."""
        ...


class Expression:
    """An expression over columns, whose paths begin with one of `roots`. It is pickled as its text.

    :raises ExpressionError: if `text` can't be parsed, or has a path that begins with another name.
    """

    def __init__(self, text: str, roots: tuple[str, ...]) -> None:
        self.text = text
        self._roots = roots
        self._tree = parsed(text, roots)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __reduce__(self) -> tuple[type[Expression], tuple[str, tuple[str, ...]]]:
        return Expression, (self.text, self._roots)

    @property
    def path(self) -> Path | None:
        """The path of the column if the expression is a single column, else None."""
        return tuple(self._tree["column_names"]) if self._tree["class"] == "COLUMN_REF" else None

    def values(self, rows: Rows) -> pa.Array:
        """Return the value for each row.

        :raises ExpressionError: if the expression does not fit the columns, or a value can't be computed.
        """
        if self.path is not None:
            try:
                return plain(rows.column(self.path))
            except NoColumnError as error:
                raise ExpressionError(str(error), self.text, place_of(self._tree)) from None
        found = _by_arrow(self._tree, rows)
        return _computed(self.text, self._roots, rows) if found is None else found

    def truths(self, rows: Rows) -> pa.Array:
        """Return true, false or null for each row.

        :raises ExpressionError: as `values`, and if the values are not boolean.
        """
        found = self.values(rows)
        if pa.types.is_null(found.type):
            return found.cast(pa.bool_())
        if not pa.types.is_boolean(found.type):
            raise ExpressionError(_not_boolean(str(found.type)), self.text, place_of(self._tree))
        return found

    def chosen(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return for which rows the expression is true, and not null.

        :raises ExpressionError: as `truths`.
        """
        flags: npt.NDArray[np.bool_] = pc.fill_null(self.truths(rows), False).to_numpy(zero_copy_only=False)
        return flags


def cast(values: pa.Array, to: str) -> pa.Array:
    """Return values cast to another type; null stays null.

    :param to: as `require_type` returns it.
    :raises ExpressionError: if there is no such cast, or a value does not fit the type.
    """
    widened = {"BIGINT": pa.int64(), "DOUBLE": pa.float64()}.get(to)
    if widened is not None and (pa.types.is_int64(plain(values).type) or values.type == widened):
        # Integers are cast without DuckDB; beyond 2**53 both round to the nearest double.
        return plain(values).cast(widened, safe=False)
    import duckdb

    try:
        found = run(f"CAST(c0 AS {to})", pa.table({"c0": _bound(values)}))
    except duckdb.Error as error:
        raise ExpressionError(reason(error), to, 0) from None
    return _unbound(found)


def plain(values: pa.Array) -> pa.Array:
    """Return values in the type used for computing: one type for each kind of values, except decimals."""
    arrow: Any = values.type
    t = pa.types
    if t.is_dictionary(arrow):
        return plain(values.cast(arrow.value_type))
    if isinstance(arrow, pa.BaseExtensionType):
        return plain(values.cast(arrow.storage_type))
    if t.is_uint64(arrow):
        return values.cast(pa.decimal128(20, 0))
    if t.is_integer(arrow):
        return values.cast(pa.int64())
    if t.is_floating(arrow):
        return values.cast(pa.float64())
    if t.is_large_string(arrow) or t.is_string_view(arrow):
        return values.cast(pa.string())
    if t.is_date(arrow):
        return values.cast(pa.date32())
    if t.is_timestamp(arrow) and arrow.unit in ("s", "ms"):
        return values.cast(pa.timestamp("us", tz=arrow.tz))
    return values


def _by_arrow(node: Node, rows: Rows) -> pa.Array | None:
    """Return the values of comparisons of a column with texts or integers, also if joined by AND and OR.

    A call of DuckDB takes longer. If the first comparisons decide the result of all rows, the columns of the
    others are not read, and need not be decoded.

    :return: None: the expression requires DuckDB.
    """
    if node["class"] == "CONJUNCTION":
        is_and, found = node["type"] == "CONJUNCTION_AND", None
        join = pc.and_kleene if is_and else pc.or_kleene
        for part in node["children"]:
            values = _by_arrow(part, rows)
            if values is None:
                return None
            found = values if found is None else join(found, values)
            if len(rows) and not found.null_count and pc.all(pc.equal(found, not is_and)).as_py():
                return found
        return found
    negated = node["type"] == "OPERATOR_NOT"
    if negated:
        node = node["children"][0]
    if node["type"] in _BY_ARROW:
        operand, items = node["left"], [node["right"]]
    elif node["type"] == "COMPARE_IN":
        operand, *items = node["children"]
    else:
        return None
    if operand["class"] != "COLUMN_REF":
        return None
    try:
        column = plain(rows.column(tuple(operand["column_names"])))
    except NoColumnError:
        return None
    if pa.types.is_string(column.type) and all(is_literal(item, "STRING") for item in items):
        wanted = pa.array([item["literal"]["text"] for item in items], pa.string())
    elif pa.types.is_int64(column.type) and all(_is_small(item) for item in items):
        wanted = pa.array([int(item["literal"]["text"]) for item in items], pa.int64())
    else:
        return None
    if node["type"] in _BY_ARROW:
        found = _BY_ARROW[node["type"]](column, wanted[0])
    else:
        among = pc.is_in(column, value_set=wanted)
        found = pc.if_else(pc.is_valid(column), among, pa.scalar(None, pa.bool_()))
    return pc.invert(found) if negated else found


_BY_ARROW: dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    "COMPARE_EQUAL": pc.equal,
    "COMPARE_NOTEQUAL": pc.not_equal,
    "COMPARE_LESSTHAN": pc.less,
    "COMPARE_GREATERTHAN": pc.greater,
    "COMPARE_LESSTHANOREQUALTO": pc.less_equal,
    "COMPARE_GREATERTHANOREQUALTO": pc.greater_equal,
}


def _is_small(node: Node) -> bool:
    return is_literal(node, "INTEGER") and re.fullmatch(r"-?\d{1,18}", node["literal"]["text"]) is not None


def _computed(text: str, roots: tuple[str, ...], rows: Rows) -> pa.Array:
    import duckdb

    columns: dict[str, pa.Array] = {}
    missing: dict[int, str] = {}
    reals: set[str] = set()  # which are computed as `double precision`
    inputs = inputs_of(text, roots)
    for place, (kind, path, at) in enumerate(inputs):
        try:
            values = getattr(rows, kind)(path)
            columns[f"c{place}"] = _wide(_bound(values))
            if pa.types.is_float32(values.type):
                reals.add(f"c{place}")
        except NoColumnError as error:
            missing[place] = str(error)
        except pa.ArrowNotImplementedError:
            raise ExpressionError(f"{'.'.join(path)} can't be cast to text", text, at) from None
    table = pa.table(columns or {"c": pa.nulls(len(rows), pa.bool_())})
    writer = _writer(text, roots, frozenset(missing))
    try:
        found = _unbound(run(_fitted(text, writer, table.schema, frozenset(reals)), table))
    except duckdb.Error as error:
        lacking = re.search(re.escape(MISSING) + r"(\d+)", str(error))
        if lacking is not None:
            place = int(lacking[1])
            raise ExpressionError(missing[place], text, inputs[place][2]) from None
        at = place_of(_blamed(writer.tree, writer, table, error))
        raise ExpressionError(reason(error), text, at) from None
    except OverflowError as error:
        raise ExpressionError(str(error), text, 0) from None
    if writer.tree["class"] == "CAST":
        return found
    if pa.types.is_decimal(found.type):
        return found.cast(pa.decimal128(38, found.type.scale))
    return plain(found)


_writer = functools.lru_cache(maxsize=1024)(SqlWriter)


def _blamed(node: Node, writer: SqlWriter, table: pa.Table, error: duckdb.Error) -> Node:
    """Return the innermost part of a node that fails with the same type of error when computed alone."""
    import duckdb

    if isinstance(error, duckdb.InterruptException | duckdb.OutOfMemoryException):
        return node
    for part in parts_of(node):
        try:
            run(writer.sql(part, kind_below(node)), table)
        except duckdb.Error as found:
            if type(found) is type(error):
                return _blamed(part, writer, table, error)
    return node


@functools.lru_cache(maxsize=1024)
def _fitted(text: str, writer: SqlWriter, schema: pa.Schema, reals: frozenset[str]) -> str:
    """Return the SQL of an expression, whose types are checked against the columns.

    DuckDB casts text implicitly to compare it with numbers, and numbers to conditions. PostgreSQL does not,
    nor is it allowed here.

    :raises ExpressionError: if it does not fit the columns; with the place.
    """
    pairs: list[tuple[Node, Node, Node]] = []
    worded: list[tuple[Node, Node]] = []  # the second is a quoted literal, which takes the type of the first
    conditions: list[Node] = []
    below = [writer.tree]
    while below:
        node = below.pop()
        below += parts_of(node)
        compared, judged = _sides(node)
        conditions += judged
        for left, right in compared:
            if is_literal(left, "STRING") or is_literal(right, "STRING"):
                worded.append((left, right) if is_literal(right, "STRING") else (right, left))
            elif not is_literal(left, "NULL_LITERAL") and not is_literal(right, "NULL_LITERAL"):
                pairs.append((node, left, right))
        results = _results(node)
        of_type = [each for each in results if not is_literal(each, "STRING", "NULL_LITERAL")]
        worded += [(of_type[0], each) for each in results if of_type and is_literal(each, "STRING")]
    sides = [*conditions, *(side for _, *both in pairs for side in both), *(side for side, _ in worded)]
    types = dict(zip(map(id, sides), _types([writer.sql(side) for side in sides], schema), strict=True))
    for node in conditions:
        if (found := _kind(types[id(node)])) not in ("boolean", "null"):
            raise ExpressionError(_not_boolean(found), text, place_of(node))
    for node, left, right in pairs:
        found, other = _kind(types[id(left)]), _kind(types[id(right)])
        if found != other and "null" not in (found, other):
            raise ExpressionError(
                f"{found} and {other} can't be compared: cast one of them", text, place_of(node)
            )
    literals = {}
    for side, literal in worded:
        type_ = "FLOAT" if writer.sql(side) in reals else types[id(side)]
        literals[id(literal)] = _literal(type_, literal, text)
    return _exact(writer.with_literals(literals), schema).sql(writer.tree)


def _literal(type_: str, node: Node, text: str) -> str:
    """Return the SQL of a quoted literal that takes a type.

    :raises ExpressionError: if it is bytea in a form that DuckDB would read as other bytes.
    """
    given = node["literal"]["text"]
    if type_ == "BLOB" and "\\" in given:
        if not re.fullmatch(r"\\x(?:[0-9A-Fa-f]{2})*", given):
            raise ExpressionError(r"bytes are written in hexadecimal digits: '\x01ff'", text, place_of(node))
        return f"from_hex({quoted(given[2:])})"
    if type_ == "FLOAT":
        return f"CAST({quoted(given)} AS FLOAT)"
    # A cast to the column's type would round a number with more digits.
    number, shape = re.fullmatch(r"-?\d+\.(\d+)", given), re.fullmatch(r"DECIMAL\(\d+,(\d+)\)", type_)
    is_longer = number is not None and shape is not None and len(number[1]) > int(shape[1])
    return f"({given})" if is_longer else quoted(given)


def _not_boolean(found: str) -> str:
    return f"this is {found}, and must be true or false: use a comparison"


def _sides(node: Node) -> tuple[list[tuple[Node, Node]], list[Node]]:
    """Return the pairs that a node compares, and the conditions in it."""
    pairs: list[tuple[Node, Node]] = []
    if node["class"] == "COMPARISON":
        pairs = [(node["left"], node["right"])]
    elif node["class"] == "BETWEEN":
        pairs = [(node["input"], node["lower"]), (node["input"], node["upper"])]
    elif node["type"] == "COMPARE_IN":
        first, *rest = node["children"]
        pairs = [(first, item) for item in rest]
    elif node["class"] == "FUNCTION" and node["function_name"] == "nullif":
        first, second = parts_of(node)
        pairs = [(first, second)]
    if node["class"] == "CONJUNCTION" or node["type"] == "OPERATOR_NOT":
        return pairs, node["children"]
    if node["class"] == "CASE":
        return pairs, [branch["when_expr"] for branch in node["case_checks"]]
    return pairs, []


def _results(node: Node) -> list[Node]:
    """Return the parts one of which is the node's value."""
    if node["class"] == "CASE":
        return [*(branch["then_expr"] for branch in node["case_checks"]), node["else_expr"]]
    return list(node["children"]) if node["type"] == "OPERATOR_COALESCE" else []


def _exact(writer: SqlWriter, schema: pa.Schema) -> SqlWriter:
    """Return the writer with casts of decimals that together have too many digits.

    DuckDB gives them one type of at most 38 digits: it keeps those before the point, and rounds those after
    it. With the casts, a value that does not fit is an error.
    """
    nodes = [writer.tree]
    for node in nodes:
        nodes += parts_of(node)
    for node in reversed(nodes):  # the type of a node depends on the casts within it
        is_joined = node["class"] == "FUNCTION" and node["function_name"] in ("greatest", "least", "%")
        joined = parts_of(node) if is_joined else _results(node)
        types = _types([writer.sql(each) for each in joined], schema)
        if (scale := _scale_needed(types)) is not None:
            pairs = zip(joined, types, strict=True)
            writer = writer.with_scales({id(each): scale for each, type_ in pairs if _digits(type_)})
    return writer


def _scale_needed(types: list[str]) -> int | None:
    """Return the scale of decimals that DuckDB would round to have one type; None: it rounds none."""
    digits = [_digits(type_) for type_ in types if type_ != '"NULL"']
    exact = [each for each in digits if each is not None]
    if not exact or len(exact) < len(digits):
        return None
    before, after = (max(each) for each in zip(*exact, strict=True))
    return after if after and before + after > DIGITS_MAX else None


def _digits(type_: str) -> tuple[int, int] | None:
    """Return the number of digits before and after the point; None: of a type that is not exact."""
    if (shape := re.fullmatch(r"DECIMAL\((\d+),(\d+)\)", type_)) is not None:
        return int(shape[1]) - int(shape[2]), int(shape[2])
    whole = {"TINYINT": 3, "SMALLINT": 5, "INTEGER": 10, "BIGINT": 19, "HUGEINT": DIGITS_MAX}.get(type_)
    return None if whole is None else (whole, 0)


def _types(sides: list[str], schema: pa.Schema) -> list[str]:
    """Return DuckDB's type of each SQL expression over the columns of a schema."""
    if not sides:
        return []
    named = ", ".join(f"{side} AS s{n}" for n, side in enumerate(sides))
    return list(map(str, database().from_arrow(schema.empty_table()).project(named).types))


def _kind(found: str) -> str:
    if found in ("VARCHAR", "JSON"):
        return "text"
    if found.startswith(("DECIMAL", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE")):
        return "a number"
    if found.startswith(("DATE", "TIMESTAMP")):
        return "a point in time"
    return found.strip('"').lower()


def _wide(values: pa.Array) -> pa.Array:
    # In DuckDB the product of decimals of up to 18 digits has no more than 18.
    is_short = pa.types.is_decimal(values.type) and values.type.precision < 19
    return values.cast(pa.decimal128(19, values.type.scale)) if is_short else values


def _bound(values: pa.Array) -> pa.Array:
    return _infinite(plain(values), 0, 1)


def _unbound(values: pa.Array) -> pa.Array:
    return _infinite(values, 1, 0)


def _infinite(values: pa.Array, old: int, new: int) -> pa.Array:
    """Return dates and timestamps with another number for `-infinity`.

    :param old: its number minus the lowest one of the type: 0 in decoded columns, 1 in DuckDB.
    """
    is_date = pa.types.is_date32(values.type)
    if not is_date and not pa.types.is_timestamp(values.type):
        return values
    whole, lowest = (pa.int32(), -(2**31)) if is_date else (pa.int64(), -(2**63))
    numbers = values.view(whole)
    found = pc.equal(numbers, pa.scalar(lowest + old, whole))
    return pc.if_else(found, pa.scalar(lowest + new, whole), numbers).view(values.type)
