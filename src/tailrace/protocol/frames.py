"""Frames, the content of the change log, and the scan that summarises them for the log.

A frame is one PostgreSQL CopyData message, byte for byte as the server sent it, or a message
of our own in the same envelope. All integers are big-endian.

    'd' | length:i32 (counts itself, not the 'd') | kind | …

    kind 'w'  XLogData of the source: start:u64 end:u64 sent_us:i64 (since 2000) payload
              The payload is a pgoutput message, protocol 1.
    kind 's'  rows of a snapshot: relation:u32 first_ordinal:u64 rows:u32 text
              The text is COPY's text format, `rows` lines, each ended by a newline.
              Units of the same `lsn` share one numbering: the first rows of a unit have the
              number from which it continues.
    kind 'x'  control, ours: subtype lsn:u64 time_us:i64 (since 1970) json
              'B' a snapshot begins, consistent with `lsn`; rows follow until
              'E' the snapshot ends; the log's position becomes `lsn`.
              'P' progress: the source has no more changes before `lsn`. Its json may be a marker:
              see `tailrace.realtime.switching`.
              'F' facts about one table from the catalogue, keyed by `relation` in the json.
              'S' state of one shard of a source with several logs, keyed by `shard` in the json.

A *unit* is captured and read completely or not at all: a transaction (Begin to Commit), a
snapshot ('B' to 'E'), a non-transactional logical message, or a progress frame. An offset after
which no unit is open is a *boundary*; readers only ever see boundaries.

A snapshot is consistent with `lsn`, the end of the last record that it saw, where the next
record begins, which may be a commit. So its rows have `lsn` - 1 as their commit LSN: every
commit record that the snapshot saw begins before that, every other one after it.

The scan is sans-IO: bytes in, numbers out, no clock, no socket. It checks every length.

Source: PostgreSQL manual, "Streaming Replication Protocol" and "Logical Replication Message
Formats".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from tailrace.compiled import compiled
from tailrace.errors import REPORT_LOG, REPORT_STREAM, Kind, TailraceError
from tailrace.model import POSTGRES_EPOCH_US
from tailrace.protocol import pgoutput as pg
from tailrace.protocol.memory import i64_at, u8_at, u32_at

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

#: A kernel argument that accepts read-only and writable buffers alike.
FROZEN_BYTES = nb.types.Array(nb.uint8, 1, "C", readonly=True)

KIND_AT, XLOG_START_AT = 5, 6
XLOG_PAYLOAD_AT = 30  # 'd' length 'w' start end sent_us
SNAPSHOT_TEXT_AT = 22  # 'd' length 's' relation first_ordinal rows
CONTROL_JSON_AT = 23  # 'd' length 'x' subtype lsn time_us

# The first byte of every frame, and the kinds of frames.
COPY_DATA, XLOG, ROWS, CONTROL = map(ord, "dwsx")
# Offsets of fields in frames of rows and control frames.
ROWS_RELATION_AT, ROWS_ORDINAL_AT, ROWS_COUNT_AT = 6, 10, 18
SUBTYPE_AT, CONTROL_LSN_AT, CONTROL_TIME_AT = 6, 7, 15

SNAPSHOT_BEGIN = b"B"
SNAPSHOT_END = b"E"
PROGRESS = b"P"
FACTS = b"F"
SHARD = b"S"


#: Limit of the tables listed for one chunk of frames: with more, it counts as touching any table.
TABLES_LISTED_MAX = 64

# Fields of the scan's state, carried from chunk to chunk.
OPEN, XID, COMMIT_LSN, COMMIT_TIME_US, ORDINAL, POSITION, POSITION_TIME_US = range(7)
STATE_FIELDS = 7
NOTHING_OPEN, TRANSACTION_OPEN, SNAPSHOT_OPEN = range(3)

# Fields of the scan's result.
_ROWS, _BOUNDARY, _SCHEMA, _UNITS, _TABLES, _ERROR, _ERROR_AT = range(7)
# Fields for the part before the last boundary; the largest commit time of the units that end.
_ROWS_BEFORE, _SCHEMA_BEFORE, _TABLES_BEFORE, _TIME_MAX = range(7, 11)
_RESULT_FIELDS = 11

_ERRORS = {
    1: "a frame is cut short or has an impossible length",
    2: "a frame has a kind that this version does not know",
    3: "a pgoutput message has a type that protocol 1 does not have",
    4: "a change is outside a transaction",
    5: "a transaction begins inside another",
    6: "a transaction commits before an earlier one",
    7: "a commit does not belong to the open transaction",
    8: "a message is shorter than its type requires",
    9: "a snapshot's rows are not numbered in sequence",
}


# The subtypes of control frames as kernels compare them.
SNAPSHOT_BEGINS, SNAPSHOT_ENDS, PROGRESSES, HAS_FACTS, HAS_SHARD = b"BEPFS"


@nb.njit(inline="always")
def frame_size(b, i):  # type: ignore[no-untyped-def]
    """Return the size of the frame at `i`; 0 if no complete frame begins there."""
    left = len(b) - i
    if left <= KIND_AT or u8_at(b, i) != COPY_DATA:
        return np.int64(0)
    size = u32_at(b, i + 1) + 1
    return size if KIND_AT < size <= left else np.int64(0)


@nb.njit(inline="always")
def message_type(b, i, size):  # type: ignore[no-untyped-def]
    """Return the type of the pgoutput message in the frame at `i`; 0 if it has none."""
    if size <= XLOG_PAYLOAD_AT or u8_at(b, i + KIND_AT) != XLOG:
        return np.int64(0)
    return u8_at(b, i + XLOG_PAYLOAD_AT)


@nb.njit(inline="always")
def _note(tables, count, relation):  # type: ignore[no-untyped-def]
    # Adds to a set in an array; returns its count. A count above the array's length: too many to list.
    if count > len(tables):
        return count
    for k in range(count):
        if tables[k] == relation:
            return count
    if count == len(tables):
        return count + 1
    tables[count] = relation
    return count + 1


@nb.njit(inline="always")
def open_transaction(b, p, state):  # type: ignore[no-untyped-def]
    """Advance `state` over the Begin message at `p`, which must be complete."""
    state[OPEN] = TRANSACTION_OPEN
    state[COMMIT_LSN] = i64_at(b, p + pg.BEGIN_LSN_AT)
    state[COMMIT_TIME_US] = i64_at(b, p + pg.BEGIN_TIME_AT) + POSTGRES_EPOCH_US
    state[XID] = u32_at(b, p + pg.BEGIN_XID_AT)
    state[ORDINAL] = 0


# The kernels of the scan return 0 or a key of `_ERRORS`; for frames with changes, also the table and their
# number. A kernel that closes a unit sets the log's position, and leaves `state[OPEN]` to `_close`.


@nb.njit(inline="always")
def _begin(b, p, room, state):  # type: ignore[no-untyped-def]
    if room < pg.BEGIN_SIZE:
        return 8
    if state[OPEN] != NOTHING_OPEN:
        return 5
    open_transaction(b, p, state)
    return 6 if state[COMMIT_LSN] < state[POSITION] else 0


@nb.njit(inline="always")
def _commit(b, p, room, state):  # type: ignore[no-untyped-def]
    if room < pg.COMMIT_SIZE:
        return 8
    if state[OPEN] != TRANSACTION_OPEN or i64_at(b, p + pg.COMMIT_LSN_AT) != state[COMMIT_LSN]:
        return 7
    if i64_at(b, p + pg.COMMIT_END_AT) < state[COMMIT_LSN]:
        return 6
    state[POSITION] = i64_at(b, p + pg.COMMIT_END_AT)
    state[POSITION_TIME_US] = state[COMMIT_TIME_US]
    return 0


@nb.njit(inline="always")
def _truncate(b, p, room, state, result, tables):  # type: ignore[no-untyped-def]
    # Returns the last table to the caller, which notes the table of every frame.
    if room < pg.TRUNCATED_AT:
        return 8, np.int64(-1), np.int64(0)
    if state[OPEN] != TRANSACTION_OPEN:
        return 4, np.int64(-1), np.int64(0)
    count = u32_at(b, p + pg.TRUNCATE_COUNT_AT)
    if room < pg.TRUNCATED_AT + pg.RELATION_SIZE * count:
        return 8, np.int64(-1), np.int64(0)
    relation = np.int64(-1)
    for k in range(count):
        if k > 0:
            result[_TABLES] = _note(tables, result[_TABLES], relation)
        relation = u32_at(b, p + pg.TRUNCATED_AT + pg.RELATION_SIZE * k)
    return 0, relation, count


@nb.njit(inline="always")
def _message(b, p, room, state):  # type: ignore[no-untyped-def]
    if room < pg.MESSAGE_SIZE_MIN:
        return 8
    if state[OPEN] == TRANSACTION_OPEN:
        return 0
    if state[OPEN] != NOTHING_OPEN or u8_at(b, p + pg.MESSAGE_FLAGS_AT) & pg.TRANSACTIONAL != 0:
        return 4
    state[ORDINAL] = 0
    # The message's LSN is the end of its record (measured on 15, 16 and 18), so the next commit record may
    # start exactly there.
    state[POSITION] = max(state[POSITION], i64_at(b, p + pg.MESSAGE_LSN_AT))
    return 0


@nb.njit(inline="always")
def _xlog(b, p, room, state, result, tables):  # type: ignore[no-untyped-def]
    # Scans the message at `p`. Returns error, table, number of changes, whether a unit ends.
    error, relation, rows, closed = 0, np.int64(-1), np.int64(0), False
    message = u8_at(b, p) if room > 0 else np.int64(0)
    if message == pg.INSERT or message == pg.UPDATE or message == pg.DELETE:
        if room < pg.CHANGE_SIZE_MIN:
            error = 8
        elif state[OPEN] != TRANSACTION_OPEN:
            error = 4
        else:
            relation, rows = u32_at(b, p + pg.RELATION_AT), np.int64(1)
    elif message == pg.BEGIN:
        error = _begin(b, p, room, state)
    elif message == pg.COMMIT:
        error, closed = _commit(b, p, room, state), True
    elif message == pg.TRUNCATE:
        error, relation, rows = _truncate(b, p, room, state, result, tables)
    elif message == pg.RELATION or message == pg.TYPE:
        result[_SCHEMA] = 1
    elif message == pg.MESSAGE:
        error, rows, closed = _message(b, p, room, state), np.int64(1), state[OPEN] == NOTHING_OPEN
    elif message != pg.ORIGIN:  # the log doesn't need Origin messages
        error = 3 if room > 0 else 8
    return error, relation, rows, closed


@nb.njit(inline="always")
def _rows(b, i, size, state):  # type: ignore[no-untyped-def]
    # Scans a frame of rows. Returns error, table, number of changes.
    if size < SNAPSHOT_TEXT_AT:
        return 8, np.int64(-1), np.int64(0)
    if state[OPEN] != SNAPSHOT_OPEN:
        return 4, np.int64(-1), np.int64(0)
    ordinal = i64_at(b, i + ROWS_ORDINAL_AT)
    if ordinal < 0 or (state[ORDINAL] != 0 and ordinal != state[ORDINAL]):
        return 9, np.int64(-1), np.int64(0)
    state[ORDINAL] = ordinal
    return 0, u32_at(b, i + ROWS_RELATION_AT), u32_at(b, i + ROWS_COUNT_AT)


@nb.njit(inline="always")
def _control(b, i, size, state, result):  # type: ignore[no-untyped-def]
    # Scans a control frame. Returns error, whether a unit ends.
    if size < CONTROL_JSON_AT:
        return 8, False
    subtype = u8_at(b, i + SUBTYPE_AT)
    lsn = i64_at(b, i + CONTROL_LSN_AT)
    time_us = i64_at(b, i + CONTROL_TIME_AT)
    if subtype == HAS_FACTS or subtype == HAS_SHARD:
        result[_SCHEMA] = 1
        return 0, False
    if subtype == SNAPSHOT_ENDS:
        if state[OPEN] != SNAPSHOT_OPEN or lsn != state[COMMIT_LSN] + 1:
            return 7, False
        state[POSITION] = lsn
        state[POSITION_TIME_US] = state[COMMIT_TIME_US]
        return 0, True
    if subtype != PROGRESSES and subtype != SNAPSHOT_BEGINS:
        return 2, False
    if state[OPEN] != NOTHING_OPEN:
        return 5, False
    if lsn < state[POSITION]:
        return 6, False
    if subtype == PROGRESSES:
        state[POSITION] = lsn
        state[POSITION_TIME_US] = time_us
        return 0, True
    state[OPEN] = SNAPSHOT_OPEN
    state[XID] = 0
    state[COMMIT_LSN] = lsn - 1
    state[COMMIT_TIME_US] = time_us
    state[ORDINAL] = 0
    return 0, False


@nb.njit(inline="always")
def _close(after, state, result, units):  # type: ignore[no-untyped-def]
    state[OPEN] = NOTHING_OPEN
    time_us = state[POSITION_TIME_US]
    if result[_UNITS] == 0 or time_us > result[_TIME_MAX]:
        result[_TIME_MAX] = time_us
    result[_BOUNDARY] = after
    result[_ROWS_BEFORE] = result[_ROWS]
    result[_SCHEMA_BEFORE] = result[_SCHEMA]
    result[_TABLES_BEFORE] = result[_TABLES]
    if result[_UNITS] < len(units):
        units[result[_UNITS], 0] = after
        units[result[_UNITS], 1] = result[_ROWS]
        units[result[_UNITS], 2] = state[POSITION]
        units[result[_UNITS], 3] = time_us
    result[_UNITS] += 1


@compiled(nb.void(FROZEN_BYTES, nb.int64[::1], nb.int64[::1], nb.int64[::1], nb.int64[:, ::1]))
def _scan(b, state, result, tables, units):  # type: ignore[no-untyped-def]
    # units: one row (offset after it, rows so far, position, time_us) for each closed unit, up to
    # the array's length; result[_UNITS] counts all of them.
    result[:] = 0
    result[_BOUNDARY] = -1
    last_relation = np.int64(-1)
    i = np.int64(0)
    while i < len(b):
        size = frame_size(b, i)
        kind = u8_at(b, i + KIND_AT) if size > 0 else np.int64(0)
        error, relation, rows, closed = 2 if size > 0 else 1, np.int64(-1), np.int64(0), False
        if kind == XLOG:
            room = size - XLOG_PAYLOAD_AT
            error, relation, rows, closed = _xlog(b, i + XLOG_PAYLOAD_AT, room, state, result, tables)
        elif kind == ROWS:
            error, relation, rows = _rows(b, i, size, state)
        elif kind == CONTROL:
            error, closed = _control(b, i, size, state, result)
        if error != 0:
            result[_ERROR] = error
            result[_ERROR_AT] = i
            return
        if relation >= 0 and relation != last_relation:
            result[_TABLES] = _note(tables, result[_TABLES], relation)
            last_relation = relation
        state[ORDINAL] += rows
        result[_ROWS] += rows
        i += size
        if closed:
            _close(i, state, result, units)


@dataclass(frozen=True, slots=True)
class OpenUnit:
    """The unit that is open at some offset, and the number of its next change.

    `commit_lsn` is the LSN of the commit record, which the Begin message already has, or the one
    before a snapshot's consistent point; `xid` is 0 for a snapshot.
    """

    kind: int  # TRANSACTION_OPEN or SNAPSHOT_OPEN
    xid: int
    commit_lsn: int
    commit_time_us: int  # since 1970
    ordinal: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of consecutive complete frames; the content of a block's header.

    `position` is the source position up to which everything is in the log at the last
    boundary: the end LSN of the last unit closed in or before these frames. `time_max_us` is the
    largest commit time of the units that end here, 0 if none does. `to_boundary` is the summary of
    the frames before the last boundary, if that lies inside.
    """

    size: int  # bytes
    rows: int
    boundary: int | None  # bytes from the first frame to the last boundary; None: no unit ends here
    units: int  # units that end here
    has_schema: bool  # Relation, Type or facts frames are among them
    tables: tuple[int, ...] | None  # relation oids touched; None: too many to list
    open_at_start: OpenUnit | None
    open_at_end: OpenUnit | None
    position_at_start: int
    position: int
    position_time_us: int
    time_max_us: int
    to_boundary: Summary | None


