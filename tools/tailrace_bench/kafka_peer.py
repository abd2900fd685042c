"""PostgreSQL to Kafka as Debezium's JSON, exactly once, alternating with Debezium's engine and a producer.

Database, broker and the measured program share the machine; each pass reads the same backlog from a separate
slot. The peer's handler sends a batch, waits until it is written, and then marks it as done: at least once.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import yaml

from tailrace.errors import Kind, TailraceError
from tailrace_bench.support import backlog, debezium, table, topics
from tailrace_bench.support.passes import Pass, cores, cpu_us, in_turn, timed
from tailrace_bench.support.process import answer_of
from tailrace_bench.support.report import Result, machine, median

if TYPE_CHECKING:
    from tailrace_servers.postgres import EmbeddedPostgres

log = structlog.get_logger(__name__)

ROWS = 1_000_000
TURNS = 3
DEADLINE_S = 900.0
OURS, PEER = "ours", "peer"


#: Our pass, from the call of `run` until everything is committed in Kafka, without the interpreter's start
#: and its imports; the peer's pass, from its first record.
Turn = tuple[Pass, Pass]


def measure(rows: int | None = None) -> Result:
    """Write `rows` rows from PostgreSQL to Kafka, with our pipeline and with the peer.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if the peer, the only reference, is not installed.
    """
    rows = rows or ROWS
    if not debezium.is_here():
        raise TailraceError(Kind.ENVIRONMENT_UNFIT, "find Debezium: it is not installed", "make bench-peers")
    with (
        table.server() as postgres,
        topics.cluster() as kafka,
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name,
    ):
        passes = _Passes(postgres, kafka.bootstrap, Path(name), rows)
        table.load(postgres.dsn(), rows)
        topics.warm_up(kafka.bootstrap)
        turns = [passes.turn(number) for number in range(TURNS)]
    return _result(rows, turns)


def _result(rows: int, turns: list[Turn]) -> Result:
    ratios = [theirs.seconds / ours.seconds for ours, theirs in turns]
    return Result(
        name="kafka_peer",
        value=rows / median([ours.seconds for ours, _ in turns]),
        unit="records/s",
        ratio=median(ratios),
        reference=f"Debezium {debezium.VERSION}'s engine with a Kafka producer, at least once",
        limit=f"the {cores()} cores, which server, broker, capture, and writing the documents share",
        setup=machine()
        | {
            "rows": rows,
            "turns": len(turns),
            "rows_a_transaction": table.ROWS_A_TRANSACTION,
            "postgresql": 18,
            "partitions": topics.PARTITIONS,
            "peer_batch": debezium.BATCH_ROWS,
            "peer_queue": debezium.QUEUE_ROWS,
            "peer_threads": cores(),
            "peer_producer": debezium.PRODUCER,
        },
        details={
            "ratios": [round(ratio, 2) for ratio in ratios],
            "peer_records_s": round(rows / median([theirs.seconds for _, theirs in turns])),
            "cpu_us_a_record": cpu_us([ours for ours, _ in turns], rows),
            "peer_cpu_us_a_record": cpu_us([theirs for _, theirs in turns], rows),
        },
    )


class _Passes:
    """Passes over one backlog; their slots are created before it."""

    def __init__(self, postgres: EmbeddedPostgres, bootstrap: str, directory: Path, rows: int) -> None:
        self._postgres = postgres
        self._bootstrap = bootstrap
        self._directory = directory
        self._rows = rows
        dsn = postgres.dsn()
        for number in range(TURNS):
            table.create_slot(dsn, f"{PEER}_{number}")
            backlog.prepare(dsn, f"{OURS}_{number}", self._log(number))

    def turn(self, number: int) -> Turn:
        """Bring the backlog into Kafka by either."""
        ours, theirs = in_turn(number, lambda: self._ours(number), lambda: self._theirs(number))
        log.info("a turn", number=number + 1, of=TURNS, ours=round(self._rows / ours.seconds),
                 theirs=round(self._rows / theirs.seconds))  # fmt: skip
        return ours, theirs

    def _log(self, number: int) -> Path:
        return self._directory / f"log-{number}"

    def _ours(self, number: int) -> Pass:
        slot = f"{OURS}_{number}"
        file = self._directory / f"{slot}.yaml"
        _write(file, self._postgres.dsn(), self._bootstrap, slot, self._log(number))
        found = Pass(**answer_of(__name__, file, deadline_s=DEADLINE_S))
        topics.take_away(self._bootstrap, f"{slot}.public.orders", self._rows)
        return found

    def _theirs(self, number: int) -> Pass:
        topic = f"{PEER}.public.orders"
        topics.create(self._bootstrap, topic)
        producer = {**debezium.PRODUCER, "bootstrap.servers": self._bootstrap}
        slot = f"{PEER}_{number}"
        found = debezium.receive(
            self._postgres, slot, self._rows, "kafka", cores(), self._directory, producer
        )
        topics.take_away(self._bootstrap, topic, self._rows)
        return Pass(found.seconds_from_first, found.cpu_seconds)


def _write(file: Path, dsn: str, bootstrap: str, slot: str, path: Path) -> None:
    document = {
        "name": slot,
        "source": table.source(dsn, slot),
        "log": {"path": str(path)},
        "sinks": [topics.sink(bootstrap, slot, atomic=True)],
    }
    file.write_text(yaml.safe_dump(document))


def _run_here(file: Path) -> Pass:
    from tailrace.config.load import load_engine
    from tailrace.pipeline.run import Run

    return timed(Run(load_engine(file), until_caught_up=True).run)


if __name__ == "__main__":
    print(json.dumps(asdict(_run_here(Path(sys.argv[1])))))
