"""Repeatable benchmarks: `tailrace bench NAME`.

Each except `stages` starts its own servers, loads the ten-column table of `table.py`, measures Tailrace
and its reference alternately in one run, and reports a ratio. Absolute figures vary with the machine's
load; the ratio is the result.
"""

from __future__ import annotations

import importlib
import signal
from typing import TYPE_CHECKING

from tailrace.warm import load_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace_bench.support.report import Result

#: Every benchmark and what it measures. The module of the same name has `measure(rows)`.
NAMES: dict[str, str] = {
    "capture": "PostgreSQL to the fsynced change log, against pg_recvlogical",
    "snapshot": "a table through four connections to the fsynced change log, against psql's COPY",
    "tables": "a first start on ten thousand empty tables, against a thousand",
    "decode": "wire bytes to typed Arrow columns, on one core",
    "vitess": "a keyspace to the fsynced change log, against a client that counts bytes",
    "vitess_rows": "responses of VStream to frames of the log, on one core, against protobuf's parser",
    "convert": "wire bytes to events in Debezium's JSON, on one core",
    "transforms": "transformations over captured changes, on one core",
    "replay": "change log through Spark to nothing, in typed columns",
    "e2e": "a backlog to Parquet and to Delta, exactly once, against pg_recvlogical",
    "stages": "the engine alone on a prepared source: hand-over, processing, commits",
    "idle": "what tasks cost to which nothing comes: CPU time of one, and of a hundred",
    "engine": "a backlog through the embedded engine to a handler, as JSON and as it is, against Debezium",
    "records": "a backlog to a handler that reads single records, against a plain loop over libpq",
    "kafka": "change log to Kafka: exactly once against at least once, and the curve of the interval",
    "kafka_transactions": "each small transaction in one of Kafka's, against a plain client",
    "kafka_peer": "a backlog to Kafka as JSON, exactly once, against Debezium and a Kafka producer",
    "kafka_spark": "change log to Kafka on Spark, exactly once, against Spark's own Kafka sink",
    "kafka_latency": "commit to record for a reader of committed records, against a plain client",
    "join": "changes in Kafka joined with their transactions, exactly once, against a plain copy",
    "join_spark": "changes in Kafka joined with their transactions in Spark, against its stream-stream join",
    "realtime": "commit to handler, at a given rate",
    "subscriptions": "commit to a subscriber in another process, at a given rate; and a thousand idle ones",
    "latency": "commit to visible row in a Parquet sink, at a given rate",
}


def run(name: str, *, rows: int | None = None, as_json: bool = False) -> int:
    """Run the benchmark `name` and print its result; return the exit status.

    It ends on SIGTERM as on Ctrl-C, even if a shell makes it ignore that, so that its servers end, too.

    :param rows: size of the table or backlog (for `latency`: rows per second; for `idle`: tasks; for
        `tables`: tables); `None`: the benchmark's default.
    :raises KeyError: if there is no such benchmark.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    measure = measurement(name)
    load_kernels()  # which is not measured
    measure(rows).print(as_json=as_json)
    return 0


def measurement(name: str) -> Callable[[int | None], Result]:
    """Return the function that measures the benchmark `name`.

    :raises KeyError: if there is no such benchmark.
    """
    if name not in NAMES:
        raise KeyError(name)
    measure: Callable[[int | None], Result] = importlib.import_module(f"tailrace_bench.{name}").measure
    return measure
