"""Changes in Kafka joined with their transactions, into Kafka, exactly once, alternating with a plain copy.

The copy uses the same client and settings for the data topic alone: it reads committed records, and writes
them and its offsets in as many transactions as the previous run of the join. Both times start when the
clients are created and compiled code is loaded, which a process does once. In addition, the merge is measured
alone, and the memory if one side is far ahead of the other, which the limits of the queues bound.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from itertools import cycle, repeat
from typing import Any

import numpy as np
import pyarrow as pa
import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition

from tailrace import Engine
from tailrace.compiled import load_all
from tailrace.engine.contracts import SourceTask
from tailrace.errors import Kind, TailraceError
from tailrace.join.connector import KafkaJoin
from tailrace.join.merge import DataRows, Merge, Position, TransactionRows
from tailrace.join.messages import READ_AHEAD
from tailrace.records.batch import Offset, Partition
from tailrace_bench.support import topics
from tailrace_bench.support.process import answer_of
from tailrace_bench.support.report import Result, machine, median

log = structlog.get_logger(__name__)

ROWS = 1_000_000
TURNS = 3
ROWS_A_TRANSACTION = 100
DEADLINE_S = 600.0
JOIN, COPY, AHEAD = "join", "copy", "ahead"
#: Number of messages by which the data topic is ahead, per row of the other runs (10 million by default), and
#: the time for reading.
AHEAD_FACTOR = 10
AHEAD_READ_S = 15.0
AHEAD_DATA, AHEAD_TRANSACTIONS = "ahead.public.orders", "ahead.transaction"
NOTE = "a note of some forty characters, no more"
DATA, TRANSACTIONS = "shop.public.orders", "shop.transaction"

#: Number of messages that the copy takes from its client at a time: that of the join, which is the fastest.
COPY_TAKEN = 500
#: Number of messages that are passed to the client before a flush.
AHEAD_CHUNK = 500_000
AHEAD_VALUES = 10_000

#: Number of rows per step when the merge is measured alone.
MERGE_ROWS = 100_000
MERGES = 50


def measure(rows: int | None = None) -> Result:
    """Join `rows` changes, and copy them, alternating; the ratio is the median of the turns' ratios."""
    rows = rows or ROWS
    rates: dict[str, list[float]] = {JOIN: [], COPY: []}
    cpu_s = dict.fromkeys(rates, 0.0)  # of the last turn
    with topics.cluster() as kafka:
        topics.warm_up(kafka.bootstrap)
        fill(kafka.bootstrap, rows)
        for turn in range(TURNS):
            seconds, cpu_s[JOIN], transactions = _run(JOIN, kafka.bootstrap, turn, rows)
            rates[JOIN].append(rows / seconds)
            seconds, cpu_s[COPY], _ = _run(COPY, kafka.bootstrap, turn, rows, transactions)
            rates[COPY].append(rows / seconds)
            log.info("a turn is done", **{how: round(found[-1]) for how, found in rates.items()})
        ahead = _measure_ahead(kafka.bootstrap, rows * AHEAD_FACTOR)
    cpu_us = {f"{how}_cpu_us_a_record": round(seconds / rows * 1e6, 1) for how, seconds in cpu_s.items()}
    return _result(rows, rates, {**cpu_us, **ahead})


def _result(rows: int, rates: Mapping[str, list[float]], more: Mapping[str, float]) -> Result:
    ratios = [ours / plain for ours, plain in zip(rates[JOIN], rates[COPY], strict=True)]
    return Result(
        name="join",
        value=median(rates[JOIN]),
        unit="records/s",
        ratio=median(ratios),
        reference="a plain copy of the data topic by the same client, exactly once",
        limit="Python's client of Kafka, which makes an object of each message that it reads",
        setup=machine()
        | {
            "rows": rows,
            "turns": TURNS,
            "rows_a_transaction": ROWS_A_TRANSACTION,
            "partitions": topics.PARTITIONS,
        },
        details={
            "ratios": [round(ratio, 2) for ratio in ratios],
            "copy_records_s": round(median(rates[COPY])),
            "merge_rows_s": round(_merge_rows_s()),
            **more,
        },
    )


