"""Finds the frames that describe tables and shards, of which a log keeps the newest version in force."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Any

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.protocol import pgoutput as pg
from tailrace.protocol.frames import (
    CONTROL,
    CONTROL_JSON_AT,
    FROZEN_BYTES,
    HAS_FACTS,
    HAS_SHARD,
    KIND_AT,
    ROWS,
    ROWS_RELATION_AT,
    SHARD,
    SNAPSHOT_TEXT_AT,
    SUBTYPE_AT,
    XLOG_PAYLOAD_AT,
    Bytes,
    control_json,
    cut_short,
    each_frame,
    frame_size,
    message_type,
)
from tailrace.protocol.memory import u8_at, u32_at

#: Number of frames that one search returns; if there are more, it is repeated with room for all.
_PLACES = 64


# The wanted frames: those that describe tables; these and the states of shards.
_SHAPES, _KEPT = range(2)

_QUOTE, _BACKSLASH, _COMMA = map(ord, '"\\,')


@nb.njit(inline="always")
def _is_same_shard(b, i, size, before):  # type: ignore[no-untyped-def]
    # Whether the frames at `i` and `before` have the same shard: they are equal up to the end of its name,
    # which comes first in their content. A quote inside the name has a backslash before it.
    k = np.int64(CONTROL_JSON_AT)
    end = np.int64(size - 1)
    while k < end:
        letter = u8_at(b, i + k)
        if letter != u8_at(b, before + k):
            return False
        if letter == _QUOTE and u8_at(b, i + k + 1) == _COMMA and u8_at(b, i + k - 1) != _BACKSLASH:
            return u8_at(b, before + k + 1) == _COMMA
        k += 1
    return False


@compiled(nb.int64(FROZEN_BYTES, nb.int64[::1], nb.int64))
def _find(b, places, wanted):  # type: ignore[no-untyped-def]
    # Returns the number of wanted frames, and writes the offsets of the first ones to `places`; or -1 - the
    # offset of an invalid length. Of consecutive frames of one shard, only the last one counts.
    n = len(b)
    count = np.int64(0)
    shard = np.int64(-1)  # the offset of the previous wanted frame, if it is a shard's
    i = np.int64(0)
    while i < n:
        size = frame_size(b, i)
        if size == 0:
            return -1 - i
        is_wanted = False
        is_shard = False
        if u8_at(b, i + KIND_AT) == CONTROL and size > SUBTYPE_AT:
            subtype = u8_at(b, i + SUBTYPE_AT)
            is_shard = subtype == HAS_SHARD and wanted == _KEPT
            is_wanted = subtype == HAS_FACTS or is_shard
        elif size >= XLOG_PAYLOAD_AT + pg.TUPLES_AT:
            message = message_type(b, i, size)
            is_wanted = message == pg.RELATION or message == pg.TYPE
        if is_wanted:
            if is_shard and shard >= 0 and _is_same_shard(b, i, size, shard):
                count -= 1  # this frame replaces it
            shard = i if is_shard else np.int64(-1)
            if count < len(places):
                places[count] = i
            count += 1
        i += size
    return count


@compiled(nb.int64(FROZEN_BYTES, nb.int64[:, ::1]))
def _find_tables(b, found):  # type: ignore[no-untyped-def]
    # Returns the number of changes of another table than the change before, and writes the table and the
    # offset of the frame of the first ones to `found`.
    count = np.int64(0)
    last = np.int64(-1)
    i = np.int64(0)
    while i < len(b):
        size = frame_size(b, i)
        if size == 0:
            break
        message = message_type(b, i, size)
        at, tables = np.int64(0), np.int64(0)
        if u8_at(b, i + KIND_AT) == ROWS:
            at = i + ROWS_RELATION_AT
            tables = np.int64(size >= SNAPSHOT_TEXT_AT)
        elif message == pg.INSERT or message == pg.UPDATE or message == pg.DELETE:
            at = i + XLOG_PAYLOAD_AT + pg.RELATION_AT
            tables = np.int64(size >= XLOG_PAYLOAD_AT + pg.CHANGE_SIZE_MIN)
        elif message == pg.TRUNCATE and size >= XLOG_PAYLOAD_AT + pg.TRUNCATED_AT:
            at = i + XLOG_PAYLOAD_AT + pg.TRUNCATED_AT
            named = u32_at(b, i + XLOG_PAYLOAD_AT + pg.TRUNCATE_COUNT_AT)
            tables = min(named, (i + size - at) // pg.RELATION_SIZE)
        for k in range(tables):
            table = u32_at(b, at + pg.RELATION_SIZE * k)
            if table != last:
                if count < len(found):
                    found[count, 0], found[count, 1] = table, i
                count += 1
                last = table
        i += size
    return count


def undescribed(frames: Bytes, described: Collection[int]) -> int | None:
    """Return a table with a change before its description among complete frames; None if there is none.

    :param described: the tables that are described before these frames.
    """
    found = np.empty((_PLACES, 2), np.int64)
    count = _find_tables(frames, found)
    if count > len(found):
        found = np.empty((count, 2), np.int64)
        _find_tables(frames, found)
    tables, first = np.unique(found[:count, 0], return_index=True)
    here: dict[str, int] = {}
    for at, key, _ in schema_frames_at(frames):
        here.setdefault(key, at)
    for table, at in zip(tables.tolist(), found[first, 1].tolist(), strict=True):
        if table not in described and here.get(f"R{table}", at) >= at:
            return int(table)
    return None


def schema_frames(frames: Bytes) -> list[tuple[str, bytes]]:
    """Return the frames that describe tables among complete frames, in order, each with the key under
    which a later one replaces it: `R<oid>`, `Y<oid>` or `F<oid>`.

    :raises TailraceError: `PROTOCOL_VIOLATION` if a length is invalid.
    """
    return [(key, frame) for _, key, frame in schema_frames_at(frames)]


def schema_frames_at(frames: Bytes) -> list[tuple[int, str, bytes]]:
    """Return `schema_frames` with the offset of each.

    :raises TailraceError: like `schema_frames`.
    """
    return [(at, _schema_key(frame), frame) for at, frame in _found(frames, _SHAPES)]


def kept_frames(frames: Bytes) -> list[tuple[str, bytes]]:
    """Return the frames that a log keeps in force: `schema_frames` and, each under the key `S<shard>`, the
    states of shards; of consecutive frames of one shard, the last one.

    :raises TailraceError: like `schema_frames`.
    """
    return [(_schema_key(frame), frame) for _, frame in _found(frames, _KEPT)]


def shard_states(in_force: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return the state of each shard, by its name, from the frames that a log keeps in force."""
    return {key[1:]: control_json(frame)["state"] for key, frame in in_force.items() if key.startswith("S")}


def _found(frames: Bytes, wanted: int) -> list[tuple[int, bytes]]:
    places = np.empty(_PLACES, np.int64)
    count = _find(frames, places, wanted)
    if count > len(places):
        places = np.empty(count, np.int64)
        _find(frames, places, wanted)
    if count < 0:
        raise cut_short(-1 - count)
    return [(at, bytes(next(each_frame(frames[at:]))[1])) for at in places[:count].tolist()]


def _schema_key(frame: bytes) -> str:
    if frame[KIND_AT] == CONTROL:
        content = control_json(frame)
        is_shard = frame[SUBTYPE_AT : SUBTYPE_AT + 1] == SHARD
        return f"S{content['shard']}" if is_shard else f"F{int(content['relation'])}"
    oid = struct.unpack_from("!I", frame, XLOG_PAYLOAD_AT + pg.RELATION_AT)[0]
    return f"{chr(frame[XLOG_PAYLOAD_AT])}{oid}"
