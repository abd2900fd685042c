"""Assigns a partition to each record, and one of several producers.

A record's partition depends on its key, as in Java's clients, or on its transaction. Its producer depends on
the key alone, by the same hash: one producer writes all records of a key, so that they stay in order, and
with as many producers as a topic has partitions, each producer writes to one partition. Records without a
key are assigned by their topic. A producer's share does not change unless the number of producers does:
the next attempt continues a share where the last one stopped.

Source: Apache Kafka, org.apache.kafka.common.utils.Utils (`murmur2`, `toPositive`), BuiltInPartitioner
(`partitionForKey`). librdkafka's `murmur2_random` does the same for keys; it is implemented here for records
that are not partitioned by key, and for readers that look for one key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.compiled import compiled
from tailrace.decode.gather import text_buffers
from tailrace.decode.kernel import NONE
from tailrace.protocol.frames import FROZEN_BYTES, Numbers
from tailrace.records.events import Converted

_FROZEN_INT64S = nb.types.Array(nb.int64, 1, "C", readonly=True)

#: Partition number for librdkafka: it chooses the partition by the key.
BY_KEY = -1

_SEED, _M = np.uint64(0x9747B28C), np.uint64(0x5BD1E995)
_LOW = np.uint64(0xFFFFFFFF)  # 32 bits: with 64-bit numbers no product overflows into a sign


@compiled(nb.uint64(FROZEN_BYTES, nb.int64, nb.int64))
def _murmur2(b, first, length):  # type: ignore[no-untyped-def]
    h = _SEED ^ np.uint64(length)
    whole = length & ~3
    for p in range(first, first + whole, 4):
        k = np.uint64(0)
        for q in range(4):
            k |= np.uint64(b[p + q]) << np.uint64(8 * q)
        k = (k * _M) & _LOW
        k = ((k ^ (k >> np.uint64(24))) * _M) & _LOW
        h = ((h * _M) & _LOW) ^ k
    for q in range(length - whole):
        h ^= np.uint64(b[first + whole + q]) << np.uint64(8 * q)
    if length > whole:
        h = (h * _M) & _LOW
    h = ((h ^ (h >> np.uint64(13))) * _M) & _LOW
    return h ^ (h >> np.uint64(15))


@compiled(nb.void(FROZEN_BYTES, _FROZEN_INT64S, nb.int64, nb.int32[::1]))
def _place(b, offsets, partitions, out):  # type: ignore[no-untyped-def]
    for r in range(len(out)):
        h = _murmur2(b, offsets[r], offsets[r + 1] - offsets[r])
        out[r] = np.int64(h & np.uint64(0x7FFFFFFF)) % partitions


def murmur2(data: bytes) -> int:
    """Return the hash that Java's clients partition keys by, as an unsigned number."""
    return int(_murmur2(np.frombuffer(data, np.uint8), 0, len(data)))


@functools.lru_cache(1024)
def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition to which Java's clients send `key`: its hash without the sign bit, modulo."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def of_keys(keys: pa.Array, partitions: int) -> npt.NDArray[np.int32]:
    """Return the partition to which Java's clients send each key (text or bytes); a null has any."""
    found = np.empty(len(keys), np.int32)
    _place(*text_buffers(keys), partitions, found)
    return found


def by_key(keys: pa.Array | Sequence[Any], partitions: int) -> npt.NDArray[np.int32]:
    """Return the partition to which Java's clients send each key (text or bytes); `BY_KEY` for a null."""
    if not isinstance(keys, pa.Array):
        keys = pa.array([key.encode() if isinstance(key, str) else key for key in keys], pa.large_binary())
    found = of_keys(keys, partitions)
    if keys.null_count:
        found[np.asarray(keys.is_null())] = BY_KEY
    return found


def by_transaction(xid: Numbers, partitions: int) -> npt.NDArray[np.int32]:
    """Return the partition of each change: that of its transaction's number, written in decimal.

    Changes without a transaction (rows of a snapshot, some messages) are partitioned by key: `BY_KEY`.
    """
    found = of_keys(pa.array(xid).cast(pa.large_string()), partitions)
    found[xid == NONE] = BY_KEY
    return found


@dataclass(frozen=True, slots=True)
class Share:
    """The records that the producer `number` (from 0) of `producers` writes."""

    number: int
    producers: int

    def has(self, keys: pa.Array | Sequence[Any] | None, topic: str, count: int) -> npt.NDArray[np.bool_]:
        """Return for each of `count` records of a topic, with these keys, whether it is in the share.

        :param keys: texts or bytes, null for a record without a key; None: no record has a key.
        """
        found: npt.NDArray[np.bool_] = shares_of(keys, topic, count, self.producers) == self.number
        return found

    def of(self, converted: Converted, topic: str) -> Converted:
        """Return the events that are in the share, in their order."""
        mine = self.has(converted.keys, topic, len(converted))
        return converted if mine.all() else converted.take(np.flatnonzero(mine))


def shares_of(
    keys: pa.Array | Sequence[Any] | None, topic: str, count: int, producers: int
) -> npt.NDArray[np.int32]:
    """Return for each of `count` records the number of the producer that writes it."""
    found = np.full(count, BY_KEY, np.int32) if keys is None else by_key(keys, producers)
    found[found == BY_KEY] = partition_of(topic.encode(), producers)
    return found