def fill(bootstrap: str, rows: int) -> None:
    """Write both topics in the form of Debezium for PostgreSQL, without schemas."""
    topics.create(bootstrap, DATA)
    topics.create(bootstrap, TRANSACTIONS, 1)
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "fill", "linger.ms": 20})
    producer.init_transactions()
    producer.begin_transaction()
    for first in range(0, rows, ROWS_A_TRANSACTION):
        before, end = first * 100, (first + ROWS_A_TRANSACTION) * 100
        count = min(ROWS_A_TRANSACTION, rows - first)
        for order in range(1, count + 1):
            number, lsn = first + order, before + order
            event = {
                "before": None,
                "after": {"id": number, "customer": number % 1000, "note": NOTE},
                "source": {"name": "shop", "schema": "public", "table": "orders", "txId": first, "lsn": lsn,
                           "sequence": f'["{before}","{lsn}"]'},
                "transaction": {"id": f"{first}:{lsn}", "total_order": order, "data_collection_order": order},
                "op": "c",
            }  # fmt: skip
            _produce(producer, DATA, str(number), event)
        ended = {"status": "END", "id": f"{first}:{end}", "event_count": count, "ts_ms": 1_700_000_000_000}
        _produce(producer, TRANSACTIONS, ended["id"], ended)
    producer.commit_transaction()


def _measure_ahead(bootstrap: str, messages: int) -> dict[str, int]:
    # Measures with a data topic of `messages` messages whose transaction has not ended.
    topics.create(bootstrap, AHEAD_DATA)
    topics.create(bootstrap, AHEAD_TRANSACTIONS, 1)
    producer = Producer(
        {"bootstrap.servers": bootstrap, "compression.type": "lz4", "queue.buffering.max.messages": 1_000_000}
    )
    # Different values, so that they are not compressed to almost nothing.
    chance = random.Random(7)  # noqa: S311 - no secret
    event = '{{"transaction":{{"id":"7:1000","total_order":1}},"note":"{:032x}"}}'
    values = [event.format(chance.getrandbits(128)).encode() for _ in range(AHEAD_VALUES)]
    for first in range(0, messages, AHEAD_CHUNK):
        count = min(AHEAD_CHUNK, messages - first)
        places = (number % topics.PARTITIONS for number in range(count))
        deque(map(producer.produce, repeat(AHEAD_DATA), cycle(values), repeat(b"key"), places), maxlen=0)
        producer.flush()
    found: dict[str, int] = answer_of(__name__, AHEAD, bootstrap, 0, 0, 0, deadline_s=DEADLINE_S)
    return {"ahead_messages": messages, **found}


def _read_ahead(bootstrap: str) -> dict[str, int]:
    from tailrace.testing.contexts import connector_context, task_context

    connector = KafkaJoin(bootstrap_servers=bootstrap, data=[AHEAD_DATA], transactions=AHEAD_TRANSACTIONS)
    connector.start(connector_context({}))
    (settings,) = connector.task_settings(1)
    task: Any = connector.create_task()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    task.start(task_context(settings))
    until_s = time.monotonic() + AHEAD_READ_S
    while time.monotonic() < until_s:
        task.poll(0.5)
    progress = task._flow.progress()  # noqa: SLF001 - what the metrics show
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    task.stop()
    return {
        "ahead_memory_mb": grown_kb >> 10,
        "ahead_queued_mb": progress.bytes_queued >> 20,
        "ahead_queued_messages": progress.rows_queued,
        "ahead_pauses": progress.pauses,
    }


def _produce(producer: Producer, topic: str, key: Any, document: Mapping[str, Any]) -> None:
    while True:
        try:
            return producer.produce(topic, json.dumps(document).encode(), str(key).encode())
        except BufferError:
            producer.poll(0.1)


def _run(how: str, bootstrap: str, turn: int, rows: int, transactions: int = 0) -> tuple[float, float, int]:
    # Returns seconds, CPU seconds and the number of transactions, which is an argument of the copy.
    arguments = (how, bootstrap, turn, rows, transactions)
    seconds, cpu_s, transactions = answer_of(__name__, *arguments, deadline_s=DEADLINE_S)
    return seconds, cpu_s, transactions


