"""Values of an expression over columns: one walk of the tree, each node one call on whole columns.

Truth has three values: a comparison with null is null, `and`, `or` and `not` go on from there, and
who chooses rows takes those that are true. `and` and `or` don't look at the right side where the
left one decides all rows, and a branch of `case` is computed for its own rows alone: so
`source.table = 'orders' and after.qty > 5` asks no other table for `qty`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.sql.casts import cast
from tailrace.sql.functions import call, in_one_type, joined
from tailrace.sql.json_members import member_of
from tailrace.sql.kinds import (
    BOOLEAN,
    DECIMAL,
    DOUBLE,
    INTEGER,
    NULL,
    NUMBERS,
    TEXT,
    KindError,
    Values,
    as_decimal,
    as_double,
    both_null,
    broadcast,
    kind_of,
    literal,
    narrowed,
    plain,
    together,
)
from tailrace.sql.tokens import ExpressionError
from tailrace.sql.tree import (
    Binary,
    Call,
    Case,
    Cast,
    Like,
    Listed,
    Literal,
    Matches,
    Node,
    Path,
    TypeName,
    Unary,
)


class NoColumnError(LookupError):
    """There is no such column; the message says what there is."""


class Rows(Protocol):
    """What an expression is computed over."""

    def __len__(self) -> int: ...

    def column(self, parts: tuple[str, ...]) -> pa.Array:
        """Return the column that a path means.

        :raises NoColumnError: if there is none.
        """
        ...

    def was_sent(self, parts: tuple[str, ...]) -> pa.Array:
        """Return in which rows the source sent the column's value.

        :raises NoColumnError: if there is no such column.
        """
        ...


def computed(node: Node, text: str, rows: Rows) -> pa.Array:
    """Return the expression's value for each row.

    :param text: of which `node` is the tree; for messages.
    :raises ExpressionError: if it does not fit the columns, or a value is out of its range.
    """
    walk = _Walk(text, rows)
    found = broadcast(walk.value(node), len(rows))
    return walk.at(node, lambda: narrowed(found))


class _Selected:
    """Some of the rows."""

    def __init__(self, rows: Rows, places: npt.NDArray[np.int64]) -> None:
        self._rows = rows
        self._places = pa.array(places)

    def __len__(self) -> int:
        return len(self._places)

    def column(self, parts: tuple[str, ...]) -> pa.Array:
        return self._rows.column(parts).take(self._places)

    def was_sent(self, parts: tuple[str, ...]) -> pa.Array:
        return self._rows.was_sent(parts).take(self._places)


class _Walk:
    """One computation."""

    def __init__(self, text: str, rows: Rows) -> None:
        self._text = text
        self._rows = rows

    def at(self, node: Node, compute: Callable[[], Values]) -> Values:
        """Return what `compute` gives; what goes wrong in it has gone wrong at this node."""
        try:
            return compute()
        except (KindError, NoColumnError) as error:
            raise ExpressionError(str(error), self._text, node.at) from None
        except pa.ArrowNotImplementedError:
            raise ExpressionError("there is no such operation on these types", self._text, node.at) from None
        except pa.ArrowInvalid:
            # Arrow's own message may quote a row's value.
            raise ExpressionError(
                "a value is out of range, or not of that form", self._text, node.at
            ) from None

    def value(self, node: Node) -> Values:
        """Return a node's values: an array of all rows, or a scalar."""
        match node:
            case Literal():
                return self.at(node, lambda: literal(node.value))
            case Path():
                return self.at(node, lambda: plain(self._rows.column(node.parts)))
            case Binary(operator=("and" | "or") as operator):
                return self._logic(node, operator)
            case Binary():
                return self._binary(node)
            case Unary():
                operand = self.value(node.operand)
                return self.at(node, lambda: _unary(node.operator, operand))
            case Listed():
                return self._listed(node)
            case Like() | Matches():
                operand = self.value(node.operand)
                return self.at(node, lambda: _matched(node, operand))
            case Case():
                return self._case(node)
            case Cast():
                operand = self.value(node.operand)
                return self.at(node, lambda: cast(operand, node.to))
            case Call(name="was_sent"):
                [path] = node.arguments
                assert isinstance(path, Path)
                return self.at(path, lambda: self._rows.was_sent(path.parts))
            case Call():
                arguments = [self.value(argument) for argument in node.arguments]
                return self.at(node, lambda: call(node.name, arguments))

    def _logic(self, node: Binary, operator: str) -> Values:
        left = self.at(node.left, lambda: truth(self.value(node.left)))
        deciding = operator == "or"
        if _is_all(left, deciding) and len(self._rows):
            return left
        right = self.at(node.right, lambda: truth(self.value(node.right)))
        return pc.and_kleene(left, right) if operator == "and" else pc.or_kleene(left, right)

    def _binary(self, node: Binary) -> Values:
        left, right = self.value(node.left), self.value(node.right)
        if node.operator in ("->", "->>"):
            return self.at(node, lambda: _member(node, left, right))
        if node.operator == "||":
            return self.at(node, lambda: joined(plain(left), plain(right)))
        left, right = self._literals(node.left, left, node.right, right)
        if node.operator in _COMPARISONS:
            return self.at(node, lambda: _compared(node.operator, left, right))
        return self.at(node, lambda: _arithmetic(node.operator, left, right))

    def _literals(
        self, left_node: Node, left: Values, right_node: Node, right: Values
    ) -> tuple[Values, Values]:
        # A text that stands in the expression has the type of what it is put beside.
        if isinstance(right_node, Literal) and kind_of(right) == TEXT:
            right = self.at(right_node, lambda: _as_kind_of(left, right))
        elif isinstance(left_node, Literal) and kind_of(left) == TEXT:
            left = self.at(left_node, lambda: _as_kind_of(right, left))
        return left, right

    def _listed(self, node: Listed) -> Values:
        found: Values = pa.scalar(False)
        operand = self.value(node.operand)
        constants = [item for item in node.items if isinstance(item, Literal)]
        if len(constants) == len(node.items) and not isinstance(operand, pa.Scalar):
            return self._among(node, operand, constants)
        for item in node.items:
            left, right = self._literals(node.operand, operand, item, self.value(item))
            equal = self.at(item, lambda left=left, right=right: _compared("=", left, right))  # type: ignore[misc]
            found = pc.or_kleene(found, equal)
        return found

    def _among(self, node: Listed, operand: Values, items: list[Literal]) -> Values:
        # A list of constants is looked up at once.
        values = []
        for item in items:
            value = self._literals(node.operand, operand, item, literal(item.value))[1]
            if value.is_valid:
                values.append(self.at(item, lambda value=value: together(operand, value)))  # type: ignore[misc]
        has_null = len(values) < len(items)
        if not values:
            return pa.nulls(len(operand), pa.bool_())
        # Decimals and numbers of several kinds have no one type: these are compared one by one.
        kinds = {(left.type, right.type) for left, right in values}
        if len(kinds) == 1:
            known = pa.array([right.as_py() for _, right in values], values[0][1].type)
            found = pc.is_in(values[0][0], value_set=known)
        else:
            found = pc.equal(*values[0])
            for left, right in values[1:]:
                found = pc.or_kleene(found, pc.equal(left, right))
            found = pc.fill_null(found, False)
        unknown = pc.is_null(operand)
        if has_null:
            unknown = pc.or_(unknown, pc.invert(found))
        return pc.if_else(unknown, pa.scalar(None, pa.bool_()), found)

    def _case(self, node: Case) -> Values:
        left = np.arange(len(self._rows), dtype=np.int64)
        parts: list[tuple[npt.NDArray[np.int64], pa.Array]] = []
        for condition, result in node.branches:
            if not len(left):
                parts.append((left, self._branch(result, left)))
                continue
            walk = _Walk(self._text, _Selected(self._rows, left))
            found = walk.at(condition, lambda walk=walk, condition=condition: truth(walk.value(condition)))  # type: ignore[misc]
            chosen = chosen_rows(broadcast(found, len(left)))
            parts.append((left[chosen], self._branch(result, left[chosen])))
            left = left[~chosen]
        parts.append((left, self._branch(node.otherwise, left)))
        return self.at(node, lambda: _put_together(parts))

    def _branch(self, node: Node, places: npt.NDArray[np.int64]) -> pa.Array:
        walk = _Walk(self._text, _Selected(self._rows, places))
        if len(places):
            return broadcast(walk.value(node), len(places))
        try:
            # For its type alone, so that that does not depend on which rows there are.
            return broadcast(walk.value(node), 0)
        except ExpressionError:
            return pa.nulls(0)


