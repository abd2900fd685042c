"""Casts of Arrow's values to PostgreSQL's text, for values that are no longer as the source sent them.

Source: PostgreSQL manual, "Floating-Point Types", "Array Input and Output Syntax".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.gather import array_mask, bit_map, text_buffers
from tailrace.decode.values.stamps import stamp_texts

#: Characters, in addition to the delimiter, for which an array's item is quoted; only ASCII's white space.
_QUOTED = re.compile(r'[{}"\\ \t\n\r\v\f]')

_ODD_FLOATS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
#: Powers of ten that are written without an exponent: [first, digits), or [first, digits of real).
_FIRST_FIXED, _FIXED_DIGITS, _FIXED_DIGITS_OF_REAL = -4, 15, 6


def texts_of(values: pa.Array, delimiter: str = ",") -> pa.StringArray:
    """Return the texts of values; null for null.

    :param delimiter: delimiter of arrays' items, as their type defines it.
    :raises pyarrow.ArrowNotImplementedError: if the type has no text, such as a map.
    """
    arrow, t = values.type, pa.types
    if t.is_dictionary(arrow):
        return texts_of(values.cast(arrow.value_type))
    if isinstance(arrow, pa.BaseExtensionType):
        return texts_of(values.cast(arrow.storage_type))
    if t.is_date(arrow) or t.is_timestamp(arrow):
        return stamp_texts(values)
    if t.is_floating(arrow):
        return _float_texts(values)
    if t.is_list(arrow):
        return _array_texts(values, delimiter)
    if t.is_binary(arrow) or t.is_large_binary(arrow):
        return hex_texts(values).cast(pa.string())
    if t.is_nested(arrow):
        raise pa.ArrowNotImplementedError(f"{arrow} has no text")
    texts = values.cast(pa.string())
    if t.is_time(arrow):
        return pc.replace_substring_regex(texts, r"(:\d\d)\.?0*$|0+$", r"\1")
    if t.is_decimal(arrow):
        # Arrow writes numbers near 0 with an exponent.
        return _rewritten(texts, pc.match_substring(texts, "E"), lambda text: format(Decimal(text), "f"))
    return texts


def hex_texts(values: pa.Array) -> pa.LargeStringArray:
    """Return bytes as PostgreSQL's bytea in hex form; null for null."""
    data, offsets = text_buffers(values)
    data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
    buffers = pa.py_buffer(2 * offsets), pa.py_buffer(data.tobytes().hex().encode())
    digits = pa.LargeStringArray.from_buffers(len(values), *buffers, bit_map(array_mask(values)))
    before, nothing = (pa.scalar(text, pa.large_string()) for text in ("\\x", ""))
    return pc.binary_join_element_wise(before, digits, nothing)


def _float_texts(values: pa.Array) -> pa.StringArray:
    # Arrow and PostgreSQL write the fewest digits that identify the number; Arrow uses exponents sooner.
    is_real = values.type != pa.float64()
    digits = _FIXED_DIGITS_OF_REAL if is_real else _FIXED_DIGITS
    size = pc.abs(values)
    odd = pc.or_(pc.is_nan(values), pc.greater_equal(size, 10.0**_FIXED_DIGITS_OF_REAL))
    odd = pc.or_(odd, pc.and_(pc.less(size, 10.0**_FIRST_FIXED), pc.not_equal(size, 0.0)))
    return _rewritten(values.cast(pa.string()), odd, lambda text: _float_text(text, digits))


def _float_text(text: str, fixed_digits: int) -> str:
    if text in _ODD_FLOATS:
        return _ODD_FLOATS[text]
    number = Decimal(text).normalize()
    power = number.adjusted()
    if _FIRST_FIXED <= power < fixed_digits:
        return format(number, "f")
    sign, digits, _ = number.as_tuple()
    first, *rest = map(str, digits)
    point = "." if rest else ""
    return f"{'-' * sign}{first}{point}{''.join(rest)}e{power:+03d}"


def _rewritten(texts: pa.StringArray, odd: pa.BooleanArray, write: Callable[[str], str]) -> pa.StringArray:
    odd = odd.fill_null(False)
    if not odd.true_count:
        return texts
    written = pa.array(map(write, texts.filter(odd).to_pylist()), pa.string())
    return pc.replace_with_mask(texts, odd, written)


def _array_texts(values: pa.ListArray, delimiter: str) -> pa.StringArray:
    flat = values.flatten()
    if pa.types.is_boolean(flat.type):
        flat = pc.if_else(flat, "t", "f")  # in arrays, PostgreSQL writes the letter, not `true` as in a cast
    items = [_item(text, delimiter) for text in texts_of(flat).to_pylist()]
    ends = pc.cumulative_sum(pc.fill_null(values.value_lengths(), 0)).to_pylist()
    spans = zip([0, *ends], ends, values.is_valid().to_pylist(), strict=False)
    texts = ["{" + delimiter.join(items[start:end]) + "}" if there else None for start, end, there in spans]
    return pa.array(texts, pa.string())


def _item(text: str | None, delimiter: str) -> str:
    if text is None:
        return "NULL"
    if text and text.upper() != "NULL" and delimiter not in text and not _QUOTED.search(text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
