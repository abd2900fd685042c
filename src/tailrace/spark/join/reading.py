"""The executors' side of `tailrace-join`: a range of a data partition, joined in bounded memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tailrace.errors import Kind, TailraceError
from tailrace.join.messages import MessageReader, Place
from tailrace.join.planning import encoded_progress
from tailrace.join.range_join import JoinRange, RangeJoin
from tailrace.spark.join.cluster import admin_settings, consumer_settings
from tailrace.spark.join.options import JoinReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

#: Longest wait of a read for the first message, in seconds.
_READ_S = 0.1
#: Timeout without new messages, in seconds: all existed at planning. Longer than the election of a leader.
_STALLED_S = 120.0
#: Fill level of a queue, as a fraction, up to which reading its topic is resumed.
_PART_TO_READ_ON = 0.5


def joined_rows(
    wanted: JoinRange, options: JoinReadOptions, group: str, *, keep_progress: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range, in order, as `RangeJoin` returns them.

    :param keep_progress: whether to store the progress, from which the next batch continues, after the last
        row.
    :raises TailraceError: `JOIN_VIOLATED`, `LOG_RANGE_GONE`, `SOURCE_UNREACHABLE`,
        `SOURCE_PRIVILEGE_MISSING`, `SOURCE_QUERY_FAILED`.
    """
    reader = MessageReader(
        consumer_settings(options, group),
        admin_settings(options),
        with_headers=True,
        keeps_progress=keep_progress,
    )
    try:
        reading = _Reading(wanted, options, reader)
        yield from reading.rows()
        if keep_progress:
            progress = reading.join.progress()
            kept = json.dumps(encoded_progress(progress))
            reader.keep_progress(wanted.place, progress.position.data, kept)
    finally:
        reader.close()


class _Reading:
    # One pass over a range, which decides when to read which topic.

    def __init__(self, wanted: JoinRange, options: JoinReadOptions, reader: MessageReader) -> None:
        self._options, self._reader = options, reader
        self._data: Place = wanted.place
        self._transactions: Place = (options.transactions, 0)
        self._extraction = options.made_extraction()
        self.join = RangeJoin(wanted, self._extraction)
        self._next = {self._data: wanted.position.data, self._transactions: wanted.position.transactions}
        self._ends = {self._data: wanted.end, self._transactions: wanted.transactions_end}
        self._paused: set[Place] = set()

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the joined rows."""
        self._reader.begin(
            {place: offset for place, offset in self._next.items() if offset < self._ends[place]}
        )
        moved_s, before = time.monotonic(), dict(self._next)
        while True:
            self._read()
            if (batch := self.join.take()) is not None:
                yield batch
                moved_s = time.monotonic()
            if self.join.is_over(self._next[self._data], self._next[self._transactions]):
                break
            if self._next != before:
                moved_s, before = time.monotonic(), dict(self._next)
            elif time.monotonic() >= moved_s + _STALLED_S:
                raise self._stalled()
            self._hold_or_read_on()
        if (batch := self.join.rest()) is not None:
            yield batch

    def _read(self) -> None:
        found = self._reader.read(_READ_S)
        if (messages := found.messages.get(self._transactions)) is not None:
            self.join.add_transactions(messages)
        if (messages := found.messages.get(self._data)) is not None:
            self.join.add_data(messages)
        for place in (*found.messages, *found.ends):
            self._next[place] = self._reader.position(place)

    def _hold_or_read_on(self) -> None:
        records_max, bytes_max = self._options.queue_records_max, self._options.queue_bytes_max
        parts = {
            self._data: max(self.join.data_queued / records_max, self.join.queued_bytes / bytes_max),
            self._transactions: self.join.transactions_queued / records_max,
        }
        for place, part in parts.items():
            is_read = self._next[place] >= self._ends[place]
            if place not in self._paused and (is_read or part >= 1):
                self._paused.add(place)
                self._reader.pause(place)
            elif place in self._paused and not is_read and part <= _PART_TO_READ_ON:
                self._paused.remove(place)
                self._reader.resume(place)

    def _stalled(self) -> TailraceError:
        topic, partition = self._data
        said = "; ".join(self._reader.errors) or "the client reported no error"
        return TailraceError(
            Kind.SOURCE_UNREACHABLE,
            f"read topic {topic}: no message arrived for {_STALLED_S:.0f} s, although the batch needs more: "
            f"{said}",
            "check that the brokers run and can be reached from the executors",
            {
                "topic": topic,
                "partition": partition,
                "data_offset": self._next[self._data],
                "transaction_offset": self._next[self._transactions],
            },
        )
