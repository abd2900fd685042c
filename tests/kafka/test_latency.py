"""From a commit in PostgreSQL to a reader of committed records: each step wakes the next one, none polls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tailrace.config import load_engine
from tailrace.pipeline import sink_worker
from tailrace.pipeline.background import Background
from tailrace.pipeline.run import Run
from tailrace.sources.postgres.streaming import standby_status
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.pipelines import pipeline
from tests.support.kafka.reading import QUIET
from tests.support.postgres import Database
from tests.support.wait import wait_until

#: Longer than a test may take.
NEVER_S = 3600.0
#: Of the client: a record that waited for it would be late.
LINGER_MS, DEADLINE_S = 50_000, 45


class Reader:
    """Reads committed ids of one partition as they come."""

    def __init__(self, kafka: EmbeddedKafka, topic: str) -> None:
        client = {"bootstrap.servers": kafka.bootstrap, **QUIET, "group.id": "read"}
        self._consumer = Consumer({**client, "isolation.level": "read_committed"})
        self._consumer.assign([TopicPartition(topic, 0, 0)])
        self._ids: list[int] = []

    def has(self, *ids: int) -> bool:
        message = self._consumer.poll(0.1)
        if message is not None and message.error() is None:
            self._ids.append(json.loads(message.value() or b"")["after"]["id"])
        return self._ids == list(ids)

    def close(self) -> None:
        self._consumer.close()


@pytest.mark.parametrize("atomic", [True, False])
def test_only_the_interval_of_batches_delays_a_commit_on_its_way_to_a_reader(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    pg.execute("create table orders (id int primary key)")
    pg.execute("insert into orders values (0)")
    file = pipeline(
        tmp_path, pg, kafka, atomic_source_offset_commit=atomic, interval_ms=0,
        converter={"type": "json", "schemas_enable": False}, options={"linger.ms": str(LINGER_MS)},
    )  # fmt: skip
    run = Run(load_engine(file))
    running = Background("run", run.run)
    running.start()
    reader = Reader(kafka, f"{pg.name}.public.orders")
    try:
        wait_until(lambda: reader.has(0), 120, "the row of the snapshot")
        # The log's creation was awaited before. From here on polling is switched off.
        monkeypatch.setattr(sink_worker, "POLL_S", NEVER_S)
        monkeypatch.setattr(standby_status, "PROGRESS_DELAY_S", NEVER_S)
        for number in range(1, 6):
            pg.execute(f"insert into orders values ({number})")
            wait_until(lambda number=number: reader.has(*range(number + 1)), DEADLINE_S, "the row")  # type: ignore[misc]
    finally:
        run.stop()
        assert running.join(60)
        reader.close()
