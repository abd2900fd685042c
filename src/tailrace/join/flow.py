"""The flow of a join: reads both sides into the queues of the merges. On one thread.

The connector and the source of `tailrace run` drive it: they call `read`, take the joined rows of each
partition, and call `pass_transactions` for transactions without rows in a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tailrace.errors import Kind, TailraceError
from tailrace.join.extraction import Extraction, extracted
from tailrace.join.merge import Position
from tailrace.join.messages import MessageReader, Place
from tailrace.join.options import JoinedTopics
from tailrace.join.partition import JoinPartition, TransactionWindow
from tailrace.sources.progress import SourceNumber

#: Fill level of a queue, as a fraction, up to which reading its partition is resumed.
_PART_TO_READ_ON = 0.5


@dataclass(frozen=True, slots=True)
class FlowProgress:
    """The lag of both sides, and the sizes of the queues.

    :param data_lag: messages of the data partitions that are not joined yet; estimated at the last read.
    :param transactions_lag: messages of the transaction topic that are not read yet; likewise.
    :param rows_queued: rows that wait for their transaction, in all partitions, with `bytes_queued` bytes.
    :param transactions_queued: transactions that wait for rows, in the partition that has most of them.
    :param paused: number of partitions whose queue is full, including the transaction topic's.
    :param pauses: number of times that one was paused.
    """

    data_lag: int = 0
    transactions_lag: int = 0
    rows_queued: int = 0
    bytes_queued: int = 0
    transactions_queued: int = 0
    paused: int = 0
    pauses: int = 0

    def numbers(self) -> tuple[SourceNumber, ...]:
        """Return the values as metrics."""
        return tuple(
            SourceNumber(f"tailrace_join_{name}", description, getattr(self, name), name == "pauses")
            for name, description in _METRICS.items()
        )


_METRICS = {
    "data_lag": "Messages of the data partitions that are not joined yet.",
    "transactions_lag": "Messages of the transaction topic that are not read yet.",
    "rows_queued": "Records that wait for their transaction.",
    "bytes_queued": "Bytes of the records that wait for their transaction.",
    "transactions_queued": "Transactions that wait for records, in the partition where they are most.",
    "paused": "Partitions whose queue is full.",
    "pauses": "Times that a partition's queue was full.",
}


def require_one_partition(topic: str, count: int) -> None:
    """Check that a transaction topic has one partition, and with it an order.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    if count != 1:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"join with topic {topic}: it has {count} partitions, and so no order of transactions",
            "the transactions of a source are in order in a topic with one partition",
            {"topic": topic},
        )


def data_partitions(options: JoinedTopics, reader: MessageReader) -> dict[str, int]:
    """Return the current number of partitions of each data topic.

    :raises TailraceError: as `MessageReader.partitions_of`; as `require_one_partition`.
    """
    counts = reader.partitions_of([*options.data, options.transactions])
    require_one_partition(options.transactions, counts.pop(options.transactions))
    return counts