def new_state(position: int = 0, time_us: int = 0) -> Numbers:
    """Return a scan state with nothing open, after `position`."""
    state = np.zeros(STATE_FIELDS, np.int64)
    state[POSITION] = position
    state[POSITION_TIME_US] = time_us
    return state


def state_within(unit: OpenUnit | None, position: int, time_us: int) -> Numbers:
    """Return the scan state at an offset where `unit` is open, such as a block's start."""
    state = new_state(position, time_us)
    if unit is not None:
        state[OPEN] = unit.kind
        state[XID] = unit.xid
        state[COMMIT_LSN] = unit.commit_lsn
        state[COMMIT_TIME_US] = unit.commit_time_us
        state[ORDINAL] = unit.ordinal
    return state


def open_unit(state: Numbers) -> OpenUnit | None:
    """Return the unit that `state` has open."""
    if state[OPEN] == NOTHING_OPEN:
        return None
    return OpenUnit(
        int(state[OPEN]),
        int(state[XID]),
        int(state[COMMIT_LSN]),
        int(state[COMMIT_TIME_US]),
        int(state[ORDINAL]),
    )


def summarise(frames: Bytes, state: Numbers) -> Summary:
    """Scan complete frames once and advance `state` to their end (it is changed in place).

    :raises TailraceError: `PROTOCOL_VIOLATION`, with the byte at which the first invalid frame
        begins; `state` must not be used any more then, and none of the frames may be kept.
    """
    summary, _ = _summarise(frames, state, 0)
    return summary


