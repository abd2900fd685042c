"""Columns in other types: to text as PostgreSQL writes it, to all else as a cast in an expression has it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.values.stamps import stamp_texts
from tailrace.expressions import computing
from tailrace.expressions.computing import plain
from tailrace.expressions.language import ExpressionError

TEXT = "VARCHAR"


def cast(values: pa.Array, to: str) -> pa.Array:
    """Return values in another type; a null stays one.

    :param to: as `expressions.language.require_type` returns it.
    :raises ExpressionError: if there is no such cast, or a value does not fit.
    """
    if to != TEXT:
        return computing.cast(values, to)
    try:
        return texts_of(values)
    except pa.ArrowNotImplementedError:
        raise ExpressionError(f"{values.type} has no text", to, 0) from None


def texts_of(values: pa.Array) -> pa.StringArray:
    """Return the texts of values.

    :raises pyarrow.ArrowNotImplementedError: if the type has none, such as a list.
    """
    values = plain(values)
    arrow = values.type
    if pa.types.is_date(arrow) or pa.types.is_timestamp(arrow):
        return stamp_texts(values)
    if pa.types.is_nested(arrow) or pa.types.is_binary(arrow):
        raise pa.ArrowNotImplementedError(f"{arrow} has no text")
    texts = values.cast(pa.string())
    if not pa.types.is_decimal(arrow):
        return texts
    # Arrow writes numbers near zero with an exponent; these few are written again.
    small = pc.match_substring(texts, "E")
    if not pc.any(small).as_py():
        return texts
    plainly = [format(number.as_py(), "f") for number in values.filter(small)]
    return pc.replace_with_mask(texts, small.fill_null(False), pa.array(plainly, pa.string()))
