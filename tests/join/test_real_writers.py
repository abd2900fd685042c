"""From PostgreSQL through Kafka: topics of Tailrace's sink and of Debezium's engine are joined."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

import tailrace
from tailrace_bench.support import debezium
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.converters.registry import FakeRegistry
from tests.support.debezium import require_debezium
from tests.support.kafka.orders import run
from tests.support.kafka.pipelines import pipeline
from tests.support.postgres import Database
from tests.support.wait import wait_until

WAIT_S = 240
TABLES = ("orders", "items")

#: A change, and its transaction's number and count of changes.
Joined = tuple[str, str, int, int, int, int]


def make(pg: Database) -> None:
    for table in TABLES:
        pg.execute(f"create table {table} (id int primary key, number int)")


def change(pg: Database, seed: int, orders_of_changed_key: int) -> list[Joined]:
    """Commit transactions of many sizes over both tables; return what a join must find.

    :param orders_of_changed_key: whether its two events have one order, as Tailrace's, or two, as Debezium's.
    """
    chance, expected, known = random.Random(seed), [], {table: [0] for table in TABLES}
    with pg.connect(autocommit=True) as connection:
        for number in range(1, 41):
            size = chance.choice([1, 2, 7, 60])
            with connection.transaction():
                xid = _scalar(connection, "select pg_current_xact_id()::text::bigint")
                found, order = [], 0
                for _ in range(size):
                    table, order = chance.choice(TABLES), order + 1
                    rows = known[table]
                    if len(rows) > 5 and chance.random() < 0.1:
                        place = chance.randrange(1, len(rows))
                        former, rows[place] = rows[place], max(rows) + 1000 + number
                        connection.execute(f"update {table} set id = {rows[place]} where id = {former}")
                        found.append((table, "d", former, order))
                        order += orders_of_changed_key - 1
                        found.append((table, "c", rows[place], order))
                        continue
                    if len(rows) > 5 and chance.random() < 0.1:
                        gone = rows.pop(chance.randrange(1, len(rows)))
                        connection.execute(f"delete from {table} where id = {gone}")
                        found.append((table, "d", gone, order))
                        continue
                    rows.append(rows[-1] + 1 if len(rows) == 1 else max(rows) + 1000 + number)
                    connection.execute(f"insert into {table} values ({rows[-1]}, {number})")
                    found.append((table, "c", rows[-1], order))
            expected += [(table, op, row, order, xid, len(found)) for table, op, row, order in found]
            with connection.transaction(force_rollback=True):
                connection.execute("insert into orders values (-1, -1)")
    return sorted(expected)


def _scalar(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def joined(value: bytes | None, facts: dict[str, Any]) -> Iterator[Joined]:
    """Yield the change of a joined message; nothing for a tombstone."""
    if value is None:
        return
    event = json.loads(value)
    event = event.get("payload", event)
    row = event["after"] or event["before"]
    xid, count = int(facts["id"].split(":")[0]), facts["event_count"]
    yield event["source"]["table"], event["op"], row["id"], facts["total_order"], xid, count


def by_engine(kafka: EmbeddedKafka, prefix: str, wanted: int) -> list[Joined]:
    found: list[Joined] = []

    def take(batch: Any) -> None:
        for record in batch:
            found.extend(joined(record.value, record.headers.get("transaction", {})))

    engine = tailrace.Engine(
        connector="kafka-join", name="join", on_batch=take, tasks_max=2,
        settings={
            "bootstrap_servers": kafka.bootstrap, "transactions": f"{prefix}.transaction",
            "data": [f"{prefix}.public.{table}" for table in TABLES],
        },
        options={"offset_storage": {"type": "memory"}},
    )  # fmt: skip
    engine.start()
    wait_until(lambda: len(found) >= wanted or engine.error is not None, WAIT_S, "all changes")
    engine.close()
    assert engine.error is None
    return sorted(found)


def by_spark(spark: Any, kafka: EmbeddedKafka, prefix: str) -> list[Joined]:
    options = {
        "bootstrapServers": kafka.bootstrap,
        "transactions": f"{prefix}.transaction",
        "data": ",".join(f"{prefix}.public.{table}" for table in TABLES),
    }
    rows = spark.read.format("tailrace-join").options(**options).load().collect()
    assert all(row.transaction_complete for row in rows if row.transaction_id)
    return sorted(each for row in rows for each in joined(row.value, facts_of(row)))


def facts_of(row: Any) -> dict[str, Any]:
    """Return a row's columns by the names that the same facts have in headers."""
    return {name.removeprefix("transaction_"): value for name, value in row.asDict().items()}


@pytest.mark.ci
def test_topics_that_our_own_sink_writes_are_joined(
    spark: Any, pg: Database, kafka: EmbeddedKafka, tmp_path: Path, join_seed: int
) -> None:
    make(pg)
    file = pipeline(
        tmp_path, pg, kafka, provide_transaction_metadata=True, topics=[{"tables": ["*.*"], "partitions": 3}]
    )
    run("run", file, "--until-caught-up")
    expected = change(pg, join_seed, 1)
    run("run", file, "--until-caught-up")
    assert by_spark(spark, kafka, pg.name) == expected, join_seed
    assert by_engine(kafka, pg.name, len(expected)) == expected, join_seed


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_topics_that_debeziums_engine_writes_are_joined(
    spark: Any, pg: Database, kafka: EmbeddedKafka, tmp_path: Path, join_seed: int
) -> None:
    require_debezium()
    make(pg)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    topics = [NewTopic(f"{pg.name}.public.{table}", 3, 1) for table in TABLES]
    for done in admin.create_topics([*topics, NewTopic(f"{pg.name}.transaction", 1, 1)]).values():
        done.result(60)
    slot = f"d_{pg.name}"
    pg.execute("create publication p for table orders, items")
    pg.execute("alter table orders replica identity full")
    pg.execute("alter table items replica identity full")
    pg.query("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    expected = change(pg, join_seed, 2)
    transactions = len({each[4] for each in expected})
    debezium.receive(
        pg.server, slot, len(expected) + 2 * transactions, "kafka", 1, tmp_path,
        {"bootstrap.servers": kafka.bootstrap, "acks": "all", "enable.idempotence": "true"},
        {
            "topic.prefix": pg.name, "database.dbname": pg.name, "publication.name": "p",
            "table.include.list": "public.*", "provide.transaction.metadata": "true",
        },
    )  # fmt: skip
    assert by_spark(spark, kafka, pg.name) == expected, join_seed
    assert by_engine(kafka, pg.name, len(expected)) == expected, join_seed


@pytest.mark.slow
def test_topics_in_avro_are_joined_by_spark(
    spark: Any, pg: Database, kafka: EmbeddedKafka, tmp_path: Path
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
        options = {
            "bootstrapServers": kafka.bootstrap,
            "data": f"{pg.name}.public.orders",
            "transactions": f"{pg.name}.transaction",
            "registry": registry.url,
        }
        rows = spark.read.format("tailrace-join").options(**options).load().collect()
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row.transaction_id, []).append(row.total_order)
    assert len(found) == 10
    assert all(sorted(orders) == [1, 2, 3, 4, 5] for orders in found.values())