def units_of(frames: Bytes, state: Numbers) -> Numbers:
    """Return the units that end in `frames`: rows of (offset after it, rows up to there,
    position, time_us), offsets and row counts from the first of `frames`.

    :raises TailraceError: `PROTOCOL_VIOLATION`, like `summarise`.
    """
    before = state.copy()
    summary, _ = _summarise(frames, before, 0)
    _, units = _summarise(frames, state, summary.units)
    return units


def _summarise(frames: Bytes, state: Numbers, unit_count: int) -> tuple[Summary, Numbers]:
    result = np.empty(_RESULT_FIELDS, np.int64)
    tables = np.empty(TABLES_LISTED_MAX, np.int64)
    units = np.empty((unit_count, 4), np.int64)
    opened, position_at_start = open_unit(state), int(state[POSITION])
    _scan(frames, state, result, tables, units)
    if result[_ERROR]:
        raise TailraceError(
            Kind.PROTOCOL_VIOLATION,
            f"read frames of the source: {_ERRORS[int(result[_ERROR])]}",
            f"{REPORT_STREAM}; what a type of source of your own wrote is for its package to correct",
            {"byte": int(result[_ERROR_AT]), "position": position_at_start},
        )
    found = Summary(
        size=len(frames),
        rows=int(result[_ROWS]),
        boundary=None if result[_BOUNDARY] < 0 else int(result[_BOUNDARY]),
        units=int(result[_UNITS]),
        has_schema=bool(result[_SCHEMA]),
        tables=_listed(tables, int(result[_TABLES])),
        open_at_start=opened,
        open_at_end=open_unit(state),
        position_at_start=position_at_start,
        position=int(state[POSITION]),
        position_time_us=int(state[POSITION_TIME_US]),
        time_max_us=int(result[_TIME_MAX]),
        to_boundary=None,
    )
    if found.boundary is None or found.boundary == found.size:
        return found, units
    head = replace(
        found,
        size=found.boundary,
        rows=int(result[_ROWS_BEFORE]),
        has_schema=bool(result[_SCHEMA_BEFORE]),
        tables=_listed(tables, int(result[_TABLES_BEFORE])),
        open_at_end=None,
    )
    return replace(found, to_boundary=head), units


