"""Measures the latency from a row's commit to a subscriber, to `tailrace tail`, or to a reader of Kafka.

Each reads in a separate process. All read Debezium's JSON, which has the time of the commit.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from tailrace_bench.support import topics

PERCENTILES = (50, 90, 95, 99, 99.9)
DEADLINE_S = 120.0
#: The token of subscribers in benchmarks.
TOKEN = "bench"
_COMMITTED = re.compile(rb'"source":\{[^{}]*?"ts_us":(\d+)')


def at(what: str, *where: str, warm_up_s: float, measured_s: float) -> np.ndarray:
    """Return milliseconds from the commit to the arrival of each row, for `measured_s` after a warm-up.

    :param where: of `what` `subscriber`: the port; `tail`: the log's directory; `kafka`: address and topic.
    """
    program = command(what, *where, warm_up_s=warm_up_s, measured_s=measured_s)
    deadline_s = 2 * DEADLINE_S + warm_up_s + measured_s
    done = subprocess.run(program, check=True, timeout=deadline_s, stdout=subprocess.PIPE)
    return np.array(json.loads(done.stdout))


def command(what: str, *where: str, warm_up_s: float, measured_s: float) -> list[str]:
    """Return the command of a process that `at` runs."""
    return [sys.executable, "-m", __name__, str(warm_up_s), str(measured_s), what, *where]


def points(milliseconds: np.ndarray) -> dict[str, float]:
    """Return percentiles, maximum and count of latencies."""
    found = {f"p{p:g}_ms": round(float(np.percentile(milliseconds, p)), 2) for p in PERCENTILES}
    return found | {"max_ms": round(float(milliseconds.max()), 1), "rows": len(milliseconds)}


def asked(port: int, wanted: str) -> socket.socket | None:
    """Return a started subscription; None if the server does not accept it yet."""
    try:
        found = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    except ConnectionRefusedError:
        return None
    found.sendall(f"GET /changes?token={TOKEN}&table={wanted} HTTP/1.0\r\n\r\n".encode())
    if b" 200 " not in found.recv(64):
        found.close()
        return None
    return found


def _take(read: Callable[[], bytes], warm_up_s: float, measured_s: float) -> list[float]:
    """Read for `measured_s` after a warm-up, which starts with the first row."""
    began_s, rest, milliseconds = 0.0, b"", []
    deadline_s = time.monotonic() + DEADLINE_S
    while not began_s or time.monotonic() - began_s < warm_up_s + measured_s:
        assert began_s or time.monotonic() < deadline_s, "nothing came"
        data = rest + read()
        seen_us = time.time_ns() / 1000
        whole = data.rfind(b"\n") + 1
        found, rest = _COMMITTED.findall(data[:whole]), data[whole:]
        began_s = began_s or (time.monotonic() if found else 0.0)
        if began_s and time.monotonic() - began_s > warm_up_s:
            milliseconds += [round((seen_us - int(committed)) / 1000, 3) for committed in found]
    return milliseconds


def _subscriber(port: str, warm_up_s: float, measured_s: float) -> list[float]:
    found = asked(int(port), "public.orders")
    assert found is not None
    with found:
        return _take(lambda: found.recv(1 << 20), warm_up_s, measured_s)


def _tail(log: str, warm_up_s: float, measured_s: float) -> list[float]:
    program = [sys.executable, "-m", "tailrace", "tail", log, "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        try:
            return _take(lambda: os.read(fd, 1 << 20), warm_up_s, measured_s)
        finally:
            process.kill()


def _kafka(bootstrap: str, topic: str, warm_up_s: float, measured_s: float) -> list[float]:
    with topics.reader(bootstrap, topic) as reader:

        def read() -> bytes:
            first = reader.poll(0.1)
            messages = [] if first is None else [first, *reader.consume(1000, 0)]
            return b"".join(value + b"\n" for message in messages if (value := message.value()) is not None)

        return _take(read, warm_up_s, measured_s)


_READERS: dict[str, Callable[..., list[float]]] = {"subscriber": _subscriber, "tail": _tail, "kafka": _kafka}

if __name__ == "__main__":
    _warm_up_s, _measured_s, _what, *_where = sys.argv[1:]
    print(json.dumps(_READERS[_what](*_where, float(_warm_up_s), float(_measured_s))))
