"""Drops updates that change none of the captured columns, under `source.skip_unchanged_updates`.

Only tables with `REPLICA IDENTITY FULL` send the old row with each update; updates of other tables are never
dropped. A compiled scan compares old and new row as the server sent them: text byte by byte, and a TOAST
value that was not sent did not change. Which columns count is decided as when the log is read (including
former names of a column). While that is not known for certain, all columns count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.config.source.column_policy import ColumnRoles
from tailrace.config.source.postgres import PostgresSource
from tailrace.model import Relation, ReplicaIdentity
from tailrace.protocol import pgoutput as pg
from tailrace.protocol.frames import FROZEN_BYTES, XLOG_PAYLOAD_AT, Bytes, Numbers
from tailrace.protocol.memory import u16_at, u32_at
from tailrace.protocol.metadata_frames import schema_frames_at
from tailrace.protocol.pgoutput import parse_relation
from tailrace.protocol.renames import Renames
from tailrace.sources.postgres.schema.table_facts import KnownFacts
from tailrace.sources.postgres.streaming.frame_filters import keep, messages, place_of


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64))
def _tuple_end(b, at, end):  # type: ignore[no-untyped-def]
    # Returns the end of the tuple whose number of columns is at `at`; -1: it is invalid.
    if at + 2 > end:
        return np.int64(-1)
    columns = u16_at(b, at)
    at += 2
    for _ in range(columns):
        if at >= end:
            return np.int64(-1)
        kind = b[at]
        at += 1
        if kind == pg.TEXT:
            if at + 4 > end:
                return np.int64(-1)
            at += 4 + u32_at(b, at)
        elif kind != pg.NULL and kind != pg.UNCHANGED:
            return np.int64(-1)
    return np.int64(at) if at <= end else np.int64(-1)


@compiled(nb.boolean(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64, nb.int64))
def _is_unchanged(b, at, end, counts, first, columns):  # type: ignore[no-untyped-def]
    # Returns whether an Update, whose tuples begin at `at`, has a whole old row that equals the new one.
    if at >= end or b[at] != pg.OLD_ROW:
        return False
    new = _tuple_end(b, at + 1, end)
    if new < 0 or new >= end or b[new] != pg.NEW_ROW or _tuple_end(b, new + 1, end) != end:
        return False
    if u16_at(b, at + 1) != columns or u16_at(b, new + 1) != columns:
        return False
    p = at + 3
    q = new + 3
    for c in range(columns):
        length = np.int64(u32_at(b, p + 1)) if b[p] == pg.TEXT else np.int64(0)
        new_length = np.int64(u32_at(b, q + 1)) if b[q] == pg.TEXT else np.int64(0)
        if counts[first + c] and b[q] != pg.UNCHANGED:
            if b[p] != b[q] or length != new_length:
                return False
            for k in range(length):
                if b[p + 5 + k] != b[q + 5 + k]:
                    return False
        p += 5 + length if b[p] == pg.TEXT else np.int64(1)
        q += 5 + new_length if b[q] == pg.TEXT else np.int64(1)
    return True


@compiled(nb.int64(nb.uint8[::1], nb.int64[::1], nb.int64[::1], nb.uint8[::1]))
def _without_unchanged(b, relations, firsts, counts):  # type: ignore[no-untyped-def]
    # The columns of relation k are counts[firsts[k] : firsts[k + 1]].
    end = np.int64(0)
    target = np.int64(0)
    for i, size, message in messages(b):
        end = i + size
        p = i + XLOG_PAYLOAD_AT
        stays = True
        if message == pg.UPDATE and end - p > pg.TUPLES_AT:
            k = place_of(relations, u32_at(b, p + pg.RELATION_AT))
            if k >= 0:
                columns = firsts[k + 1] - firsts[k]
                stays = not _is_unchanged(b, p + pg.TUPLES_AT, end, counts, firsts[k], columns)
        if stays:
            target = keep(b, i, end, target)
    return keep(b, end, len(b), target)


@dataclass(frozen=True, slots=True)
class _Entry:
    relation: Relation
    counts: bytes


class _CountedColumns:
    """The columns that count, for the relations whose updates send the whole old row."""

    def __init__(self, entries: Mapping[int, _Entry]) -> None:
        counted = [(oid, entry.counts) for oid, entry in sorted(entries.items()) if entry.counts]
        self.relations: Numbers = np.array([oid for oid, _ in counted], np.int64)
        firsts: Numbers = np.cumsum([0, *(len(counts) for _, counts in counted)], dtype=np.int64)
        self.arrays = (
            self.relations,
            firsts,
            np.frombuffer(b"".join(c for _, c in counted), np.uint8).copy(),
        )


class UnchangedUpdates:
    """Drops updates that change no captured column. Used only by the thread that appends.

    :param renames: returns the names that columns have had, including those in the chunk.
    """

    def __init__(self, source: PostgresSource, renames: Callable[[], Renames]) -> None:
        self._source = source
        self._renames = renames
        self._entries: dict[int, _Entry] = {}
        self._columns: _CountedColumns | None = None  # arrays for the scan; None: to be built

    def apply(self, chunk: Bytes, in_force: KnownFacts, has_schema: bool) -> Bytes:
        """Return the chunk without those updates; the same object if it has none.

        :param in_force: the facts before the chunk.
        :raises TailraceError: `PROTOCOL_VIOLATION` if a Relation message is invalid.
        """
        if not has_schema:
            return self._without(chunk)
        known, parts, done = KnownFacts(base=in_force), list[Bytes](), 0
        for at, key, frame in schema_frames_at(chunk):
            parts += (self._without(chunk[done:at]), chunk[at : at + len(frame)])
            done = at + len(frame)
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
            self._columns = None

    def _counts(self, relation: Relation, known: KnownFacts) -> bytes:
        """Return for each column whether it counts; empty if updates don't send the whole old row."""
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
        if not len(chunk):
            return chunk
        if self._columns is None:
            self._columns = _CountedColumns(self._entries)
        if not len(self._columns.relations):
            return chunk
        writable = chunk if chunk.flags.writeable else chunk.copy()
        size = int(_without_unchanged(writable, *self._columns.arrays))
        return writable[:size] if size < len(chunk) else chunk