def _listed(tables: Numbers, count: int) -> tuple[int, ...] | None:
    return None if count > TABLES_LISTED_MAX else tuple(tables[:count].tolist())


def each_frame(frames: Bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield offset and content of each frame. A Python loop: for rare frames and tests.

    :raises TailraceError: `PROTOCOL_VIOLATION` if a length does not fit.
    """
    view = frames.data
    at = 0
    while at < len(view):
        length = struct.unpack_from("!i", view, at + 1)[0] if at + 5 <= len(view) else -1
        if view[at] != COPY_DATA or length < 5 or at + 1 + length > len(view):
            raise cut_short(at)
        yield at, view[at : at + 1 + length]
        at += 1 + length


def cut_short(at: int) -> TailraceError:
    """Return the error for a frame at `at` whose length does not fit."""
    return TailraceError(Kind.PROTOCOL_VIOLATION, f"split frames: {_ERRORS[1]}", REPORT_LOG, {"byte": at})


def xlog_frame(start: int, end: int, sent_us: int, payload: bytes) -> bytes:
    """Return an XLogData frame; `sent_us` counts from 2000, as on the wire."""
    return (
        struct.pack("!cicQQq", b"d", XLOG_PAYLOAD_AT - 1 + len(payload), b"w", start, end, sent_us) + payload
    )


def snapshot_frame(relation: int, first_ordinal: int, rows: int, text: bytes) -> bytes:
    """Return a frame of `rows` snapshot rows in COPY's text format."""
    frame = bytearray(SNAPSHOT_TEXT_AT) + text
    put_rows_head(frame, relation, rows, first_ordinal)
    return bytes(frame)


def put_rows_head(frame: bytearray, relation: int, rows: int, first_ordinal: int = 0) -> None:
    """Write the header of a frame of rows."""
    struct.pack_into("!cicIQI", frame, 0, b"d", len(frame) - 1, b"s", relation, first_ordinal, rows)


def control_frame(subtype: bytes, lsn: int, time_us: int, content: dict[str, Any]) -> bytes:
    """Return a control frame; `time_us` counts from 1970."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return struct.pack("!ciccQq", b"d", CONTROL_JSON_AT - 1 + len(text), b"x", subtype, lsn, time_us) + text


def shard_frame(shard: str, state: dict[str, Any]) -> bytes:
    """Return a frame with a shard's state. It is written inside the transaction that leads to the state."""
    return control_frame(SHARD, 0, 0, {"shard": shard, "state": state})


def control_json(frame: memoryview | bytes) -> dict[str, Any]:
    """Return a control frame's content.

    :raises TailraceError: `PROTOCOL_VIOLATION` if it is not a JSON object.
    """
    try:
        content = json.loads(bytes(frame[CONTROL_JSON_AT:]))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise TailraceError(Kind.PROTOCOL_VIOLATION, "read a control frame: not a JSON object", REPORT_LOG)
    return content
