"""Commit to subscriber: how long after PostgreSQL's commit another process has the row over HTTP.

Beside it `tailrace tail`, which reads the log by itself; and what a thousand subscribers cost to which
nothing comes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tailrace_bench.latency import ROWS_A_TRANSACTION, write
from tailrace_bench.support import table
from tailrace_bench.support.report import Result, machine
from tailrace_servers.ports import free_port

ROWS_A_SECOND = 5_000
SUBSCRIBERS = 1_000
WARM_UP_S = 3.0
MEASURED_S = 15.0
TARGET_MS = 8.0
PERCENTILES = (50, 95, 99)
DEADLINE_S = 120.0
_TOKEN = "bench"
_COMMITTED = re.compile(rb'"op":"c","ts_ms":\d+,"ts_us":(\d+)')


def measure(rows: int | None = None) -> Result:
    """Measure at `rows` rows a second: a subscriber, then `tailrace tail`, then many idle ones."""
    rate = rows or ROWS_A_SECOND
    stop = threading.Event()
    with (
        table.server() as postgres,
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name,
        ExitStack() as stack,
    ):
        port, folder = free_port(), Path(name)
        file = _pipeline(folder, postgres.dsn())
        stack.enter_context(_process(folder, "run", str(file)))
        serving = stack.enter_context(_process(folder, "serve", str(file), "--port", str(port)))
        _wait_until(lambda: _is_serving(port))
        idle = _idle(serving, port)
        writer = threading.Thread(target=write, args=(postgres.dsn(), rate, stop))
        writer.start()
        try:
            subscriber = _timed("subscriber", str(port))
            tail = _timed("tail", str(folder / "log"))
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
def _process(folder: Path, command: str, *words: str) -> Iterator[psutil.Process]:
    with (folder / f"{command}.err").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tailrace", command, *words],
            stdout=said,
            stderr=said,
            env=os.environ | {"TAILRACE_TOKEN": _TOKEN},
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("the processes that are measured did not start in time")
        time.sleep(0.1)


def _is_serving(port: int) -> bool:
    if (found := _asked(port, "public.orders")) is None:
        return False
    found.close()
    return True


def _asked(port: int, wanted: str) -> socket.socket | None:
    """Return a subscription that has begun; None if there is none to be had yet."""
    try:
        found = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    except ConnectionRefusedError:
        return None
    found.sendall(f"GET /changes?token={_TOKEN}&table={wanted} HTTP/1.0\r\n\r\n".encode())
    if b" 200 " not in found.recv(64):
        found.close()
        return None
    return found


def _idle(serving: psutil.Process, port: int) -> dict[str, Any]:
    """Return what many cost while nothing is committed: percent of a core, and memory."""
    before_bytes = serving.memory_info().rss
    with _subscribed(port, SUBSCRIBERS, "other.*"):
        percent = _percent(serving)
        held_bytes = serving.memory_info().rss - before_bytes
    return {"idle_percent": percent, "idle_kb_each": round(held_bytes / SUBSCRIBERS / 1000, 1)}


def _idle_beside_flow(serving: psutil.Process, port: int) -> dict[str, Any]:
    """Return what the server takes for one subscriber, alone and beside many of another table."""
    with _taking(port):
        alone = _percent(serving)
        with _subscribed(port, SUBSCRIBERS - 1, "other.*"):
            beside = _percent(serving)
    return {"flow_percent": alone, "flow_beside_idle_percent": beside}


@contextmanager
def _subscribed(port: int, count: int, wanted: str) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            found = _asked(port, wanted)
            assert found is not None
            stack.enter_context(found)
        yield


@contextmanager
def _taking(port: int) -> Iterator[None]:
    """Have a process of its own take every change."""
    program = [sys.executable, "-m", __name__, "subscriber", str(port), "0", "3600"]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def _percent(process: psutil.Process) -> float:
    """Return the share of a core that a process takes, over some seconds."""
    time.sleep(WARM_UP_S)
    began, before = time.monotonic(), process.cpu_times()
    time.sleep(MEASURED_S)
    after = process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    return round(used_s / (time.monotonic() - began) * 100, 2)


def _timed(what: str, where: str) -> dict[str, Any]:
    program = [sys.executable, "-m", __name__, what, where, str(WARM_UP_S), str(MEASURED_S)]
    done = subprocess.run(program, check=True, timeout=DEADLINE_S + MEASURED_S, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _take(read: Callable[[], bytes], warm_up_s: float, measured_s: float) -> dict[str, Any]:
    """Read for so long after a warm-up; return how long after its commit each row came."""
    began, rest, milliseconds = time.monotonic(), b"", []
    while (elapsed := time.monotonic() - began) < warm_up_s + measured_s:
        data = rest + read()
        seen_us = time.time_ns() / 1000
        whole = data.rfind(b"\n") + 1
        found, rest = _COMMITTED.findall(data[:whole]), data[whole:]
        if elapsed > warm_up_s:
            milliseconds += [(seen_us - int(committed)) / 1000 for committed in found]
    measured = np.array(milliseconds)
    points = {f"p{p:g}_ms": round(float(np.percentile(measured, p)), 2) for p in PERCENTILES}
    return points | {"rows": len(measured)}


def _main(what: str, where: str, warm_up_s: float, measured_s: float) -> None:
    if what == "subscriber":
        found = _asked(int(where), "public.orders")
        assert found is not None
        print(json.dumps(_take(lambda: found.recv(1 << 20), warm_up_s, measured_s)))
        return
    program = [sys.executable, "-m", "tailrace", "tail", where, "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        os.read(fd, 1)  # its start is not measured
        print(json.dumps(_take(lambda: os.read(fd, 1 << 20), warm_up_s, measured_s)))
        process.kill()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
