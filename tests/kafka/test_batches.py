"""Client batches that brokers find too large: as large as useful, and smaller if they do not compress."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from structlog.testing import capture_logs

from tailrace import Engine, failpoints
from tailrace.errors import Kind, TailraceError
from tailrace.failpoints import FailpointError
from tailrace.records.batch import Batch
from tailrace.records.making import SourceRecord
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.batches import fill, not_shrinking
from tests.support.kafka.engine_lines import BatchesSource, options_of
from tests.support.kafka.shares_rig import NOTES, ORDERS, opened, records, sink_of, write
from tests.support.kafka_cluster import alter
from tests.support.spark.wire import HandmadeLog, insert

WARNING = "batches are too large for a topic: smaller ones now"


def text(length: int, seed: int = 1) -> str:
    return not_shrinking(random.Random(seed), length)


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


@pytest.mark.parametrize("limit", [50_000, 20_000])
def test_limits_that_are_lowered_one_after_the_other_are_respected(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, limit: int
) -> None:
    # The batches already fit the second limit: only the larger record does not.
    letters = f"{topic_name}-letters"
    with HandmadeLog(tmp_path / "log") as log:
        sink = opened(sink_of(kafka, topic_name, 0, dead_letter_topic=letters), log)
        write(sink, log, log.commit(ORDERS, NOTES, insert(1, 1, "small"), insert(2, 1, "small")))
        alter(kafka, f"{topic_name}.public.orders", "max.message.bytes", "20000")
        write(sink, log, log.commit(*(insert(1, 2 + row, text(9000)) for row in range(10))))
        alter(kafka, f"{topic_name}.public.notes", "max.message.bytes", str(limit))
        assert write(sink, log, log.commit(insert(2, 2, text(60_000)))).dead_letters == 1
        sink.close()
    assert len(written(kafka, topic_name)) == 11
    assert len(records(kafka, letters)) == 1


def test_a_limit_below_that_of_a_rule_is_respected(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    rule = {"tables": ["*.*"], "settings": {"max.message.bytes": "200000"}}
    with HandmadeLog(tmp_path / "log") as log:
        sink = opened(sink_of(kafka, topic_name, 0, topics=[rule]), log)
        write(sink, log, log.commit(ORDERS, insert(1, 1, "small")))
        alter(kafka, f"{topic_name}.public.orders", "max.message.bytes", "20000")
        write(sink, log, log.commit(*(insert(1, 2 + row, text(9000)) for row in range(10))))
        sink.close()
    assert set(written(kafka, topic_name).values()) == {1}


@pytest.mark.parametrize("options", [{}, {"batch.size": "150000"}])
def test_after_a_limit_is_lowered_or_raised_records_are_compared_with_the_new_one(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, options: dict[str, str]
) -> None:
    letters, topic = f"{topic_name}-letters", f"{topic_name}.public.orders"
    with HandmadeLog(tmp_path / "log") as log:
        sink = opened(sink_of(kafka, topic_name, 0, dead_letter_topic=letters, options=options), log)
        write(sink, log, log.commit(ORDERS, insert(1, 0, "small")))
        for row, limit in enumerate(("20000", "200000", "20000"), 1):
            alter(kafka, topic, "max.message.bytes", limit)
            is_letter = limit == "20000"
            assert write(sink, log, log.commit(insert(1, row, text(30_000)))).dead_letters == is_letter
        sink.close()
    assert written(kafka, topic_name) == {b'{"id":0}': 1, b'{"id":2}': 1}
    assert [key for key, _ in records(kafka, letters)] == [b'{"id":1}', b'{"id":3}']


def test_an_engines_batches_need_not_compress(kafka: EmbeddedKafka, topic_name: str) -> None:
    topic = f"{topic_name}.all"
    batch = [
        SourceRecord(topic=topic, offset={"line": row}, key={"id": row}, value={"text": text(6000, row)})
        for row in range(1000)
    ]
    source = BatchesSource(Batch.of_records(batch, {"of": "x"}))
    Engine(connector=source, name=topic_name, options=options_of(kafka, topic_name)).run()
    assert len(records(kafka, topic)) == 1000


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
