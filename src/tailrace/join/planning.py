"""Plans micro-batches of a join from offsets alone. Pure.

A batch starts and ends at an offset of each data partition and an offset of the transaction topic. In each
partition, the end is before the first row that is not before both: whose own offset is not below the
partition's, or whose transaction's offset is not below the transaction topic's. So a plan determines the rows
of a batch before anything is read, and a batch that is read again has the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.errors import Kind, TailraceError
from tailrace.join.merge import Position

#: Topic and number of a partition.
Place = tuple[str, int]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Ends:
    """The first offset and the ends of a partition.

    :param first: offset of its first record.
    :param committed: the offset before which no transaction is open; readers of committed records end here.
    :param written: the offset after the last record, committed or not.
    """

    first: int
    committed: int
    written: int


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The state of the topics, requested from the cluster in this order.

    :param transactions: ends of the transaction topic.
    :param topics: identifiers by topic; a topic that is created again has another identifier.
    :param data: ends of each data partition; `written` is requested before `committed`.
    """

    transactions: Ends
    topics: Mapping[str, str]
    data: Mapping[Place, Ends]


@dataclass(frozen=True, slots=True)
class SettledTransactions:
    """The settled transactions: those with an END before an offset. All their rows can be read.

    :param transactions: that offset.
    :param written: for each partition that existed, the offset before which their rows are.
    """

    transactions: int
    written: Mapping[Place, int]


class Settling:
    """Finds the newest settled transactions from successive states of the cluster.

    The writer of an END has written the rows of its transaction before. So they are before the written end of
    their partition, if that is requested after the END was readable; they can be read once that end is
    committed. Kafka closes a transaction in one partition after the other, so a readable END is not enough.
    """

    def __init__(self) -> None:
        self.found: SettledTransactions | None = None
        self._candidate: SettledTransactions | None = None

    def look(self, state: ClusterState) -> SettledTransactions | None:
        """Return the newest settled transactions after this state; None: none are known yet."""
        now = SettledTransactions(
            state.transactions.committed, {place: ends.written for place, ends in state.data.items()}
        )
        if _is_committed(now, state):
            self.found, self._candidate = now, None
        elif self._candidate is None:
            self._candidate = now
        elif _is_committed(self._candidate, state):
            self.found, self._candidate = self._candidate, now
        return self.found


