"""Compiled readers of hstore's text: `"a"=>"1", "b"=>NULL`, quoted with backslashes.

Source: PostgreSQL manual, "hstore", external representation.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.decode.kernel import CELLS, TEXT, TRIPLE
from tailrace.decode.values.literals import item_end, unquote_item
from tailrace.decode.values.text_writers import write_letter
from tailrace.protocol.frames import FROZEN_BYTES

_SPACE, _QUOTE, _COMMA, _COLON, _EQUALS, _GREATER, _BACKSLASH = map(ord, ' ",:=>\\')
_OPEN_BRACE, _CLOSE_BRACE = map(ord, "{}")
_CAPITAL_L, _CAPITAL_N, _CAPITAL_U = map(ord, "LNU")


@compiled(TRIPLE(FROZEN_BYTES, nb.int64, nb.int64))
def _pair(b, p, end):  # type: ignore[no-untyped-def]
    # Returns the end of the key that begins at `p`, the start and the end of its value; the last is
    # -1 if there is no pair.
    nothing = np.int64(-1), np.int64(-1), np.int64(-1)
    if p >= end or b[p] != _QUOTE:
        return nothing
    key_end, _, _ = item_end(b, p, end, _COMMA)
    if key_end < 0 or end - key_end < 4 or b[key_end] != _EQUALS or b[key_end + 1] != _GREATER:
        return nothing
    value = key_end + 2
    if b[value] == _QUOTE:
        value_end, _, _ = item_end(b, value, end, _COMMA)
        return key_end, value, value_end
    if (
        end - value >= 4
        and b[value] == _CAPITAL_N
        and b[value + 1] == _CAPITAL_U
        and b[value + 2] == _CAPITAL_L
        and b[value + 3] == _CAPITAL_L
    ):
        return key_end, value, value + 4
    return nothing


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64))
def _next_pair(b, p, end):  # type: ignore[no-untyped-def]
    # Returns the place of the pair after the one that ended at `p`; `end` if there is none, -1 if
    # something else follows.
    if p == end:
        return end
    if end - p > 2 and b[p] == _COMMA and b[p + 1] == _SPACE:
        return p + 2
    return np.int64(-1)


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64))
def _write_string(b, p, end, out, to):  # type: ignore[no-untyped-def]
    # Writes a quoted text as a JSON string.
    out[to] = _QUOTE
    to += 1
    p += 1
    while p < end - 1:
        if b[p] == _BACKSLASH:
            p += 1
        to = write_letter(b[p], out, to)
        p += 1
    out[to] = _QUOTE
    return to + 1


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64))
def write_object(b, p, length, out, to):  # type: ignore[no-untyped-def]
    """Write an hstore as a JSON object, without white space; -1 if it is not an hstore."""
    end = p + length
    out[to] = _OPEN_BRACE
    to += 1
    while p < end:
        key_end, value, value_end = _pair(b, p, end)
        if value_end < 0:
            return np.int64(-1)
        to = _write_string(b, p, key_end, out, to)
        out[to] = _COLON
        to += 1
        if b[value] == _QUOTE:
            to = _write_string(b, value, value_end, out, to)
        else:
            for letter in (110, 117, 108, 108):  # null
                out[to] = letter
                to += 1
        p = _next_pair(b, value_end, end)
        if p < 0:
            return np.int64(-1)
        if p < end:
            out[to] = _COMMA
            to += 1
    out[to] = _CLOSE_BRACE
    return to + 1


@compiled(nb.int64(*CELLS, nb.int32[::1], nb.uint8[::1], nb.uint8[::1]))
def measure_maps(b, start, length, kind, offsets, valid, outcome):  # type: ignore[no-untyped-def]
    """Count the pairs of a column of hstores in `offsets`; returns how many cells are not hstores.

    `valid` is a zeroed bit map; `outcome` gets 1 for a cell that is not an hstore.
    """
    specials = 0
    offsets[0] = 0
    for r in range(len(start)):
        outcome[r] = 0
        pairs = np.int64(0)
        if kind[r] == TEXT:
            p = np.int64(start[r])
            end = p + length[r]
            while 0 <= p < end:
                _, _, after = _pair(b, p, end)
                p = np.int64(-1) if after < 0 else _next_pair(b, after, end)
                pairs += 1
            if p < 0:
                outcome[r] = 1
                specials += 1
                pairs = np.int64(0)
            else:
                valid[r >> 3] |= np.uint8(1 << (r & 7))
        offsets[r + 1] = offsets[r] + pairs
    return specials


@compiled(
    nb.void(
        FROZEN_BYTES, nb.int32[::1], nb.int32[::1], nb.int32[::1], nb.int32[::1], nb.uint8[::1],
        nb.int32[::1], nb.uint8[::1], nb.uint8[::1],
    )
)  # fmt: skip
def read_maps(b, start, length, offsets, key_ends, keys, value_ends, values, valid):  # type: ignore[no-untyped-def]
    """Write keys and values of hstores that `measure_maps` accepted; `valid` is the values' bit map."""
    key_ends[0] = 0
    value_ends[0] = 0
    for r in range(len(start)):
        p = np.int64(start[r])
        end = p + length[r]
        for pair in range(offsets[r], offsets[r + 1]):
            key_end, value, value_end = _pair(b, p, end)
            key_ends[pair + 1] = unquote_item(b, p, key_end, keys, key_ends[pair])
            value_ends[pair + 1] = value_ends[pair]
            if b[value] == _QUOTE:
                value_ends[pair + 1] = unquote_item(b, value, value_end, values, value_ends[pair])
                valid[pair >> 3] |= np.uint8(1 << (pair & 7))
            p = _next_pair(b, value_end, end)
