"""A database whose changes a writer brings into topics, and what a join of these must return.

Like `JoinTopics`, but the topics have transactions of a real PostgreSQL, written by Tailrace's own sink in a
process that may be killed, or by Debezium's engine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # type: ignore[attr-defined]

from tailrace_bench.support import debezium
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.orders import run
from tests.support.kafka.pipelines import pipeline
from tests.support.kafka.reading import Message
from tests.support.postgres import Database

#: A change: operation, number, place in its transaction, the transaction's number and count of changes;
#: of a snapshot row the first two.
Row = tuple[str, int | None, int, int, int]

TABLES = ("orders", "items")
KEYS = 40


class Chain:
    """Two tables with random changes; their topics have three partitions.

    `expected` has the changes of each key (table and row), in order.
    """

    def __init__(self, pg: Database, kafka: EmbeddedKafka, seed: int) -> None:
        self.pg, self.kafka, self.name = pg, kafka, pg.name
        self.random = random.Random(seed)
        self.expected: dict[str, list[Row]] = defaultdict(list)
        self.data = tuple(f"{pg.name}.public.{table}" for table in TABLES)
        self.transactions = f"{pg.name}.transaction"
        self._known: dict[str, set[int]] = {table: set() for table in TABLES}
        self._number = 0
        self._admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        for table in TABLES:
            pg.execute(f"create table {table} (id int primary key, number int)")
        topics = [NewTopic(topic, 3, 1) for topic in self.data]
        for done in self._admin.create_topics([*topics, NewTopic(self.transactions, 1, 1)]).values():
            done.result(60)

    def settings(self) -> dict[str, Any]:
        """The join's options."""
        return {
            "bootstrap_servers": self.kafka.bootstrap,
            "data": list(self.data),
            "transactions": self.transactions,
        }

    def row_of(self, message: Message) -> tuple[str, Row] | None:
        """Return the key and the change of a joined message; None for a tombstone."""
        if (event := message.document) is None:
            return None
        event = event.get("payload", event)
        row, of = event["after"] or event["before"], json.loads(message.headers.get("transaction", "{}"))
        xid = int(of.get("id", "0").split(":")[0])
        place, count = of.get("total_order", 0), of.get("event_count", 0)
        number = None if event["op"] == "d" else row["number"]
        return f"{event['source']['table']} {row['id']}", (event["op"], number, place, xid, count)

    def write(self, transactions: int) -> None:
        """Commit so many transactions, and roll some back."""
        with self.pg.connect(autocommit=True) as connection:
            for _ in range(transactions):
                size, found = self.random.choice((1, 2, 7, 40)), []
                with connection.transaction():
                    row = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()
                    assert row is not None
                    for order in range(1, size + 1):
                        key, op, number = self._change(connection)
                        found.append((key, (op, number, order, row[0], size)))
                for key, change in found:
                    self.expected[key].append(change)
                with connection.transaction(force_rollback=True):
                    connection.execute("insert into orders values (-1, -1)")

    def _change(self, connection: Any) -> tuple[str, str, int | None]:
        self._number += 1
        table, row = self.random.choice(TABLES), self.random.randrange(KEYS)
        key, known = f"{table} {row}", self._known[table]
        if row not in known:
            known.add(row)
            connection.execute(f"insert into {table} values ({row}, {self._number})")
            return key, "c", self._number
        if self.random.random() < 0.2:
            known.discard(row)
            connection.execute(f"delete from {table} where id = {row}")
            return key, "d", None
        connection.execute(f"update {table} set number = {self._number} where id = {row}")
        return key, "u", self._number


class SinkChain(Chain):
    """Topics that Tailrace's own sink writes; its process is killed and restarted meanwhile."""

    def __init__(self, pg: Database, kafka: EmbeddedKafka, seed: int, directory: Path) -> None:
        super().__init__(pg, kafka, seed)
        self._file = pipeline(
            directory, pg, kafka, provide_transaction_metadata=True,
            topics=[{"tables": ["*.*"], "partitions": 3}],
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def snapshot(self, rows: int) -> None:
        """Insert rows, bring them into the topics as a snapshot, and start the pipeline."""
        for row in range(rows):
            self._number += 1
            self._known["orders"].add(row)
            self.pg.execute(f"insert into orders values ({row}, {self._number})")
            self.expected[f"orders {row}"].append(("r", self._number, 0, 0, 0))
        run("run", self._file, "--until-caught-up")
        self._start()

    def write(self, transactions: int) -> None:
        """Commit so many transactions; now and then the pipeline's process is killed and restarted."""
        super().write(transactions)
        assert self._process is not None
        if self.random.random() < 0.3:
            self._process.kill()
            self._process.wait(10)
        if self._process.poll() is not None:
            self._start()

    def grow(self, partitions: int) -> None:
        """Add partitions to the first data topic."""
        for made in self._admin.create_partitions([NewPartitions(self.data[0], partitions)]).values():
            made.result(60)

    def calm(self) -> None:
        """Let the pipeline go on without faults."""
        self.close()
        self._start("")

    def close(self) -> None:
        """End the pipeline."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def _start(self, faults: str | None = None) -> None:
        if faults is None:
            point = self.random.choice(("kafka.before_commit", "kafka.after_commit", "kafka.in_batch"))
            faults = f"{point}=kill@{self.random.randint(3, 12)}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tailrace", "run", str(self._file)],
            env={**os.environ, "TAILRACE_FAILPOINTS": faults},
            stdout=subprocess.DEVNULL,
        )


class DebeziumChain(Chain):
    """Topics that Debezium's engine wrote before the join: without Kafka Connect it is not exactly once."""

    def __init__(
        self, pg: Database, kafka: EmbeddedKafka, seed: int, directory: Path, transactions: int
    ) -> None:
        super().__init__(pg, kafka, seed)
        slot = f"d_{pg.name}"
        pg.execute("create publication p for table orders, items")
        pg.query("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        super().write(transactions)
        changes = [change for rows in self.expected.values() for change in rows]
        debezium.receive(
            pg.server, slot, len(changes) + 2 * transactions, "kafka", 1, directory,
            {"bootstrap.servers": kafka.bootstrap, "acks": "all", "enable.idempotence": "true"},
            {
                "topic.prefix": pg.name, "database.dbname": pg.name, "publication.name": "p",
                "table.include.list": "public.*", "provide.transaction.metadata": "true",
            },
        )  # fmt: skip

    def snapshot(self, rows: int) -> None:
        """Nothing: it was started without a snapshot."""

    def write(self, transactions: int) -> None:
        """Nothing: everything is in the topics."""

    def close(self) -> None:
        """Nothing: it has ended."""
