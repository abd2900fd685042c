"""Commit to visible record: the time from PostgreSQL's commit until a committed record is read from Kafka.

Once without an interval between batches, so that only the work and the cluster take time, and once with the
default interval. In addition the latency of a plain transactional client: from the start of its transaction
until a reader has its records.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Consumer, Producer

from tailrace.config.kafka import KafkaSinkConfig
from tailrace.errors import Kind, TailraceError
from tailrace_bench.latency import ROWS_A_TRANSACTION, write
from tailrace_bench.support import table, topics
from tailrace_bench.support.process import BenchPipeline
from tailrace_bench.support.report import Result, machine

ROWS_A_SECOND = 200
WARM_UP_S = 5.0
MEASURED_S = 20.0
_TIMEOUT_S = 60.0

#: Returns the commit time in a record's value, in microseconds since 1970.
CommittedUs = Callable[[Any], int]


def measure(rows: int | None = None) -> Result:
    """Measure each at `rows` rows per second for twenty seconds, after five of warm-up."""
    rate = rows or ROWS_A_SECOND
    with topics.cluster() as kafka:
        topics.warm_up(kafka.bootstrap)
        plain = _plain(kafka.bootstrap, rate)
        at_once = _ours(kafka.bootstrap, rate, "at_once", {"interval_ms": 0})
        usual = _ours(kafka.bootstrap, rate, "usual", {})
    return Result(
        name="kafka_latency",
        value=at_once["p50_ms"],
        unit="ms (median), without an interval between batches",
        ratio=plain["p50_ms"] / at_once["p50_ms"],
        reference="a plain transactional client's, from its producer to its reader (above 1 is faster)",
        limit="the cluster's answers to a transaction, then capture's fsync; by default interval_ms",
        setup=machine() | {"rows_a_second": rate, "rows_a_transaction": ROWS_A_TRANSACTION},
        details={"at_once": at_once, "interval_ms_by_default": usual, "plain_client": plain},
    )


def _ours(bootstrap: str, rate: int, name: str, settings: dict[str, Any]) -> dict[str, float]:
    topic = f"{name}.public.orders"
    topics.create(bootstrap, topic)
    sink = topics.sink(bootstrap, name, atomic=True) | settings
    KafkaSinkConfig.model_validate(sink)
    stop = threading.Event()
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        writer = threading.Thread(target=write, args=(postgres.dsn(), rate, stop))
        with (
            BenchPipeline(Path(directory), name, postgres.dsn(), sink) as pipeline,
            topics.reader(bootstrap, topic) as reader,
        ):
            writer.start()
            try:
                pipeline.wait_until(lambda: reader.poll(0.0) is not None, 0.05)
                return _observed(reader, lambda value: int(value["source"]["ts_us"]))
            finally:
                stop.set()
                writer.join(_TIMEOUT_S)


def _plain(bootstrap: str, rate: int) -> dict[str, float]:
    topics.create(bootstrap, "plain")
    stop = threading.Event()

    def produce() -> None:
        producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "plain"})
        producer.init_transactions(_TIMEOUT_S)
        while not stop.is_set():
            producer.begin_transaction()
            value = json.dumps({"us": time.time_ns() // 1000, "row": "x" * 400})
            for number in range(ROWS_A_TRANSACTION):
                producer.produce("plain", value, str(number))
            producer.commit_transaction(_TIMEOUT_S)
            stop.wait(ROWS_A_TRANSACTION / rate)

    writer = threading.Thread(target=produce)
    with topics.reader(bootstrap, "plain") as reader:
        writer.start()
        try:
            return _observed(reader, lambda value: int(value["us"]))
        finally:
            stop.set()
            writer.join(_TIMEOUT_S)


def _observed(reader: Consumer, committed_us: CommittedUs) -> dict[str, float]:
    began, measured = time.monotonic(), []
    while (now := time.monotonic() - began) < WARM_UP_S + MEASURED_S:
        message = reader.poll(0.1)
        seen_us = time.time_ns() / 1000
        value = None if message is None else message.value()
        if value is not None and now > WARM_UP_S:
            measured.append((seen_us - committed_us(json.loads(value))) / 1e3)
    if not measured:
        raise TailraceError(Kind.INTERNAL, "read what is written to Kafka: nothing came")
    points = {f"p{p}_ms": round(float(np.percentile(measured, p)), 1) for p in (50, 95, 99)}
    return points | {"max_ms": round(max(measured), 1), "records": len(measured)}
