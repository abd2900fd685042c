"""How large records are, and which of them a topic can't take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.protocol.frames import Numbers
from tailrace.records.events import Converted

#: Beside its parts a record takes up to so many bytes, with the batch that it is alone in: what the
#: client and the broker add before they compare (record format 2: 61 and 21; librdkafka counts 36).
OVERHEAD = 128

#: Of each header: two lengths.
_HEADER_OVERHEAD = 10

Mask = npt.NDArray[np.bool_]


def largest(events: Converted) -> int:
    """Return the most bytes that a record may have, at a glance: no record is larger."""
    parts = [_lengths(values) for values in (events.keys, events.values) if values is not None]
    size = sum(int(lengths.max(initial=0)) for lengths in parts)
    if events.headers is not None:
        size += int(_header_sizes(events.headers).max(initial=0))
    return size + OVERHEAD


def sizes(events: Converted) -> Numbers:
    """Return how many bytes each record takes at most."""
    found: Numbers = _lengths(events.values) + OVERHEAD
    if events.keys is not None:
        found += _lengths(events.keys)
    if events.headers is not None:
        found += _header_sizes(events.headers)
    return found


def taken(events: Converted, chosen: Mask) -> Converted:
    """Return some of the events, still each of its row."""
    at = np.flatnonzero(chosen)
    return replace(
        events,
        keys=_taken(events.keys, at),
        values=_taken(events.values, at),
        headers=None if events.headers is None else events.headers.take(pa.array(at)),
        rows=at if events.rows is None else events.rows[at],
    )


def _taken(values: pa.Array | Sequence[Any] | None, at: Numbers) -> pa.Array | Sequence[Any] | None:
    if isinstance(values, pa.Array):
        return values.take(pa.array(at))
    return None if values is None else [values[place] for place in at]


def _lengths(values: pa.Array | Sequence[Any]) -> Numbers:
    if not isinstance(values, pa.Array):
        return np.array([len(value or b"") for value in values], np.int64)
    if pa.types.is_null(values.type):
        return np.zeros(len(values), np.int64)
    found: Numbers = pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _header_sizes(headers: pa.StructArray) -> Numbers:
    found = np.zeros(len(headers), np.int64)
    for field, values in zip(headers.type, headers.flatten(), strict=True):
        there = values.is_valid().to_numpy(zero_copy_only=False)
        texts = values if pa.types.is_large_string(values.type) else values.cast(pa.large_binary())
        found += there * (_lengths(texts) + len(field.name.encode()) + _HEADER_OVERHEAD)
    return found
