"""PostgreSQL to a handler of single records that reads each row, alternating with a plain loop over libpq."""

from __future__ import annotations

import json
import select
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from tailrace_bench.support import backlog, table
from tailrace_bench.support.process import answer_of
from tailrace_bench.support.report import Result, machine, median

log = structlog.get_logger(__name__)

#: Number of rows, so large that the start of an engine is a small part of a pass.
ROWS = 1_000_000
#: Number of passes, each with a run of the loop and of every order.
PASSES = 3
DEADLINE_S = 600.0

LOOP = "loop"
ORDERS = ("ordered", "unordered", "key")


def measure(rows: int | None = None) -> Result:
    """Read `rows` rows of a backlog with a plain loop, and with `on_record` in each order, alternating.

    Both read every row as a dictionary: the loop with texts, the handler `record.after` with Python's types.
    The ratio is the median of the passes' ratios. The details also have the ratio of the CPU times, which is
    more reliable if the machine has other load.
    """
    rows = rows or ROWS
    runs: dict[str, list[_Run]] = {how: [] for how in (LOOP, *ORDERS)}
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        directory, dsn = Path(name), postgres.dsn()
        for turn in range(PASSES):
            table.create_slot(dsn, f"{LOOP}_{turn}")
            for order in ORDERS:
                backlog.prepare(dsn, f"{order}_{turn}", directory / f"{order}_{turn}")
        table.load(dsn, rows)
        for turn in range(PASSES):
            for how, found in runs.items():
                found.append(_run(dsn, how, f"{how}_{turn}", directory, rows))
            log.info(
                "a pass is done", **{how: round(rows / found[-1].seconds) for how, found in runs.items()}
            )
    return _result(rows, runs)


def _result(rows: int, runs: Mapping[str, list[_Run]]) -> Result:
    rates = {how: [rows / run.seconds for run in found] for how, found in runs.items()}
    for_cpu = {how: [rows / run.cpu_seconds for run in found] for how, found in runs.items()}

    def ratios(of: Mapping[str, list[float]], how: str, to: str) -> list[float]:
        return [mine / theirs for mine, theirs in zip(of[how], of[to], strict=True)]

    details: dict[str, Any] = {}
    for how in runs:
        details[f"{how}_records_s"] = round(median(rates[how]))
        details[f"{how}_cpu_us"] = round(1e6 / median(for_cpu[how]), 2)
    details["ordered_to_loop"] = [round(ratio, 2) for ratio in ratios(rates, "ordered", LOOP)]
    for how, to in (("ordered", LOOP), ("unordered", "ordered"), ("key", "ordered")):
        if to != LOOP:
            details[f"{how}_to_{to}"] = round(median(ratios(rates, how, to)), 2)
        details[f"{how}_to_{to}_for_cpu"] = round(median(ratios(for_cpu, how, to)), 2)
    return Result(
        name="records",
        value=median(rates["ordered"]),
        unit="records/s",
        ratio=median(ratios(rates, "ordered", LOOP)),
        reference="a loop over psycopg.pq that decodes rows to dictionaries of texts",
        limit="Python, which makes a dictionary of each row and calls a function with it, on one core",
        setup=machine()
        | {"rows": rows, "rows_a_transaction": table.ROWS_A_TRANSACTION, "postgresql": 18, "passes": PASSES},
        details=details,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One pass of the loop or of an order, without the interpreter's start and imports."""

    seconds: float
    cpu_seconds: float


def _run(dsn: str, how: str, slot: str, directory: Path, rows: int) -> _Run:
    found = answer_of(__name__, dsn, how, slot, directory / slot, rows, deadline_s=DEADLINE_S)
    return _Run(**found)


def _loop(dsn: str, slot: str, rows: int) -> _Run:
    """Measure a program without Tailrace, from connecting to the last row."""
    from psycopg import pq

    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    connection = pq.PGconn.connect(f"{dsn}?replication=database".encode())
    options = f"proto_version '1', publication_names '{table.PUBLICATION}'"
    started = connection.exec_(f"START_REPLICATION SLOT {slot} LOGICAL 0/0 ({options})".encode())
    assert started.status == pq.ExecStatus.COPY_BOTH, started.error_message
    columns: list[str] = []
    seen = 0
    while seen < rows:
        length, message = connection.get_copy_data(1)
        if not length:
            select.select([connection.socket], [], [], DEADLINE_S)
            connection.consume_input()
            continue
        data = bytes(message)
        if data[:1] != b"w":
            continue
        kind = data[25:26]
        if kind == b"R":
            columns = _columns(data)
        elif kind == b"I":
            after = _row(data, columns)
            seen += after["id"] is not None
    run = _Run(time.perf_counter() - began_s, time.process_time() - cpu_began_s)
    connection.finish()
    return run


def _columns(data: bytes) -> list[str]:
    # After the header and the table's OID: its schema and name, the identity, the number of columns.
    at = data.index(b"\0", data.index(b"\0", 30) + 1) + 2
    count, at = int.from_bytes(data[at : at + 2], "big"), at + 2
    names = []
    for _ in range(count):
        end = data.index(b"\0", at + 1)
        names.append(data[at + 1 : end].decode())
        at = end + 9
    return names


def _row(data: bytes, columns: list[str]) -> dict[str, str | None]:
    # After the header, the table's OID, `N` and the number of columns.
    at = 33
    row: dict[str, str | None] = {}
    for name in columns:
        kind, at = data[at], at + 1
        if kind != ord("t"):
            row[name] = None
            continue
        length, at = int.from_bytes(data[at : at + 4], "big"), at + 4
        row[name] = data[at : at + length].decode()
        at += length
    return row


class _Reading:
    """A handler that reads each row, and stops the engine at the last one."""

    def __init__(self, rows: int) -> None:
        from tailrace import StopEngine

        self.ended_s = self.cpu_ended_s = 0.0
        self._left = iter(range(rows - 1, -1, -1))
        self._end = StopEngine

    def take(self, record: Any) -> None:
        assert record.after["id"] is not None
        if not next(self._left):  # atomic, as several threads may count at once
            self.ended_s, self.cpu_ended_s = time.perf_counter(), time.process_time()
            raise self._end


def _engine(dsn: str, order: str, slot: str, log_path: str, rows: int) -> _Run:
    from tailrace import Engine

    handler = _Reading(rows)
    engine = Engine(
        {
            "name": "bench",
            "source": table.source(dsn, slot),
            "log": {"path": log_path},
            "engine": {"record_processing": {"order": order}},
        },
        on_record=handler.take,
    )
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    engine.run()
    return _Run(handler.ended_s - began_s, handler.cpu_ended_s - cpu_began_s)


if __name__ == "__main__":
    _dsn, _how, _slot, _log, _rows = sys.argv[1:]
    _measured = (
        _loop(_dsn, _slot, int(_rows)) if _how == LOOP else _engine(_dsn, _how, _slot, _log, int(_rows))
    )
    print(json.dumps(asdict(_measured)))
