"""The functions that an expression may call, but for those that are about its columns.

Texts are counted in characters from 1, as in PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.sql.casts import cast
from tailrace.sql.kinds import (
    DECIMAL,
    DOUBLE,
    INTEGER,
    NULL,
    NUMBERS,
    TEXT,
    KindError,
    Values,
    as_decimal,
    kind_of,
    plain,
    together,
)
from tailrace.sql.tree import TypeName

_TEXT_TYPE = TypeName("text")


def call(name: str, arguments: Sequence[Values]) -> Values:
    """Return what a function gives; at least one of the arguments may be an array.

    :raises KindError: if an argument is of the wrong kind.
    :raises pyarrow.ArrowInvalid: if a value is out of range.
    """
    return _FUNCTIONS[name]([plain(argument) for argument in arguments])


def in_one_type(values: Sequence[Values]) -> list[Values]:
    """Return all values in one type.

    :raises KindError: if there is none.
    """
    widest = values[0]
    for other in values[1:]:
        widest, _ = together(widest, other)
    # A second time: what was seen before the widest takes its type too.
    for other in values:
        widest, _ = together(widest, other)
    return [together(value, widest)[0] for value in values]


def joined(left: Values, right: Values) -> Values:
    """Return `left || right`: null if one of them is."""
    return pc.binary_join_element_wise(_as_text(left), _as_text(right), "")


def _texts(name: str, compute: Callable[..., Values]) -> Callable[[Sequence[Values]], Values]:
    def run(arguments: Sequence[Values]) -> Values:
        return compute(*(_text(name, argument) for argument in arguments))

    return run


def _text(name: str, value: Values) -> Values:
    kind = kind_of(value)
    if kind == NULL:
        return value.cast(pa.string())
    if kind != TEXT:
        raise KindError(f"{name} takes text, not {kind}: cast it")
    return value


def _as_text(value: Values) -> Values:
    return value if kind_of(value) == TEXT else cast(value, _TEXT_TYPE)


def _constant(name: str, value: Values, kind: str) -> object:
    found = kind_of(value)
    if not isinstance(value, pa.Scalar) or found != kind or not value.is_valid:
        raise KindError(f"{name} takes {kind} that stands in the expression, here")
    return value.as_py()


def _substring(arguments: Sequence[Values]) -> Values:
    text = _text("substring", arguments[0])
    first = int(str(_constant("substring", arguments[1], INTEGER)))
    if len(arguments) == 2:
        return pc.utf8_slice_codeunits(text, start=max(first - 1, 0))
    count = int(str(_constant("substring", arguments[2], INTEGER)))
    if count < 0:
        raise KindError("substring takes no negative length")
    return _sliced(text, max(first - 1, 0), max(first - 1 + count, 0))


def _sliced(text: Values, start: int, stop: int) -> Values:
    return pc.utf8_slice_codeunits(text, start=start, stop=max(start, stop))


def _left(arguments: Sequence[Values]) -> Values:
    text, count = _text("left", arguments[0]), int(str(_constant("left", arguments[1], INTEGER)))
    return pc.utf8_slice_codeunits(text, start=0, stop=count)


def _right(arguments: Sequence[Values]) -> Values:
    text, count = _text("right", arguments[0]), int(str(_constant("right", arguments[1], INTEGER)))
    if count == 0:
        return _sliced(text, 0, 0)
    return pc.utf8_slice_codeunits(text, start=-count)


def _replace(arguments: Sequence[Values]) -> Values:
    old, new = (str(_constant("replace", argument, TEXT)) for argument in arguments[1:])
    text = _text("replace", arguments[0])
    return pc.replace_substring(text, pattern=old, replacement=new) if old else text


def _begins(arguments: Sequence[Values]) -> Values:
    start = str(_constant("starts_with", arguments[1], TEXT))
    return pc.starts_with(_text("starts_with", arguments[0]), pattern=start)


def _ends(arguments: Sequence[Values]) -> Values:
    end = str(_constant("ends_with", arguments[1], TEXT))
    return pc.ends_with(_text("ends_with", arguments[0]), pattern=end)


def _number(name: str, compute: Callable[[Values], Values]) -> Callable[[Sequence[Values]], Values]:
    def run(arguments: Sequence[Values]) -> Values:
        return compute(_require_number(name, arguments[0]))

    return run


def _require_number(name: str, value: Values) -> Values:
    kind = kind_of(value)
    if kind == NULL:
        return value.cast(pa.int64())
    if kind not in NUMBERS:
        raise KindError(f"{name} takes a number, not {kind}: cast it")
    return value


def _whole(mode: str) -> Callable[[Values], Values]:
    def compute(value: Values) -> Values:
        if kind_of(value) == INTEGER:
            return value
        return pc.round(_roomy(value), ndigits=0, round_mode=mode)

    return compute


def _roomy(value: Values) -> Values:
    # Rounding may need a digit more than the type has.
    if kind_of(value) != DECIMAL:
        return value
    digits = min(value.type.precision + 1, 76)
    return as_decimal(value).cast(pa.decimal256(digits, value.type.scale))


def _round(arguments: Sequence[Values]) -> Values:
    value = _require_number("round", arguments[0])
    digits = int(str(_constant("round", arguments[1], INTEGER))) if len(arguments) > 1 else 0
    kind = kind_of(value)
    if kind == INTEGER and digits >= 0:
        return value
    mode = "half_to_even" if kind == DOUBLE and len(arguments) == 1 else "half_towards_infinity"
    return pc.round(_roomy(value), ndigits=digits, round_mode=mode)


def _coalesce(arguments: Sequence[Values]) -> Values:
    return pc.coalesce(*in_one_type(arguments))


def _nullif(arguments: Sequence[Values]) -> Values:
    value, other = together(*arguments)
    if kind_of(value) == NULL:
        return value
    equal = pc.fill_null(pc.equal(value, other), False)
    return pc.if_else(equal, pa.scalar(None, value.type), value)


def _extreme(compute: Callable[..., Values]) -> Callable[[Sequence[Values]], Values]:
    def run(arguments: Sequence[Values]) -> Values:
        values = in_one_type(arguments)
        return values[0] if kind_of(values[0]) == NULL else compute(*values, skip_nulls=True)

    return run


def _concat(arguments: Sequence[Values]) -> Values:
    texts = [pc.fill_null(_as_text(argument), "") for argument in arguments]
    return pc.binary_join_element_wise(*texts, "")


_FUNCTIONS: dict[str, Callable[[Sequence[Values]], Values]] = {
    "abs": _number("abs", pc.abs_checked),
    "ceil": _number("ceil", _whole("up")),
    "coalesce": _coalesce,
    "concat": _concat,
    "ends_with": _ends,
    "floor": _number("floor", _whole("down")),
    "greatest": _extreme(pc.max_element_wise),
    "least": _extreme(pc.min_element_wise),
    "left": _left,
    "length": _texts("length", lambda text: pc.utf8_length(text).cast(pa.int64())),
    "lower": _texts("lower", pc.utf8_lower),
    "ltrim": _texts("ltrim", lambda text: pc.utf8_ltrim(text, characters=" ")),
    "nullif": _nullif,
    "replace": _replace,
    "right": _right,
    "round": _round,
    "rtrim": _texts("rtrim", lambda text: pc.utf8_rtrim(text, characters=" ")),
    "starts_with": _begins,
    "substring": _substring,
    "trim": _texts("trim", lambda text: pc.utf8_trim(text, characters=" ")),
    "upper": _texts("upper", pc.utf8_upper),
}
