"""A query of `format("tailrace-join")` that stops at the topics' present ends, and its micro-batches."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.kafka.debezium_topics import JoinTopics

WAIT_S = 300


def options_of(topics: JoinTopics, **more: Any) -> dict[str, Any]:
    """Return the options that read these topics."""
    return {
        "bootstrapServers": topics.kafka.bootstrap,
        "data": ",".join(topics.data),
        "transactions": topics.transactions,
        **more,
    }


class JoinStream:
    """Runs a query up to the topics' present ends; `batches` has the rows of each micro-batch.

    :param on_batch: called with the number of a micro-batch and its rows once they are read.
    """

    def __init__(
        self,
        spark: Any,
        checkpoint: Path,
        options: dict[str, Any],
        on_batch: Callable[[int, list[Any]], None] = lambda *_: None,
    ) -> None:
        self.batches: dict[int, list[Any]] = {}

        def take(frame: Any, number: int) -> None:
            self.batches[number] = frame.collect()
            on_batch(number, self.batches[number])

        frame = spark.readStream.format("tailrace-join").options(**options).load()
        writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
        self.query = writer.trigger(availableNow=True).start()
        try:
            assert self.query.awaitTermination(WAIT_S), "the stream did not end"
        finally:
            self.query.stop()

    @property
    def rows(self) -> list[Any]:
        """Rows of all micro-batches."""
        return [row for batch in self.batches.values() for row in batch]


def by_key(rows: list[Any]) -> dict[str, list[tuple[int, str]]]:
    """Return rows in the form of `JoinTopics.expected`."""
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for row in sorted(rows, key=lambda each: (each.topic, each.partition, each.offset)):
        event = json.loads(row.value)
        event = event.get("payload", event)
        found[row.key.decode()].append((event["after"]["number"], row.transaction_id or ""))
    return found
