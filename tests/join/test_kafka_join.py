"""The join over a real Kafka: every change with the right transaction, whatever is interrupted."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.errors import Kind, TailraceError
from tailrace.join import connector as connector_module
from tailrace.join import messages as messages_module
from tailrace.join.connector import KafkaJoin, KafkaJoinTask, options_of
from tailrace.testing.conformance import check_connector
from tailrace.testing.contexts import connector_context, task_context
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.converters.registry import FakeRegistry
from tests.support.kafka.debezium_topics import TIME_MS, JoinTopics
from tests.support.kafka.orders import run
from tests.support.kafka.pipelines import pipeline
from tests.support.postgres import Database
from tests.support.wait import wait_until

WAIT_S = 120


class Got:
    """A handler of batches that records changes by key; it may fail at one of them."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.count = 0
        self.topics: set[str] = set()
        self.last: Any = None
        self.fails_at = -1
        self._lock = threading.Lock()

    def batch(self, batch: Any) -> None:
        with self._lock:
            for record in batch:
                document = json.loads(record.value)
                event = document.get("payload", document)
                of = record.headers.get("transaction", {})
                block = event["transaction"]
                assert of.get("total_order") == (block and block["total_order"])
                self.rows[record.key.decode()].append((event["after"]["number"], of.get("id") or ""))
                self.topics.add(record.topic)
                self.last = of
                self.count += 1
            if 0 <= self.fails_at <= self.count:
                self.fails_at = -1
                raise RuntimeError("for once")


def joined(topics: JoinTopics, store: Path, got: Got, wanted: int, tasks: int = 1, **settings: Any) -> None:
    """Run the join until so many records came."""
    engine = tailrace.Engine(
        connector="kafka-join",
        settings=topics.settings(**settings),
        name="join",
        tasks_max=tasks,
        on_batch=got.batch,
        options={"offset_storage": {"type": "file", "path": str(store)}},
    )
    engine.start()
    try:
        wait_until(lambda: got.count >= wanted or engine.error is not None, WAIT_S, "the records")
    finally:
        engine.close()
    if engine.error is not None:
        raise engine.error


def total(topics: JoinTopics) -> int:
    return sum(map(len, topics.expected.values()))


@pytest.mark.parametrize("schemas", [False, True])
def test_each_change_comes_once_with_its_transaction(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int, schemas: bool
) -> None:
    topics = JoinTopics(kafka, topic_name, join_seed, schemas=schemas)
    topics.snapshot(30)
    topics.write(60)
    got = Got()
    joined(topics, tmp_path / "offsets", got, total(topics), tasks=2)
    assert got.rows == topics.expected, join_seed
    assert got.topics == {f"{topic}-joined" for topic in topics.data}
    topics.write(40)
    joined(topics, tmp_path / "offsets", got, total(topics), tasks=3)
    assert got.rows == topics.expected, join_seed
    named = got.last["id"]
    position = int(named.split(":")[1])
    assert got.last["position"] == position
    assert got.last["ts_ms"] == TIME_MS + position
    assert got.last["event_count"] == topics.counts[named]


