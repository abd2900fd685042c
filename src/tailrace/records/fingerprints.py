"""64-bit fingerprints of values in columns: equal values have equal fingerprints, in every batch.

The fingerprint is that of the value's text, so that it does not depend on the width of a number. Two
different values have the same fingerprint with a probability of about 2⁻⁶⁴: good for distributing work, not
for identifying values.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.compiled import compiled
from tailrace.protocol.frames import FROZEN_BYTES
from tailrace.records.values import python_values

Fingerprints = npt.NDArray[np.uint64]

# FNV-1a, 64 bits: http://www.isthe.com/chongo/tech/comp/fnv/
_START = np.uint64(0xCBF29CE484222325)
_PRIME = np.uint64(0x100000001B3)
_NULL = np.uint64(0x9E3779B97F4A7C15)
_NOTHING = np.zeros(0, np.uint8)


@compiled(nb.void(FROZEN_BYTES, nb.int32[::1], nb.uint64[::1]))
def _take_texts(data, ends, prints):  # type: ignore[no-untyped-def]
    # Extends the hashes in `prints` by the bytes of each text, and by its length.
    for r in range(len(prints)):
        x = prints[r]
        first, last = np.int64(ends[r]), np.int64(ends[r + 1])
        for i in range(first, last):
            x = (x ^ np.uint64(data[i])) * np.uint64(0x100000001B3)
        x = (x ^ np.uint64(last - first)) * np.uint64(0x100000001B3)
        prints[r] = x ^ (x >> np.uint64(29))


def fingerprints(values: pa.Array) -> Fingerprints:
    """Return the fingerprint of each value; for a struct, of the values of its fields in their order."""
    prints = np.full(len(values), _START, np.uint64)
    _take(values, prints)
    return prints


def fingerprint_of(text: str) -> int:
    """Return the fingerprint of one text."""
    return int(fingerprints(pa.array([text]))[0])


def _take(values: pa.Array, prints: Fingerprints) -> None:
    if pa.types.is_struct(values.type):
        for field in values.flatten():
            _take(field, prints)
        return
    texts = _texts(values)
    _, ends, data = texts.buffers()
    at = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1] if ends else None
    if at is not None and len(texts):
        bytes_ = _NOTHING if data is None else np.frombuffer(data, np.uint8)
        bytes_.flags.writeable = False
        _take_texts(bytes_, np.ascontiguousarray(at), prints)
    if values.null_count:
        missing = np.asarray(pc.is_null(values))
        prints[missing] = (prints[missing] ^ _NULL) * _PRIME


def _texts(values: pa.Array) -> pa.Array:
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return values
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        # As numbers: the text of a time in a time zone requires the time zone database.
        values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    if pa.types.is_null(kind):
        return pa.nulls(len(values), pa.string())
    if pa.types.is_nested(kind) or pa.types.is_dictionary(kind):
        # A table's key never has such a type; a key that a transformation made can have one.
        return pa.array(
            [None if value is None else repr(value) for value in python_values(values)], pa.string()
        )
    if pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return pc.cast(values, pa.binary())
    return pc.cast(values, pa.string())
