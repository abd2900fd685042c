"""What values are to an expression, whatever Arrow holds them in, and how they come together.

Integers are computed in 64 bits, decimals in 256, floats in 64. Text is compared by code point.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: An Arrow array or scalar.
Values = Any

NULL, BOOLEAN, INTEGER, DECIMAL, DOUBLE, TEXT = "null", "boolean", "integer", "decimal", "double", "text"
DATE, TIMESTAMP, TIMESTAMPTZ, OTHER = "date", "timestamp", "timestamptz", "another type"

NUMBERS = (INTEGER, DECIMAL, DOUBLE)

_INTEGER_MAX = 2**63 - 1
_UNSIGNED = pa.decimal128(20, 0)


class KindError(ValueError):
    """Values that can't come together. The message holds kinds, no values."""


def kind_of(values: Values) -> str:
    """Return the kind of values."""
    arrow = values.type
    t = pa.types
    if t.is_null(arrow):
        return NULL
    if t.is_boolean(arrow):
        return BOOLEAN
    if t.is_integer(arrow):
        return INTEGER
    if t.is_decimal(arrow):
        return DECIMAL
    if t.is_floating(arrow):
        return DOUBLE
    if t.is_string(arrow):
        return TEXT
    if t.is_date(arrow):
        return DATE
    if t.is_timestamp(arrow):
        return TIMESTAMP if arrow.tz is None else TIMESTAMPTZ
    return OTHER


def plain(values: Values) -> Values:
    """Return values in the type that is computed with: one for each kind, but for decimals."""
    arrow: Any = values.type
    t = pa.types
    if t.is_dictionary(arrow):
        return plain(values.cast(arrow.value_type))
    if isinstance(arrow, pa.BaseExtensionType):
        return plain(values.cast(arrow.storage_type))
    if t.is_uint64(arrow):
        return values.cast(_UNSIGNED)
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


def literal(value: bool | float | Decimal | str | None) -> pa.Scalar:
    """Return a value of the text."""
    if isinstance(value, int) and abs(value) > _INTEGER_MAX:
        return pa.scalar(Decimal(value))
    return pa.scalar(value)


def together(left: Values, right: Values) -> tuple[Values, Values]:
    """Return both in one type, so that they can be compared, or stand in one column.

    :raises KindError: if there is none.
    """
    kinds = kind_of(left), kind_of(right)
    if kinds[0] == NULL:
        return _nulls(left, right.type), right
    if kinds[1] == NULL:
        return left, _nulls(right, left.type)
    if kinds[0] in NUMBERS and kinds[1] in NUMBERS:
        return _numbers(left, right, kinds)
    if set(kinds) == {DATE, TIMESTAMP}:
        return _as_timestamp(left), _as_timestamp(right)
    if left.type == right.type:
        return left, right
    if kinds[0] == kinds[1] and kinds[0] in (TIMESTAMP, TIMESTAMPTZ):
        finest = pa.timestamp("ns", tz=left.type.tz)
        return left.cast(finest), right.cast(finest)
    raise KindError(f"{kinds[0]} and {kinds[1]} don't go together: cast one of them")


def _numbers(left: Values, right: Values, kinds: tuple[str, str]) -> tuple[Values, Values]:
    if DOUBLE in kinds:
        return as_double(left), as_double(right)
    if DECIMAL in kinds:
        left, right = as_decimal(left), as_decimal(right)
        scale = max(left.type.scale, right.type.scale)
        digits = max(found.type.precision - found.type.scale for found in (left, right)) + scale
        common = pa.decimal256(min(digits, 76), scale)
        return left.cast(common), right.cast(common)
    return left, right


def as_double(values: Values) -> Values:
    """Return numbers as floats; large ones lose digits."""
    return values if pa.types.is_float64(values.type) else values.cast(pa.float64(), safe=False)


def as_decimal(values: Values) -> Values:
    """Return whole numbers and decimals as wide decimals."""
    if pa.types.is_integer(values.type):
        return values.cast(pa.decimal256(19, 0))
    if pa.types.is_decimal256(values.type):
        return values
    return values.cast(pa.decimal256(values.type.precision, values.type.scale))


def narrowed(values: Values) -> Values:
    """Return decimals in 128 bits, in which everything that leaves an expression is.

    :raises pyarrow.ArrowInvalid: if they don't fit.
    """
    if not pa.types.is_decimal256(values.type):
        return values
    scale = min(values.type.scale, 38)
    return values.cast(pa.decimal128(38, scale))


def broadcast(values: Values, count: int) -> pa.Array:
    """Return a scalar as an array."""
    if not isinstance(values, pa.Scalar):
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return pa.repeat(values, count) if values.is_valid else pa.nulls(count, values.type)


def both_null(left: Values, right: Values) -> Values:
    """Return where both are null."""
    return pc.and_(pc.is_null(left), pc.is_null(right))


def _nulls(values: Values, arrow: pa.DataType) -> Values:
    return pa.scalar(None, arrow) if isinstance(values, pa.Scalar) else pa.nulls(len(values), arrow)


def _as_timestamp(values: Values) -> Values:
    return values.cast(pa.timestamp("us")) if pa.types.is_date(values.type) else values
