"""The first start on a database of many empty tables: the time per table, with all and with a tenth."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg
import yaml

from tailrace_bench.support.report import Result, machine
from tailrace_servers.install import find_install
from tailrace_servers.postgres import EmbeddedPostgres

TABLES = 10_000
DEADLINE_S = 1800.0
#: Number of tables created per transaction: the server has a lock for each of them.
TABLES_A_TRANSACTION = 500


@dataclass(frozen=True, slots=True)
class _Start:
    """One start until the pipeline has caught up. Seconds; `cpu_s` is without the server's CPU time."""

    seconds: float
    cpu_s: float


def measure(rows: int | None = None) -> Result:
    """Start `tailrace run --until-caught-up` without a sink on a tenth of the tables, and on all.

    :param rows: number of tables; default: ten thousand.
    """
    tables = rows or TABLES
    few = max(1, tables // 10)
    settings = {"max_locks_per_transaction": "1024"}
    with (
        EmbeddedPostgres(find_install(18), settings=settings, durable=False) as postgres,
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory,
    ):
        starts = {}
        for count in (few, tables):
            postgres.create_database(f"tables_{count}")
            dsn = postgres.dsn(f"tables_{count}")
            _make(dsn, count)
            starts[count] = _start(dsn, count, Path(directory))
    each = {count: start.seconds / count for count, start in starts.items()}
    return Result(
        name="tables",
        value=round(starts[tables].seconds, 1),
        unit=f"s, {tables} empty tables",
        ratio=round(each[tables] / each[few], 2),
        reference=f"the time a table takes with {few} (1: grows with their number, 10: with its square)",
        limit="making the publication, and one look at the catalogue for all tables",
        setup=machine() | {"tables": tables, "postgresql": 18},
        details={
            "cpu_s": round(starts[tables].cpu_s, 1),
            "few_s": round(starts[few].seconds, 1),
            "few_cpu_s": round(starts[few].cpu_s, 1),
            "ms_a_table": round(each[tables] * 1000, 2),
        },
    )


def _make(dsn: str, count: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for first in range(0, count, TABLES_A_TRANSACTION):
            numbers = range(first, min(count, first + TABLES_A_TRANSACTION))
            made = [f"create table t{number} (id int primary key, what text)" for number in numbers]
            connection.execute("; ".join(made).encode())


def _start(dsn: str, count: int, directory: Path) -> _Start:
    file = directory / f"tables-{count}.yaml"
    source = {"type": "postgresql", "dsn": dsn, "tables": ["public.*"], "slot": f"tables_{count}"}
    log = {"path": str(directory / f"log-{count}")}
    file.write_text(yaml.safe_dump({"name": f"tables-{count}", "source": source, "log": log, "sinks": []}))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "tailrace", "run", str(file), "--until-caught-up"],
        check=True, capture_output=True, timeout=DEADLINE_S,
    )  # fmt: skip
    seconds = time.perf_counter() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _Start(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
