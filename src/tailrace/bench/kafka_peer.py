"""PostgreSQL to Kafka as Debezium's JSON, exactly once, in turn with Debezium's engine and a Kafka producer.

Database, broker and whoever is measured share the machine; each takes the same backlog from a slot of
its own. The peer's handler sends a batch, waits for all of it, and then marks it as done: at least once.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
import yaml

from tailrace.bench import backlog, debezium, table, topics
from tailrace.bench.kafka import cores
from tailrace.bench.report import Result, machine
from tailrace.errors import Kind, TailraceError

log = structlog.get_logger(__name__)

ROWS = 2_000_000
DEADLINE_S = 900.0
OURS, PEER = "ours", "peer"


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One timed pass: from the call of `run` until all is committed in Kafka. The start of the
    interpreter and its imports are left out.
    """

    seconds: float
    cpu_seconds: float


def measure(rows: int | None = None) -> Result:
    """Bring `rows` rows from PostgreSQL into Kafka, by our pipeline and by the peer.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if the peer is not here: there is nothing else to compare with.
    """
    rows = rows or ROWS
    if not debezium.is_here():
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT, "look for Debezium: it was not fetched", "make bench-peers"
        )
    with (
        table.server() as postgres,
        topics.cluster() as kafka,
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name,
    ):
        directory, dsn = Path(name), postgres.dsn()
        table.create_slot(dsn, PEER)
        backlog.prepare(dsn, OURS, directory / "log")
        table.load(dsn, rows)
        topics.warm_up(kafka.bootstrap)
        ours = _run(_file(directory, dsn, kafka.bootstrap))
        topics.require_rows(kafka.bootstrap, f"{OURS}.public.orders", rows)
        log.info("the pipeline has written the backlog", seconds=round(ours.seconds, 1))
        topics.create(kafka.bootstrap, f"{PEER}.public.orders")
        producer = {**debezium.PRODUCER, "bootstrap.servers": kafka.bootstrap}
        theirs = debezium.receive(postgres, PEER, rows, "kafka", cores(), directory, producer)
        topics.require_rows(kafka.bootstrap, f"{PEER}.public.orders", rows)
        log.info("and so has Debezium's engine", seconds=round(theirs.seconds_from_first, 1))
    rate, reference = rows / ours.seconds, rows / theirs.seconds_from_first
    return Result(
        name="kafka_peer",
        value=rate,
        unit="records/s",
        ratio=rate / reference,
        reference=f"Debezium {debezium.VERSION}'s engine with a Kafka producer, at least once",
        limit=f"the {cores()} cores, which server, broker, capture, and writing the documents share",
        setup=machine()
        | {
            "rows": rows,
            "rows_a_transaction": table.ROWS_A_TRANSACTION,
            "postgresql": 18,
            "partitions": topics.PARTITIONS,
            "peer_batch": debezium.BATCH_ROWS,
            "peer_queue": debezium.QUEUE_ROWS,
            "peer_threads": cores(),
            "peer_producer": debezium.PRODUCER,
        },
        details={
            "peer_records_s": round(reference),
            "cpu_us_a_record": round(ours.cpu_seconds / rows * 1e6, 2),
            "peer_cpu_us_a_record": round(theirs.cpu_seconds / rows * 1e6, 2),
        },
    )


def _file(directory: Path, dsn: str, bootstrap: str) -> Path:
    file = directory / "pipeline.yaml"
    document = {
        "name": "bench",
        "source": {
            "type": "postgresql",
            "dsn": dsn,
            "tables": ["public.orders"],
            "slot": OURS,
            "publication": table.PUBLICATION,
            "snapshot": "never",
        },
        "log": {"path": str(directory / "log")},
        "sinks": [topics.sink(bootstrap, OURS, atomic=True)],
    }
    file.write_text(yaml.safe_dump(document))
    return file


def _run(file: Path) -> PipelineRun:
    command = [sys.executable, "-m", __name__, str(file)]
    done = subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True)
    return PipelineRun(**json.loads(done.stdout.splitlines()[-1]))


def _run_here(file: Path) -> PipelineRun:
    from tailrace.config.load import load_engine
    from tailrace.pipeline.run import Run

    pipeline = Run(load_engine(file), until_caught_up=True)
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    pipeline.run()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return PipelineRun(seconds, cpu)


if __name__ == "__main__":
    print(json.dumps(asdict(_run_here(Path(sys.argv[1])))))
