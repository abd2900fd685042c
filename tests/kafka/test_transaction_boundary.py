"""`transaction_boundary: transaction`: converted as one part of the log, committed in the source's
transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace import failpoints
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.errors import Kind, TailraceError
from tailrace.model import LogRange
from tailrace.pipeline import sink_worker as feeds
from tailrace.pipeline.sink_worker import SinkWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.ranges import changes as ranges
from tailrace.ranges import plan
from tailrace.sinks.kafka import transactions as kafka_transactions
from tailrace.sinks.kafka.sink import KafkaSink
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import read_topic
from tests.support.kafka.shares_rig import NOTES, ORDERS, content, fill, opened, sink_of
from tests.support.spark.wire import HandmadeLog, insert

ONE_PARTITION = [{"tables": ["*.*"], "partitions": 1}]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[HandmadeLog]:
    with HandmadeLog(tmp_path / "log") as written:
        yield written
    failpoints.arm("")


def sink(kafka: EmbeddedKafka, name: str, **settings: Any) -> KafkaSink:
    given = {"transaction_boundary": "transaction", "topics": ONE_PARTITION, **settings}
    return sink_of(kafka, name, 0, **given)


def write(target: KafkaSink, log: HandmadeLog, end: int) -> int:
    """Write from the sink's position to `end`, as one range."""
    start = target.position("0") or 0
    with LogReader.open(log.path, "0") as reader:
        splits = plan.input_splits("0", reader.blocks(start, end), start, end)
    return target.write(None, log.path, LogRange("0", start, end), splits).rows


def transactions(kafka: EmbeddedKafka, topic: str) -> list[list[int]]:
    """Return the ids of rows by Kafka transaction: its end marker takes an offset, too."""
    found: list[list[int]] = []
    before = -2
    for message in read_topic(kafka.bootstrap, topic):
        if message.offset != before + 1:
            found.append([])
        before = message.offset
        if message.value is not None:
            found[-1].append(message.document["after"]["id"])
    return found


def small(log: HandmadeLog, sizes: list[int]) -> int:
    """Write transactions with so many rows; ids rise. Every third one changes another table, too."""
    number = 0
    for at, size in enumerate(sizes):
        described = (ORDERS, NOTES) if number == 0 else ()
        rows = [insert(1, number + row, "x") for row in range(size)]
        others = [insert(2, number, "y")] if at % 3 == 0 else []
        end = log.commit(*described, *rows, *others)
        number += size
    return end


def expected(sizes: list[int]) -> list[list[int]]:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def test_each_transaction_is_one_kafka_transaction_and_the_log_is_converted_once(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = 0
    decode = vars(ranges)["decode_block"]

    def counting(*args: Any, **named: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return decode(*args, **named)

    monkeypatch.setattr(ranges, "decode_block", counting)
    sizes = [1 + number % 4 for number in range(200)]
    end = small(log, sizes)
    target = opened(sink(kafka, topic_name), log)
    assert write(target, log, end) == sum(sizes) + 67
    assert target.position("0") == end
    target.close()
    assert transactions(kafka, f"{topic_name}.public.orders") == expected(sizes)
    assert len(transactions(kafka, f"{topic_name}.public.notes")) == 67
    assert decoded < 5


@pytest.mark.parametrize("parts", [1, 300, 64 << 10], ids=["one by one", "small parts", "as one"])
@pytest.mark.parametrize("atomic", [True, False], ids=["exactly once", "at least once"])
@pytest.mark.ci
def test_the_records_are_the_same_as_with_another_boundary(
    kafka: EmbeddedKafka,
    topic_name: str,
    log: HandmadeLog,
    monkeypatch: pytest.MonkeyPatch,
    parts: int,
    atomic: bool,
) -> None:
    monkeypatch.setattr(kafka_transactions, "_FIRST_BYTES", parts)
    monkeypatch.setattr(kafka_transactions, "DECODED_BYTES_MAX", parts)
    end = fill(log, 40)[-1]
    given: dict[str, Any] = {"atomic_source_offset_commit": atomic}
    given["provide_transaction_metadata"] = parts == 300
    for name, boundary in ((topic_name, "transaction"), (f"{topic_name}-poll", "poll")):
        given["schema_changes_topic"] = name
        target = opened(sink(kafka, name, transaction_boundary=boundary, **given), log)
        write(target, log, end)
        target.close()
    assert content(kafka, topic_name) == content(kafka, f"{topic_name}-poll")
    beside = [topic_name, *([f"{topic_name}.transaction"] if parts == 300 else [])]
    for topic in beside:
        theirs = topic.replace(topic_name, f"{topic_name}-poll")
        assert len(read_topic(kafka.bootstrap, topic)) == len(read_topic(kafka.bootstrap, theirs)) > 0


@pytest.mark.parametrize(
    "failure",
    [
        "kafka.in_batch=error@7",
        "kafka.before_commit=error@7",
        "kafka.after_commit=error@7",
        "sink.after_write=error@7",
    ],
)
def test_after_a_crash_within_a_range_the_sink_continues_after_the_last_committed_transaction(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, failure: str
) -> None:
    sizes = [2] * 12
    end = small(log, sizes)
    died = opened(sink(kafka, topic_name), log)  # never closed, as in a killed process
    failpoints.arm(failure)
    with pytest.raises(failpoints.FailpointError):
        write(died, log, end)
    failpoints.arm("")
    target = opened(sink(kafka, topic_name), log)
    assert 0 < (target.position("0") or 0) < end
    write(target, log, end)
    target.close()
    assert transactions(kafka, f"{topic_name}.public.orders") == expected(sizes)


def test_a_record_that_is_too_large_stops_the_sink_after_all_earlier_transactions(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog
) -> None:
    ends = [log.commit(*([ORDERS] if row == 0 else []), insert(1, row, "x" * (4000 if row == 7 else 4)))
            for row in range(10)]  # fmt: skip
    options = {"message.max.bytes": "3000"}
    target = opened(sink(kafka, topic_name, options=options), log)
    with pytest.raises(TailraceError) as refused:
        write(target, log, ends[-1])
    assert refused.value.kind is Kind.SINK_RECORD_TOO_LARGE
    assert target.position("0") == ends[6]
    target.close()
    target = opened(
        sink(kafka, topic_name, options=options, dead_letter_topic=f"{topic_name}.dead-letter"), log
    )
    write(target, log, ends[-1])
    target.close()
    found = transactions(kafka, f"{topic_name}.public.orders")
    assert found == [[row] for row in range(10) if row != 7]
    assert len(read_topic(kafka.bootstrap, f"{topic_name}.dead-letter")) == 1


def test_the_position_is_not_recorded_in_the_log_for_each_batch(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "REGISTER_S", 3600.0)
    told: list[int] = []
    commit = Readers.commit

    def counting(readers: Readers, name: str, task: str, offset: int, **kept: Any) -> None:
        told.append(offset)
        commit(readers, name, task, offset, **kept)

    monkeypatch.setattr(Readers, "commit", counting)
    end = small(log, [1] * 30)
    settings = {"transaction_boundary": "records", "batch_rows_max": 1}
    config = sink(kafka, topic_name, **settings)._config
    feed = SinkWorker(config, "shop", log.path, lambda: sink(kafka, topic_name, **settings), SparkHost(None))  # type: ignore[arg-type]
    feed.finish_at(end)
    feed.run()
    assert feed.view.batches == 30
    assert told == [0, end]  # at the start and the end, and not sooner than `REGISTER_S` between them