class JoinFlow:
    """Some data partitions, with the transaction topic, which is read once for all of them."""

    def __init__(self, options: JoinedTopics, extraction: Extraction, reader: MessageReader) -> None:
        self._options, self._extraction, self._reader = options, extraction, reader
        self._transactions: Place = (options.transactions, 0)
        self._is_paused = False
        self._pauses = 0
        self._safe = reader.end(self._transactions)
        # The last transaction that is passed once its partition is read up to an offset, and that offset.
        self._passing: dict[Place, tuple[int, int]] = {}
        self._unqueued: dict[Place, pa.RecordBatch] = {}  # messages that were read and are in no queue yet
        self.partitions: dict[Place, JoinPartition] = {}
        self.window: TransactionWindow | None = None

    def places(self) -> list[Place]:
        """Return all current partitions of the data topics, topic by topic.

        :raises TailraceError: as `data_partitions`.
        """
        counts = data_partitions(self._options, self._reader)
        return [(topic, number) for topic in self._options.data for number in range(counts[topic])]

    def begin(self, positions: Mapping[Place, Position | None], *, were_added: bool = False) -> None:
        """Start to read partitions at their positions, or, without one, at their first message.

        Both sides are read from offsets, so it is an error if retention removes the next messages meanwhile.

        :param were_added: they were not there when partitions were looked for before: their rows are of
            transactions whose `END` came after that.
        """
        is_new = any(position is None for position in positions.values())
        first_new = self._reader.first(self._transactions) if is_new and not were_added else self._safe
        begun = {
            place: Position(self._reader.first(place), first_new) if position is None else position
            for place, position in positions.items()
        }
        for (topic, number), position in begun.items():
            name = {"topic": topic, "partition": str(number)}
            self._passing.pop((topic, number), None)
            self.partitions[topic, number] = JoinPartition(self._options.joined_topic(topic), name, position)
        if self.partitions:
            self._begin_transactions(min(each.transactions_needed for each in self.partitions.values()))
        self._reader.begin({place: position.data for place, position in begun.items()})

    def _begin_transactions(self, first: int) -> None:
        # Before the data: the client reads ahead in this order, and rows wait for transactions.
        if self.window is None:
            self._reader.begin({self._transactions: first})
            self.window = TransactionWindow(first)
        elif first < self.window.next_offset:
            # The window keeps its transactions: other partitions may need them before they are read again.
            self.window.next_offset = first
            self._reader.seek(self._transactions, first)
            self._unqueued.pop(self._transactions, None)  # they are read again
            self._is_paused = False

    def look_for_partitions(
        self, mine: Callable[[], Sequence[Place]], position: Callable[[Place], Position | None]
    ) -> list[Place]:
        """Start to read the partitions that are new, and return them.

        :param mine: returns the current partitions.
        :param position: returns the committed position of a partition.
        """
        # The end is read first: afterwards a partition may be added, and a transaction with rows in it end.
        safe = self._reader.end(self._transactions)
        new = [place for place in mine() if place not in self.partitions]
        if new:
            self.begin({place: position(place) for place in new}, were_added=True)
        self._safe = safe
        return new

    def read(self, timeout_s: float) -> None:
        """Read the available messages and queue them; wait at most `timeout_s` for the first one.

        After an error the next call queues the messages that this one did not, as the reader has passed them.

        :raises TailraceError: as `MessageReader.read`; `JOIN_VIOLATED`; what the extraction raises.
        """
        if not self._unqueued:
            self._unqueued = dict(self._reader.read(timeout_s).messages)
        for place in list(self._unqueued):
            self._queue(place, self._unqueued[place])
            del self._unqueued[place]

    def _queue(self, place: Place, messages: pa.RecordBatch) -> None:
        if place != self._transactions:
            self.partitions[place].add_data(messages, self._extraction)
            return
        transactions = extracted(self._extraction.transactions, messages, *place)
        assert self.window is not None, "transactions are read for partitions"
        self.window.add(transactions)
        for partition in self.partitions.values():
            partition.add_transactions(transactions.rows)

    def hold_or_read_on(self, place: Place, waiting: int = 0, waiting_bytes: int = 0) -> None:
        """Pause a partition whose queue is full, and resume it when half of the queue is free.

        :param waiting: number of records that were taken and wait elsewhere, with `waiting_bytes` bytes.
        """
        partition = self.partitions[place]
        part = max(
            (partition.data_queued + waiting) / self._options.queue_records_max,
            (partition.queued_bytes + waiting_bytes) / self._options.queue_bytes_max,
        )
        if part >= 1 and not partition.is_paused:
            partition.is_paused = True
            self._pauses += 1
            self._reader.pause(place)
        elif part <= _PART_TO_READ_ON and partition.is_paused:
            partition.is_paused = False
            self._reader.resume(place)

    def forget(self, before: int | None = None) -> None:
        """Remove transactions that are not needed, and pause or resume the transaction topic.

        :param before: the first transaction that is still needed for rows that were taken.
        """
        if self.window is None:
            return
        partitions = self.partitions.values()
        needed = min(each.transactions_needed for each in partitions)
        self.window.forget_before(needed if before is None else min(before, needed))
        # A partition that already has the transactions that are read next does not queue them again.
        read_next = self.window.next_offset
        queues = (each.merge.transactions_queued for each in partitions if each.transactions_fed <= read_next)
        queued = max(queues, default=0)
        if (queued >= self._options.queue_records_max) != self._is_paused:
            self._is_paused = not self._is_paused
            self._pauses += self._is_paused
            (self._reader.pause if self._is_paused else self._reader.resume)(self._transactions)

    @property
    def is_held(self) -> bool:
        """Whether the transaction topic is paused, as too many transactions wait for rows."""
        return self._is_paused

    def pass_transactions(self, places: Sequence[Place]) -> list[Place]:
        """Pass the transactions without rows in these partitions; return the partitions that passed any.

        The rows of a transaction are written before its END. So they are before the written end of their
        partition, if that is requested after the END was read; once the partition is read up to there, no
        more of them can follow. The committed end is not enough: Kafka closes a transaction in one
        partition after the other, and an END may be readable before its rows.
        """
        passed = []
        for place in places:
            partition = self.partitions[place]
            if partition.data_queued or not partition.merge.transactions_queued:
                continue
            if place not in self._passing:
                self._passing[place] = (partition.transactions_fed - 1, self._reader.written_end(place))
            upto, written = self._passing[place]
            if self._reader.position(place) >= written:
                del self._passing[place]
                partition.merge.pass_transactions(upto, self._reader.position(place))
                passed.append(place)
        return passed

    def is_at_end(self, place: Place) -> bool:
        """Return whether all committed messages of a partition were read; asks the broker."""
        return self._reader.position(place) >= self._reader.end(place)

    def progress(self) -> FlowProgress:
        """Return the lag of both sides, and the sizes of the queues."""
        partitions = self.partitions.values()
        queued = sum(each.data_queued for each in partitions)
        return FlowProgress(
            sum(self._reader.lag(place) for place in self.partitions) + queued,
            self._reader.lag(self._transactions) if self.partitions else 0,
            queued,
            sum(each.queued_bytes for each in partitions),
            max((each.merge.transactions_queued for each in partitions), default=0),
            sum(each.is_paused for each in partitions) + self._is_paused,
            self._pauses,
        )
