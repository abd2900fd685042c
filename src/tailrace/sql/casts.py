"""Casts between kinds, with PostgreSQL's meaning: what does not fit is an error, never a null."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.sql.kinds import (
    BOOLEAN,
    DATE,
    DECIMAL,
    DOUBLE,
    INTEGER,
    NULL,
    NUMBERS,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    KindError,
    Values,
    as_decimal,
    as_double,
    kind_of,
    plain,
)
from tailrace.sql.tree import TypeName

#: Digits of `numeric` without any said, before and after the point.
NUMERIC_SHAPE = (38, 10)

#: Digits after the point of a text that becomes a number, before it is rounded.
_READ_SCALE = 38

_TRUE = pa.array(["true", "t", "yes", "y", "on", "1"])
_FALSE = pa.array(["false", "f", "no", "n", "off", "0"])
_UTC = "UTC"


def arrow_type(to: TypeName) -> pa.DataType:
    """Return the Arrow type that a type's name stands for."""
    if to.name == "numeric":
        shape = (*to.numbers, 0)[:2] if to.numbers else NUMERIC_SHAPE
        return pa.decimal128(*shape)
    return {
        "boolean": pa.bool_(),
        "smallint": pa.int16(),
        "integer": pa.int32(),
        "bigint": pa.int64(),
        "real": pa.float32(),
        "double": pa.float64(),
        "text": pa.string(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us"),
        "timestamptz": pa.timestamp("us", tz=_UTC),
    }[to.name]


def cast(values: Values, to: TypeName) -> Values:
    """Return values in another type. A null stays one.

    :raises KindError: if there is no such cast.
    :raises pyarrow.ArrowInvalid: if a value does not fit; its message may hold the value.
    """
    target = arrow_type(to)
    values = plain(values)
    kind = kind_of(values)
    if kind == NULL:
        return values.cast(target)
    wanted = kind_of(pa.scalar(None, target))
    step = _CASTS.get((kind, wanted))
    if step is None:
        raise KindError(f"there is no cast from {kind} to {to.name}")
    return step(values, target)


def _direct(values: Values, target: pa.DataType) -> Values:
    return values.cast(target)


def _boolean_of_text(values: Values, _target: pa.DataType) -> Values:
    words = pc.utf8_lower(pc.utf8_trim_whitespace(values))
    true, false = pc.is_in(words, value_set=_TRUE), pc.is_in(words, value_set=_FALSE)
    known = pc.or_(pc.or_(true, false), pc.is_null(values))
    if not _all(known):
        raise pa.ArrowInvalid("a text is neither true nor false")
    return pc.if_else(pc.is_valid(values), true, pa.scalar(None, pa.bool_()))


def _all(flags: Values) -> bool:
    found = flags if isinstance(flags, pa.Scalar) else pc.all(flags)
    return found.as_py() is not False


def _number_of_text(values: Values, target: pa.DataType) -> Values:
    trimmed = pc.utf8_trim_whitespace(values)
    if pa.types.is_decimal(target):
        return _rounded(trimmed.cast(pa.decimal256(76, _READ_SCALE)), target)
    return trimmed.cast(target)


def _integer_of_double(values: Values, target: pa.DataType) -> Values:
    return pc.round(values, round_mode="half_to_even").cast(target)


def _integer_of_decimal(values: Values, target: pa.DataType) -> Values:
    return _rounded(as_decimal(values), pa.decimal256(76, 0)).cast(pa.int64()).cast(target)


def _decimal_of_number(values: Values, target: pa.DataType) -> Values:
    if kind_of(values) == DOUBLE:
        # The shortest text that is this number, as PostgreSQL takes it.
        return _number_of_text(values.cast(pa.string()), target)
    return _rounded(as_decimal(values), target)


def _rounded(values: Values, target: pa.DataType) -> Values:
    # Half away from zero, as PostgreSQL rounds numeric.
    if values.type.scale > target.scale:
        room = pa.decimal256(76, values.type.scale)
        values = pc.round(values.cast(room), ndigits=target.scale, round_mode="half_towards_infinity")
    return values.cast(target)


def _double_of_decimal(values: Values, target: pa.DataType) -> Values:
    return as_double(values).cast(target)


def _float_of_number(values: Values, target: pa.DataType) -> Values:
    return values.cast(target, safe=False)


def _text_of_decimal(values: Values, target: pa.DataType) -> Values:
    texts = values.cast(target)
    small = pc.match_substring(texts, "E")
    if isinstance(texts, pa.Scalar):
        texts, small = pa.array([texts.as_py()], target), pa.array([small.as_py()])
        return _without_exponents(texts, small)[0]
    return _without_exponents(texts, small)


def _without_exponents(texts: pa.Array, small: pa.Array) -> pa.Array:
    # Arrow writes numbers near zero with an exponent; these few are written again.
    if not pc.any(small).as_py():
        return texts
    plainly = [format(_decimal(text), "f") for text in texts.filter(small).to_pylist()]
    return pc.replace_with_mask(texts, small.fill_null(False), pa.array(plainly, pa.string()))


def _decimal(text: str) -> object:
    from decimal import Decimal

    return Decimal(text)


def _text_of_time(values: Values, target: pa.DataType) -> Values:
    zoned = values.type.tz is not None
    texts = values.cast(pa.timestamp("us", tz=values.type.tz)).cast(target)
    if zoned:
        texts = pc.replace_substring_regex(texts, r"Z$", "")
    texts = pc.replace_substring_regex(texts, r"(\.\d*?)0+$", r"\1")
    texts = pc.replace_substring_regex(texts, r"\.$", "")
    return pc.binary_join_element_wise(texts, "+00", "") if zoned else texts


def _time_of_text(values: Values, target: pa.DataType) -> Values:
    trimmed = pc.utf8_trim_whitespace(values)
    if pa.types.is_date(target):
        return trimmed.cast(target)
    if target.tz is not None:
        # `+00` and `+0530` become `+00:00` and `+05:30`; without a zone it is UTC.
        trimmed = pc.replace_substring_regex(trimmed, r"([ T].*[+-]\d{2})$", r"\1:00")
        trimmed = pc.replace_substring_regex(trimmed, r"^(\d{4}-\d\d-\d\d)$", r"\1 00:00:00")
        trimmed = pc.replace_substring_regex(trimmed, r"([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)$", r"\1Z")
    return trimmed.cast(target)


def _day(values: Values, target: pa.DataType) -> Values:
    return pc.floor_temporal(values, unit="day").cast(target, safe=False)


_Step = Callable[[Values, pa.DataType], Values]

_CASTS: dict[tuple[str, str], _Step] = {
    **{(kind, kind): _direct for kind in (BOOLEAN, INTEGER, TEXT, DATE, TIMESTAMP, TIMESTAMPTZ)},
    **{(kind, DECIMAL): _decimal_of_number for kind in NUMBERS},
    (INTEGER, DOUBLE): _float_of_number,
    (DOUBLE, DOUBLE): _float_of_number,
    (DECIMAL, DOUBLE): _double_of_decimal,
    (DOUBLE, INTEGER): _integer_of_double,
    (DECIMAL, INTEGER): _integer_of_decimal,
    (BOOLEAN, INTEGER): _direct,
    (INTEGER, BOOLEAN): _direct,
    (TEXT, BOOLEAN): _boolean_of_text,
    **{(TEXT, kind): _number_of_text for kind in NUMBERS},
    **{(kind, TEXT): _direct for kind in (BOOLEAN, INTEGER, DOUBLE, DATE)},
    (DECIMAL, TEXT): _text_of_decimal,
    **{(kind, TEXT): _text_of_time for kind in (TIMESTAMP, TIMESTAMPTZ)},
    **{(TEXT, kind): _time_of_text for kind in (DATE, TIMESTAMP, TIMESTAMPTZ)},
    (DATE, TIMESTAMP): _direct,
    (DATE, TIMESTAMPTZ): lambda values, target: values.cast(pa.timestamp("us")).cast(target),
    (TIMESTAMP, TIMESTAMPTZ): _direct,
    (TIMESTAMPTZ, TIMESTAMP): _direct,
    (TIMESTAMP, DATE): _day,
    (TIMESTAMPTZ, DATE): _day,
}
