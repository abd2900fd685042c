"""A transaction is passed when no more of its rows can come, not when none is readable yet."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pytest

from tailrace.errors import RetriableError
from tailrace.join.extraction import MESSAGES, JsonFields, Transactions
from tailrace.join.flow import JoinFlow
from tailrace.join.merge import DataRows, Position
from tailrace.join.messages import MessageReader, Place, Read
from tailrace.join.options import KafkaJoinOptions

DATA, OTHER, HEADS = ("lines", 0), ("lines", 1), ("heads", 0)
FIELDS = JsonFields("order", "id", "line")
OPTIONS = KafkaJoinOptions.model_validate(
    {"bootstrap_servers": "x:1", "data": ["lines"], "transactions": "heads"}
)


def messages(first: int, *documents: dict[str, Any]) -> pa.RecordBatch:
    count = len(documents)
    values = pa.array([json.dumps(document).encode() for document in documents])
    offsets = pa.array(range(first, first + count))
    columns = [pa.nulls(count, pa.binary()), values, offsets, pa.array([0] * count)]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGES)


class HalfClosed:
    """A cluster in which a Kafka transaction is closed in the transaction topic before the data topic.

    One row and its `END` are written; of the row's partition nothing is committed until `close`.
    """

    def __init__(self) -> None:
        self.positions: dict[Place, int] = {DATA: 0, HEADS: 0}
        self._new = {HEADS: messages(0, {"id": "t"})}

    def close(self) -> None:
        self._new[DATA] = messages(0, {"order": "t", "line": 1})

    def begin(self, positions: dict[Place, int]) -> None:
        """Read from the first message."""

    def first(self, _place: Place) -> int:
        return 0

    def read(self, _timeout_s: float) -> Read:
        found, self._new = self._new, {}
        self.positions |= dict.fromkeys(found, 2)  # after the row or `END`, and the marker
        return Read(found, {})

    def position(self, place: Place) -> int:
        return self.positions[place]

    def end(self, place: Place) -> int:
        return self.positions[place]  # everything committed was read

    def written_end(self, _place: Place) -> int:
        return 2

    def partitions_of(self, _topics: object) -> dict[str, int]:
        return {"lines": 1, "heads": 1}


@pytest.mark.parametrize("looks", [1, 3])
def test_an_end_that_is_readable_before_its_rows_is_not_passed(looks: int) -> None:
    cluster = HalfClosed()
    flow = JoinFlow(OPTIONS, FIELDS, cast(MessageReader, cluster))
    flow.begin({DATA: None})
    flow.read(0)
    for _ in range(looks):
        assert flow.pass_transactions([DATA]) == []
    cluster.close()
    flow.read(0)
    assert flow.window is not None
    rows = flow.partitions[DATA].take_rows(flow.window)
    assert rows is not None
    assert [each["id"] for each in rows.facts.to_pylist()] == ["t"]


def test_a_transaction_without_rows_in_a_partition_is_passed_once_that_is_read() -> None:
    cluster = HalfClosed()
    flow = JoinFlow(OPTIONS, FIELDS, cast(MessageReader, cluster))
    flow.begin({DATA: None})
    flow.read(0)
    cluster.positions[DATA] = 2  # what was written there was aborted
    assert flow.pass_transactions([DATA]) == [DATA]
    assert flow.partitions[DATA].merge.transactions_queued == 0


ROWS: dict[Place, list[dict[str, Any]]] = {
    HEADS: [{"id": "t"}, {"id": "u"}, {"id": "v"}],
    DATA: [{"order": "t", "line": 1}, {"order": "u", "line": 1}, {"order": "v", "line": 1}],
    OTHER: [{"order": "u", "line": 2}, {"order": "v", "line": 2}],
}


class Cluster:
    """A cluster that has `ROWS`. A read returns the next message of each partition in `gives`."""

    def __init__(self) -> None:
        self.partitions = 1
        self.positions: dict[Place, int] = {HEADS: 0}
        self.paused: set[Place] = set()
        self.gives: list[Place] = []

    def begin(self, positions: dict[Place, int]) -> None:
        self.positions |= positions

    def seek(self, place: Place, offset: int) -> None:
        self.positions[place] = offset
        self.paused.discard(place)

    def pause(self, place: Place) -> None:
        self.paused.add(place)

    def resume(self, place: Place) -> None:
        self.paused.discard(place)

    def first(self, _place: Place) -> int:
        return 0

    def read(self, _timeout_s: float) -> Read:
        found = {}
        for place in self.gives:
            at = self.positions[place]
            if place not in self.paused and at < len(ROWS[place]):
                found[place] = messages(at, ROWS[place][at])
                self.positions[place] += 1
        return Read(found, {})

    def position(self, place: Place) -> int:
        return self.positions[place]

    def end(self, place: Place) -> int:
        return self.positions[place]

    def written_end(self, place: Place) -> int:
        return len(ROWS[place])

    def partitions_of(self, _topics: object) -> dict[str, int]:
        return {"lines": self.partitions, "heads": 1}


def ids_taken(flow: JoinFlow, place: Place) -> list[str]:
    """Return the transactions of the rows that can be joined now."""
    assert flow.window is not None
    rows = flow.partitions[place].take_rows(flow.window)
    return [] if rows is None else [each["id"] for each in rows.facts.to_pylist()]


@dataclass
class FailsSometimes:
    """An extraction whose schema registry does not answer the first requests."""

    left: int

    def _ask(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise RetriableError("no answer")

    def data(self, found: pa.RecordBatch) -> DataRows:
        self._ask()
        return FIELDS.data(found)

    def transactions(self, found: pa.RecordBatch) -> Transactions:
        self._ask()
        return FIELDS.transactions(found)


@pytest.mark.parametrize("order", [[DATA, HEADS], [HEADS, DATA]])
@pytest.mark.parametrize("failures", [1, 3])
def test_messages_whose_extraction_failed_are_queued_by_the_retry(order: list[Place], failures: int) -> None:
    cluster = Cluster()
    flow = JoinFlow(OPTIONS, FailsSometimes(failures), cast(MessageReader, cluster))
    flow.begin({DATA: None})
    cluster.gives = order
    for _ in range(failures):
        with pytest.raises(RetriableError):
            flow.read(0)
    flow.read(0)
    flow.read(0)
    assert ids_taken(flow, DATA) == ["t", "u"]


def test_transactions_whose_extraction_failed_are_not_queued_before_those_that_are_read_again() -> None:
    cluster, extraction = Cluster(), FailsSometimes(0)
    flow = JoinFlow(OPTIONS, extraction, cast(MessageReader, cluster))
    flow.begin({DATA: None})
    cluster.gives = [HEADS]
    flow.read(0)
    extraction.left = 1
    with pytest.raises(RetriableError):
        flow.read(0)
    cluster.partitions = 2
    assert flow.look_for_partitions(flow.places, lambda _: Position()) == [OTHER]
    cluster.gives = [HEADS, OTHER]
    for _ in range(3):
        flow.read(0)
    assert ids_taken(flow, OTHER) == ["u", "v"]


def orders_of(steps: Counter[str]) -> Iterator[list[str]]:
    """Yield every order in which the steps can happen."""
    if not steps:
        yield []
    for step in steps:
        for rest in orders_of(steps - Counter([step])):
            yield [step, *rest]


@pytest.mark.parametrize("queue", [1, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("were_passed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_adding_a_partition_at_any_time_does_not_affect_the_others(queue: int, were_passed: bool) -> None:
    """The transaction topic is read again for it, also from before the known transactions."""
    options = OPTIONS.model_copy(update={"queue_records_max": queue})
    places = {"heads": HEADS, "row": DATA}
    for steps in orders_of(Counter({"heads": 3, "row": 2, "add": 1})):
        cluster = Cluster()
        flow = JoinFlow(options, FIELDS, cast(MessageReader, cluster))
        flow.begin({DATA: None})
        found: dict[Place, list[str]] = {DATA: [], OTHER: []}
        # At the end everything is read, and paused partitions are resumed.
        for step in [*steps, *["all"] * 5]:
            if step == "add":
                cluster.partitions = 2
                flow.look_for_partitions(flow.places, lambda _: Position())
            else:
                cluster.gives = [places[step]] if step in places else list(cluster.positions)
                flow.read(0)
            for place in flow.partitions:
                found[place] += ids_taken(flow, place)
            if were_passed or step == "all":
                flow.pass_transactions(list(flow.partitions))
            flow.forget()
        assert found == {DATA: ["t", "u", "v"], OTHER: ["u", "v"]}, steps


def test_the_transaction_topic_is_read_again_although_another_partitions_queue_is_full() -> None:
    """That queue may wait for the new partition: an END comes after the rows in all partitions."""
    cluster = Cluster()
    options = OPTIONS.model_copy(update={"queue_records_max": 2})
    flow = JoinFlow(options, FIELDS, cast(MessageReader, cluster))
    flow.begin({DATA: None})
    cluster.gives = [HEADS]
    held = []
    for step in ("read", "read", "add", "read", "read", "read"):
        if step == "add":
            cluster.partitions = 2
            flow.look_for_partitions(flow.places, lambda _: Position())
        else:
            flow.read(0)
        flow.forget()
        held.append(flow.is_held)
    assert held == [False, True, False, False, True, True]
    assert flow.partitions[OTHER].merge.transactions_queued == 2
    assert flow.partitions[DATA].merge.transactions_queued == 2
