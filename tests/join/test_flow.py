"""A transaction is passed when none of its rows can come, and not when none is readable yet."""

from __future__ import annotations

import json
from typing import Any, cast

import pyarrow as pa
import pytest

from tailrace.join.extraction import MESSAGES, JsonFields
from tailrace.join.flow import JoinFlow
from tailrace.join.messages import MessageReader, Place, Read
from tailrace.join.options import KafkaJoinOptions

DATA, HEADS = ("lines", 0), ("heads", 0)
FIELDS = JsonFields("order", "id", "line")
OPTIONS = KafkaJoinOptions.model_validate(
    {"bootstrap_servers": "x:1", "data": ["lines"], "transactions": "heads"}
)


def message(offset: int, document: dict[str, Any]) -> pa.RecordBatch:
    value = json.dumps(document).encode()
    columns = [pa.nulls(1, pa.binary()), pa.array([value]), pa.array([offset]), pa.array([0])]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGES)


class HalfClosed:
    """A cluster in which a transaction of Kafka is closed in the transaction topic before the data topic.

    One row and its `END` are written; of the row's partition nothing is committed until `close`.
    """

    def __init__(self) -> None:
        self.positions: dict[Place, int] = {DATA: 0, HEADS: 0}
        self._new = {HEADS: message(0, {"id": "t"})}

    def close(self) -> None:
        self._new[DATA] = message(0, {"order": "t", "line": 1})

    def begin(self, positions: dict[Place, int]) -> None:
        """Read from the first message."""

    def first(self, _place: Place) -> int:
        return 0

    def read(self, _timeout_s: float) -> Read:
        found, self._new = self._new, {}
        self.positions |= dict.fromkeys(found, 2)  # behind the row or `END`, and the marker
        return Read(found, {})

    def position(self, place: Place) -> int:
        return self.positions[place]

    def end(self, place: Place) -> int:
        return self.positions[place]  # all that is committed was read

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


def test_a_transaction_without_rows_here_is_passed_once_the_partition_is_read() -> None:
    cluster = HalfClosed()
    flow = JoinFlow(OPTIONS, FIELDS, cast(MessageReader, cluster))
    flow.begin({DATA: None})
    flow.read(0)
    cluster.positions[DATA] = 2  # what was written there was aborted
    assert flow.pass_transactions([DATA]) == [DATA]
    assert flow.partitions[DATA].merge.transactions_queued == 0