def chosen_rows(truths: pa.Array) -> npt.NDArray[np.bool_]:
    """Return the rows that are true, and not false or null."""
    filled = pc.fill_null(truths, False)
    flags: npt.NDArray[np.bool_] = filled.to_numpy(zero_copy_only=False)
    return flags


def truth(values: Values) -> Values:
    """Return values that are to be true or false.

    :raises KindError: if they are not.
    """
    kind = kind_of(values)
    if kind == NULL:
        return values.cast(pa.bool_())
    if kind != BOOLEAN:
        raise KindError(f"this is {kind}, and must be true or false: compare it with something")
    return values


def require_patterns(node: Node, text: str) -> None:
    """Try the regular expressions below a node.

    :raises ExpressionError: if one of them is none; its syntax is RE2's.
    """
    from tailrace.sql.tree import parts_of

    if isinstance(node, Matches):
        try:
            pc.match_substring_regex(pa.array([""]), node.pattern)
        except pa.ArrowInvalid:
            raise ExpressionError("this is no regular expression that RE2 knows", text, node.at) from None
    for part in parts_of(node):
        require_patterns(part, text)


def _unary(operator: str, operand: Values) -> Values:
    if operator == "is null":
        return pc.is_null(operand)
    if operator == "-":
        kind = kind_of(operand)
        if kind == NULL:
            return operand
        if kind not in NUMBERS:
            raise KindError(f"a sign stands before a number, not {kind}")
        return pc.negate_checked(operand) if kind != DECIMAL else pc.negate(operand)
    found = truth(operand)
    if operator == "not":
        return pc.invert(found)
    if operator == "is false":
        found = pc.invert(found)
    return pc.fill_null(found, False)


