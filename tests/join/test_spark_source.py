"""`format("tailrace-join")` over a real Kafka, on a real Spark: every change with its transaction, once."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tailrace.errors import Kind, TailraceError
from tailrace.spark.jobs import translated
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.join.spark_stream import JoinStream, by_key, options_of
from tests.support.kafka.debezium_topics import TIME_MS, JoinTopics
from tests.support.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300


def read(spark: Any, topics: JoinTopics, **options: Any) -> Any:
    return spark.read.format("tailrace-join").options(**options_of(topics, **options)).load()


@pytest.mark.parametrize("schemas", [False, True])
def test_a_batch_has_each_change_with_its_transaction(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, join_seed: int, schemas: bool
) -> None:
    topics = JoinTopics(kafka, topic_name, join_seed, schemas=schemas)
    topics.snapshot(30)
    topics.write(60)
    frame = read(spark, topics)
    rows = frame.collect()
    assert by_key(rows) == topics.expected, join_seed
    parts = Counter((row.transaction_id, row.topic, row.partition) for row in rows if row.transaction_id)
    for row in rows:
        assert row.timestamp is not None
        if row.transaction_id is None:
            assert row.transaction_complete is row.transaction_offset is row.total_order is None
            continue
        event = json.loads(row.value)
        block = event.get("payload", event)["transaction"]
        position = int(row.transaction_id.split(":")[1])
        assert row.total_order == block["total_order"]
        assert row.transaction_position == position
        committed = dt.datetime.fromtimestamp((TIME_MS + position) / 1000, dt.UTC).replace(tzinfo=None)
        assert row.transaction_timestamp == committed
        assert row.transaction_event_count == topics.counts[row.transaction_id]
        last = row.partition_order == parts[row.transaction_id, row.topic, row.partition]
        assert (row.partition_complete, row.transaction_complete) == (last, True)
    # Evaluated twice, the frame reads the same range twice.
    topics.write(5)
    assert sorted(frame.collect()) == sorted(rows)


@pytest.mark.ci
def test_a_stream_of_whole_transactions_continues_from_its_checkpoint(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics, rows = JoinTopics(kafka, topic_name, join_seed), []
    for _ in range(2):
        topics.write(30)
        stream = JoinStream(
            spark, tmp_path, options_of(topics, maxTransactionOffsetsPerTrigger=20, queueRecordsMax=1)
        )
        for batch in stream.batches.values():
            counts = Counter(row.transaction_id for row in batch)
            assert counts == {name: topics.counts[name] for name in counts}, join_seed
            assert all(row.transaction_complete for row in batch)
        assert len(stream.batches) > 1
        rows += stream.rows
        assert by_key(rows) == topics.expected, join_seed
    assert JoinStream(spark, tmp_path, options_of(topics)).rows == []


@pytest.mark.ci
def test_transactions_are_whole_while_the_topics_grow(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = JoinTopics(kafka, topic_name, join_seed)
    topics.write(5)
    batches: list[list[Any]] = []
    frame = spark.readStream.format("tailrace-join").options(**options_of(topics)).load()
    writer = frame.writeStream.foreachBatch(lambda batch, _: batches.append(batch.collect()))
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    try:
        for _ in range(15):
            before = len(batches)
            topics.write(15)
            wait_until(lambda n=before: len(batches) > n or not query.isActive, WAIT_S, "a batch")  # type: ignore[misc]
        total = sum(map(len, topics.expected.values()))
        wait_until(lambda: sum(map(len, batches)) >= total or not query.isActive, WAIT_S, "all rows")
        assert query.exception() is None
    finally:
        query.stop()
    for batch in batches:
        counts = Counter(row.transaction_id for row in batch)
        assert counts == {name: topics.counts[name] for name in counts}, join_seed
    assert by_key([row for batch in batches for row in batch]) == topics.expected, join_seed


@pytest.mark.ci
def test_a_batch_that_was_planned_but_not_committed_has_the_same_rows_again(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics, tried, rows = JoinTopics(kafka, topic_name, join_seed), {}, {}
    topics.snapshot(10)
    topics.write(40)
    options = options_of(topics, maxOffsetsPerTrigger=150, startingOffsets="earliest")

    def fail_once(number: int, batch: list[Any]) -> None:
        if number not in tried:
            tried[number] = batch
            topics.write(3)
            raise RuntimeError("for once")
        assert sorted(tried[number]) == sorted(batch), join_seed
        rows[number] = batch

    for _ in range(40):
        try:
            JoinStream(spark, tmp_path, options, fail_once)
        except Exception as error:  # noqa: BLE001 — whatever Spark makes of it
            assert "for once" in str(error)  # noqa: PT017
        if len(rows) >= 4:
            break
    topics.write(1)
    last = JoinStream(spark, tmp_path, options)
    found = [row for batch in (rows | last.batches).values() for row in batch]
    assert by_key(found) == topics.expected, join_seed
    assert all(len(batch) <= 150 for batch in (rows | last.batches).values())


@pytest.mark.ci
def test_each_change_comes_once_despite_kills(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = JoinTopics(kafka, topic_name, join_seed)
    out, checkpoint = tmp_path / "rows", tmp_path / "checkpoint"
    out.mkdir()
    given = {"options": options_of(topics, maxOffsetsPerTrigger=100), "out": str(out)}
    for kills in ("read", "written", ""):
        topics.write(30)
        given |= {"checkpoint": str(checkpoint), "kill_when": kills}
        command = [sys.executable, "-m", "tests.support.join.spark_process", json.dumps(given)]
        done = subprocess.run(command, cwd=ROOT, check=False, timeout=WAIT_S)
        assert done.returncode == (-9 if kills else 0)
    rows = [json.loads(line) for file in out.iterdir() for line in file.read_text().splitlines()]
    found: dict[str, list[tuple[int, str]]] = {}
    for row in sorted(rows, key=lambda each: each[:3]):
        found.setdefault(row[3], []).append((row[4], row[5]))
    assert found == topics.expected, join_seed


def test_added_partitions_are_read_from_their_first_record(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = JoinTopics(kafka, topic_name, join_seed, partitions=1)
    topics.write(20)
    rows = JoinStream(spark, tmp_path, options_of(topics)).rows
    topics.grow(4)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    wait_until(
        lambda: len(admin.list_topics(topics.data[0], 10).topics[topics.data[0]].partitions) == 4,
        WAIT_S,
        "the new partitions",
    )
    before = len(rows)
    for _ in range(20):  # until the producer has learned of them
        topics.write(20)
        rows += JoinStream(spark, tmp_path, options_of(topics)).rows
        if {row.partition for row in rows[before:] if row.topic == topics.data[0]} - {0}:
            break
    found = by_key(rows)
    assert {key: sorted(each) for key, each in found.items()} == {
        key: sorted(each) for key, each in topics.expected.items()
    }, join_seed
    assert {row.partition for row in rows if row.topic == topics.data[0]} > {0}


def test_a_read_has_the_configured_start_and_end(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = JoinTopics(kafka, topic_name, join_seed, partitions=1)
    topics.write(20)
    checkpoint = tmp_path / "latest"
    assert JoinStream(spark, checkpoint, options_of(topics, startingOffsets="latest")).rows == []
    rows = read(spark, topics).collect()
    topics.write(20)
    later = JoinStream(spark, checkpoint, options_of(topics, startingOffsets="latest")).rows
    assert by_key(rows + later) == topics.expected, join_seed
    own = sorted((row for row in rows + later if row.topic == topics.data[0]), key=lambda row: row.offset)
    third = own[len(own) // 3]
    others = [row.offset for row in rows + later if row.topic == topics.data[1]
              and row.transaction_offset >= third.transaction_offset]  # fmt: skip
    data = {topics.data[0]: {0: third.offset}, topics.data[1]: {0: min(others)}}
    given = {"data": data, "transactions": third.transaction_offset}
    rest = read(spark, topics, startingOffsets=json.dumps(given)).collect()
    found = sorted(row.offset for row in rest if row.topic == topics.data[0])
    assert found == [row.offset for row in own if row.offset >= third.offset]
    ended = read(spark, topics, endingOffsets=json.dumps(given)).collect()
    found = sorted(row.offset for row in ended if row.topic == topics.data[0])
    assert found == [row.offset for row in own if row.transaction_offset < third.transaction_offset]
    for given, kind in (
        ({"data": {topics.data[0]: {9: 0}}}, Kind.CONFIG_INVALID),
        ({"data": {topics.data[0]: {0: 1 << 40}}}, Kind.LOG_RANGE_INVALID),
        ({"data": {}, "transactions": 1 << 40}, Kind.LOG_RANGE_INVALID),
    ):
        for option in ("startingOffsets", "endingOffsets"):
            with pytest.raises(Exception, match=option) as caught:
                read(spark, topics, **{option: json.dumps(given)})
            assert failure(caught.value).kind is kind


def test_a_stream_continues_although_the_records_at_its_first_start_are_removed(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = JoinTopics(kafka, topic_name, join_seed, partitions=1)
    topics.write(20)
    given = json.dumps({"data": {topics.data[0]: {0: 0}}, "transactions": 0})
    rows = JoinStream(spark, tmp_path, options_of(topics, startingOffsets=given)).rows
    last = {(row.topic, row.partition): row.offset for row in sorted(rows, key=lambda row: row.offset)}
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    removed = [TopicPartition(*place, offset) for place, offset in last.items()]
    for done in admin.delete_records(removed).values():
        done.result(60)
    topics.write(5)
    rows += JoinStream(spark, tmp_path, options_of(topics, startingOffsets=given)).rows
    assert by_key(rows) == topics.expected, join_seed
    with pytest.raises(Exception, match="log_range_gone"):
        read(spark, topics, startingOffsets=given).collect()


def test_an_end_before_the_start_is_refused(spark: Any, kafka: EmbeddedKafka, topic_name: str) -> None:
    topics = JoinTopics(kafka, topic_name, 1, partitions=1)
    topics.write(10)
    for end in ({"data": {topics.data[0]: {0: 1}}}, {"data": {}, "transactions": 1}):
        with pytest.raises(Exception, match=r"startingOffsets is \d+, after endingOffsets, 1") as caught:
            read(spark, topics, startingOffsets="latest", endingOffsets=json.dumps(end))
        assert failure(caught.value).kind is Kind.CONFIG_INVALID


def failure(error: BaseException) -> TailraceError:
    found = translated(error)
    assert isinstance(found, TailraceError), error
    return found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transactions": "nowhere"}, "nowhere: it does not exist"),
        ({"data": ""}, "data"),
        ({"maxOfsetsPerTrigger": "1"}, "maxOffsetsPerTrigger"),
        ({"maxOffsetsPerTrigger": "1"}, "options of streams"),
        ({"startingOffsets": "yesterday"}, "startingOffsets"),
        ({"endingOffsets": "earliest"}, "endingOffsets"),
        ({"kafka.sasl.password": "clear"}, "sasl.password"),
        ({"kafka.isolation.level": "read_uncommitted"}, "isolation.level"),
        ({"extraction": "nowhere:Thing"}, "nowhere:Thing"),
        ({"extraction": "json:JSONDecoder"}, "methods of tailrace.join.extraction.Extraction"),
        ({"extraction": "json:loads"}, "methods of tailrace.join.extraction.Extraction"),
    ],
)
def test_topics_that_cannot_be_joined_are_refused(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, changes: dict[str, Any], said: str
) -> None:
    topics = JoinTopics(kafka, topic_name, 1)
    with pytest.raises(Exception, match=said) as caught:
        read(spark, topics, **changes).collect()
    assert failure(caught.value).kind in (Kind.CONFIG_INVALID, Kind.TABLE_MISSING)


def test_topics_of_another_source_are_refused_with_both_positions(
    spark: Any, kafka: EmbeddedKafka, topic_name: str
) -> None:
    topics, other = JoinTopics(kafka, topic_name, 1), JoinTopics(kafka, f"{topic_name}-other", 2)
    topics.write(30)
    other.write(30)
    with pytest.raises(Exception, match="transaction") as caught:
        read(spark, topics, transactions=other.transactions).collect()
    found = failure(caught.value)
    assert found.kind is Kind.JOIN_VIOLATED
    assert {"topic", "partition", "rule", "data_offset", "transaction_offset"} <= found.context.keys()


def test_recreated_topics_are_refused(
    spark: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    topics = JoinTopics(kafka, topic_name, 1)
    topics.write(10)
    JoinStream(spark, tmp_path, options_of(topics))
    frame = read(spark, topics)
    assert frame.count() > 0
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for done in admin.delete_topics([*topics.data, topics.transactions]).values():
        done.result(60)
    wait_until(lambda: not admin.list_topics(timeout=10).topics.keys() & {*topics.data}, WAIT_S, "their end")
    again = JoinTopics(kafka, topic_name, 2)
    again.write(40)
    for reads in (frame.count, lambda: JoinStream(spark, tmp_path, options_of(again))):
        with pytest.raises(Exception, match="created again") as caught:
            reads()
        assert failure(caught.value).kind is Kind.LOG_RANGE_GONE
