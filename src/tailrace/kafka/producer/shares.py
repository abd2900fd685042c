"""Shares of a task's records: which of several producers writes a record.

The key alone decides, by the hash with which Java's clients place it: all records of a key are one
producer's, so that they stay in order, and with as many producers as a topic has partitions each of them
writes to one. Records without a key have the share of their topic.

What is in a share never changes as long as the number of producers doesn't: a share that was cut short is
gone on with by whoever comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.kafka.producer.partitioner import of_keys, partition_of
from tailrace.protocol.frames import Numbers
from tailrace.records.events import Converted


@dataclass(frozen=True, slots=True)
class Share:
    """What the producer `number` (from 0) of `producers` writes."""

    number: int
    producers: int

    def has(self, keys: pa.Array | Sequence[Any] | None, topic: str, count: int) -> npt.NDArray[np.bool_]:
        """Tell for each of `count` records of a topic, with these keys, whether it is in the share.

        :param keys: texts or bytes, null where there is none; None: nowhere is one.
        """
        found: npt.NDArray[np.bool_] = shares_of(keys, topic, count, self.producers) == self.number
        return found

    def of(self, converted: Converted, topic: str) -> Converted:
        """Return the events that are in the share, in their order."""
        mine = self.has(converted.keys, topic, len(converted))
        if mine.all():
            return converted
        places = np.flatnonzero(mine)
        rows = places if converted.rows is None else converted.rows[places]
        return replace(
            converted,
            keys=None if converted.keys is None else _taken(converted.keys, places),
            values=_taken(converted.values, places),
            headers=None if converted.headers is None else converted.headers.take(pa.array(places)),
            rows=rows,
        )


def shares_of(keys: pa.Array | Sequence[Any] | None, topic: str, count: int, producers: int) -> Numbers:
    """Return for each of `count` records the number of the producer that writes it."""
    of_topic = partition_of(topic.encode(), producers)
    if keys is None:
        return np.full(count, of_topic, np.int64)
    array = (
        keys if isinstance(keys, pa.Array) else pa.array([_as_bytes(key) for key in keys], pa.large_binary())
    )
    array = array.cast(pa.large_binary())
    found = of_keys(array, producers).astype(np.int64)
    if array.null_count:
        found[np.asarray(array.is_null())] = of_topic
    return found


def _as_bytes(key: Any) -> bytes | None:
    return key.encode() if isinstance(key, str) else key


def _taken(values: pa.Array | Sequence[Any], places: Numbers) -> pa.Array | Sequence[Any]:
    if isinstance(values, pa.Array):
        return values.take(pa.array(places))
    return [values[place] for place in places.tolist()]