_COMPARISONS: dict[str, Callable[[Values, Values], Values]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "is not distinct from": pc.equal,
}


def _compared(operator: str, left: Values, right: Values) -> Values:
    left, right = together(left, right)
    if kind_of(left) == NULL:
        unknown = pa.scalar(None, pa.bool_())
        found = pc.if_else(pc.is_null(left), unknown, unknown)
    else:
        found = _COMPARISONS[operator](left, right)
    if operator != "is not distinct from":
        return found
    same = pc.fill_null(found, False)
    return pc.or_(same, both_null(left, right))


def _arithmetic(operator: str, left: Values, right: Values) -> Values:
    kinds = {kind_of(left), kind_of(right)}
    if wrong := kinds - {*NUMBERS, NULL}:
        raise KindError(f"{operator} takes numbers, not {', '.join(sorted(wrong))}: cast it")
    if NULL in kinds:
        left, right = together(left, right)
        if kinds == {NULL}:
            return left
    if DOUBLE in kinds:
        left, right = as_double(left), as_double(right)
    elif DECIMAL in kinds:
        left, right = _fitting(as_decimal(left), as_decimal(right))
    if operator in ("/", "%"):
        # As in SQLite and MySQL, dividing by zero gives null: one row stops no stream.
        right = pc.if_else(pc.equal(right, pa.scalar(0).cast(right.type)), pa.scalar(None, right.type), right)
    if operator != "%":
        return _ARITHMETIC[operator](left, right)
    if kinds - {INTEGER, NULL}:
        raise KindError("% takes whole numbers: cast them")
    # Of the lowest number and -1 there is no quotient; what remains is 0 all the same.
    one = pa.scalar(1, pa.int64())
    right = pc.if_else(pc.equal(right, pa.scalar(-1, pa.int64())), one, right)
    return pc.subtract_checked(left, pc.multiply_checked(pc.divide_checked(left, right), right))


