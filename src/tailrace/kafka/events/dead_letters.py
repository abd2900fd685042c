"""Records that are too large for their topic: the sizes of records, and the dead letters for such records.

A dead letter identifies the record, and names the reason and the place. It is written to a topic of its own,
in the transaction of the record's batch, so that it exists exactly if the batch does.
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

#: Bytes that a record and its batch take at most in addition to key, value and headers, when client and
#: broker compare them with a limit (record format 2: 61 and 21; librdkafka counts 36).
OVERHEAD = 128

#: Bytes of each header in addition to name and value: two lengths.
_HEADER_OVERHEAD = 10

#: Bytes of an integer as text, at most.
_NUMBER_BYTES_MAX = 20
#: Number of values whose bytes `largest` adds up.
_RUN = 64

#: Longest key in a dead letter, which must itself fit; longer ones are left out.
KEY_BYTES_MAX = 64 << 10

#: librdkafka's default of `message.max.bytes`.
_MESSAGE_BYTES_MAX = 1_000_000

_TEXT = pa.large_string()


def message_bytes_max(options: Mapping[str, str | Secret]) -> int:
    """Return the largest record, in bytes, that a client with these options accepts.

    :raises TailraceError: `SECRET_MISSING`.
    """
    return int(resolved(options.get("message.max.bytes", str(_MESSAGE_BYTES_MAX))))


def largest(events: Converted) -> int:
    """Return a quick upper bound of the records' sizes: the largest sum of `_RUN` consecutive records."""
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
    # For arrays, sums of `_RUN` values. Arrow's functions, and numpy's on more than 500 numbers, release the
    # interpreter's lock and then wait for it: without any check a join took a tenth less (five runs of each).
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
    """Return an upper bound of each record's size in bytes."""
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
    lengths = pc.binary_length(header_texts(values))
    found: Numbers = lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _header_sizes(headers: pa.StructArray) -> Numbers:
    found = np.zeros(len(headers), np.int64)
    for name, values in _named(headers):
        there = values.is_valid().to_numpy(zero_copy_only=False)
        found += there * (_lengths(values) + len(name.encode()) + _HEADER_OVERHEAD)
    return found


def too_large(events: Converted, limit: int) -> npt.NDArray[np.bool_] | None:
    """Return which records are larger than a topic allows; None: none of them."""
    if largest(events) <= limit:
        return None
    found = sizes(events) > limit
    return found if found.any() else None


def refusal(
    events: Converted, row: int, topic: str, limit: int, way_out: str, place: Mapping[str, object]
) -> TailraceError:
    """Return the error of a record that is too large.

    :param way_out: what helps other than a higher limit.
    :param place: the record's table and place in the log, as far as known.
    """
    size = int(sizes(events)[row]) - OVERHEAD
    return TailraceError(
        Kind.SINK_RECORD_TOO_LARGE,
        f"send a record of {size} bytes: the limit, with the overhead of the protocol, is {limit}",
        f"raise max.message.bytes of the topic and message.max.bytes in `options`, {way_out}",
        {"topic": topic, **place},
    )


def letters(events: Converted, rows: Numbers, changes: TableChanges, topic: str, limit: int) -> Converted:
    """Return a dead letter for each event.

    Its headers: `tailrace.error` (a `Kind`), `tailrace.topic`, `tailrace.table`, `tailrace.op`,
    `tailrace.log_offset`, `tailrace.commit_lsn`, `tailrace.ordinal`, `tailrace.size` and
    `tailrace.limit` in bytes, `tailrace.key_size`. Its key is the record's; null if that is too long.
    Its value is null.

    :param rows: the row of `changes` of each event.
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
