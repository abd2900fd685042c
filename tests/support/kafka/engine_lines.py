"""Engines that write lines to Kafka, and the lines in the topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace import Engine
from tailrace.engine.contracts import Settings
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.testing import LinesSource
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import read_topic


def options_of(kafka: EmbeddedKafka, name: str, *, atomic: bool = True, **section: Any) -> dict[str, Any]:
    """Return the options of an engine whose topics begin with its name.

    :param section: keys of `kafka`.
    """
    return {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "offsets_topic": f"{name}-offsets", **section},
        "atomic_source_offset_commit": atomic,
        "errors_retry_delay_initial_ms": 10,
        "transformations": [{"type": "route", "regex": r"lines\.(.*)", "replacement": f"{name}.$1"}],
    }


def engine_of(
    kafka: EmbeddedKafka, name: str, source: LinesSource, *, atomic: bool = True, **section: Any
) -> Engine:
    """Return an engine that writes lines to topics that begin with its name."""
    options = options_of(kafka, name, atomic=atomic, **section)
    return Engine(connector=source, name=name, tasks_max=8, options=options)


def numbers_in(kafka: EmbeddedKafka, name: str, partition: str) -> list[int]:
    """Return the numbers of the lines in a partition, as a reader of committed records gets them."""
    found = read_topic(kafka.bootstrap, f"{name}.{partition}")
    return [message.document["after"]["number"] for message in found]


class BatchesSource:
    """A connector that returns some batches once, whatever was committed."""

    def __init__(self, *batches: Batch) -> None:
        self._left = list(batches)

    def start(self, context: Any) -> None:
        """Nothing: it is both the connector and its only task."""
        self._context = context

    def task_settings(self, tasks_max: int) -> Sequence[Settings]:
        """Return the settings of one task."""
        return [{}]

    def create_task(self) -> BatchesSource:
        """Return the task."""
        return self

    def poll(self, timeout_s: float) -> Batch | None:
        """Return the next batch."""
        if not self._left:
            self._context.finish()
            return None
        return self._left.pop(0)

    def commit(self, partition: Partition, offset: Offset) -> None:
        """Nothing: it keeps no positions."""

    def stop(self) -> None:
        """Nothing: it holds no resource."""
