"""The flow of a join: what is read of both sides, the queues, and the merges. On one thread.

The connector and the source of `tailrace run` drive it: they read, take what is joined of each partition, and
have the transactions passed that a partition has no rows of.
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

#: How full a queue may be so that its partition is read on.
_PART_TO_READ_ON = 0.5


@dataclass(frozen=True, slots=True)
class FlowProgress:
    """How far both sides are, and how full the queues.

    :param data_lag: messages of the data partitions that are not taken yet; an estimate, as of the last read.
    :param transactions_lag: likewise, of the transaction topic.
    :param rows_queued: rows that wait for their transaction, of `bytes_queued`, in all partitions.
    :param transactions_queued: transactions that wait for rows, in the partition where they are most.
    :param paused: partitions whose queue is full, the transaction topic's among them.
    :param pauses: times that one was paused.
    """

    data_lag: int = 0
    transactions_lag: int = 0
    rows_queued: int = 0
    bytes_queued: int = 0
    transactions_queued: int = 0
    paused: int = 0
    pauses: int = 0

    def numbers(self) -> tuple[SourceNumber, ...]:
        """Return them as metrics."""
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
    """Check that a transaction topic with so many partitions has an order.

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
    """Return how many partitions each data topic has now.

    :raises TailraceError: as `MessageReader.partitions_of`; as `require_one_partition`.
    """
    counts = reader.partitions_of([*options.data, options.transactions])
    require_one_partition(options.transactions, counts.pop(options.transactions))
    return counts


class JoinFlow:
    """Some data partitions, and the transaction topic, once for all of them."""

    def __init__(self, options: JoinedTopics, extraction: Extraction, reader: MessageReader) -> None:
        self._options, self._extraction, self._reader = options, extraction, reader
        self._transactions: Place = (options.transactions, 0)
        self._is_paused = False
        self._pauses = 0
        self._safe = reader.end(self._transactions)
        # Transactions that are passed once a partition is read up to an offset: their last, and that offset.
        self._passing: dict[Place, tuple[int, int]] = {}
        self._unqueued: dict[Place, pa.RecordBatch] = {}  # what was read and is in no queue yet
        self.partitions: dict[Place, JoinPartition] = {}
        self.window: TransactionWindow | None = None

    def places(self) -> list[Place]:
        """Return all partitions of the data topics, as they are now; topic by topic.

        :raises TailraceError: as `data_partitions`.
        """
        counts = data_partitions(self._options, self._reader)
        return [(topic, number) for topic in self._options.data for number in range(counts[topic])]

    def begin(self, positions: Mapping[Place, Position | None], *, were_added: bool = False) -> None:
        """Read partitions from their positions, or, without one, from the first message that is there.

        Both sides are read from offsets: what retention removes meanwhile is noticed.

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
        # Before the data: what the client reads ahead comes in its order, and rows wait for transactions.
        if self.window is None:
            self._reader.begin({self._transactions: first})
            self.window = TransactionWindow(first)
        elif first < self.window.next_offset:
            # What the window has stays in it: rows of other partitions may be joined before it is read again.
            self.window.next_offset = first
            self._reader.seek(self._transactions, first)
            self._unqueued.pop(self._transactions, None)  # it is read again
            self._is_paused = False

    def look_for_partitions(
        self, mine: Callable[[], Sequence[Place]], position: Callable[[Place], Position | None]
    ) -> list[Place]:
        """Begin the partitions that are new, and return them.

        :param mine: asks for the partitions that there are now.
        :param position: what was committed of a partition.
        """
        # Asked for first: a partition may be added, and a transaction with rows in it end, before the other.
        safe = self._reader.end(self._transactions)
        new = [place for place in mine() if place not in self.partitions]
        if new:
            self.begin({place: position(place) for place in new}, were_added=True)
        self._safe = safe
        return new

    def read(self, timeout_s: float) -> None:
        """Read what is there, after at most so long, and queue it.

        After an error the next call queues what this one did not: the reader is behind it already.

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
        """Do not read a partition whose queue is full, until half of it has gone.

        :param waiting: records that were taken and wait elsewhere; with so many bytes.
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
        """Forget the transactions that nobody needs, and hold or read on the transaction topic.

        :param before: the first one that is still needed for rows that were taken.
        """
        if self.window is None:
            return
        partitions = self.partitions.values()
        needed = min(each.transactions_needed for each in partitions)
        self.window.forget_before(needed if before is None else min(before, needed))
        # A partition that has what is read next already does not get it again.
        read_next = self.window.next_offset
        queues = (each.merge.transactions_queued for each in partitions if each.transactions_fed <= read_next)
        queued = max(queues, default=0)
        if (queued >= self._options.queue_records_max) != self._is_paused:
            self._is_paused = not self._is_paused
            self._pauses += self._is_paused
            (self._reader.pause if self._is_paused else self._reader.resume)(self._transactions)

    @property
    def is_held(self) -> bool:
        """Whether the transaction topic is not read on, as too many wait for rows."""
        return self._is_paused

    def pass_transactions(self, places: Sequence[Place]) -> list[Place]:
        """Pass the transactions of which these partitions have no rows; return where some were passed.

        The rows of a transaction are written before its END. So they are below the end of what is written
        in their partition, if that is asked for after the END was read; once the partition is read up to
        there, none of them can come. The end of what is committed would not do: Kafka closes a transaction
        in one partition after the other, and an END may be readable before its rows.
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
        """Tell whether everything that is committed in a partition was read; asks the broker."""
        return self._reader.position(place) >= self._reader.end(place)

    def progress(self) -> FlowProgress:
        """Return how far both sides are."""
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
