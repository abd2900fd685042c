"""What the sink makes of the log at a time is bounded; it waits for a full client, and knows its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace.converters.debezium import JsonConverter
from tailrace.errors import TailraceError
from tailrace.kafka.client.failures import LIMIT_S
from tailrace.kafka.producer import sender as sending
from tailrace.kafka.producer.account import raise_out_of_time
from tailrace.kafka.producer.sender import Sender
from tailrace.records.events import CONVERTED_BYTES, Converted, bytes_of
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.once import numbers
from tests.support.kafka.shares_rig import opened, records, sink_of, write
from tests.support.sinks.rig import relation
from tests.support.spark.wire import INT8, HandmadeLog, insert

ROWS = 1000


def wide(columns: int) -> bytes:
    names = {f"a_long_name_as_people_give_them_to_columns_{number}": INT8 for number in range(columns - 1)}
    return relation(1, "public.wide", {"id": INT8, **names})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes in bytes that are handed to a producer at a time."""
    found: list[int] = []
    send = Sender.send

    def noted(self: Sender, topic: str, events: Any, *others: Any) -> None:
        found.append(bytes_of(events))
        send(self, topic, events, *others)

    monkeypatch.setattr(Sender, "send", noted)
    return found


@pytest.mark.parametrize(("columns", "schemas"), [(1590, True), (1500, False), (3, True)])
@pytest.mark.parametrize("producers", [0, 2])
@pytest.mark.ci
def test_records_of_tables_of_any_width_are_converted_in_parts(
    kafka: EmbeddedKafka,
    topic_name: str,
    tmp_path: Path,
    made: list[int],
    columns: int,
    schemas: bool,
    producers: int,
) -> None:
    with HandmadeLog(tmp_path / "log") as log:
        nulls = [None] * (columns - 1)
        end = log.commit(wide(columns), *[insert(1, number, *nulls) for number in range(ROWS)])
        converter = JsonConverter(schemas_enable=schemas)
        metadata: Any = {} if producers else {"provide_transaction_metadata": True}
        sink = opened(sink_of(kafka, topic_name, producers, converter=converter, **metadata), log)
        assert write(sink, log, end).rows == ROWS
        sink.close()
    assert max(made) < 2 * CONVERTED_BYTES
    if columns > 1000 and schemas:
        assert sum(made) > 10 * CONVERTED_BYTES
    found = records(kafka, f"{topic_name}.public.wide")
    assert len({key for key, _ in found}) == len(found) == ROWS


def test_the_sink_waits_for_a_client_whose_queue_is_full(
    kafka: EmbeddedKafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"bootstrap.servers": kafka.bootstrap, "queue.buffering.max.messages": 7, "linger.ms": 0}
    producer = Producer({**settings, "log_level": 0, "enable.idempotence": True})
    monkeypatch.setattr(sending, "MESSAGES_MAX", 1_000_000)

    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic_name, 1, 1)])[topic_name].result(60)
    sender = Sender(producer, settings, timeout_s=60.0)
    sender.send(topic_name, numbers(1, 2000))
    sender.flush()
    sender.close()
    del producer
    assert [value for _, value in records(kafka, topic_name)] == [str(n).encode() for n in range(1, 2001)]


def test_headers_count_for_the_bytes_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting:
        """A client that delivers nothing before it is waited for."""

        messages = most = 0

        def __len__(self) -> int:
            return self.messages

        def produce(self, *_: Any) -> None:
            self.messages += 1
            self.most = max(self.most, self.messages)

        def poll(self, timeout_s: float) -> None:
            self.messages = 0 if timeout_s else self.messages

    monkeypatch.setattr(sending, "BYTES_MAX", 3 << 19)
    headers = pa.StructArray.from_arrays([pa.array(["x" * 1024] * 4000)], ["a"])
    client = Waiting()
    Sender(client, {}, 60.0).send("t", Converted(None, pa.array(["x"] * 4000), headers))  # type: ignore[arg-type]
    assert client.most == sending.CHUNK


def test_records_that_were_not_delivered_and_earlier_batches_are_no_progress() -> None:
    class Client:
        def __init__(self) -> None:
            self.reports: list[Callable[..., None]] = []

        def __len__(self) -> int:
            return len(self.reports)

        def produce(self, topic: str, value: Any, key: Any, partition: int, report: Any) -> None:
            self.reports.append(report)

        def poll(self, timeout_s: float) -> None:
            """Report nothing."""

    client = Client()
    sender = Sender(client, {}, 60.0)  # type: ignore[arg-type]

    def end_with(code: int) -> None:
        for report in client.reports:
            report(KafkaError(code), SimpleNamespace(topic=lambda: "t"))
        client.reports.clear()

    sender.send("t", numbers(1, 10))
    end_with(KafkaError._PURGE_QUEUE)
    sender.begin()
    sender.send("t", numbers(1, 10))
    client.reports.clear()  # delivered: the client reports errors only
    assert sender.has_moved()
    sender.begin()
    sender.send("t", numbers(11, 20))
    end_with(KafkaError._MSG_TIMED_OUT)
    assert not sender.has_moved()
    progress = replace(sender.progress, seconds=60.0, idle_s=60.0)
    with pytest.raises(TailraceError, match="0 of 20 records") as raised:
        raise_out_of_time(
            sender.failure("send records"),  # type: ignore[arg-type]
            SimpleNamespace(progress=progress, limit_s=60.0),
        )
    assert "a topic was deleted" in raised.value.hint
    assert LIMIT_S not in raised.value.context
