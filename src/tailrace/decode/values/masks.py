"""Masks of cells, which replace a column's values before anything reads them.

A mask changes where a column's cells point to, in its own copy of the places; the block itself is
not changed. New texts are appended to the block's bytes, each distinct one once. NULL remains NULL,
and a value that was not sent remains unsent.
"""

from __future__ import annotations

import hashlib
import hmac

import numba as nb
import numpy as np
import pyarrow as pa

from tailrace.compiled import compiled
from tailrace.decode.gather import Cells, gather
from tailrace.decode.kernel import CELLS, NULL, TEXT
from tailrace.decode.tuples import Spans, Tuples
from tailrace.protocol.frames import Bytes

#: Hexadecimal digits of a hash.
HASH_LENGTH = 64


def hashed(tuples: Tuples, place: int, salt: bytes) -> Tuples:
    """Return `tuples` with HMAC-SHA-256 in place of a column's texts, in hexadecimal.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8, or the block grows too large.
    """
    sides = (tuples.current, tuples.old)
    texts = pa.concat_arrays([gather(_cells(tuples.buffer, side, place)) for side in sides])
    coded = texts.dictionary_encode()
    first = len(tuples.buffer)
    codes = coded.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    tuples = _grown(tuples, hashed_texts(coded.dictionary, salt))
    count = len(tuples)
    for side, mine in zip(sides, (codes[:count], codes[count:]), strict=True):
        there = side.kind[place] == TEXT
        side.start[place][there] = (first + HASH_LENGTH * mine)[there]
        side.length[place][there] = HASH_LENGTH
    return tuples


def hashed_texts(texts: pa.StringArray, salt: bytes) -> Bytes:
    """Return the HMAC-SHA-256 of each text as hexadecimal digits, one after another.

    Each text costs a Python call: pass only the distinct values of a column.

    :param texts: texts without nulls.
    """
    keyed = hmac.new(salt, digestmod=hashlib.sha256)
    digests = bytearray()
    for text in texts.cast(pa.binary()).to_pylist():
        # `keyed` has hashed the salt once for all texts.
        digest = keyed.copy()
        digest.update(text)
        digests += digest.digest()
    return np.frombuffer(digests.hex().encode(), np.uint8)


def fixed(tuples: Tuples, place: int, text: bytes) -> Tuples:
    """Return `tuples` with `text` in place of a column's texts.

    :raises TailraceError: `DECODE_FAILED` if the block grows too large.
    """
    first = len(tuples.buffer)
    for side in (tuples.current, tuples.old):
        there = side.kind[place] == TEXT
        side.start[place][there] = first
        side.length[place][there] = len(text)
    return _grown(tuples, np.frombuffer(text, np.uint8))


def shortened(tuples: Tuples, place: int, characters: int) -> None:
    """Truncate a column's texts to their first characters, in place."""
    for side in (tuples.current, tuples.old):
        _shorten(tuples.buffer, side.start[place], side.length[place], side.kind[place], characters)


def nulled(tuples: Tuples, place: int) -> None:
    """Make a column's values NULL, in place."""
    for side in (tuples.current, tuples.old):
        there = side.kind[place] == TEXT
        side.kind[place][there] = NULL
        side.length[place][there] = 0


@compiled(nb.void(*CELLS, nb.int64))
def _shorten(b, start, length, kind, characters):  # type: ignore[no-untyped-def]
    # A character of UTF-8 begins at a byte other than 10xxxxxx.
    for r in range(len(start)):
        if kind[r] != TEXT or length[r] <= characters:
            continue
        first = np.int64(start[r])
        size = np.int64(0)
        seen = np.int64(0)
        while size < length[r]:
            if b[first + size] & 0xC0 != 0x80:
                if seen == characters:
                    break
                seen += 1
            size += 1
        length[r] = size


def _cells(buffer: Bytes, side: Spans, place: int) -> Cells:
    return Cells(buffer, side.start[place], side.length[place], side.kind[place])


def _grown(tuples: Tuples, texts: Bytes) -> Tuples:
    hint = "lower source.frame_bytes_max, or leave the column out instead (source.columns_exclude)"
    return tuples.with_texts(texts, attempted="masked a column", hint=hint)