def test_small_queues_and_stops_anywhere_lose_nothing_and_repeat_nothing_committed(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics, got = JoinTopics(kafka, topic_name, join_seed), Got()
    topics.write(80, 30)
    store = tmp_path / "offsets"
    for step in range(1, 6):
        wanted = total(topics) * step // 5
        settings = {"queue_records_max": step, "queue_bytes_max": 100 * step}
        joined(topics, store, got, wanted, tasks=1 + step % 3, **settings)
        topics.write(5)
    joined(topics, store, got, total(topics))
    # What was committed before a normal end does not come again.
    assert got.rows == topics.expected, join_seed


def test_records_of_a_failed_handler_come_again(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics, got = JoinTopics(kafka, topic_name, join_seed), Got()
    topics.write(60)
    got.fails_at = total(topics) // 2
    with pytest.raises(TailraceError) as caught:
        joined(topics, tmp_path / "offsets", got, total(topics))
    assert caught.value.kind is Kind.TASK_FAILED
    joined(topics, tmp_path / "offsets", got, total(topics))
    topics.write(1)
    for key, rows in topics.expected.items():
        assert [row for row in rows if row in got.rows[key]] == rows[: len(set(got.rows[key]))], join_seed
        assert list(dict.fromkeys(got.rows[key])) == rows[: len(set(got.rows[key]))], join_seed


def test_added_partitions_are_read_from_their_first_record(
    kafka: EmbeddedKafka,
    topic_name: str,
    tmp_path: Path,
    join_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector_module, "_LOOK_S", 0.5)
    topics, got = JoinTopics(kafka, topic_name, join_seed, partitions=1), Got()
    topics.write(20)

    def grow() -> None:
        wait_until(lambda: got.count > 0, WAIT_S, "the first records")
        topics.grow(4)
        time.sleep(2)  # so that the producer learns of it
        topics.write(40)
        done.set()

    done = threading.Event()
    thread = threading.Thread(target=grow)
    thread.start()
    engine = tailrace.Engine(
        connector=KafkaJoin(**topics.settings()), name="join", on_batch=got.batch,
        options={"offset_storage": {"type": "file", "path": str(tmp_path / "offsets")}},
    )  # fmt: skip
    engine.start()
    wait_until(lambda: done.is_set() and got.count >= total(topics), WAIT_S, "all records")
    engine.close()
    thread.join()
    assert {key: sorted(rows) for key, rows in got.rows.items()} == dict(topics.expected), join_seed


def test_topics_that_our_own_sink_writes_are_joined(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    pg.execute("create table orders (id int primary key, number int)")
    pg.execute("create table items (id int primary key, number int)")
    pg.execute("insert into orders values (0, 0)")
    file = pipeline(
        tmp_path, pg, kafka, provide_transaction_metadata=True, topics=[{"tables": ["*.*"], "partitions": 3}]
    )
    run("run", file, "--until-caught-up")
    commits: dict[int, int] = {}
    for number in range(1, 31):
        table = ("orders", "items")[number % 2]
        statements = f"insert into {table} select {number} * 100 + n, {number} from generate_series(1, 7) n"
        more = "; update orders set number = number where id = 0" if number % 5 == 0 else ""
        pg.execute(f"begin; {statements}{more}; commit")
        commits[number] = 8 if more else 7
    run("run", file, "--until-caught-up")
    found: dict[int, set[tuple[Any, ...]]] = defaultdict(set)
    orders, snapshot = [], []

    def take(batch: Any) -> None:
        for record in batch:
            change = json.loads(record.value)
            if change["op"] == "r":
                snapshot.append(record.headers)
            elif change["after"]["id"]:
                of = record.headers["transaction"]
                assert of["id"].startswith(f"{change['source']['txId']}:")
                assert of["position"] > change["source"]["lsn"]
                found[change["after"]["number"]].add((of["id"], of["event_count"]))
                orders.append(of["total_order"])

    engine = tailrace.Engine(
        connector="kafka-join", name="join", on_batch=take,
        settings={
            "bootstrap_servers": kafka.bootstrap, "transactions": f"{pg.name}.transaction",
            "data": [f"{pg.name}.public.orders", f"{pg.name}.public.items"],
        },
        options={"offset_storage": {"type": "memory"}},
    )  # fmt: skip
    engine.start()
    wait_until(lambda: len(orders) == 30 * 7 or engine.error is not None, WAIT_S, "all changes")
    engine.close()
    assert engine.error is None
    assert {number: {count for _, count in named} for number, named in found.items()} == {
        number: {count} for number, count in commits.items()
    }
    assert all(len(named) == 1 for named in found.values())
    assert not any(snapshot)


def test_topics_in_avro_are_joined_with_the_schemas_of_the_registry(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    pg.execute("create table orders (id int primary key, number int)")
    with FakeRegistry() as registry:
        file = pipeline(
            tmp_path, pg, kafka, provide_transaction_metadata=True,
            converter={"type": "avro", "registry_url": registry.url},
        )  # fmt: skip
        run("run", file, "--until-caught-up")
        for number in range(1, 11):
            pg.execute(f"insert into orders select {number} * 100 + n, {number} from generate_series(1, 5) n")
        run("run", file, "--until-caught-up")
        found: dict[str, list[int]] = defaultdict(list)

        def take(batch: Any) -> None:
            for record in batch:
                of = record.headers["transaction"]
                found[of["id"]].append(of["total_order"])

        engine = tailrace.Engine(
            connector="kafka-join", name="join", on_batch=take,
            settings={
                "bootstrap_servers": kafka.bootstrap, "transactions": f"{pg.name}.transaction",
                "data": [f"{pg.name}.public.orders"], "registry": {"registry_url": registry.url},
            },
            options={"offset_storage": {"type": "memory"}},
        )  # fmt: skip
        engine.start()
        wait_until(
            lambda: sum(map(len, found.values())) == 50 or engine.error is not None, WAIT_S, "all changes"
        )
        text = engine.metrics.text()
        engine.close()
    assert engine.error is None
    assert len(found) == 10
    assert all(orders == [1, 2, 3, 4, 5] for orders in found.values())
    assert 'tailrace_join_rows_queued{engine="join",task="0"} 0.0' in text


@pytest.mark.follows("join_violated")
def test_messages_that_are_not_avro_are_reported(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    topics, got = JoinTopics(kafka, topic_name, 1), Got()
    topics.write(5)
    with FakeRegistry() as registry, pytest.raises(TailraceError, match="wire format") as caught:
        joined(topics, tmp_path / "offsets", got, 1 << 40, registry={"registry_url": registry.url})
    assert caught.value.kind is Kind.JOIN_VIOLATED
    assert "or leave out `registry`" in caught.value.hint
    joined(topics, tmp_path / "offsets", got, total(topics))
    assert got.rows == topics.expected


def test_the_contract_of_connectors_is_kept(kafka: EmbeddedKafka, topic_name: str, join_seed: int) -> None:
    topics = JoinTopics(kafka, topic_name, join_seed)
    topics.write(20)
    check_connector(KafkaJoin, topics.settings(), tasks_max=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": []}, "data: "),
        ({"topic": "{table}"}, "placeholder"),
        ({"topic": "{topic}"}, "which is read"),
        ({"transactions": "nowhere"}, "nowhere: it does not exist"),
        ({"options": {"sasl.password": "clear"}}, "sasl.password"),
    ],
)
def test_topics_that_cannot_be_joined_are_refused_at_the_start(
    kafka: EmbeddedKafka, topic_name: str, changes: dict[str, Any], said: str
) -> None:
    topics = JoinTopics(kafka, topic_name, 1)
    with pytest.raises(TailraceError, match=said) as caught:
        tailrace.Engine(
            connector="kafka-join", settings=topics.settings(**changes), on_batch=lambda _: None
        ).run()
    assert caught.value.kind in (Kind.CONFIG_INVALID, Kind.TABLE_MISSING)
    assert "Value error" not in str(caught.value)


@pytest.mark.follows("join_violated")
def test_a_missing_transaction_is_reported_with_both_positions(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    topics, other = JoinTopics(kafka, topic_name, 1), JoinTopics(kafka, f"{topic_name}-other", 2)
    got = Got()
    topics.write(30)
    other.write(30)
    with pytest.raises(TailraceError) as caught:
        joined(topics, tmp_path / "offsets", got, 1 << 40, transactions=other.transactions)
    assert caught.value.kind is Kind.JOIN_VIOLATED
    assert {"topic", "partition", "rule", "data_offset", "transaction_offset"} <= caught.value.context.keys()
    assert "see that `transactions` is the topic of the data's producer" in caught.value.hint
    joined(topics, tmp_path / "offsets", got, total(topics))
    assert got.rows == topics.expected


def test_a_side_that_is_far_ahead_is_paused(
    kafka: EmbeddedKafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "_READ_MAX", 100)
    topics = JoinTopics(kafka, topic_name, 3, partitions=1)
    topics.write(400, 20)
    empty = JoinTopics(kafka, f"{topic_name}-empty", 4)
    for settings, side in (
        (topics.settings(transactions=empty.transactions, queue_records_max=50), "data"),
        (topics.settings(data=[*empty.data], queue_records_max=50), "transactions"),
    ):
        connector = KafkaJoin(**settings)
        connector.start(connector_context({}))
        (given, *_) = connector.task_settings(1)
        task: Any = connector.create_task()
        task.start(task_context(given))
        most = 0
        for _ in range(40):
            batch = task.poll(0.05)
            assert batch is None or not batch.polled
            waiting = [
                each.data_queued if side == "data" else each.merge.transactions_queued
                for each in task._flow.partitions.values()
            ]
            most = max(most, *waiting)
        found = task._flow.progress()
        task.stop()
        connector.stop()
        assert found.pauses
        assert (side == "data") == bool(found.paused and found.data_lag)
        assert (50 <= most <= 50 + 2 * 101) if side == "data" else most <= 50 + 101, side


def test_a_task_that_has_not_started_has_no_errors_and_can_be_stopped() -> None:
    # The engine does both while a start still waits for the cluster.
    options = options_of({"bootstrap_servers": "nobody:1", "data": ["orders"], "transactions": "units"})
    task = KafkaJoinTask(options, None)  # type: ignore[arg-type]
    assert not task.errors
    task.stop()


def test_tasks_on_spark_are_refused_for_the_connector_and_the_hint_names_the_source() -> None:
    settings = {"bootstrap_servers": "nobody:1", "data": ["orders"], "transactions": "units"}
    with pytest.raises(TailraceError, match="tasks_on: spark is not supported by KafkaJoin") as caught:
        tailrace.Engine(
            connector="kafka-join", settings=settings, on_batch=lambda _: None, options={"tasks_on": "spark"}
        )
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert "pass the engine a file" in caught.value.hint
