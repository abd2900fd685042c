"""Filters over whole frames on their way into the log, as compiled scans.

All of them expect whole frames, from `backend_messages.split_wire` or from the log, and look at no length
that was not checked there. What is no whole frame is left as it is, for the log's own scan to refuse.

Updates that change none of the captured columns are the subject of `unchanged_updates`.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled, iterated
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import REPORT_STREAM, Kind, TailraceError
from tailrace.model import format_lsn
from tailrace.protocol import pgoutput as pg
from tailrace.protocol.frames import (
    CONTROL,
    FROZEN_BYTES,
    KIND_AT,
    SNAPSHOT_BEGINS,
    SNAPSHOT_ENDS,
    SUBTYPE_AT,
    XLOG_PAYLOAD_AT,
    Bytes,
    Numbers,
    frame_size,
    message_type,
)
from tailrace.protocol.memory import address_of, i64_at, move_bytes, u16_at, u32_at

#: A server that sends more than this of what was acknowledged does not follow the protocol.
TRANSACTIONS_DROPPED_MAX = 10_000_000

#: So many prefixes of logical messages are remembered, and prefixes of together so many bytes; then they are
#: forgotten.
PREFIXES_MAX = 64
PREFIX_BYTES_MAX = 16 * 1024

# The state of `_new_since`: whether a transaction that is dropped is open, whether all that follows is new,
# how many transactions and messages were dropped.
_INSIDE, _DONE, _DROPPED = range(3)

# The state of `_without_messages`: where it goes on, where what stays ends, and where the prefix ends that is
# not known.
_AT, _KEPT, _UNKNOWN_END = range(3)


@iterated
def messages(b, start=0):  # type: ignore[no-untyped-def]
    """Yield place, size and type of the whole frames of `b`, in order, as `message_type` has it.

    Bytes before the place of the next frame may be moved meanwhile.
    """
    i = np.int64(start)
    while True:
        size = frame_size(b, i)
        if size == 0:
            break
        yield i, size, message_type(b, i, size)
        i += size


@nb.njit(inline="always")
def keep(b, begin, end, target):  # type: ignore[no-untyped-def]
    """Move what stays of `b` forward, to `target`; return the place after it."""
    if target != begin:
        move_bytes(address_of(b), begin, end, target)
    return target + end - begin


@nb.njit(inline="always")
def place_of(relations, relation):  # type: ignore[no-untyped-def]
    """Return the place of `relation` among sorted numbers; -1 if it is not there."""
    low = np.int64(0)
    high = np.int64(len(relations))
    while low < high:
        middle = (low + high) >> 1
        if relations[middle] < relation:
            low = middle + 1
        else:
            high = middle
    return low if low < len(relations) and relations[low] == relation else np.int64(-1)


@compiled(nb.int64(FROZEN_BYTES, nb.boolean, nb.int64))
def _before(b, unit_open, limit):  # type: ignore[no-untyped-def]
    for i, size, message in messages(b):
        p = i + XLOG_PAYLOAD_AT
        room = i + size - p
        if message == pg.BEGIN and room >= pg.BEGIN_LSN_AT + 8:
            if i64_at(b, p + pg.BEGIN_LSN_AT) >= limit:
                return i
            unit_open = True
        elif message == pg.COMMIT:
            unit_open = False
        elif (
            message == pg.MESSAGE
            and room >= pg.PREFIX_AT
            and not unit_open
            and i64_at(b, p + pg.MESSAGE_LSN_AT) > limit
        ):
            return i
    return np.int64(len(b))


@compiled(nb.int64(nb.uint8[::1], nb.int64[::1]))
def _without(b, relations):  # type: ignore[no-untyped-def]
    end = np.int64(0)
    target = np.int64(0)
    for i, size, message in messages(b):
        end = i + size
        is_change = message == pg.INSERT or message == pg.UPDATE or message == pg.DELETE
        p = i + XLOG_PAYLOAD_AT
        if not (
            is_change and end - p >= pg.TUPLES_AT and place_of(relations, u32_at(b, p + pg.RELATION_AT)) >= 0
        ):
            target = keep(b, i, end, target)
    return keep(b, end, len(b), target)


@compiled(nb.int64(FROZEN_BYTES, nb.int64[::1]))
def _snapshot_marks(b, found):  # type: ignore[no-untyped-def]
    count = np.int64(0)
    for i, size, _ in messages(b):
        if b[i + KIND_AT] == CONTROL and size > SUBTYPE_AT:
            subtype = b[i + SUBTYPE_AT]
            if subtype == SNAPSHOT_BEGINS or subtype == SNAPSHOT_ENDS:
                if count < len(found):
                    found[count] = i
                count += 1
    return count


@nb.njit(inline="always")
def _leaves_out(b, i, end):  # type: ignore[no-untyped-def]
    # Whether an Update, whose old key begins at i, has a value in its new row that was not sent.
    for mark in (pg.OLD_KEY, pg.NEW_ROW):
        if i + 3 > end or b[i] != mark:
            return False
        columns = u16_at(b, i + 1)
        i += 3
        for _ in range(columns):
            if i >= end:
                return False
            kind = b[i]
            i += 1
            if kind == pg.UNCHANGED and mark == pg.NEW_ROW:
                return True
            if kind == pg.TEXT:
                if i + 4 > end:
                    return False
                i += 4 + u32_at(b, i)
    return False


@compiled(nb.void(FROZEN_BYTES, nb.int64[::1], nb.boolean[::1]))
def _moved(b, relations, found):  # type: ignore[no-untyped-def]
    for i, size, message in messages(b):
        p = i + XLOG_PAYLOAD_AT
        if message == pg.UPDATE and i + size - p > pg.TUPLES_AT:
            k = place_of(relations, u32_at(b, p + pg.RELATION_AT))
            if k >= 0 and not found[k] and _leaves_out(b, p + pg.TUPLES_AT, i + size):
                found[k] = True


@compiled(nb.int64(nb.uint8[::1], nb.int64, nb.int64[::1]))
def _new_since(b, position, state):  # type: ignore[no-untyped-def]
    end = np.int64(0)
    target = np.int64(0)
    for i, size, message in messages(b):
        if state[_DONE] == 1:
            break
        end = i + size
        p = i + XLOG_PAYLOAD_AT
        room = end - p
        stays = True
        if message == pg.RELATION or message == pg.TYPE:
            pass
        elif state[_INSIDE] == 1:
            stays = False
            if message == pg.COMMIT:
                state[_INSIDE] = 0
                state[_DROPPED] += 1
        elif message == pg.BEGIN and room >= pg.BEGIN_LSN_AT + 8:
            stays = i64_at(b, p + pg.BEGIN_LSN_AT) >= position
            state[_DONE if stays else _INSIDE] = 1
        elif message == pg.MESSAGE and room >= pg.PREFIX_AT:
            stays = i64_at(b, p + pg.MESSAGE_LSN_AT) > position
            state[_DONE if stays else _DROPPED] += 1
        if stays:
            target = keep(b, i, end, target)
    return keep(b, end, len(b), target)


@nb.njit(inline="always")
def _prefix_among(b, begin, end, known, ends, count):  # type: ignore[no-untyped-def]
    # The place of a prefix among those that are known; -1 if it is none of them.
    first = np.int64(0)
    for k in range(count):
        if ends[k] - first == end - begin:
            j = np.int64(0)
            while j < end - begin and known[first + j] == b[begin + j]:
                j += 1
            if j == end - begin:
                return np.int64(k)
        first = ends[k]
    return np.int64(-1)


@compiled(nb.boolean(nb.uint8[::1], FROZEN_BYTES, nb.int64[::1], nb.boolean[::1], nb.int64, nb.int64[::1]))
def _without_messages(b, known, ends, captured, count, state):  # type: ignore[no-untyped-def]
    # False: the prefix of the message at state[_AT] is not known, and ends before state[_UNKNOWN_END].
    end = state[_AT]
    target = state[_KEPT]
    for i, size, message in messages(b, state[_AT]):
        begin = i + XLOG_PAYLOAD_AT + pg.PREFIX_AT
        stays = True
        if message == pg.MESSAGE and begin < i + size:
            prefix_end = begin
            while prefix_end < i + size and b[prefix_end] != 0:
                prefix_end += 1
            found = _prefix_among(b, begin, prefix_end, known, ends, count)
            if found < 0:
                state[_AT] = i
                state[_KEPT] = target
                state[_UNKNOWN_END] = prefix_end
                return False
            stays = captured[found]
        end = i + size
        if stays:
            target = keep(b, i, end, target)
    state[_KEPT] = keep(b, end, len(b), target)
    return True


def before(chunk: Bytes, limit: int, *, unit_open: bool) -> int:
    """Return how many bytes of `chunk` lie before the first transaction whose commit record is at
    or after `limit`; a message outside a transaction, whose LSN is its end, may be at `limit`.

    :param unit_open: the chunk begins inside a transaction.
    """
    return int(_before(chunk, unit_open, limit))


def without(chunk: Bytes, relations: Numbers) -> Bytes:
    """Return `chunk`, which is changed in place, without the rows that changed in `relations`, sorted."""
    return chunk[: int(_without(chunk, relations))]


def snapshot_marks(chunk: Bytes) -> Numbers:
    """Return where in `chunk` frames lie that begin or end a unit of a snapshot."""
    found = np.empty(64, np.int64)
    count = int(_snapshot_marks(chunk, found))
    if count > len(found):
        found = np.empty(count, np.int64)
        _snapshot_marks(chunk, found)
    return found[:count]


def moved(chunk: Bytes, relations: Numbers) -> list[int]:
    """Return those of `relations`, sorted, of which a row changed its key and was not sent whole."""
    found = np.zeros(len(relations), np.bool_)
    _moved(chunk, relations, found)
    return [int(relation) for relation in relations[found]]


class ResumptionFilter:
    """Drops what lies before `position`, until the first that does not. One a connection.

    The server is asked to start at the log's position, and may yet send transactions before it: a
    slot's own position is saved only now and then, and goes back when the server crashes. Rows
    have no position of their own that could be compared. So a transaction is dropped whole if its
    commit record starts before the position, and the first one that does not ends the filter for
    good. `<`, never `<=`: a commit record may start exactly where the one before it ended.

    A logical message outside a transaction carries the end of its record, so there `<=` is right:
    one that ends at the position is in the log, and none that follows can end there too. Relation
    and Type messages are kept always: the server sends them once a connection, perhaps inside a
    transaction that is dropped, and later transactions rely on them.
    """

    def __init__(self, position: int) -> None:
        self._position = position
        self._state = np.zeros(3, np.int64)

    @property
    def done(self) -> bool:
        """Whether everything from now on is new."""
        return bool(self._state[_DONE])

    @property
    def dropped(self) -> int:
        """Transactions and messages dropped so far."""
        return int(self._state[_DROPPED])

    def apply(self, chunk: Bytes) -> Bytes:
        """Return what is new of a run of whole XLogData frames; `chunk` is changed in place.

        :raises TailraceError: `PROTOCOL_VIOLATION` if the dropping does not end.
        """
        if self.done:
            return chunk
        left = _new_since(chunk, self._position, self._state)
        if self.dropped > TRANSACTIONS_DROPPED_MAX:
            raise TailraceError(
                Kind.PROTOCOL_VIOLATION,
                f"resume at {format_lsn(self._position)}: the server sent more than "
                f"{TRANSACTIONS_DROPPED_MAX} transactions that end before it",
                REPORT_STREAM,
            )
        return chunk[: int(left)]


class MessageFilter:
    """Drops the logical messages that `source` leaves out by their prefix. One thread.

    The compiled scan compares prefixes with those that were met before: Python is asked about a prefix once,
    as long as there are no more of them than are remembered.
    """

    def __init__(self, source: PostgresSource) -> None:
        self._source = source
        self._known = np.empty(PREFIX_BYTES_MAX, np.uint8)
        self._ends = np.zeros(PREFIXES_MAX, np.int64)
        self._captured = np.zeros(PREFIXES_MAX, np.bool_)
        self._count = 0

    def apply(self, chunk: Bytes) -> Bytes:
        """Return what is to be captured of a run of whole XLogData frames; `chunk` is changed in place."""
        if not self._source.leaves_messages_out:
            return chunk
        state = np.zeros(3, np.int64)
        while not _without_messages(chunk, self._known, self._ends, self._captured, self._count, state):
            self._decide(chunk[state[_AT] + XLOG_PAYLOAD_AT + pg.PREFIX_AT : state[_UNKNOWN_END]])
        return chunk[: int(state[_KEPT])]

    def _decide(self, prefix: Bytes) -> None:
        begin = int(self._ends[self._count - 1]) if self._count else 0
        if self._count == PREFIXES_MAX or begin + len(prefix) > PREFIX_BYTES_MAX:
            self._count, begin = 0, 0
        if len(prefix) > PREFIX_BYTES_MAX:
            self._known = np.empty(len(prefix), np.uint8)  # that of one message, which is there already
        self._known[begin : begin + len(prefix)] = prefix
        self._ends[self._count] = begin + len(prefix)
        text = prefix.tobytes().decode(errors="surrogateescape")
        self._captured[self._count] = self._source.captures_message(text)
        self._count += 1