class _Watched(KafkaJoin):
    """The join, with an event that is set when `rows` records are committed.

    Polling the engine ten times a second took a twentieth of the measured time.
    """

    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__(**options)
        self._rows = rows
        self._committed: dict[str, int] = {}
        self.is_done = threading.Event()

    def create_task(self) -> SourceTask:
        """Return a task whose commits are counted."""
        task = super().create_task()
        task.commit = self._count  # type: ignore[method-assign]
        return task

    def _count(self, partition: Partition, offset: Offset) -> None:
        # Each partition has all its records from offset 0 on.
        self._committed[partition["partition"]] = offset["data"]
        if sum(self._committed.values()) >= self._rows:
            self.is_done.set()


def _join(bootstrap: str, turn: int, rows: int) -> tuple[float, float, int]:
    join = _Watched(
        rows,
        bootstrap_servers=bootstrap,
        data=[DATA],
        transactions=TRANSACTIONS,
        topic=f"{{topic}}-joined-{turn}",
    )
    engine = Engine(
        connector=join,
        name=f"join-{turn}",
        converter="bytes",
        options={"kafka": {"bootstrap_servers": bootstrap}, "atomic_source_offset_commit": True},
    )
    load_all()
    engine.start()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while not join.is_done.wait(1.0):
        if engine.error is not None:
            raise engine.error
        if time.perf_counter() > began_s + DEADLINE_S:
            raise TailraceError(Kind.INTERNAL, f"join {rows} records: not within {DEADLINE_S:.0f} s")
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    batches = sum(task.batches for task in engine.view().tasks)  # each is a transaction
    engine.close()
    return seconds, cpu_s, batches


def _copy(bootstrap: str, turn: int, rows: int, transactions: int) -> tuple[float, float, int]:
    target = f"copy-{turn}"
    topics.create(bootstrap, target)
    consumer = Consumer(
        {
            **READ_AHEAD,
            "bootstrap.servers": bootstrap,
            "group.id": target,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(DATA, number, OFFSET_BEGINNING) for number in range(topics.PARTITIONS)])
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": target,
            "linger.ms": 20,
            "compression.type": "lz4",
            "partitioner": "murmur2_random",
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    producer.init_transactions()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    copied = in_transaction = 0
    while copied < rows:
        messages = consumer.consume(COPY_TAKEN, 0.1)
        if not messages:
            continue
        if not in_transaction:
            producer.begin_transaction()
        for message in messages:
            if (error := message.error()) is not None:
                raise KafkaException(error)
            producer.produce(target, message.value(), message.key())
        copied += len(messages)
        in_transaction += len(messages)
        if in_transaction >= rows // transactions or copied >= rows:
            places = consumer.position(consumer.assignment())
            producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata())
            producer.commit_transaction()
            in_transaction = 0
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    consumer.close()
    return seconds, cpu_s, transactions


def _merge_rows_s() -> float:
    # Returns the data rows per second that the merge alone joins on one core.
    merge, seconds = Merge(Position()), 0.0
    transactions = MERGE_ROWS // ROWS_A_TRANSACTION
    numbers = np.arange(MERGE_ROWS, dtype=np.int64)
    for step in range(MERGES):
        first, first_transaction = step * MERGE_ROWS, step * transactions
        of_each = first_transaction + numbers // ROWS_A_TRANSACTION
        keys = pa.array(of_each).cast(pa.string())
        ids = np.arange(first_transaction, first_transaction + transactions, dtype=np.int64)
        data = DataRows(first + numbers, keys, of_each, numbers % ROWS_A_TRANSACTION + 1)
        counts = np.full(transactions, ROWS_A_TRANSACTION)
        ends = TransactionRows(ids, pa.array(ids).cast(pa.string()), ids + 1, counts)
        began_s = time.perf_counter()
        merge.add_data(data)
        merge.add_transactions(ends)
        joined = merge.take()
        seconds += time.perf_counter() - began_s
        if joined.rows != MERGE_ROWS:
            raise TailraceError(Kind.INTERNAL, f"merge {MERGE_ROWS} rows: {joined.rows} were joined")
    return MERGES * MERGE_ROWS / seconds


if __name__ == "__main__":
    how_, bootstrap_, *numbers = sys.argv[1:]
    turn_, rows_, transactions_ = map(int, numbers)
    if how_ == AHEAD:
        print(json.dumps(_read_ahead(bootstrap_)))
    elif how_ == JOIN:
        print(json.dumps(_join(bootstrap_, turn_, rows_)))
    else:
        print(json.dumps(_copy(bootstrap_, turn_, rows_, transactions_)))
