"""The compiled writer of JSON: one document per change, from a template and the cells of its row.

A template is a list of constant texts, each followed by a number of the change, the letter of its
operation, or the row before or after it: the writer does not depend on Debezium's form. A column's
*style* says how its values are written; a value that does not have the style's form is written as
PostgreSQL's text, in quotes.

Source: RFC 8259 (JSON), RFC 4648 (base64), ISO 8601 (timestamps).
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.decode.gather import copy_bytes
from tailrace.decode.kernel import NONE, NULL, SPANS, TEXT, TRIPLE, UNCHANGED
from tailrace.decode.values.decimals import trimmed, write_money, write_unscaled
from tailrace.decode.values.floats import write_java
from tailrace.decode.values.forms import (
    AMOUNT_DOUBLE,
    BASE64,
    BIT,
    BOOLEAN,
    DOUBLE,
    FLOATING,
    INTEGER,
    JAVA,
    NUMBERS,
    PAIRS,
    PAIRS_QUOTED,
    QUOTED,
    RAW,
    TEXTS,
    VARIABLE_SCALE,
    delimiter_in,
    form_in,
    parameter_in,
    read_number,
    write_text,
)
from tailrace.decode.values.json_texts import number_end
from tailrace.decode.values.literals import PLAIN, is_null_item, item_end, unquote_item
from tailrace.decode.values.text_writers import (
    PLAIN_LETTERS,
    write_base64,
    write_integer,
    write_quoted,
    write_string,
)
from tailrace.decode.values.times import write_stamp_iso
from tailrace.protocol.frames import FROZEN_BYTES

_QUOTE, _COMMA, _POINT, _ZERO, _ONE, _NINE, _OPEN_BRACKET, _CLOSE_BRACKET, _OPEN_BRACE = map(ord, '",.019[]{')
_CLOSE_BRACE = ord("}")
_SMALL_E, _SMALL_F, _SMALL_T = map(ord, "eft")
_CASE_BIT = 32  # set in lower-case letters, not in upper-case ones

# Slots of a template other than a row of `numbers`: see `write_documents`.
NOTHING, OP_LETTER, BEFORE, AFTER = -1, -2, -3, -4

#: `CODED - k`: the change's text in the k-th list of coded texts, of up to ten lists.
CODED = -5

#: `CELL - c`: the value of column c after the change, or null.
CELL = -16

#: Added to the row of a number: write it as a text, or null if missing; as milliseconds in ISO 8601.
AS_TEXT, AS_ISO = 64, 128
_ROW_BITS = 63

#: Slot of a condition: if the number in the row `slot & _ROW_BITS` is missing, null replaces as many
#: constants as `slot >> 8 & 255` says.
UNLESS = 1 << 16

#: Limits of the growth of a value: factors, and bytes that do not depend on its length. In a JSON document
#: within a string, every byte may become \\\\u00xx; of an array's items in a form of their own, the two
#: bytes `1,` become 27 at most, as `VARIABLE_SCALE`.
GROWTH, GROWTH_OF_ITEMS, GROWTH_FIXED = 7, 14, 64

#: Rows of `write_documents`' argument `choice`.
BEFORE_CHOICE, AFTER_CHOICE = 0, 1

#: Limit of the size of a written number, in bytes: 64 bits with a sign, in quotes; a timestamp in ISO 8601.
NUMBER_BYTES_MAX = 40

_NULL = np.frombuffer(b"null", np.uint8)
_TRUE = np.frombuffer(b"true", np.uint8)
_FALSE = np.frombuffer(b"false", np.uint8)
_SCALE = np.frombuffer(b'{"scale":', np.uint8)
_VALUE = np.frombuffer(b',"value":"', np.uint8)

_WRITER = nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64)
_TEXTS = (FROZEN_BYTES, nb.int64[::1])  # concatenated, and the offset of each


@compiled(nb.int64(nb.int64, nb.uint8[::1], nb.int64))
def _write_number(value, out, to):  # type: ignore[no-untyped-def]
    if value == NONE:
        for k in range(4):
            out[to + k] = _NULL[k]
        return to + 4
    return write_integer(value, out, to)


@nb.njit(inline="always")
def _growth(style):  # type: ignore[no-untyped-def]
    has_own_items = delimiter_in(style) != 0 and form_in(style) >= NUMBERS
    return np.int64(GROWTH_OF_ITEMS if has_own_items else GROWTH)


@nb.njit(inline="always")
def _is_whole(b, p, length):  # type: ignore[no-untyped-def]
    # Whether it is an integer above 0, as most are; `_is_number` checks the others.
    good = length > 0 and b[p] != _ZERO
    for k in range(p, p + length):
        good &= _ZERO <= b[k] <= _NINE
    return good


@compiled(nb.boolean(FROZEN_BYTES, nb.int64, nb.int64, nb.boolean))
def _is_number(b, p, length, floating):  # type: ignore[no-untyped-def]
    # Whether it is a number in JSON; if not `floating`, without fraction and exponent.
    if not floating:
        for k in range(p + 1, p + length):
            if not _ZERO <= b[k] <= _NINE:
                return False
    return number_end(b, p, p + length) == p + length


@compiled(_WRITER)
def _write_double(b, p, length, style, out, to):  # type: ignore[no-untyped-def]
    # Writes a number with a point or an exponent, so that readers take it for a double; -1: not a number.
    if form_in(style) == AMOUNT_DOUBLE:
        end = write_money(b, p, length, parameter_in(style), out, to)
    else:
        if not _is_number(b, p, length, True):
            return np.int64(-1)
        copy_bytes(out, to, b, p, length)
        end = to + length
    for k in range(to, end):
        if out[k] == _POINT or (out[k] | _CASE_BIT) == _SMALL_E:
            return end
    if end >= 0:
        out[end] = _POINT
        out[end + 1] = _ZERO
        end += 2
    return end


@compiled(_WRITER)
def _write_variable_scale(b, p, length, _style, out, to):  # type: ignore[no-untyped-def]
    # Writes Debezium's VariableScaleDecimal; -1: not a number.
    # Like Debezium, it omits zeros at the end of the fraction.
    length, scale = trimmed(b, p, length)
    copy_bytes(out, to, _SCALE, np.int64(0), np.int64(len(_SCALE)))
    to = write_integer(scale, out, to + len(_SCALE))
    copy_bytes(out, to, _VALUE, np.int64(0), np.int64(len(_VALUE)))
    to = write_unscaled(b, p, length, scale, PLAIN_LETTERS, out, to + len(_VALUE))
    if to >= 0:
        out[to] = _QUOTE
        out[to + 1] = _CLOSE_BRACE
        to += 2
    return to


@compiled(_WRITER, allocates=True)
def _write_form(b, p, length, style, out, to):  # type: ignore[no-untyped-def]
    # Writes a value in a form other than its text; -1 if the value does not have that form.
    form = form_in(style)
    if form == DOUBLE or form == AMOUNT_DOUBLE:
        return _write_double(b, p, length, style, out, to)
    if form == VARIABLE_SCALE:
        return _write_variable_scale(b, p, length, style, out, to)
    if form == JAVA:
        return write_java(b, p, length, parameter_in(style), out, to)
    if form == PAIRS:
        return write_text(b, p, length, style, out, to)
    if form == PAIRS_QUOTED:
        document = np.empty(6 * length + 16, np.uint8)
        end = write_text(b, p, length, PAIRS, document, 0)
        return end if end < 0 else write_quoted(document, 0, end, out, to)
    if form < TEXTS:
        value, became = read_number(b, p, length, form)
        return write_integer(value, out, to) if became == PLAIN else np.int64(-1)
    end = write_text(b, p, length, style, out, to + 1)
    if end >= 0:
        out[to] = _QUOTE
        out[end] = _QUOTE
        end += 1
    return end


@compiled(_WRITER)
def _write_scalar(b, p, length, style, out, to):  # type: ignore[no-untyped-def]
    form = form_in(style)
    if form == INTEGER or form == FLOATING:
        if _is_number(b, p, length, form == FLOATING):
            copy_bytes(out, to, b, p, length)
            return to + length
    elif form == BOOLEAN:
        if length == 1 and b[p] == _SMALL_T:
            copy_bytes(out, to, _TRUE, np.int64(0), np.int64(4))
            return to + 4
        if length == 1 and b[p] == _SMALL_F:
            copy_bytes(out, to, _FALSE, np.int64(0), np.int64(5))
            return to + 5
    elif form == BIT:
        if length == 1 and (b[p] == _ZERO or b[p] == _ONE):
            size = np.int64(4) if b[p] == _ONE else np.int64(5)
            copy_bytes(out, to, _TRUE if b[p] == _ONE else _FALSE, np.int64(0), size)
            return to + size
    elif form == RAW:
        copy_bytes(out, to, b, p, length)
        return to + length
    elif form == BASE64:
        out[to] = _QUOTE
        to = write_base64(b, p, length, False, PLAIN_LETTERS, out, to + 1)
        out[to] = _QUOTE
        return to + 1
    elif form >= NUMBERS:
        end = _write_form(b, p, length, style, out, to)
        if end >= 0:
            return end
    return write_quoted(b, p, length, out, to)


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.uint8[::1], nb.int64))
def _write_array(b, p, length, style, scratch, out, to):  # type: ignore[no-untyped-def]
    # Writes arrays of any depth, without recursion. Other texts, and arrays with their own bounds
    # (`[0:1]={…}`), are written as text.
    delimiter = delimiter_in(style)
    start = p
    begun = to
    end = p + length
    depth = 0
    item_next = True
    while p < end:
        letter = b[p]
        if letter == _OPEN_BRACE and item_next:
            depth += 1
            out[to] = _OPEN_BRACKET
            to += 1
            p += 1
            item_next = p >= end or b[p] != _CLOSE_BRACE
        elif letter == _CLOSE_BRACE and not item_next and depth > 0:
            depth -= 1
            out[to] = _CLOSE_BRACKET
            to += 1
            p += 1
            if depth == 0:
                break
        elif letter == delimiter and not item_next and depth > 0:
            out[to] = _COMMA
            to += 1
            p += 1
            item_next = True
        elif item_next and depth > 0:
            after, size, quoted = item_end(b, p, end, delimiter)
            if after < 0:
                break
            if quoted != 0:
                unquote_item(b, p, after, scratch, 0)
                to = _write_scalar(scratch, 0, size, style, out, to)
            elif is_null_item(b, p, size, quoted):
                copy_bytes(out, to, _NULL, np.int64(0), np.int64(4))
                to += 4
            else:
                to = _write_scalar(b, p, size, style, out, to)
            p = after
            item_next = False
        else:
            break
    if depth != 0 or p != end or p == start:
        return write_quoted(b, start, length, out, begun)
    return to


@compiled(
    nb.int64(
        FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.uint8[::1], nb.int64
    )
)  # fmt: skip
def _write_value(b, p, length, style, scratch, out, to):  # type: ignore[no-untyped-def]
    if delimiter_in(style) != 0:
        return _write_array(b, p, length, style, scratch, out, to)
    return _write_scalar(b, p, length, style, out, to)


@nb.njit(inline="always")
def _write_cell(b, p, length, style, scratch, out, to):  # type: ignore[no-untyped-def]
    # `_write_value` with one call instead of several: a call costs as much as a short value.
    form = form_in(style)
    end = np.int64(-1)
    if delimiter_in(style) == 0:
        if form == JAVA:
            end = write_java(b, p, length, parameter_in(style), out, to)
        elif form >= NUMBERS and form < TEXTS:
            value, became = read_number(b, p, length, form)
            if became == PLAIN:
                end = write_integer(value, out, to)
        elif form >= TEXTS and form < PAIRS:
            end = write_text(b, p, length, style, out, to + 1)
            if end >= 0:
                out[to] = _QUOTE
                out[end] = _QUOTE
                end += 1
    if end < 0:
        end = _write_value(b, p, length, style, scratch, out, to)
    return end


@compiled(
    nb.int64(
        FROZEN_BYTES, nb.int64, nb.boolean[::1], *_TEXTS, nb.int64[::1], *_TEXTS, *_TEXTS, *SPANS,
        nb.uint8[::1], nb.uint8[::1], nb.int64,
    )
)  # fmt: skip
def _write_object(  # type: ignore[no-untyped-def]
    b, r, wanted, names, name_at, styles, unavailable, unavailable_at, absent, absent_at,
    start, length, kind, scratch, out, to,
):  # fmt: skip
    out[to] = _OPEN_BRACE
    to += 1
    first = True
    for c in range(start.shape[0]):
        held = kind[c, r]
        there = wanted[c] and (held == TEXT or held == NULL or held == UNCHANGED)
        if not there and absent_at[c + 1] == absent_at[c]:
            continue
        if not first:
            out[to] = _COMMA
            to += 1
        first = False
        copy_bytes(out, to, names, name_at[c], name_at[c + 1] - name_at[c])
        to += name_at[c + 1] - name_at[c]
        if not there:
            copy_bytes(out, to, absent, absent_at[c], absent_at[c + 1] - absent_at[c])
            to += absent_at[c + 1] - absent_at[c]
        elif held == NULL:
            copy_bytes(out, to, _NULL, np.int64(0), np.int64(4))
            to += 4
        elif held == UNCHANGED:
            copy_bytes(out, to, unavailable, unavailable_at[c], unavailable_at[c + 1] - unavailable_at[c])
            to += unavailable_at[c + 1] - unavailable_at[c]
        elif styles[c] == QUOTED:
            to = write_string(b, np.int64(start[c, r]), np.int64(length[c, r]), out, to)
        elif styles[c] == INTEGER and _is_whole(b, np.int64(start[c, r]), np.int64(length[c, r])):
            copy_bytes(out, to, b, np.int64(start[c, r]), np.int64(length[c, r]))
            to += length[c, r]
        else:
            to = _write_cell(b, np.int64(start[c, r]), np.int64(length[c, r]), styles[c], scratch, out, to)
    out[to] = _CLOSE_BRACE
    return to + 1


@compiled(
    nb.int64(nb.int64, nb.int64[:, ::1], nb.int64, nb.uint8[::1], nb.int64)
)  # fmt: skip
def _write_slot(slot, numbers, r, out, to):  # type: ignore[no-untyped-def]
    value = numbers[slot & _ROW_BITS, r]
    quoted = slot >= AS_TEXT and value != NONE
    if quoted:
        out[to] = _QUOTE
        to += 1
    if slot >= AS_ISO and value != NONE:
        to = write_stamp_iso(value, out, to)
    else:
        to = _write_number(value, out, to)
    if quoted:
        out[to] = _QUOTE
        to += 1
    return to


@nb.njit(inline="always")
def _fixed_need(slots, text_at, name_at, unavailable_at, absent_at):  # type: ignore[no-untyped-def]
    # Returns the bytes that a document needs at most, without its values and coded texts.
    images = np.int64(0)
    for part in range(len(slots)):
        if slots[part] == BEFORE or slots[part] == AFTER:
            images += 1
    of_columns = np.int64(2)
    for c in range(len(name_at) - 1):
        longest = max(
            GROWTH_FIXED, unavailable_at[c + 1] - unavailable_at[c], absent_at[c + 1] - absent_at[c]
        )
        of_columns += name_at[c + 1] - name_at[c] + 1 + longest
    return text_at[len(text_at) - 1] + len(slots) * NUMBER_BYTES_MAX + images * of_columns


@nb.njit(inline="always")
def _coded_need(slots, coded_at):  # type: ignore[no-untyped-def]
    longest = np.int64(0)
    for text in range(len(coded_at) - 1):
        longest = max(longest, coded_at[text + 1] - coded_at[text])
    need = np.int64(0)
    for part in range(len(slots)):
        if CELL < slots[part] <= CODED:
            need += longest
    return need


@nb.njit(inline="always")
def _values_need(r, styles, length, old_length):  # type: ignore[no-untyped-def]
    need = np.int64(0)
    for c in range(length.shape[0]):
        growth = _growth(styles[c])
        need += growth * np.int64(length[c, r])
        if old_length.shape[1] > 0:
            need += growth * np.int64(old_length[c, r])
    return need


@compiled(
    TRIPLE(
        FROZEN_BYTES, nb.int64, nb.int64[::1], nb.uint8[::1], nb.int64[:, ::1], *_TEXTS, nb.int64[::1],
        nb.uint8[:, ::1], nb.boolean[:, ::1], *_TEXTS, nb.int64[::1], *_TEXTS, *_TEXTS,
        *SPANS, *SPANS, nb.int64[::1], nb.int64, *_TEXTS, nb.uint8[::1], nb.uint8[::1], nb.int64[::1],
    )
)  # fmt: skip
def write_documents(  # type: ignore[no-untyped-def]
    b, first, rows, op, numbers, texts, text_at, slots, choice, wanted, names, name_at, styles,
    unavailable, unavailable_at, absent, absent_at, old_start, old_length, old_kind, start, length, kind,
    codes, coded_each, coded, coded_at, scratch, out, ends,
):  # fmt: skip
    """Write documents from `first` on, while `out` has room for the largest possible next document.

    Document d describes the change `rows[d]`, with the letter `op[d]`; 0: nothing is written.
    After each constant of the template comes its slot of `slots`: a row of `numbers` (with `AS_TEXT`
    or `AS_ISO`), one cell, `BEFORE` (from the cells `old_…`) or `AFTER`. These two are an object or null,
    as their row of `choice` says: 0 for null, else a row of `wanted`, counted from 1, with the object's
    columns. A value that was not sent is written as its column's `unavailable`; a column that is not wanted
    or not there as its `absent`, or left out if that is empty. Each list of `coded` has `coded_each` texts;
    a change has the text of its code.

    Returns the next document to write, the bytes written, and the bytes that the next document needs.
    `ends` gets the place after each document.
    """
    fixed = _fixed_need(slots, text_at, name_at, unavailable_at, absent_at) + _coded_need(slots, coded_at)
    to = np.int64(0)
    for d in range(first, len(rows)):
        if op[d] == 0:
            ends[d] = to
            continue
        r = rows[d]
        need = fixed + _values_need(r, styles, length, old_length)
        if need > len(out) - to:
            return np.int64(d), to, need
        part = 0
        while part < len(slots):
            size = text_at[part + 1] - text_at[part]
            copy_bytes(out, to, texts, text_at[part], size)
            to += size
            slot = slots[part]
            part += 1
            if slot == OP_LETTER:
                out[to] = op[d]
                to += 1
            elif slot == BEFORE or slot == AFTER:
                chosen = choice[AFTER_CHOICE if slot == AFTER else BEFORE_CHOICE, d]
                if chosen == 0:
                    to = _write_number(NONE, out, to)
                elif slot == AFTER:
                    to = _write_object(
                        b, r, wanted[chosen - 1], names, name_at, styles, unavailable, unavailable_at,
                        absent, absent_at, start, length, kind, scratch, out, to,
                    )  # fmt: skip
                else:
                    to = _write_object(
                        b, r, wanted[chosen - 1], names, name_at, styles, unavailable, unavailable_at,
                        absent, absent_at, old_start, old_length, old_kind, scratch, out, to,
                    )  # fmt: skip
            elif slot >= UNLESS:
                if numbers[slot & _ROW_BITS, r] == NONE:
                    to = _write_number(NONE, out, to)
                    part += (slot >> 8) & 255
            elif slot >= 0:
                to = _write_slot(slot, numbers, r, out, to)
            elif slot <= CELL:
                c = CELL - slot
                if kind[c, r] == TEXT:
                    to = _write_value(
                        b, np.int64(start[c, r]), np.int64(length[c, r]), styles[c], scratch, out, to
                    )  # fmt: skip
                else:
                    to = _write_number(NONE, out, to)
            elif slot <= CODED:
                text = (CODED - slot) * coded_each + codes[r]
                size = coded_at[text + 1] - coded_at[text]
                copy_bytes(out, to, coded, coded_at[text], size)
                to += size
        ends[d] = to
    return np.int64(len(rows)), to, np.int64(0)


@compiled(
    TRIPLE(
        FROZEN_BYTES, nb.int64, nb.int32[::1], nb.int32[::1], nb.uint8[::1], nb.int64, nb.uint8[::1],
        nb.uint8[::1], nb.int64[::1],
    )
)  # fmt: skip
def write_values(b, first, start, length, kind, style, scratch, out, ends):  # type: ignore[no-untyped-def]
    """Write one column's values from `first` on, while `out` has room; nothing for a cell without a text.

    Returns the same as `write_documents`.
    """
    to = np.int64(0)
    for r in range(first, len(start)):
        if kind[r] == TEXT:
            need = _growth(style) * np.int64(length[r]) + GROWTH_FIXED
            if need > len(out) - to:
                return np.int64(r), to, need
            to = _write_value(b, np.int64(start[r]), np.int64(length[r]), style, scratch, out, to)
        ends[r] = to
    return np.int64(len(start)), to, np.int64(0)


@compiled(nb.void(*_TEXTS, *_TEXTS, nb.int64[::1], nb.uint8[::1]))
def write_objects(texts, text_at, constants, constant_at, ends, out):  # type: ignore[no-untyped-def]
    """Write for each row the same constants, and between each two of them the row's text of a list.

    `texts` has one list after the other, each with one text per row. `ends` gets the place after each row.
    """
    to, last = np.int64(0), len(constant_at) - 2
    for r in range(len(ends)):
        for part in range(last + 1):
            size = constant_at[part + 1] - constant_at[part]
            copy_bytes(out, to, constants, constant_at[part], size)
            to += size
            if part < last:
                text = part * len(ends) + r
                size = text_at[text + 1] - text_at[text]
                copy_bytes(out, to, texts, text_at[text], size)
                to += size
        ends[r] = to
