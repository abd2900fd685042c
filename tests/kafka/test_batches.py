"""Client batches that brokers find too large: as large as useful, and smaller if they do not compress."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from structlog.testing import capture_logs

from tailrace import failpoints
from tailrace.errors import Kind, TailraceError
from tailrace.failpoints import FailpointError
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.batches import fill, not_shrinking
from tests.support.kafka.shares_rig import opened, records, sink_of, write
from tests.support.kafka_cluster import alter
from tests.support.spark.wire import HandmadeLog, insert

WARNING = "batches are too large for a topic: smaller ones now"


def shrinking(_random: random.Random, length: int) -> str:
    return "again " * (length // 6)


def written(kafka: EmbeddedKafka, name: str) -> Counter[bytes | None]:
    return Counter(key for key, _ in records(kafka, f"{name}.public.orders"))


def warnings(logs: list[Any]) -> list[dict[str, Any]]:
    return [dict(line) for line in logs if line["event"] == WARNING]


@pytest.mark.parametrize(("producers", "atomic"), [(0, True), (0, False), (2, True)])
def test_batches_that_do_not_compress_are_sent_again_in_smaller_ones(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, producers: int, atomic: bool
) -> None:
    with HandmadeLog(tmp_path / "log") as log, capture_logs() as logs:
        ends = [fill(log, 1500, 6000, not_shrinking), fill(log, 1500, 6000, not_shrinking)]
        sink = opened(sink_of(kafka, topic_name, producers, atomic_source_offset_commit=atomic), log)
        for end in ends:
            assert write(sink, log, end).rows == 1500
        assert sink.position("0") == ends[-1]
        sink.close()
    [warning] = warnings(logs)  # the second range began with smaller ones
    assert (warning["topic"], warning["bytes"]) == (f"{topic_name}.public.orders", 943_729)
    found = written(kafka, topic_name)
    assert set(found) == {f'{{"id":{row}}}'.encode() for row in range(1500)}
    assert set(found.values()) == {2} if atomic else min(found.values()) >= 2


@pytest.mark.parametrize("producers", [0, 2])
def test_after_a_crash_before_the_repeat_the_next_sink_writes_the_batch(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, producers: int
) -> None:
    with HandmadeLog(tmp_path / "log") as log:
        end = fill(log, 1500, 6000, not_shrinking)
        died = opened(sink_of(kafka, topic_name, producers), log)  # never closed, as in a killed process
        failpoints.arm("kafka.after_refusal=error")
        with pytest.raises(FailpointError):
            write(died, log, end)
        failpoints.arm("")
        sink = opened(sink_of(kafka, topic_name, producers), log)
        write(sink, log, end)
        assert sink.position("0") == end
        sink.close()
    assert written(kafka, topic_name) == {f'{{"id":{row}}}'.encode(): 1 for row in range(1500)}


def test_batches_that_compress_are_not_refused(kafka: EmbeddedKafka, topic_name: str, tmp_path: Path) -> None:
    with HandmadeLog(tmp_path / "log") as log, capture_logs() as logs:
        end = fill(log, 3000, 6000, shrinking)
        sink = opened(sink_of(kafka, topic_name, 0), log)
        assert write(sink, log, end).rows == 3000
        sink.close()
    assert warnings(logs) == []
    assert set(written(kafka, topic_name).values()) == {1}


def test_the_lower_limit_of_an_existing_topic_is_respected(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    admin, topic = AdminClient({"bootstrap.servers": kafka.bootstrap}), f"{topic_name}.public.orders"
    admin.create_topics([NewTopic(topic, 1, 1, config={"max.message.bytes": "60000"})])[topic].result(60)
    with HandmadeLog(tmp_path / "log") as log, capture_logs() as logs:
        end = fill(log, 200, 20_000, not_shrinking)
        sink = opened(sink_of(kafka, topic_name, 0), log)
        assert write(sink, log, end).rows == 200
        sink.close()
    assert [warning["bytes"] for warning in warnings(logs)] == [54_000]
    assert set(written(kafka, topic_name).values()) == {1}


def test_a_limit_that_is_lowered_while_the_sink_runs_is_respected(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    letters = f"{topic_name}-letters"
    with HandmadeLog(tmp_path / "log") as log:
        sink = opened(sink_of(kafka, topic_name, 0, dead_letter_topic=letters), log)
        write(sink, log, fill(log, 10, 6000, not_shrinking))
        alter(kafka, f"{topic_name}.public.orders", "max.message.bytes", "20000")
        end = log.commit(*(insert(1, 50 + n, not_shrinking(random.Random(n), 9000)) for n in range(10)))
        large = log.commit(insert(1, 100, not_shrinking(random.Random(1), 30_000)))
        assert write(sink, log, end).dead_letters == 0
        assert write(sink, log, large).dead_letters == 1
        sink.close()
    keys = [f'{{"id":{row}}}'.encode() for row in (*range(10), *range(50, 60))]
    assert written(kafka, topic_name) == dict.fromkeys(keys, 1)
    assert [key for key, _ in records(kafka, letters)] == [b'{"id":100}']


def test_batch_sizes_in_the_options_are_used(kafka: EmbeddedKafka, topic_name: str, tmp_path: Path) -> None:
    options = {"batch.size": "3000000", "linger.ms": "1000"}
    with HandmadeLog(tmp_path / "log") as log:
        end = fill(log, 600, 6000, not_shrinking)
        sink = opened(sink_of(kafka, topic_name, 0, options=options), log)
        with pytest.raises(TailraceError) as refused:
            write(sink, log, end)
        sink.close()
    assert refused.value.kind is Kind.SINK_RECORD_TOO_LARGE
    assert refused.value.context["topic"] == f"{topic_name}.public.orders"
    assert "batch.size" in refused.value.hint
    assert written(kafka, topic_name) == Counter()
