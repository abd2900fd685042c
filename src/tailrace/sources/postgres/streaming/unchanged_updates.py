"""Updates that change none of the captured columns: left out before the log, where that is asked for.

Only `REPLICA IDENTITY FULL` sends the old row with each update; those of other tables are never left
out. Old and new row are compared as the server sent them, by a compiled scan: texts byte by byte, and a
large value that was not sent again is one that did not change. Which columns count is decided as it is
where the log is read (names that a column had before included). While that is not known for certain, all do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numba as nb
import numpy as np
import numpy.typing as npt

from tailrace.compiled import KERNEL
from tailrace.config.source.column_policy import ColumnRoles
from tailrace.config.source.postgres import PostgresSource
from tailrace.model import Relation, ReplicaIdentity
from tailrace.protocol.frames import FROZEN_BYTES, XLOG_PAYLOAD_AT, Bytes, Numbers, schema_frames_at
from tailrace.protocol.memory import u16_at, u32_at
from tailrace.protocol.pgoutput import parse_relation
from tailrace.protocol.renames import Renames
from tailrace.sources.postgres.schema.table_metadata import KnownFacts

#: Updates found by one scan, before it is made again with more room.
_PLACES = 1024


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64), **KERNEL)
def _tuple_end(b, at, end):  # type: ignore[no-untyped-def]
    # `at` is that of the number of columns. -1: the tuple does not fit.
    if at + 2 > end:
        return np.int64(-1)
    columns = u16_at(b, at)
    at += 2
    for _ in range(columns):
        if at >= end:
            return np.int64(-1)
        kind = b[at]
        at += 1
        if kind == 116:  # 't'
            if at + 4 > end:
                return np.int64(-1)
            at += 4 + u32_at(b, at)
        elif kind != 110 and kind != 117:  # 'n' 'u'
            return np.int64(-1)
    return np.int64(at) if at <= end else np.int64(-1)


@nb.njit(nb.boolean(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64, nb.int64), **KERNEL)
def _is_unchanged(b, at, end, counts, first, columns):  # type: ignore[no-untyped-def]
    # Whether an Update, whose tuples begin at `at`, has a whole old row that agrees with the new one.
    if at >= end or b[at] != 79:  # 'O'
        return False
    new = _tuple_end(b, at + 1, end)
    if new < 0 or new >= end or b[new] != 78 or _tuple_end(b, new + 1, end) != end:  # 'N'
        return False
    if u16_at(b, at + 1) != columns or u16_at(b, new + 1) != columns:
        return False
    p = at + 3
    q = new + 3
    for c in range(columns):
        length = np.int64(u32_at(b, p + 1)) if b[p] == 116 else np.int64(0)
        new_length = np.int64(u32_at(b, q + 1)) if b[q] == 116 else np.int64(0)
        if counts[first + c] and b[q] != 117:  # 'u': it is what it was
            if b[p] != b[q] or length != new_length:
                return False
            for k in range(length):
                if b[p + 5 + k] != b[q + 5 + k]:
                    return False
        p += 5 + length if b[p] == 116 else np.int64(1)
        q += 5 + new_length if b[q] == 116 else np.int64(1)
    return True


@nb.njit(
    nb.int64(FROZEN_BYTES, nb.int64[:, ::1], nb.uint8[::1], nb.int64[::1], nb.int64[::1]),
    **KERNEL,
)
def _find(b, slots, counts, places, ends):  # type: ignore[no-untyped-def]
    # Returns how many updates change nothing, and where the first of them begin and end.
    n = len(b)
    mask = len(slots) - 1
    found = np.int64(0)
    i = np.int64(0)
    while i + 6 <= n:
        size = np.int64(u32_at(b, i + 1)) + 1
        if size < 6 or size > n - i:
            break
        if b[i + 5] == 119 and size > 36 and b[i + 30] == 85:  # 'w' 'U'
            key = np.int64(u32_at(b, i + 31)) + 1
            slot = (key * 0x9E3779B1) & mask
            while slots[slot, 0] != 0 and slots[slot, 0] != key:
                slot = (slot + 1) & mask
            columns = slots[slot, 2] if slots[slot, 0] == key else np.int64(0)
            if columns > 0 and _is_unchanged(b, i + 35, i + size, counts, slots[slot, 1], columns):
                if found < len(places):
                    places[found] = i
                    ends[found] = i + size
                found += 1
        i += size
    return found


@nb.njit(nb.void(FROZEN_BYTES, nb.int64[::1], nb.int64[::1], nb.int64, nb.uint8[::1]), **KERNEL)
def _copy_others(b, places, ends, count, out):  # type: ignore[no-untyped-def]
    target = np.int64(0)
    begin = np.int64(0)
    for k in range(count + 1):
        end = places[k] if k < count else np.int64(len(b))
        for i in range(begin, end):
            out[target] = b[i]
            target += 1
        if k < count:
            begin = ends[k]


class _Table:
    """Which columns count, by relation: a hash table for the scan."""

    def __init__(self) -> None:
        self._used = 0
        self._room = 0  # bytes of `counts` that are taken
        # Relation + 1, first of its columns, how many, and for how many there is room.
        self.slots: Numbers = np.zeros((64, 4), np.int64)
        self.counts: npt.NDArray[np.uint8] = np.empty(1024, np.uint8)

    def put(self, relation: int, counts: Bytes) -> None:
        """Set the columns of a relation that count; none at all: its updates stay."""
        slot = self._slot(relation)
        if not self.slots[slot, 0]:
            self._used += 1
            if 2 * self._used > len(self.slots):
                held, self.slots = self.slots, np.zeros((2 * len(self.slots), 4), np.int64)
                for row in held[held[:, 0] > 0]:
                    self.slots[self._slot(int(row[0]) - 1)] = row
                slot = self._slot(relation)
        _, first, _, room = self.slots[slot].tolist()
        if len(counts) > room:
            first, room = self._room, len(counts)
            self._room += len(counts)
            if self._room > len(self.counts):
                grown = np.empty(2 * self._room, np.uint8)
                grown[:first] = self.counts[:first]
                self.counts = grown
        self.counts[first : first + len(counts)] = counts
        self.slots[slot] = relation + 1, first, len(counts), room

    def _slot(self, relation: int) -> int:
        mask = len(self.slots) - 1
        slot = ((relation + 1) * 0x9E3779B1) & mask
        while self.slots[slot, 0] not in (0, relation + 1):
            slot = (slot + 1) & mask
        return slot


@dataclass(frozen=True, slots=True)
class _Entry:
    relation: Relation
    counts: bytes


class UnchangedUpdates:
    """Leaves out updates that change nothing that is captured. Belongs to the thread that appends.

    :param renames: returns the names that columns have had, those in the chunk included.
    """

    def __init__(self, source: PostgresSource, renames: Callable[[], Renames]) -> None:
        self._source = source
        self._renames = renames
        self._table = _Table()
        self._entries: dict[int, _Entry] = {}

    def apply(self, chunk: Bytes, in_force: KnownFacts, has_schema: bool) -> Bytes:
        """Return the chunk without those updates; the same object if it has none.

        :param in_force: the facts before the chunk.
        :raises TailraceError: `PROTOCOL_VIOLATION` if a Relation message makes no sense.
        """
        if not has_schema:
            return self._without(chunk)
        known, parts, done = KnownFacts(base=in_force), list[Bytes](), 0
        for at, key, frame in schema_frames_at(chunk):
            parts.append(self._without(chunk[done:at]))
            done = at
            known.take(key, frame)
            self._learn(key, frame, known)
        parts.append(self._without(chunk[done:]))
        left = np.concatenate(parts)
        return left if len(left) < len(chunk) else chunk

    def _learn(self, key: str, frame: bytes, known: KnownFacts) -> None:
        oid = int(key[1:])
        held = self._entries.get(oid)
        if key.startswith("R"):
            relation = parse_relation(frame[XLOG_PAYLOAD_AT:])
        elif key.startswith("F") and held is not None:
            relation = held.relation
        else:
            return
        entry = _Entry(relation, self._counts(relation, known))
        if entry != held:
            self._entries[oid] = entry
            self._table.put(oid, np.frombuffer(entry.counts, np.uint8))

    def _counts(self, relation: Relation, known: KnownFacts) -> bytes:
        """Return for each column whether it counts; nothing if updates don't send the whole old row."""
        if relation.identity is not ReplicaIdentity.FULL:
            return b""
        names = tuple(column.name for column in relation.columns)
        facts = known.get(relation.oid)
        if facts is None or facts.pending or tuple(column.name for column in facts.columns) != names:
            return bytes([True] * len(names))
        columns = ColumnRoles(
            names,
            identity=frozenset(names),
            full=True,
            primary_key=frozenset(facts.primary_key),
            renamed=self._renames().of(relation.oid, facts.columns),
        )
        left_out = self._source.left_out(relation.schema, relation.table, columns)
        return bytes(name not in left_out for name in names)

    def _without(self, chunk: Bytes) -> Bytes:
        places, ends = np.empty(_PLACES, np.int64), np.empty(_PLACES, np.int64)
        count = int(_find(chunk, self._table.slots, self._table.counts, places, ends))
        if count > len(places):
            places, ends = np.empty(count, np.int64), np.empty(count, np.int64)
            _find(chunk, self._table.slots, self._table.counts, places, ends)
        if not count:
            return chunk
        left: Bytes = np.empty(len(chunk) - int((ends[:count] - places[:count]).sum()), np.uint8)
        _copy_others(chunk, places, ends, count, left)
        return left
