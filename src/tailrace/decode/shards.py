"""Shard positions: of each transaction, the shard and its position once the transaction is in the log.

A transaction has one frame with its shard's position, after its rows (`protocol.frames.shard_frame`). It is
read once per transaction, not once per row, and only on request: rows find it by the transaction's position.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import numba as nb
import numpy as np
import pyarrow as pa

from tailrace.compiled import compiled
from tailrace.decode.gather import Cells, gather
from tailrace.decode.kernel import TEXT
from tailrace.protocol import frames
from tailrace.protocol import pgoutput as pg
from tailrace.protocol.frames import FROZEN_BYTES, Bytes, Numbers, OpenUnit, frame_size, message_type
from tailrace.protocol.memory import i64_at, u8_at

# Rows of the array of results, which has one column per transaction: its commit LSN, start and end of the
# shard's name and position in the frames, the shard's epoch, the rank, and the watermark.
_COMMIT_LSN, _NAME_AT, _NAME_END, _GTID_AT, _GTID_END, _EPOCH, _RANK, _WATERMARK_US = range(8)
_FIELDS = 8

_QUOTE, _BACKSLASH, _COMMA, _SLASH, _ZERO, _NINE = map(ord, '"\\,/09')
_SHARD, _GTID, _EPOCH_IS, _WATERMARK_IS = (
    np.frombuffer(text, np.uint8) for text in (b'{"shard":"', b'"gtid":"', b'"epoch":', b'"watermark":')
)
#: Estimate of the smallest transaction with a row and such a frame, in bytes; few are smaller.
_TRANSACTION_BYTES = 256
#: Number of decimal digits that always fit 64 bits.
_DIGITS_MAX = 18


@nb.njit(inline="always")
def _begins(b, at, end, text):  # type: ignore[no-untyped-def]
    if end - at < len(text):
        return False
    k = 0
    while k < len(text) and u8_at(b, at + k) == text[k]:
        k += 1
    return k == len(text)


@nb.njit(inline="always")
def _text_end(b, at, end):  # type: ignore[no-untyped-def]
    # Returns the place of the quote that ends the JSON text at `at`.
    while at < end and u8_at(b, at) != _QUOTE:
        at += 2 if u8_at(b, at) == _BACKSLASH else 1
    return min(at, end)


@nb.njit(inline="always")
def _number(b, at, end):  # type: ignore[no-untyped-def]
    found = np.int64(0)
    stop = min(end, at + _DIGITS_MAX)
    while at < stop and _ZERO <= u8_at(b, at) <= _NINE:
        found = found * 10 + u8_at(b, at) - _ZERO
        at += 1
    return found


@nb.njit(inline="always")
def _rank(b, at, end):  # type: ignore[no-untyped-def]
    # Returns the sum of the last numbers of all servers in a GTID set: each transaction increases it.
    total = np.int64(0)
    begin = at
    for k in range(at, end + 1):
        if k == end or u8_at(b, k) == _COMMA:
            first = k
            while first > begin and k - first < _DIGITS_MAX and _ZERO <= u8_at(b, first - 1) <= _NINE:
                first -= 1
            total += _number(b, first, k)
            begin = k + 1
    return total


@nb.njit(inline="always")
def _read(b, at, end, found, n):  # type: ignore[no-untyped-def]
    # Writes the fields of the frame's JSON in [at, end) to `found`. Returns whether it has a position.
    if not _begins(b, at, end, _SHARD):
        return False
    found[_NAME_AT, n] = at + len(_SHARD)
    found[_NAME_END, n] = _text_end(b, at + len(_SHARD), end)
    found[_GTID_AT, n] = found[_EPOCH, n] = found[_WATERMARK_US, n] = -1
    for k in range(found[_NAME_END, n], end):
        if u8_at(b, k) != _QUOTE:
            continue
        # Inside a text, each quote has a backslash before it. The name of a table may be any of these
        # words, but a text follows it, and it comes before the position.
        if _begins(b, k, end, _GTID):
            found[_GTID_AT, n] = k + len(_GTID)
        elif _begins(b, k, end, _EPOCH_IS) and _ZERO <= u8_at(b, k + len(_EPOCH_IS)) <= _NINE:
            found[_EPOCH, n] = _number(b, k + len(_EPOCH_IS), end)
        elif _begins(b, k, end, _WATERMARK_IS) and _ZERO <= u8_at(b, k + len(_WATERMARK_IS)) <= _NINE:
            found[_WATERMARK_US, n] = _number(b, k + len(_WATERMARK_IS), end)
    if found[_GTID_AT, n] < 0:
        return False
    found[_GTID_END, n] = _text_end(b, found[_GTID_AT, n], end)
    found[_RANK, n] = _rank(b, found[_GTID_AT, n], found[_GTID_END, n])
    found[_EPOCH, n] = max(found[_EPOCH, n], 0)
    return True


@compiled(nb.int64(FROZEN_BYTES, nb.int64[::1], nb.int64[:, ::1]))
def _find(b, state, found):  # type: ignore[no-untyped-def]
    # Returns the number of transactions with such a frame; of several in one, the last counts. `found`
    # gets as many of them as it has room for.
    count = np.int64(0)
    spare = found.shape[1] - 1
    i = np.int64(0)
    last = np.int64(-1)
    while i < len(b):
        size = frame_size(b, i)
        if size == 0:
            break
        message = message_type(b, i, size)
        payload = i + frames.XLOG_PAYLOAD_AT
        if message == pg.BEGIN and size - frames.XLOG_PAYLOAD_AT >= pg.BEGIN_SIZE:
            frames.open_transaction(b, payload, state)
        elif message == pg.COMMIT:
            state[frames.OPEN] = frames.NOTHING_OPEN
        elif u8_at(b, i + frames.KIND_AT) == frames.CONTROL and size >= frames.CONTROL_JSON_AT:
            subtype = u8_at(b, i + frames.SUBTYPE_AT)
            if subtype == frames.SNAPSHOT_BEGINS:
                state[frames.OPEN] = frames.SNAPSHOT_OPEN
                state[frames.COMMIT_LSN] = i64_at(b, i + frames.CONTROL_LSN_AT) - 1
            elif subtype == frames.SNAPSHOT_ENDS:
                state[frames.OPEN] = frames.NOTHING_OPEN
            elif subtype == frames.HAS_SHARD and state[frames.OPEN] != frames.NOTHING_OPEN:
                n = count - 1 if count > 0 and last == state[frames.COMMIT_LSN] else count
                n = min(n, spare)
                if _read(b, i + frames.CONTROL_JSON_AT, i + size, found, n):
                    found[_COMMIT_LSN, n] = state[frames.COMMIT_LSN]
                    count += 0 if last == state[frames.COMMIT_LSN] else 1
                    last = state[frames.COMMIT_LSN]
        i += size
    return count


@dataclass(frozen=True, slots=True, eq=False)
class ShardPositions:
    """The shard positions of transactions, in log order.

    :param commit_lsn: ascending.
    :param shard: keyspace and shard, separated by a slash; JSON texts without their quotes.
    :param gtid: everything up to here is in the log once the transaction is; needs no escapes in JSON.
    :param rank: increases from transaction to transaction of a shard's epoch.
    :param watermark_us: when the transaction was written, the log contained everything that any shard had
        committed before this time; -1: not known.
    """

    commit_lsn: Numbers
    shard: pa.StringArray
    gtid: pa.StringArray
    epoch: Numbers
    rank: Numbers
    watermark_us: Numbers

    def __len__(self) -> int:
        return len(self.commit_lsn)

    def take(self, places: Numbers) -> ShardPositions:
        """Return the transactions at the indexes `places`."""
        arrow = pa.array(places)
        return ShardPositions(
            self.commit_lsn[places],
            self.shard.take(arrow),
            self.gtid.take(arrow),
            self.epoch[places],
            self.rank[places],
            self.watermark_us[places],
        )

    def places(self, commit_lsn: Numbers) -> Numbers:
        """Return the index of each of these transactions; -1 if it is not here."""
        if not len(self):
            return np.full(len(commit_lsn), -1, np.int64)
        found = np.minimum(np.searchsorted(self.commit_lsn, commit_lsn), len(self) - 1)
        return np.where(self.commit_lsn[found] == commit_lsn, found, -1)


@dataclass(frozen=True, slots=True, eq=False)
class RowShards:
    """The shard positions of some rows.

    :param places: index of each row's transaction in `positions`; -1: it is not there.
    """

    positions: ShardPositions
    places: Numbers

    def of(self, column: pa.Array) -> pa.Array:
        """Return for each row its transaction's value in `column`; null if the transaction is not known."""
        return column.take(pa.array(self.places, mask=self.places < 0))


