"""What is copied of a shard, in chunks that streams of their own can copy: tables, and ranges of keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from tailrace.config.source.vitess import VitessSource
from tailrace.sources.vitess.connection.metadata import ask_key_range, integral_keys, release
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace.sources.vitess.resharding.shard_state import CopyChunk
from tailrace.sources.vitess.rows.transcoder import is_internal

#: From this release on, a tablet reads only the rows of a range; before, it reads the table for each.
RANGES_SINCE = 22
#: A range of a table has at least about so many rows.
RANGE_ROWS_MIN = 100_000
#: Shards are asked for so many tables at a time.
_ASKED_MAX = 32


def planned_chunks(
    vtgate: Vtgate, source: VitessSource, shard: str, before: Sequence[CopyChunk], streams: int
) -> tuple[CopyChunk, ...]:
    """Return the chunks of a shard's copy, in the order in which they are begun.

    :param before: those that it has. What was begun stays; the rest of a table that is gone is done.
    :param streams: so many copy the shard at the same time.
    """
    keys = {
        table: key
        for table, key in integral_keys(vtgate, source, shard).items()
        if source.captures(table) and not is_internal(table)
    }
    begun = {chunk.table for chunk in before if chunk.is_begun}
    kept = tuple(_kept(chunk, is_there=chunk.table in keys) for chunk in before if chunk.table in begun)
    new = {table: key for table, key in keys.items() if table not in begun}
    found = dict(_split(vtgate, source, shard, new, streams))
    return (*kept, *(chunk for table in new for chunk in found.get(table, (CopyChunk(table),))))


def _kept(chunk: CopyChunk, *, is_there: bool) -> CopyChunk:
    return chunk if is_there else replace(chunk, is_done=True)


def _split(
    vtgate: Vtgate, source: VitessSource, shard: str, keys: Mapping[str, str], streams: int
) -> Iterator[tuple[str, tuple[CopyChunk, ...]]]:
    integral = [(table, key) for table, key in keys.items() if key]
    if not integral or release(vtgate) < RANGES_SINCE:
        return
    for at in range(0, len(integral), _ASKED_MAX):
        some = integral[at : at + _ASKED_MAX]
        asked = [
            ask_key_range(vtgate, source, shard, table, key, streams * RANGE_ROWS_MIN) for table, key in some
        ]
        for (table, key), answer in zip(some, asked, strict=True):
            first, last, rows = answer.result(2 * source.connect_timeout)[0]
            if first is not None and last is not None:
                parts = min(streams, int(rows or 0) // RANGE_ROWS_MIN)
                yield table, ranges(table, key, int(first), int(last), parts)


def ranges(table: str, column: str, first: int, last: int, parts: int) -> tuple[CopyChunk, ...]:
    """Return a table's keys in ranges of the same width; all keys lie in one, whatever `first` and `last`.

    :param first: the least key that is there, and `last`, the largest one.
    """
    width = last - first + 1
    if min(parts, width) < 2:
        return (CopyChunk(table),)
    parts = min(parts, width)
    bounds = (None, *(first + width * part // parts for part in range(1, parts)), None)
    return tuple(CopyChunk(table, column, low, high) for low, high in pairwise(bounds))
