"""Commit to handler: how long after PostgreSQL's commit an engine's handler is called with the row.

From memory and from the log, and through Debezium's engine, one after another while rows are written.
Then, on a backlog, what real time costs capture: with a handler that keeps up, and with one that hangs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.errors import Kind, TailraceError
from tailrace_bench.latency import ROWS_A_TRANSACTION, write
from tailrace_bench.support import backlog, debezium, histogram, table
from tailrace_bench.support.report import Result, machine

ROWS_A_SECOND = 5_000
WARM_UP_S = 5.0
MEASURED_S = 20.0
PERCENTILES = (50, 90, 95, 99, 99.9)
BACKLOG_ROWS = 500_000
PICTURE = Path("docs") / "realtime-latency.svg"
_START_DEADLINE_S = 60.0
_RUN_DEADLINE_S = 300.0


def measure(rows: int | None = None) -> Result:
    """Measure at `rows` rows a second, each way for twenty seconds after five of warm-up."""
    rate = rows or ROWS_A_SECOND
    backlog_rows = BACKLOG_ROWS if rows is None else 10 * rows
    measured: dict[str, np.ndarray] = {}
    cpu: dict[str, float] = {}
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        dsn, directory = postgres.dsn(), Path(name)
        for place, (way, realtime) in enumerate((("from memory", True), ("from the log", False))):
            slot, log_path = f"realtime_{place}", directory / f"log-{place}"
            backlog.prepare(dsn, slot, log_path)
            with _writing(dsn, rate, place, slot):
                settings = {"slot": slot, "log": str(log_path), "realtime": realtime}
                settings |= {"warm_up_s": WARM_UP_S, "measured_s": MEASURED_S}
                found = _child("latency", {"dsn": dsn, **settings})
            measured[way] = np.array(found["ms"])
            cpu[f"cpu_us_a_row_{way.replace(' ', '_')}"] = found["cpu_us_a_row"]
        if debezium.is_here():
            table.create_slot(dsn, "peer")
            with _writing(dsn, rate, 2, "peer"):
                wanted = int(rate * (WARM_UP_S + MEASURED_S))
                theirs = debezium.latencies(postgres, "peer", wanted, directory)
            measured["Debezium's engine"] = np.array(theirs[int(rate * WARM_UP_S) :]) / 1e3
        costs = _costs(dsn, directory, backlog_rows)
    if rows is None and PICTURE.parent.is_dir():
        histogram.draw(PICTURE, f"From the commit to the handler, {rate:,} rows a second", measured)
    ours = float(np.median(measured["from memory"]))
    peer = measured.get("Debezium's engine")
    return Result(
        name="realtime",
        value=round(ours, 2),
        unit="ms (median)",
        ratio=None if peer is None else round(float(np.median(peer)) / ours, 2),
        reference="" if peer is None else "Debezium's engine, its poll interval at 1 ms (above 1 is faster)",
        limit="PostgreSQL's sender, then capture's fsync, then decoding and the hand-over to the handler",
        setup=machine() | {"rows_a_second": rate, "rows_a_transaction": ROWS_A_TRANSACTION},
        details={way: _points(found) for way, found in measured.items()} | cpu | costs,
    )


def _points(found: np.ndarray) -> dict[str, float]:
    points = {f"p{p:g}_ms": round(float(np.percentile(found, p)), 2) for p in PERCENTILES}
    return points | {"max_ms": round(float(found.max()), 1), "rows": len(found)}


@contextlib.contextmanager
def _writing(dsn: str, rate: int, place: int, slot: str) -> Iterator[None]:
    """Have rows written beside, with keys of their own, from when somebody reads `slot`: no backlog."""
    stop = threading.Event()

    def run() -> None:
        table.wait_until_read(dsn, slot, stop)
        write(dsn, rate, stop, first=1 + place * 100_000_000)

    writer = threading.Thread(target=run)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join(_START_DEADLINE_S)


def _costs(dsn: str, directory: Path, rows: int) -> dict[str, Any]:
    """Return how fast a backlog is captured with handlers, to capture alone, by the wall clock and by CPU."""
    ways = {"alone": "none", "keeps up": "counts", "hangs": "hangs"}
    for place, handler in enumerate(ways.values()):
        backlog.prepare(dsn, f"costs_{place}", directory / f"costs-{place}-{handler}")
    table.load(dsn, rows, first=900_000_000)
    found = {}
    for place, (way, handler) in enumerate(ways.items()):
        settings = {"slot": f"costs_{place}", "log": str(directory / f"costs-{place}-{handler}")}
        found[way] = _child(
            "costs", {"dsn": dsn, **settings, "realtime": True, "handler": handler, "rows": rows}
        )
    alone = found["alone"]
    return {
        "capture_rows_a_second": round(rows / alone["captured_s"]),
        "throughput_with_handler_to_capture_alone": round(
            alone["captured_s"] / found["keeps up"]["handled_s"], 2
        ),
        "capture_beside_hanging_handler_to_alone": round(
            alone["captured_s"] / found["hangs"]["captured_s"], 2
        ),
        "capture_cpu_beside_hanging_handler_to_alone": round(alone["cpu_s"] / found["hangs"]["cpu_s"], 2),
    }


def _child(what: str, settings: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, what, json.dumps(settings)]
    done = subprocess.run(command, check=True, timeout=_RUN_DEADLINE_S, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class _Timing:
    """A handler that notes how long ago each row was committed, and asks for the end in time."""

    def __init__(self, warm_up_s: float, measured_s: float) -> None:
        self.milliseconds: list[np.ndarray] = []
        self._warm_up_s, self._until_s = warm_up_s, warm_up_s + measured_s
        self._began_s = 0.0
        self.cpu_before_s = 0.0  # at the end of the warm-up

    def take(self, batch: Any) -> None:
        from tailrace import StopEngine

        seen_us = time.time_ns() / 1000
        self._began_s = self._began_s or time.monotonic()
        elapsed_s = time.monotonic() - self._began_s
        if elapsed_s > self._warm_up_s:
            self.cpu_before_s = self.cpu_before_s or time.process_time()
            self.milliseconds += [(seen_us - group.wire.commit_time_us) / 1e3 for group in batch.groups]
        if elapsed_s > self._until_s:
            raise StopEngine


def _engine_settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "bench",
        "source": {
            "type": "postgresql",
            "dsn": settings["dsn"],
            "tables": ["public.orders"],
            "slot": settings["slot"],
            "publication": table.PUBLICATION,
            "snapshot": "never",
        },
        "log": {"path": settings["log"]},
        "realtime": settings["realtime"],
    }


def _latency(settings: dict[str, Any]) -> dict[str, Any]:
    from tailrace import Engine

    handler = _Timing(settings["warm_up_s"], settings["measured_s"])
    Engine(_engine_settings(settings), on_batch=handler.take).run()
    cpu_s = time.process_time() - handler.cpu_before_s
    if not handler.milliseconds:
        raise TailraceError(Kind.INTERNAL, "hand rows to a handler: nothing came")
    found = np.concatenate(handler.milliseconds)
    return {"ms": found.round(3).tolist(), "cpu_us_a_row": round(cpu_s * 1e6 / len(found), 1)}


def _measure_costs(settings: dict[str, Any]) -> dict[str, Any]:
    """Capture a backlog beside a handler; return seconds from the first look on."""
    from tailrace import Engine
    from tailrace.changelog.reader import LogReader

    handled, wanted, goes_on = [0, 0.0], settings["rows"], threading.Event()

    def count(batch: Any) -> None:
        handled[0] += batch.polled
        handled[1] = time.monotonic()

    handlers: dict[str, Any] = {"none": None, "counts": count, "hangs": lambda _: goes_on.wait()}
    engine = Engine(_engine_settings(settings), on_batch=handlers[settings["handler"]])
    began_s, before_s = time.monotonic(), time.process_time()
    with engine:
        with LogReader.open(settings["log"], "0") as reader:
            while sum(ref.header.rows for ref in reader.blocks(0, reader.end().offset)) < wanted:
                time.sleep(0.02)
        captured_s, cpu_s = time.monotonic() - began_s, time.process_time() - before_s
        while settings["handler"] == "counts" and handled[0] < wanted:
            time.sleep(0.02)
        goes_on.set()
    return {"captured_s": captured_s, "cpu_s": cpu_s, "handled_s": handled[1] - began_s}


if __name__ == "__main__":
    _what, _settings = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps((_latency if _what == "latency" else _measure_costs)(_settings)))