def _fitting(left: Values, right: Values) -> tuple[Values, Values]:
    # What two decimals make must have a type of 76 digits at most; their values rarely need theirs.
    if left.type.precision + right.type.precision < 76:
        return left, right
    shapes = [pa.decimal256(min(value.type.precision, 37), value.type.scale) for value in (left, right)]
    return left.cast(shapes[0]), right.cast(shapes[1])


_ARITHMETIC: dict[str, Callable[[Values, Values], Values]] = {
    "+": pc.add_checked,
    "-": pc.subtract_checked,
    "*": pc.multiply_checked,
    "/": pc.divide_checked,
}


def _as_kind_of(other: Values, text: Values) -> Values:
    kind = kind_of(other)
    if kind in (NULL, TEXT):
        return text
    names = {BOOLEAN: "boolean", INTEGER: "bigint", DOUBLE: "double", "date": "date"}
    names |= {"timestamp": "timestamp", "timestamptz": "timestamptz"}
    if kind == DECIMAL:
        return cast(text, TypeName("numeric", (38, min(other.type.scale + 4, 38))))
    if kind not in names:
        raise KindError(f"{kind} and text don't go together")
    return cast(text, TypeName(names[kind]))


def _matched(node: Like | Matches, operand: Values) -> Values:
    kind = kind_of(operand)
    if kind == NULL:
        return operand.cast(pa.bool_())
    if kind != TEXT:
        raise KindError(f"a pattern is for text, not {kind}: cast it")
    if isinstance(node, Matches):
        return pc.match_substring_regex(operand, node.pattern, ignore_case=node.ignores_case)
    pattern = _like_pattern(node.pattern, node.escape)
    return pc.match_like(operand, pattern, ignore_case=node.ignores_case)


def _like_pattern(pattern: str, escape: str) -> str:
    """Return a pattern with the backslash for its escape, which is Arrow's."""
    written, at = "", 0
    while at < len(pattern):
        letter = pattern[at]
        if escape and letter == escape:
            if at + 1 == len(pattern):
                raise KindError("the pattern ends in its escape")
            at += 1
            letter = pattern[at]
            written += "\\" + letter if letter in "%_\\" else letter
        else:
            written += "\\\\" if letter == "\\" else letter
        at += 1
    return written


def _member(node: Binary, left: Values, right: Values) -> Values:
    if not isinstance(node.right, Literal) or kind_of(right) not in (TEXT, INTEGER) or not right.is_valid:
        raise KindError(f"{node.operator} takes a member's name, or its place from 0, as it stands")
    key = right.as_py()
    if isinstance(key, int) and key < 0:
        raise KindError(f"{node.operator} takes no negative place")
    kind = kind_of(left)
    if kind == NULL:
        return left.cast(pa.string())
    if kind != TEXT:
        raise KindError(f"{node.operator} reads JSON from text, not from {kind}")
    as_text = node.operator == "->>"
    if isinstance(left, pa.Scalar):
        return member_of(pa.array([left.as_py()], pa.string()), key, as_text=as_text)[0]
    return member_of(left, key, as_text=as_text)


def _put_together(parts: list[tuple[npt.NDArray[np.int64], pa.Array]]) -> pa.Array:
    values = in_one_type([values for _, values in parts])
    order = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable")
    return pa.concat_arrays([broadcast(value, 0) for value in values]).take(pa.array(order))


def _is_all(values: Values, wanted: bool) -> bool:
    if isinstance(values, pa.Scalar):
        return bool(values.is_valid and values.as_py() is wanted)
    if values.null_count:
        return False
    return bool(pc.all(values).as_py()) if wanted else not pc.any(values).as_py()
