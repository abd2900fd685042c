"""Records that their topic can't hold: how large they are, and the dead-letter record in the place of each.

A dead-letter record says which it was, why and where. It goes to a topic of its own, in the transaction of
the batch that the record belongs to, so that it is there exactly if the batch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.headers import header_texts
from tailrace.decode.changes import TableChanges
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import Numbers
from tailrace.records.events import Converted
from tailrace.secrets import Secret, resolved

#: Beside its parts a record takes up to so many bytes, with the batch that it is alone in: what the
#: client and the broker add before they compare (record format 2: 61 and 21; librdkafka counts 36).
OVERHEAD = 128

#: Of each header: two lengths.
_HEADER_OVERHEAD = 10

#: Of the text of a whole number.
_NUMBER_BYTES_MAX = 20
#: Values of which the bytes are looked at together.
_RUN = 64

#: Longer keys than this are left out: a letter itself must fit.
KEY_BYTES_MAX = 64 << 10

#: librdkafka's own limit for a message, where the options give none.
_MESSAGE_BYTES_MAX = 1_000_000

_TEXT = pa.large_string()


def message_bytes_max(options: Mapping[str, str | Secret]) -> int:
    """Return the most bytes that a client of these options takes for a record.

    :raises TailraceError: `SECRET_MISSING`.
    """
    return int(resolved(options.get("message.max.bytes", str(_MESSAGE_BYTES_MAX))))


def largest(events: Converted) -> int:
    """Return bytes that no record exceeds, at a glance: those of `_RUN` records that follow each other."""
    size = OVERHEAD
    for values in (events.keys, events.values):
        size += 0 if values is None else _largest_run(values)
    for name, values in () if events.headers is None else _named(events.headers):
        size += _largest_run(values) + len(name.encode()) + _HEADER_OVERHEAD
    return size


def _named(headers: pa.StructArray) -> Iterator[tuple[str, pa.Array]]:
    for field, values in zip(headers.type, headers.flatten(), strict=True):
        yield field.name, values


def _largest_run(values: pa.Array | Sequence[Any]) -> int:
    # Of arrays the bytes of `_RUN` values. Arrow's functions, and numpy's of more than 500 numbers, let go of
    # the interpreter and then wait for it: without any check a join took a tenth less (five runs of each).
    if not isinstance(values, pa.Array):
        return int(_lengths(values).max(initial=0))
    if pa.types.is_null(values.type):
        return 0
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        return _NUMBER_BYTES_MAX
    texts = header_texts(values)
    if not len(texts):
        return 0
    wide = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    ends = np.frombuffer(texts.buffers()[1], np.int64 if wide else np.int32)
    ends = ends[texts.offset : texts.offset + len(texts) + 1]
    return int(np.diff(ends[::_RUN], append=ends[-1]).max())


def sizes(events: Converted) -> Numbers:
    """Return how many bytes each record takes at most."""
    found: Numbers = _lengths(events.values) + OVERHEAD
    if events.keys is not None:
        found += _lengths(events.keys)
    if events.headers is not None:
        found += _header_sizes(events.headers)
    return found


def _lengths(values: pa.Array | Sequence[Any]) -> Numbers:
    if not isinstance(values, pa.Array):
        return np.array([len(value or b"") for value in values], np.int64)
    if pa.types.is_null(values.type):
        return np.zeros(len(values), np.int64)
    found: Numbers = pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _header_sizes(headers: pa.StructArray) -> Numbers:
    found = np.zeros(len(headers), np.int64)
    for name, values in _named(headers):
        there = values.is_valid().to_numpy(zero_copy_only=False)
        found += there * (_lengths(header_texts(values)) + len(name.encode()) + _HEADER_OVERHEAD)
    return found


def too_large(events: Converted, limit: int) -> npt.NDArray[np.bool_] | None:
    """Return which records take more bytes than a topic allows; None: none of them."""
    if largest(events) <= limit:
        return None
    found = sizes(events) > limit
    return found if found.any() else None


def refusal(
    events: Converted, row: int, topic: str, limit: int, way_out: str, place: Mapping[str, object]
) -> TailraceError:
    """Return the error of a record that is too large.

    :param way_out: what else than a higher limit helps.
    :param place: what is known of where it comes from.
    """
    size = int(sizes(events)[row]) - OVERHEAD
    return TailraceError(
        Kind.SINK_RECORD_TOO_LARGE,
        f"send a record of {size} bytes: {limit} are the most that a record and what is around it may have",
        f"raise max.message.bytes of the topic and message.max.bytes in `options`, {way_out}",
        {"topic": topic, **place},
    )


def letters(events: Converted, rows: Numbers, changes: TableChanges, topic: str, limit: int) -> Converted:
    """Return a letter for each event.

    Its headers: `tailrace.error` (a `Kind`), `tailrace.topic`, `tailrace.table`, `tailrace.op`,
    `tailrace.log_offset`, `tailrace.commit_lsn`, `tailrace.ordinal`, `tailrace.size` and
    `tailrace.limit` in bytes, `tailrace.key_size`. Its key is the record's; null if that is too long.
    Its value is null.

    :param rows: of `changes`, for each event.
    """
    table = changes.relation.qualified_name if changes.relation else ""
    keys = _bytes(events.keys, len(events))
    key_sizes = pc.binary_length(keys)
    short = pc.less_equal(key_sizes, KEY_BYTES_MAX)
    headers = {
        "tailrace.error": _same(str(Kind.SINK_RECORD_TOO_LARGE), len(events)),
        "tailrace.topic": _same(topic, len(events)),
        "tailrace.table": _same(table, len(events)),
        "tailrace.op": pa.array([chr(letter) for letter in changes.op[rows]], _TEXT),
        "tailrace.log_offset": _texts(changes.log_offset[rows]),
        "tailrace.commit_lsn": _texts(changes.commit_lsn[rows]),
        "tailrace.ordinal": _texts(changes.ordinal[rows]),
        "tailrace.size": _texts(sizes(events) - OVERHEAD),
        "tailrace.limit": _texts(np.full(len(events), limit, np.int64)),
        "tailrace.key_size": key_sizes.cast(_TEXT),
    }
    return Converted(
        pc.if_else(short, keys, pa.scalar(None, pa.large_binary())),
        pa.nulls(len(events), pa.large_binary()),
        pa.StructArray.from_arrays(list(headers.values()), list(headers)),
    )


def _bytes(values: pa.Array | Sequence[object] | None, count: int) -> pa.Array:
    if values is None:
        return pa.nulls(count, pa.large_binary())
    found = values if isinstance(values, pa.Array) else pa.array(values)
    return found.cast(pa.large_binary())


def _texts(numbers: Numbers) -> pa.Array:
    return pa.array(numbers).cast(_TEXT)


def _same(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, _TEXT), count)
