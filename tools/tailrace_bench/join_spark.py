"""`format("tailrace-join")` against Spark's stream-stream join of the same topics, which has state.

Each runs in a separate process, with micro-batches of the same number of offsets. The number of rows, and a
sum of hashes of key, value and transaction, show whether the results are equal.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import structlog

from tailrace.config import SparkConfig
from tailrace.errors import Kind, TailraceError
from tailrace.spark.session import session, warm
from tailrace_bench.join import DATA, ROWS_A_TRANSACTION, TRANSACTIONS, fill
from tailrace_bench.kafka_spark import JARS
from tailrace_bench.support import topics
from tailrace_bench.support.process import answer_of
from tailrace_bench.support.report import Result, machine

if TYPE_CHECKING:
    import psutil
    from pyspark.sql import DataFrame, SparkSession

log = structlog.get_logger(__name__)

ROWS = 200_000
OFFSETS_A_BATCH = 50_000
DEADLINE_S = 1800.0
MIB = 1 << 20
OURS, SPARKS = "tailrace-join", "stream-stream"

_SETTINGS = {
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}


def measure(rows: int | None = None) -> Result:
    """Join `rows` changes with each, one after the other.

    :raises TailraceError: `ENVIRONMENT_UNFIT` without Spark's Kafka source; `INTERNAL` if the rows differ.
    """
    rows = rows or ROWS
    if not any(JARS.glob("*.jar")):
        raise TailraceError(Kind.ENVIRONMENT_UNFIT, "find Spark's Kafka source", "make bench-peers")
    with topics.cluster() as kafka:
        fill(kafka.bootstrap, rows)
        ours, sparks = (_measured(how, kafka.bootstrap) for how in (OURS, SPARKS))
    if ours["found"] != sparks["found"] or ours["found"][0] != rows:
        raise TailraceError(
            Kind.INTERNAL, f"compare joins of {rows} rows: they gave {ours['found']} and {sparks['found']}"
        )
    return Result(
        name="join_spark",
        value=rows / ours["seconds"],
        unit="records/s",
        ratio=sparks["seconds"] / ours["seconds"],
        reference="Spark's stream-stream join, with its state in RocksDB",
        limit="Python's client of Kafka, which makes an object of each message that it reads",
        setup=machine()
        | {
            "rows": rows,
            "rows_a_transaction": ROWS_A_TRANSACTION,
            "offsets_a_batch": OFFSETS_A_BATCH,
            "partitions": topics.PARTITIONS,
        },
        details={
            f"{name}_{what}": value
            for name, found in (("ours", ours), ("sparks", sparks))
            for what, value in (
                ("records_s", round(rows / found["seconds"])),
                ("cpu_us_a_record", round(found["cpu_seconds"] / rows * 1e6, 1)),
                ("memory_mib", round(found["memory_bytes"] / MIB)),
                ("checkpoint_mib", round(found["checkpoint_bytes"] / MIB, 1)),
                ("local_state_mib", round(found["local_bytes"] / MIB, 1)),
            )
        },
    )


def _measured(how: str, bootstrap: str) -> dict[str, Any]:
    found: dict[str, Any] = answer_of(__name__, how, bootstrap, deadline_s=DEADLINE_S)
    log.info("joined", how=how, **found)
    return found


def _ours(spark: SparkSession, bootstrap: str) -> DataFrame:
    return (
        spark.readStream.format("tailrace-join")
        .option("bootstrapServers", bootstrap)
        .option("data", DATA)
        .option("transactions", TRANSACTIONS)
        .option("maxOffsetsPerTrigger", OFFSETS_A_BATCH)
        .load()
        .select("key", "value", "transaction_id")
    )


def _sparks(spark: SparkSession, bootstrap: str) -> DataFrame:
    # What a user would write: both sides keep an hour of state, as writing a transaction may take that long.
    from pyspark.sql import functions as f

    def topic(name: str) -> DataFrame:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("kafka.isolation.level", "read_committed")
            .option("subscribe", name)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", OFFSETS_A_BATCH)
            .load()
        )

    value = f.col("value").cast("string")
    changes = (
        topic(DATA)
        .select("key", "value", f.col("timestamp").alias("at"),
                f.substring_index(f.get_json_object(value, "$.transaction.id"), ":", 1).alias("number"))
        .withWatermark("at", "1 hour")
    )  # fmt: skip
    ends = (
        topic(TRANSACTIONS)
        .select(f.get_json_object(value, "$.id").alias("transaction_id"),
                f.get_json_object(value, "$.status").alias("status"), f.col("timestamp").alias("ended"))
        .where("status = 'END'")
        .withColumn("ended_number", f.substring_index("transaction_id", ":", 1))
        .withWatermark("ended", "1 hour")
    )  # fmt: skip
    near = f.expr("number = ended_number and at between ended - interval 1 hour and ended + interval 1 hour")
    return changes.join(ends, near).select("key", "value", "transaction_id")


def _run_here(how: str, bootstrap: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        checkpoint, local = Path(name, "checkpoint"), Path(name, "local")
        conf = {
            **_SETTINGS,
            "spark.driver.extraClassPath": ":".join(sorted(str(jar) for jar in JARS.glob("*.jar"))),
            "spark.local.dir": str(local),
        }
        spark = session(SparkConfig.model_validate({"conf": conf}), "tailrace-bench")
        warm(spark)
        frame = (_ours if how == OURS else _sparks)(spark, bootstrap)
        found = [0, 0]

        def take(batch: DataFrame, _: int) -> None:
            counted = batch.selectExpr(
                "count(*)", "sum(cast(xxhash64(key, value, transaction_id) as decimal(38, 0)))"
            ).first()
            assert counted is not None, "an aggregate has a row"
            found[0] += counted[0]
            found[1] += int(counted[1] or 0)

        with _Watch(checkpoint, local) as watch:
            query = (
                frame.writeStream.foreachBatch(take)
                .option("checkpointLocation", str(checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
        spark.stop()
    return {"found": [found[0], str(found[1])], **watch.found}


class _Watch:
    """Measures this process and its children: seconds, CPU time, maxima of memory and of two directories."""

    def __init__(self, checkpoint: Path, local: Path) -> None:
        import psutil

        self._own = psutil.Process()
        self._directories = {"checkpoint_bytes": checkpoint, "local_bytes": local}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.found: dict[str, float] = dict.fromkeys(("memory_bytes", *self._directories), 0.0)

    def __enter__(self) -> Self:
        self._began_s, self._cpu_s = time.perf_counter(), self._cpu()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.found |= {
            "seconds": time.perf_counter() - self._began_s,
            "cpu_seconds": self._cpu() - self._cpu_s,
        }
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.5):
            now = {name: float(_size(path)) for name, path in self._directories.items()}
            now["memory_bytes"] = self._sum(lambda process: float(process.memory_full_info().pss))
            for name, size in now.items():
                self.found[name] = max(self.found[name], size)

    def _cpu(self) -> float:
        return self._sum(lambda process: sum(process.cpu_times()[:4]))

    def _sum(self, of: Callable[[psutil.Process], float]) -> float:
        import psutil

        total = 0.0
        for process in (self._own, *self._own.children(recursive=True)):
            try:
                total += of(process)
            except psutil.Error:
                continue
        return total


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


if __name__ == "__main__":
    print(json.dumps(_run_here(*sys.argv[1:])))