def rows_of(positions: ShardPositions | None, commit_lsn: Numbers) -> RowShards:
    """Return the shard positions of rows with these commit LSNs."""
    if positions is None:
        nothing, text = np.empty(0, np.int64), pa.array([], pa.string())
        positions = ShardPositions(nothing, text, text, nothing, nothing, nothing)
    places = positions.places(commit_lsn)
    if len(places) < len(positions):  # the other transactions are of other tables
        used, places = np.unique(places, return_inverse=True)
        missing = int(len(used) > 0 and used[0] < 0)
        positions, places = positions.take(used[missing:]), places - missing
    return RowShards(positions, places)


def full_names(positions: ShardPositions) -> pa.DictionaryArray:
    """Return the shards' names, keyspace and shard separated by a slash, as a dictionary array."""
    coded = positions.shard.dictionary_encode()
    names = [json.loads(f'"{name}"') for name in coded.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(coded.indices, pa.array(names, pa.string()))


def own_names(positions: ShardPositions) -> pa.StringArray:
    """Return the shards' names without the keyspace."""
    names = full_names(positions)
    own = [name.partition("/")[2] for name in names.dictionary.to_pylist()]
    return pa.array(own, pa.string()).take(names.indices)


def joined(parts: list[ShardPositions]) -> ShardPositions:
    """Return the transactions of several parts, without duplicates."""
    lsns = np.concatenate([part.commit_lsn for part in parts])
    whole = ShardPositions(
        lsns,
        pa.concat_arrays([part.shard for part in parts]),
        pa.concat_arrays([part.gtid for part in parts]),
        np.concatenate([part.epoch for part in parts]),
        np.concatenate([part.rank for part in parts]),
        np.concatenate([part.watermark_us for part in parts]),
    )
    return whole.take(np.unique(lsns, return_index=True)[1])


def find_shards(raw: Bytes, open_at_start: OpenUnit | None) -> ShardPositions:
    """Return the shard positions of the transactions in complete frames.

    :param open_at_start: the unit that is open at their start.
    """
    found = np.empty((_FIELDS, 1 + len(raw) // _TRANSACTION_BYTES), np.int64)
    count = _find(raw, frames.state_within(open_at_start, 0, 0), found)
    if count > found.shape[1]:
        found = np.empty((_FIELDS, count), np.int64)
        _find(raw, frames.state_within(open_at_start, 0, 0), found)
    found = found[:, :count]
    return ShardPositions(
        found[_COMMIT_LSN].copy(),
        _texts(raw, found[_NAME_AT], found[_NAME_END]),
        _texts(raw, found[_GTID_AT], found[_GTID_END]),
        found[_EPOCH].copy(),
        found[_RANK].copy(),
        found[_WATERMARK_US].copy(),
    )


def _texts(raw: Bytes, begin: Numbers, end: Numbers) -> pa.StringArray:
    kind = np.full(len(begin), TEXT, np.uint8)
    return gather(Cells(raw, begin.astype(np.int32), (end - begin).astype(np.int32), kind))


class BlockShards:
    """The shard positions of the transactions in some frames, which the first access finds.

    :param beyond: positions of transactions whose shard frame comes after these frames.
    """

    def __init__(
        self, raw: Bytes, open_at_start: OpenUnit | None, beyond: ShardPositions | None = None
    ) -> None:
        self._raw = raw
        self._open_at_start = open_at_start
        self._beyond = beyond

    @functools.cached_property
    def positions(self) -> ShardPositions:
        """The positions of the transactions in the frames, and those of `beyond`."""
        here = find_shards(self._raw, self._open_at_start)
        return here if self._beyond is None else joined([here, self._beyond])
