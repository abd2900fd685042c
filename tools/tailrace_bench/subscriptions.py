"""Commit to subscriber: the time from PostgreSQL's commit of a row until another process has it over HTTP.

In addition `tailrace tail`, which reads the log by itself, and the costs of a thousand idle subscribers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tailrace_bench.latency import ROWS_A_TRANSACTION, write
from tailrace_bench.support import arrivals, table
from tailrace_bench.support.report import Result, machine
from tailrace_servers.ports import free_port

ROWS_A_SECOND = 5_000
SUBSCRIBERS = 1_000
WARM_UP_S = 3.0
MEASURED_S = 15.0
TARGET_MS = 8.0
DEADLINE_S = 120.0


def measure(rows: int | None = None) -> Result:
    """Measure at `rows` rows per second: a subscriber, then `tailrace tail`, then many idle subscribers."""
    rate = rows or ROWS_A_SECOND
    stop = threading.Event()
    with (
        table.server() as postgres,
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name,
        ExitStack() as stack,
    ):
        port, folder = free_port(), Path(name)
        file = _pipeline(folder, postgres.dsn())
        stack.enter_context(process(folder, "run", str(file)))
        serving = stack.enter_context(process(folder, "serve", str(file), "--port", str(port)))
        wait_until_served(port)
        idle = _idle(serving, port)
        writer = threading.Thread(target=write, args=(postgres.dsn(), rate, stop))
        writer.start()
        try:
            times = {"warm_up_s": WARM_UP_S, "measured_s": MEASURED_S}
            subscriber = arrivals.points(arrivals.at("subscriber", str(port), **times))
            tail = arrivals.points(arrivals.at("tail", str(folder / "log"), **times))
            idle |= _idle_beside_flow(serving, port)
        finally:
            stop.set()
            writer.join(DEADLINE_S)
    return Result(
        name="subscriptions",
        value=subscriber["p50_ms"],
        unit="ms (median)",
        ratio=round(TARGET_MS / subscriber["p50_ms"], 2),
        reference=f"{TARGET_MS:g} ms, the goal (above 1 is faster)",
        limit="PostgreSQL's sender and capture's fsync, then the look at the log's end and decoding",
        setup=machine()
        | {"rows_a_second": rate, "rows_a_transaction": ROWS_A_TRANSACTION, "idle": SUBSCRIBERS},
        details=subscriber
        | {f"tail_{key}": value for key, value in tail.items()}
        | {"to_tail": round(tail["p50_ms"] / subscriber["p50_ms"], 2)}
        | idle,
    )


def _pipeline(folder: Path, dsn: str) -> Path:
    source = {"dsn": dsn, "tables": ["public.orders"], "publication": table.PUBLICATION, "snapshot": "never"}
    file = folder / "bench.yaml"
    file.write_text(json.dumps({"name": "bench", "source": source, "log": {"path": str(folder / "log")}}))
    return file


@contextmanager
def process(folder: Path, command: str, *words: str) -> Iterator[psutil.Process]:
    """Run a command of `tailrace` in a separate process. Its output goes to `<folder>/<command>.err`."""
    with (folder / f"{command}.err").open("wb") as said:
        running = subprocess.Popen(
            [sys.executable, "-m", "tailrace", command, *words],
            stdout=said,
            stderr=said,
            env=os.environ | {"TAILRACE_TOKEN": arrivals.TOKEN},
        )
    try:
        yield psutil.Process(running.pid)
    finally:
        running.terminate()
        running.wait(60)


def wait_until_served(port: int) -> None:
    """Wait until a server accepts subscribers.

    :raises TimeoutError: if it does not within `DEADLINE_S`.
    """
    deadline = time.monotonic() + DEADLINE_S
    while (found := arrivals.asked(port, "public.orders")) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the measured processes did not start in time")
        time.sleep(0.1)
    found.close()


def _idle(serving: psutil.Process, port: int) -> dict[str, Any]:
    """Return the costs of many subscribers while nothing is committed: percent of a core, and memory."""
    before_bytes = serving.memory_info().rss
    with _subscribed(port, SUBSCRIBERS, "other.*"):
        percent = _percent(serving)
        held_bytes = serving.memory_info().rss - before_bytes
    return {"idle_percent": percent, "idle_kb_each": round(held_bytes / SUBSCRIBERS / 1000, 1)}


def _idle_beside_flow(serving: psutil.Process, port: int) -> dict[str, Any]:
    """Return the server's CPU share for one subscriber, alone and together with many of another table."""
    with _taking(port):
        alone = _percent(serving)
        with _subscribed(port, SUBSCRIBERS - 1, "other.*"):
            beside = _percent(serving)
    return {"flow_percent": alone, "flow_beside_idle_percent": beside}


@contextmanager
def _subscribed(port: int, count: int, wanted: str) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            found = arrivals.asked(port, wanted)
            assert found is not None
            stack.enter_context(found)
        yield


@contextmanager
def _taking(port: int) -> Iterator[None]:
    """Run a separate process that receives every change."""
    program = arrivals.command("subscriber", str(port), warm_up_s=0, measured_s=3600)
    with subprocess.Popen(program, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def _percent(process: psutil.Process) -> float:
    """Return the share of a core that a process takes during `MEASURED_S`, in percent."""
    time.sleep(WARM_UP_S)
    began, before = time.monotonic(), process.cpu_times()
    time.sleep(MEASURED_S)
    after = process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    return round(used_s / (time.monotonic() - began) * 100, 2)
