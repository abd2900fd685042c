"""In-memory topics, written message by message, and readers of them: no server."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import pyarrow as pa

from tailrace.errors import Kind, TailraceError
from tailrace.join.extraction import MESSAGES
from tailrace.join.messages import MessageReader, Place, Read
from tests.support.join.pair import change_of, end_of


class TopicsInMemory:
    """A data topic and its transaction topic; messages are committed at once.

    :param read_max: messages of a partition that a reader returns at a time.
    :param in_turn: whether each read is of one partition; else of all.
    """

    def __init__(self, partitions: int = 1, read_max: int = 1000, *, in_turn: bool = False) -> None:
        self.data, self.transactions = "t.data", "t.transaction"
        self.partitions = {self.data: partitions, self.transactions: 1}
        self.read_max, self.in_turn = read_max, in_turn
        self.messages: dict[Place, list[bytes]] = defaultdict(list)
        self.first: dict[Place, int] = defaultdict(int)
        #: Called before each read.
        self.on_read: Callable[[], object] = lambda: None

    def settings(self, **more: Any) -> dict[str, Any]:
        """The join's options."""
        return {"bootstrap_servers": "x:1", "data": [self.data], "transactions": self.transactions, **more}

    def change(self, xid: int, order: int, after: int, partition: int = 0) -> None:
        """Write a change of a transaction that comes after the commit at `after`."""
        self.send(self.data, change_of(xid, order, after), partition)

    def end(self, xid: int, commit: int, count: int) -> None:
        """Write the end of a transaction."""
        self.send(self.transactions, end_of(xid, commit, count))

    def send(self, topic: str, document: Any, partition: int = 0) -> None:
        """Write a message."""
        value = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.messages[topic, partition].append(value)

    def remove(self, place: Place, kept: int = 0) -> None:
        """Remove all but the last messages of a partition, as retention does."""
        self.first[place] = len(self.messages[place]) - kept

    def reader(self, *_: Any) -> MessageReader:
        """Return a reader."""
        return cast(MessageReader, _Reader(self))


class _Reader:
    # As `MessageReader`.
    def __init__(self, topics: TopicsInMemory) -> None:
        self._topics = topics
        self._positions: dict[Place, int] = {}
        self._paused: set[Place] = set()
        self._turn = 0

    def cluster(self) -> str:
        return "memory"

    def partitions_of(self, topics: list[str]) -> dict[str, int]:
        return {topic: self._topics.partitions[topic] for topic in topics}

    def begin(self, positions: Mapping[Place, int]) -> None:
        self._positions |= positions

    def seek(self, place: Place, offset: int) -> None:
        self._positions[place] = offset
        self._paused.discard(place)

    def pause(self, place: Place) -> None:
        self._paused.add(place)

    def resume(self, place: Place) -> None:
        self._paused.discard(place)

    def read(self, timeout_s: float) -> Read:
        self._topics.on_read()
        found, ends = {}, {}
        places = [place for place in self._positions if place not in self._paused]
        if self._topics.in_turn:
            self._turn += 1
            places = [places[self._turn % len(places)]]
        for place in places:
            position = self._positions[place]
            if position < self._topics.first[place]:
                raise TailraceError(Kind.LOG_RANGE_GONE, f"read {place}", "", {"offset": position})
            values = self._topics.messages[place][position : position + self._topics.read_max]
            if values:
                found[place] = _batch(position, values)
                self._positions[place] += len(values)
            else:
                ends[place] = position
        if not found:
            threading.Event().wait(min(timeout_s, 0.001))
        return Read(found, ends)

    def position(self, place: Place) -> int:
        return self._positions[place]

    def end(self, place: Place) -> int:
        return len(self._topics.messages[place])

    written_end = end

    def first(self, place: Place) -> int:
        return self._topics.first[place]

    def lag(self, place: Place) -> int:
        return self.end(place) - self._positions[place]

    def close(self) -> None:
        """Nothing: it holds no resource."""


def _batch(first: int, values: list[bytes]) -> pa.RecordBatch:
    rows = [
        {"key": b'{"id": "1"}', "value": value, "offset": offset, "timestamp_ms": 1}
        for offset, value in enumerate(values, first)
    ]
    return pa.RecordBatch.from_pylist(rows, MESSAGES)
