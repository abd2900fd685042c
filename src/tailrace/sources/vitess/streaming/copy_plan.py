"""Plans the copy of a shard in chunks, one stream each: tables, or ranges of a table's keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from tailrace.config.source.vitess import VitessSource
from tailrace.sources.vitess.connection.metadata import ask_key_range, integral_keys, release
from tailrace.sources.vitess.connection.vtgate import Vtgate, answer_of
from tailrace.sources.vitess.resharding.shard_state import CopyChunk
from tailrace.sources.vitess.rows.copy_keys import whole_number
from tailrace.sources.vitess.rows.transcoder import is_internal

#: First release of Vitess whose tablets read only the rows of a range; earlier ones read the whole table.
RANGES_SINCE = 22
#: Least number of rows in a range, approximately.
RANGE_ROWS_MIN = 100_000
#: Limit of the parts of a table that interruptions of its copy add to the planned ones.
PARTS_MAX = 256
#: Limit of unanswered queries for tables at a time.
_ASKED_MAX = 32


def planned_chunks(
    vtgate: Vtgate, source: VitessSource, shard: str, before: Sequence[CopyChunk], streams: int
) -> tuple[CopyChunk, ...]:
    """Return the chunks of a shard's copy, in the order in which they are started.

    :param before: the present chunks. Copied parts stay; the rest of a dropped table is done.
    :param streams: the number of streams that copy the shard at the same time.
    """
    keys = {
        table: key
        for table, key in integral_keys(vtgate, source, shard).items()
        if source.captures(source.keyspace, table) and not is_internal(table)
    }
    begun = {chunk.table for chunk in before if chunk.is_begun}
    kept = (parts_of(chunk, is_there=chunk.table in keys) for chunk in before if chunk.table in begun)
    new = {table: key for table, key in keys.items() if table not in begun}
    found = dict(_split(vtgate, source, shard, new, streams))
    return (*chain(*kept), *(chunk for table in new for chunk in found.get(table, (CopyChunk(table),))))


def has_too_many_parts(source: VitessSource, chunks: Sequence[CopyChunk]) -> bool:
    """Return whether a copy has too many parts to be divided again: each append has its whole state."""
    parts = Counter(chunk.table for chunk in chunks)
    return max(parts.values(), default=0) > source.snapshot_connections + PARTS_MAX


def parts_of(chunk: CopyChunk, *, is_there: bool) -> Iterator[CopyChunk]:
    """Yield a chunk; an interrupted one in two: the copied part, and the rest, which gets a position of its
    own. So chunks' streams send only rows, and one stream sends all changes.
    """
    if chunk.is_done or not is_there:
        yield replace(chunk, is_done=True)
    elif chunk.column and chunk.key:
        rest = whole_number(chunk.key) + 1
        yield replace(chunk, high=rest, is_done=True)
        if chunk.high is None or rest < chunk.high:
            yield CopyChunk(chunk.table, chunk.column, rest, chunk.high)
    else:
        yield chunk


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
            attempted = f"ask the shard {shard} for the keys of {table}"
            first, last, rows = answer_of(answer, 2 * source.connect_timeout, attempted)[0]
            parts = min(streams, int(rows or 0) // RANGE_ROWS_MIN)
            yield table, ranges(table, key, int(first or 0), int(last or 0), parts)


def ranges(table: str, column: str, first: int, last: int, parts: int) -> tuple[CopyChunk, ...]:
    """Return a table's keys in ranges of the same width; keys below 0 are in one, because tablets accept no
    negative bound. Every key lies in exactly one range, whatever `first` and `last`.

    :param first: the least existing key; `last`: the largest one.
    """
    width = last - first + 1
    if min(parts, width) < 2:
        return (CopyChunk(table, column),)
    parts = min(parts, width)
    between = (first + width * part // parts for part in range(1, parts))
    bounds = (None, *(bound for bound in between if bound >= 0), None)
    return tuple(CopyChunk(table, column, low, high) for low, high in pairwise(bounds))
