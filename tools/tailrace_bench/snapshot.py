"""A table's initial snapshot to the fsynced change log, alternating with psql's COPY of the same ranges."""

from __future__ import annotations

import resource
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

from tailrace.config import PostgresSource
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.catalog import published_tables
from tailrace.sources.postgres.snapshot.chunk_planner import plan_table
from tailrace.sources.postgres.snapshot.chunks import chunks_of
from tailrace_bench.support import backlog, table
from tailrace_bench.support.pg_recvlogical import ReceiverRun
from tailrace_bench.support.report import Result, machine, median
from tailrace_servers.postgres import EmbeddedPostgres

ROWS = 5_000_000
TURNS = 3
ROWS_A_TRANSACTION = 100_000

DEADLINE_S = 600.0


def measure(rows: int | None = None) -> Result:
    """Measure the snapshot of a table of `rows` rows in three turns each."""
    rows = rows or ROWS
    source = PostgresSource.model_validate({"type": "postgresql", "publication": table.PUBLICATION})
    connections = source.snapshot_connections
    ours: list[backlog.CaptureRun] = []
    theirs: list[ReceiverRun] = []
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        dsn = postgres.dsn()
        table.load(dsn, rows, rows_a_transaction=ROWS_A_TRANSACTION)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("vacuum (freeze, analyze) orders")
        commands = _commands(dsn, source)
        for turn in range(TURNS):
            theirs.append(_copy_by_psql(postgres, commands, connections))
            log = Path(directory) / f"log-{turn}"
            ours.append(backlog.snapshot(dsn, f"ours_{turn}", log))
            table.drop_slot(dsn, f"ours_{turn}")
    rates = [run.rows / run.seconds for run in ours]
    reference = [rows / run.seconds for run in theirs]
    return Result(
        name="snapshot",
        value=median(rates),
        unit="rows/s",
        ratio=median([a / b for a, b in zip(rates, reference, strict=True)]),
        reference=f"{connections} parallel psql COPY TO STDOUT",
        limit="the cores, of which the server's making of text takes most",
        setup=machine() | {"rows": rows, "connections": connections, "chunks": len(commands), "turns": TURNS,
                           "postgresql": 18},
        details={
            "reference_rows_s": round(median(reference)),
            "cpu_us_a_row": round(median([run.cpu_seconds / run.rows * 1e6 for run in ours]), 2),
            "reference_cpu_us_a_row": round(median([run.cpu_seconds / rows * 1e6 for run in theirs]), 2),
            "rss_mb_max": round(max(run.rss_bytes_max for run in ours) / 1e6),
            "log_mb": round(max(run.log_bytes for run in ours) / 1e6),
        },
    )  # fmt: skip


def _commands(dsn: str, source: PostgresSource) -> list[str]:
    """Return the COPY command of each chunk of the snapshot."""
    import threading

    session = Session.connect(source.model_copy(update={"dsn": dsn}), threading.Event())
    try:
        [orders] = published_tables(session, source)
        columns = [column.name for column in orders.columns]
        plan = plan_table(session, orders, source)
        return [chunk.copy_command(orders.name, columns, ()) for chunk in chunks_of(plan.relations)]
    finally:
        session.close()


def _copy_by_psql(postgres: EmbeddedPostgres, commands: list[str], connections: int) -> ReceiverRun:
    """Run the commands with several psql at once, which discard the rows."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    running = []
    for number in range(connections):
        share = [word for command in commands[number::connections] for word in ("-c", command)]
        if share:
            program = [str(postgres.bin / "psql"), "-X", "-q", "-d", postgres.dsn(), *share]
            running.append(subprocess.Popen(program, stdout=subprocess.DEVNULL))
    status = [process.wait(DEADLINE_S) for process in running]
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if any(status):
        raise subprocess.CalledProcessError(max(status), "psql")
    return ReceiverRun(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
