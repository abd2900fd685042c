"""PostgreSQL to a handler of single records that reads each row, in turn with a plain loop over libpq."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from tailrace_bench.support import backlog, table
from tailrace_bench.support.report import Result, machine, median

log = structlog.get_logger(__name__)

ROWS = 200_000
#: Each has a turn of the loop and of every order.
PASSES = 3
DEADLINE_S = 600.0

LOOP = "loop"
ORDERS = ("ordered", "unordered", "key")


def measure(rows: int | None = None) -> Result:
    """Have `rows` rows read from a backlog by a plain loop, and by `on_record` in each order, in turn.

    Both read every row as a dictionary: the loop of texts, the handler `record.after`, of Python's types.
    The ratio is the median of the passes' ratios.
    """
    rows = rows or ROWS
    rates: dict[str, list[float]] = {how: [] for how in (LOOP, *ORDERS)}
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        directory, dsn = Path(name), postgres.dsn()
        for turn in range(PASSES):
            table.create_slot(dsn, f"{LOOP}_{turn}")
            for order in ORDERS:
                backlog.prepare(dsn, f"{order}_{turn}", directory / f"{order}_{turn}")
        table.load(dsn, rows)
        for turn in range(PASSES):
            for how, found in rates.items():
                found.append(rows / _run(dsn, how, f"{how}_{turn}", directory, rows))
            log.info("a pass is done", **{how: round(found[-1]) for how, found in rates.items()})
    return _result(rows, rates)


def _result(rows: int, rates: Mapping[str, list[float]]) -> Result:
    def ratio(how: str, to: str) -> float:
        return median([mine / theirs for mine, theirs in zip(rates[how], rates[to], strict=True)])

    details: dict[str, Any] = {f"{how}_records_s": round(median(found)) for how, found in rates.items()}
    details["ordered_to_loop"] = [
        round(mine / theirs, 2) for mine, theirs in zip(rates["ordered"], rates[LOOP], strict=True)
    ]
    for order in ORDERS[1:]:
        details[f"{order}_to_ordered"] = round(ratio(order, "ordered"), 2)
    return Result(
        name="records",
        value=median(rates["ordered"]),
        unit="records/s",
        ratio=ratio("ordered", LOOP),
        reference="a loop over psycopg.pq that decodes rows to dictionaries of texts",
        limit="Python, which makes a dictionary of each row and calls a function with it, on one core",
        setup=machine()
        | {"rows": rows, "rows_a_transaction": table.ROWS_A_TRANSACTION, "postgresql": 18, "passes": PASSES},
        details=details,
    )


def _run(dsn: str, how: str, slot: str, directory: Path, rows: int) -> float:
    command = [sys.executable, "-m", __name__, dsn, how, slot, str(directory / slot), str(rows)]
    done = subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True)
    seconds: float = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _loop(dsn: str, slot: str, rows: int) -> float:
    """Return the seconds that a program without Tailrace takes, from connecting to the last row."""
    from psycopg import pq

    began_s = time.perf_counter()
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
    seconds = time.perf_counter() - began_s
    connection.finish()
    return seconds


def _columns(data: bytes) -> list[str]:
    # Behind the header and the table's OID: its schema and name, the identity, the number of columns.
    at = data.index(b"\0", data.index(b"\0", 30) + 1) + 2
    count, at = int.from_bytes(data[at : at + 2], "big"), at + 2
    names = []
    for _ in range(count):
        end = data.index(b"\0", at + 1)
        names.append(data[at + 1 : end].decode())
        at = end + 9
    return names


def _row(data: bytes, columns: list[str]) -> dict[str, str | None]:
    # Behind the header, the table's OID, `N` and the number of columns.
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
    """A handler that reads each row, and asks for the end at the last one."""

    def __init__(self, rows: int) -> None:
        self.ended_s = 0.0
        self._left = iter(range(rows - 1, -1, -1))

    def take(self, record: Any) -> None:
        from tailrace import StopEngine

        assert record.after["id"] is not None
        if not next(self._left):  # also where several threads count at once
            self.ended_s = time.perf_counter()
            raise StopEngine


def _engine(dsn: str, order: str, slot: str, log_path: str, rows: int) -> float:
    from tailrace import Engine

    handler = _Reading(rows)
    engine = Engine(
        {
            "name": "bench",
            "source": {
                "type": "postgresql",
                "dsn": dsn,
                "tables": ["public.orders"],
                "slot": slot,
                "publication": table.PUBLICATION,
                "snapshot": "never",
            },
            "log": {"path": log_path},
            "engine": {"record_processing": {"order": order}},
        },
        on_record=handler.take,
    )
    began_s = time.perf_counter()
    engine.run()
    return handler.ended_s - began_s


if __name__ == "__main__":
    _dsn, _how, _slot, _log, _rows = sys.argv[1:]
    _seconds = (
        _loop(_dsn, _slot, int(_rows)) if _how == LOOP else _engine(_dsn, _how, _slot, _log, int(_rows))
    )
    print(json.dumps(_seconds))