def _is_committed(settled: SettledTransactions, state: ClusterState) -> bool:
    data = state.data
    return all(place in data and data[place].committed >= end for place, end in settled.written.items())


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """A data partition's part of a batch.

    :param position: the position at which the merge starts; not after the previous batch's end.
    :param begin: the data offset at which the previous batch ended.
    :param end: the data offset at which this batch ends, exclusive.
    :param settled: the offset before which all rows of the batch's transactions are.
    """

    position: Position
    begin: int
    end: int
    settled: int

    @property
    def is_whole(self) -> bool:
        """Whether no row of the batch's transactions, or of earlier ones, follows in this partition."""
        return self.end >= self.settled

    @property
    def has_rows(self) -> bool:
        """Whether the part may have rows."""
        return self.position.data < self.end


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The plan of a batch, which Spark stores as the batch's end offset.

    :param group: the consumer group in which progress is stored.
    :param topics: identifiers by topic.
    :param begin: the transaction offset at which the previous batch ended.
    :param end: the transaction offset at which this batch ends, exclusive.
    """

    group: str
    topics: Mapping[str, str]
    begin: int
    end: int
    partitions: Mapping[Place, PartitionPlan]

    @property
    def is_whole(self) -> bool:
        """Whether all rows of its transactions are in this batch or in previous ones."""
        return all(each.is_whole for each in self.partitions.values())

    def ends_as(self, other: BatchPlan) -> bool:
        """Return whether this batch has the same end as another one."""
        ends, others = (
            {place: each.end for place, each in plan.partitions.items()} for plan in (self, other)
        )
        return self.end == other.end and ends == others


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of a partition's merge at the end of a batch.

    :param position: the position from which it continues.
    :param data: the data offset at which the batch ended.
    :param transactions: the transaction offset at which the batch ended.
    """

    position: Position
    data: int
    transactions: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch; None: no limit.

    :param offsets: number of offsets of all data partitions together.
    :param transaction_offsets: number of offsets of the transaction topic.
    """

    offsets: int | None = None
    transaction_offsets: int | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    # The best known position of a partition's merge at the end of a plan.
    position: Position
    is_exact: bool


def first_plan(
    group: str, state: ClusterState, positions: Mapping[Place, int], transactions: int
) -> BatchPlan:
    """Return the plan before the first batch: it ends where the first batch starts.

    :param positions: the offset of each partition's first row.
    :param transactions: an offset such that no row from these on belongs to an earlier transaction.
    """
    partitions = {
        place: PartitionPlan(Position(offset, transactions), offset, offset, offset)
        for place, offset in positions.items()
    }
    return BatchPlan(group, dict(state.topics), transactions, transactions, partitions)


def next_plan(
    before: BatchPlan,
    state: ClusterState,
    settled: SettledTransactions | None,
    progress: Mapping[Place, Progress],
    limits: BatchLimits,
    new_from: int,
) -> BatchPlan:
    """Return the plan of the next batch.

    :param settled: the settled transactions, of which alone the batch may have rows.
    :param progress: stored by readers of earlier batches. A partition without it is read again from an
        earlier position; progress of later batches is not used.
    :param new_from: the first transaction that may have rows in a new partition.
    :raises TailraceError: `LOG_RANGE_GONE` if partitions, or the next records, do not exist any more.
    """
    require_same_topics(before, state)
    # A partition that did not exist when transactions were settled may have rows of them.
    knows_all = settled is not None and state.data.keys() <= settled.written.keys()
    end = max(before.end, settled.transactions) if settled is not None and knows_all else before.end
    if limits.transaction_offsets is not None:
        end = min(end, before.end + limits.transaction_offsets)
    known = {
        place: _known(each, before.end, progress.get(place)) for place, each in before.partitions.items()
    }
    for place in state.data.keys() - known.keys():
        known[place] = _Known(Position(state.data[place].first, new_from), True)
    begins = {
        place: before.partitions[place].end if place in before.partitions else each.position.data
        for place, each in known.items()
    }
    ends = _ends(begins, known, state, limits.offsets)
    partitions = {}
    for place in sorted(known):
        if end > before.end and settled is not None:
            bound = settled.written[place]
        else:
            bound = before.partitions[place].settled if place in before.partitions else begins[place]
        partitions[place] = PartitionPlan(known[place].position, begins[place], ends[place], bound)
    return BatchPlan(before.group, {**before.topics, **state.topics}, before.end, end, partitions)


def require_same_topics(before: BatchPlan, state: ClusterState) -> None:
    """Refuse topics that are not those of a plan, or have lost the next records.

    :raises TailraceError: `LOG_RANGE_GONE`.
    """
    require_identifiers(before, state.topics)
    if before.end > state.transactions.committed:
        raise _gone("the transaction topic has fewer records than it had", {"offset": before.end})
    for (topic, number), each in before.partitions.items():
        ends = state.data.get((topic, number))
        where = {"topic": topic, "partition": number, "offset": each.end}
        if ends is None:
            raise _gone(f"partition {number} of topic {topic} is not there any more", where)
        if each.end > ends.written:
            raise _gone(f"topic {topic} has fewer records than it had", where)
        if each.end < ends.first:
            raise _gone(f"the records of topic {topic} that come next were removed", where)


def require_identifiers(plan: BatchPlan, topics: Mapping[str, str]) -> None:
    """Refuse topics that are not those of a plan.

    :param topics: identifiers by topic.
    :raises TailraceError: `LOG_RANGE_GONE`.
    """
    for topic, identifier in plan.topics.items():
        if (found := topics.get(topic)) != identifier:
            what = "is not one of the query's any more" if found is None else "was created again since"
            raise _gone(f"topic {topic} {what}", {"topic": topic})


def _gone(found: str, where: dict[str, Any]) -> TailraceError:
    return TailraceError(
        Kind.LOG_RANGE_GONE,
        f"go on with a join: {found}",
        "name all topics of the checkpoint in the options, and keep their records longer (retention.ms); to "
        "begin at what is there, load() again, a stream with a new checkpoint and a new target",
        where,
    )


def _known(each: PartitionPlan, transactions: int, progress: Progress | None) -> _Known:
    known = _Known(each.position, False)
    if progress is not None and progress.data <= each.end and progress.transactions <= transactions:
        is_exact = (progress.data, progress.transactions) == (each.end, transactions)
        found = progress.position
        if is_exact or (found.data, found.transactions) > (each.position.data, each.position.transactions):
            known = _Known(found, is_exact)
    if known.position.data >= each.end:
        # No row waits. Transactions without rows in this partition are passed.
        is_passed = each.is_whole and transactions > known.position.transactions
        return _Known(Position(each.end, transactions) if is_passed else known.position, True)
    return known


def _ends(
    begins: Mapping[Place, int],
    known: Mapping[Place, _Known],
    state: ClusterState,
    limit: int | None,
) -> dict[Place, int]:
    ahead = {place: max(0, state.data[place].committed - begin) for place, begin in begins.items()}
    total = sum(ahead.values())
    if limit is None:
        return {place: begin + ahead[place] for place, begin in begins.items()}
    # Rows that wait for their transaction may all be in the next batch.
    held = sum(begins[place] - each.position.data for place, each in known.items() if each.is_exact)
    left = max(0, limit - held)
    if total <= left:
        return {place: begin + ahead[place] for place, begin in begins.items()}
    ends = {place: begin + ahead[place] * left // total for place, begin in begins.items()}
    spare = left - sum(end - begins[place] for place, end in ends.items())
    for place in sorted(begins, key=lambda each: -ahead[each])[:spare]:
        ends[place] += 1 if ends[place] < begins[place] + ahead[place] else 0
    return ends


# ---------------------------------------------------------------------- the stored forms


def encoded(plan: BatchPlan) -> dict[str, Any]:
    """Return a plan in its JSON form."""
    topics: dict[str, dict[str, list[int]]] = {}
    for (topic, number), each in sorted(plan.partitions.items()):
        numbers = [each.begin, each.end, each.settled, *_numbers(each.position)]
        topics.setdefault(topic, {})[str(number)] = numbers
    return {
        "version": _VERSION,
        "group": plan.group,
        "topics": dict(sorted(plan.topics.items())),
        "transactions": [plan.begin, plan.end],
        "partitions": topics,
    }


def decoded(kept: Mapping[str, Any]) -> BatchPlan:
    """Return the plan in a checkpoint.

    :raises TailraceError: `LOG_FORMAT_UNKNOWN` if the version is unknown.
    """
    if kept.get("version") != _VERSION:
        raise TailraceError(
            Kind.LOG_FORMAT_UNKNOWN,
            f"go on from a checkpoint: its offsets are of version {kept.get('version')!r}, "
            f"this reads version {_VERSION}",
            "use the version of Tailrace that made the checkpoint, or a later one",
        )
    partitions = {
        (topic, int(number)): PartitionPlan(Position(*values[3:]), *values[:3])
        for topic, found in kept["partitions"].items()
        for number, values in found.items()
    }
    begin, end = kept["transactions"]
    return BatchPlan(kept["group"], dict(kept["topics"]), begin, end, partitions)


def encoded_progress(progress: Progress) -> list[int]:
    """Return progress in the form that is stored with the data offset of its position."""
    return [_VERSION, progress.data, progress.transactions, *_numbers(progress.position)]


def decoded_progress(kept: Any) -> Progress | None:
    """Return stored progress, or None if the form is unknown."""
    if not isinstance(kept, list) or len(kept) != 7 or kept[0] != _VERSION:
        return None
    if not all(isinstance(value, int) for value in kept):
        return None
    return Progress(Position(*kept[3:]), kept[1], kept[2])


def _numbers(position: Position) -> list[int]:
    return [position.data, position.transactions, position.seen, position.order]
