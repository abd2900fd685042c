"""Commit to handler: the time from PostgreSQL's commit of a row to the call of an engine's handler.

From memory, from the log, and through Debezium's engine, one after another while rows are written. Likewise
the time to a subscriber in another process, and to a reader of committed records in Kafka. Then, with a
backlog, the costs of real time: with a handler that keeps up, and with one that blocks for a while.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.errors import Kind, TailraceError
from tailrace_bench.latency import ROWS_A_TRANSACTION, write
from tailrace_bench.subscriptions import process, wait_until_served
from tailrace_bench.support import arrivals, backlog, debezium, histogram, table, topics
from tailrace_bench.support.passes import in_turn
from tailrace_bench.support.process import answer_of
from tailrace_bench.support.report import Result, machine, median
from tailrace_servers.ports import free_port
from tailrace_servers.postgres import EmbeddedPostgres

if TYPE_CHECKING:
    from tailrace import Engine

ROWS_A_SECOND = 5_000
WARM_UP_S = 5.0
MEASURED_S = 20.0
#: Number of rows, so large that the start of an engine, which varies, is a small part of a pass.
BACKLOG_ROWS = 2_000_000
#: Number of turns with a backlog, each with a pass of every variant.
TURNS = 3
#: Buffer of a handler that blocks, in bytes: smaller than the backlog, so that real time falls back.
SMALL_BUFFER_BYTES = 16 << 20
PICTURE = Path("docs") / "realtime-latency.svg"
#: Time for which the peer has rows to write after the reader's end, in seconds.
PEER_LONGER_S = 10.0
#: Timeout for a fall-back to be in the status, which takes a second or two, in seconds.
_SHOWN_S = 10.0
_START_DEADLINE_S = 60.0
_RUN_DEADLINE_S = 300.0


def measure(rows: int | None = None) -> Result:
    """Measure at `rows` rows per second, each variant for twenty seconds after five of warm-up."""
    rate = rows or ROWS_A_SECOND
    backlog_rows = BACKLOG_ROWS if rows is None else 10 * rows
    cpu: dict[str, float] = {}
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        bench = _Bench(postgres, Path(name), rate)
        handled = {"from memory": bench.handled(cpu, realtime=True), "from the log": bench.handled(cpu)}
        if debezium.is_here():
            handled["Debezium's engine"] = bench.peer()
        elsewhere = {"to a subscriber": bench.served(), **bench.in_kafka()}
        costs = _costs(postgres.dsn(), Path(name), backlog_rows)
    if rows is None and PICTURE.parent.is_dir():
        histogram.draw(PICTURE, f"From the commit to the handler, {rate:,} rows a second", handled)
    ours = float(np.median(handled["from memory"]))
    peer = handled.get("Debezium's engine")
    return Result(
        name="realtime",
        value=round(ours, 2),
        unit="ms (median)",
        ratio=None if peer is None else round(float(np.median(peer)) / ours, 2),
        reference="" if peer is None else "Debezium's engine, its poll interval at 1 ms (above 1 is faster)",
        limit="PostgreSQL's sender, then capture's fsync, then decoding and the hand-over to the handler",
        setup=machine() | {"rows_a_second": rate, "rows_a_transaction": ROWS_A_TRANSACTION},
        details={way: arrivals.points(found) for way, found in (handled | elsewhere).items()} | cpu | costs,
    )


class _Bench:
    """Measurements of rows that are written at a rate, each with a separate slot."""

    def __init__(self, postgres: EmbeddedPostgres, directory: Path, rate: int) -> None:
        self._postgres, self._directory, self._rate = postgres, directory, rate
        self._times = {"warm_up_s": WARM_UP_S, "measured_s": MEASURED_S}
        self._places = itertools.count()

    def handled(self, cpu: dict[str, float], *, realtime: bool = False) -> np.ndarray:
        """Return the milliseconds to an engine's handler; add the CPU time per row to `cpu`."""
        with self._written() as settings:
            found = _child("latency", {**settings, "realtime": realtime, **self._times})
        cpu["cpu_us_a_row_from_memory" if realtime else "cpu_us_a_row_from_the_log"] = found["cpu_us_a_row"]
        return np.array(found["ms"])

    def peer(self) -> np.ndarray:
        """Return the milliseconds to the handler of Debezium's engine."""
        with self._written(prepared=False) as settings:
            theirs = debezium.latencies(self._postgres, settings["slot"], self._peer_rows, self._directory)
        return np.array(theirs[int(self._rate * WARM_UP_S) :]) / 1e3

    def served(self) -> np.ndarray:
        """Return the milliseconds to a subscriber of the server in the capturing process."""
        port = free_port()
        with self._written() as settings:
            document = _file(settings) | {"subscriptions": {"port": port}}
            with self._run(document):
                wait_until_served(port)
                return arrivals.at("subscriber", str(port), **self._times)

    def in_kafka(self) -> dict[str, np.ndarray]:
        """Return the milliseconds to a reader of committed records, for an exactly-once sink and the peer."""
        found = {}
        with topics.cluster() as kafka:
            topics.warm_up(kafka.bootstrap)
            for prefix in ("ours", "peer"):
                topics.create(kafka.bootstrap, f"{prefix}.public.orders")
            with self._written() as settings:
                sink = topics.sink(kafka.bootstrap, "ours", atomic=True) | {"interval_ms": 0}
                with self._run(_file(settings) | {"sinks": [sink], "realtime": True}):
                    found["to Kafka"] = arrivals.at(
                        "kafka", kafka.bootstrap, "ours.public.orders", **self._times
                    )
            if debezium.is_here():
                with (
                    self._written(prepared=False) as settings,
                    self._peer_to(kafka.bootstrap, settings["slot"]),
                ):
                    found["Debezium's engine to Kafka, at least once"] = arrivals.at(
                        "kafka", kafka.bootstrap, "peer.public.orders", **self._times
                    )
        return found

    @property
    def _peer_rows(self) -> int:
        return int(self._rate * (WARM_UP_S + MEASURED_S))

    @contextlib.contextmanager
    def _peer_to(self, bootstrap: str, slot: str) -> Iterator[None]:
        # The peer ends with its last row, so it gets more rows than the reader takes.
        rows = self._peer_rows + int(self._rate * PEER_LONGER_S)
        producer = debezium.PRODUCER | {"bootstrap.servers": bootstrap, "linger.ms": "0"}
        arguments = (self._postgres, slot, rows, "kafka", 1, self._directory, producer, debezium.QUICK)
        peer = threading.Thread(target=debezium.receive, args=arguments)
        peer.start()
        try:
            yield
        finally:
            peer.join(_RUN_DEADLINE_S)

    @contextlib.contextmanager
    def _run(self, document: dict[str, Any]) -> Iterator[None]:
        file = self._directory / f"{Path(document['log']['path']).name}.yaml"
        file.write_text(json.dumps(document))
        with process(self._directory, "run", str(file)):
            yield

    @contextlib.contextmanager
    def _written(self, *, prepared: bool = True) -> Iterator[dict[str, Any]]:
        """Write rows with new keys on another thread, once a client reads the slot, so without a backlog.

        :param prepared: whether to create the log, too.
        """
        place, dsn, stop = next(self._places), self._postgres.dsn(), threading.Event()
        slot, log = f"realtime_{place}", self._directory / f"log-{place}"
        if prepared:
            backlog.prepare(dsn, slot, log)
        else:
            table.create_slot(dsn, slot)

        def run() -> None:
            table.wait_until_read(dsn, slot, stop)
            write(dsn, self._rate, stop, first=1 + place * 100_000_000)

        writer = threading.Thread(target=run)
        writer.start()
        try:
            yield {"dsn": dsn, "slot": slot, "log": str(log)}
        finally:
            stop.set()
            writer.join(_START_DEADLINE_S)


def _costs(dsn: str, directory: Path, rows: int) -> dict[str, Any]:
    """Return the speed of capturing and handling a backlog relative to capture alone, in time and CPU time.

    The variants alternate, as the server's rate varies more between passes than they differ.
    """
    ways: dict[str, dict[str, Any]] = {
        "alone": {"handler": "none", "realtime": False},
        "keeps up": {"handler": "counts", "realtime": True},
        "hangs": {
            "handler": "hangs",
            "realtime": {"enabled": True, "buffer_bytes": min(SMALL_BUFFER_BYTES, rows * 32)},
        },
        "from the log": {"handler": "hangs", "realtime": False},
    }
    slots = {(turn, way): f"costs_{turn}_{at}" for turn in range(TURNS) for at, way in enumerate(ways)}
    for slot in slots.values():
        backlog.prepare(dsn, slot, directory / slot)
    table.load(dsn, rows, first=900_000_000)

    def measured(turn: int, way: str) -> dict[str, Any]:
        slot = slots[turn, way]
        log = str(directory / slot)
        return _child("costs", {**ways[way], "dsn": dsn, "slot": slot, "log": log, "rows": rows})

    turns = []
    for turn in range(TURNS):
        found = in_turn(turn, *(functools.partial(measured, turn, way) for way in ways))
        turns.append(_compared(dict(zip(ways, found, strict=True)), rows))
    return {name: median([each[name] for each in turns]) for name in turns[0]}


def _compared(found: Mapping[str, dict[str, Any]], rows: int) -> dict[str, float]:
    alone, hangs, log_alone = found["alone"], found["hangs"], found["from the log"]
    return {
        "capture_rows_a_second": round(rows / alone["captured_s"]),
        "throughput_with_handler_to_capture_alone": round(
            alone["captured_s"] / found["keeps up"]["handled_s"], 2
        ),
        "capture_beside_hanging_handler_to_alone": round(alone["captured_s"] / hangs["captured_s"], 2),
        "capture_cpu_beside_hanging_handler_to_alone": round(alone["cpu_s"] / hangs["cpu_s"], 2),
        "hanging_handler_fall_backs": hangs["fall_backs"],
        "hanging_handler_buffer_mb": round(hangs["capacity_bytes"] / 1e6, 1),
        "hanging_handler_memory_mb_above_alone": round((hangs["rss_bytes"] - alone["rss_bytes"]) / 1e6, 1),
        # After the block: catching up from the log, relative to a handler that never used memory.
        "catch_up_to_the_log_alone": round(log_alone["catch_up_us_a_row"] / hangs["catch_up_us_a_row"], 2),
        "catch_up_cpu_to_the_log_alone": round(
            log_alone["catch_up_cpu_us_a_row"] / hangs["catch_up_cpu_us_a_row"], 2
        ),
    }


def _child(what: str, settings: dict[str, Any]) -> dict[str, Any]:
    document = json.dumps(settings)
    found: dict[str, Any] = answer_of(__name__, what, document, deadline_s=_RUN_DEADLINE_S)
    return found


class _Timing:
    """A handler that records the latency of each row, and stops the engine after the measurement."""

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


def _file(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the pipeline's file."""
    return {
        "name": "bench",
        "source": table.source(settings["dsn"], settings["slot"]),
        "log": {"path": settings["log"]},
        "realtime": settings.get("realtime", False),
    }


def _latency(settings: dict[str, Any]) -> dict[str, Any]:
    from tailrace import Engine

    handler = _Timing(settings["warm_up_s"], settings["measured_s"])
    Engine(_file(settings), on_batch=handler.take).run()
    cpu_s = time.process_time() - handler.cpu_before_s
    if not handler.milliseconds:
        raise TailraceError(Kind.INTERNAL, "hand rows to a handler: nothing came")
    found = np.concatenate(handler.milliseconds)
    return {"ms": found.round(3).tolist(), "cpu_us_a_row": round(cpu_s * 1e6 / len(found), 1)}


def _once_fallen_back(engine: Engine) -> Mapping[str, Any]:
    """Return the status of the handler's real time after the fall-back to the log."""
    until_s = time.monotonic() + _SHOWN_S
    while True:
        (shown,) = engine.realtime_status()
        if shown.get("fall_backs") or time.monotonic() > until_s:
            return shown
        time.sleep(0.1)


def _measure_costs(settings: dict[str, Any]) -> dict[str, Any]:
    """Capture a backlog while a handler runs; return times, CPU times and memory."""
    from tailrace import Engine
    from tailrace.changelog.reader import LogReader

    handled, wanted, goes_on = [0, 0.0], settings["rows"], threading.Event()

    def count(batch: Any) -> None:
        handled[0] += batch.polled
        handled[1] = time.monotonic()

    def hang(batch: Any) -> None:
        goes_on.wait()
        count(batch)

    handlers: dict[str, Any] = {"none": None, "counts": count, "hangs": hang}
    # A short queue: the batches that wait in it during the block were read before.
    options = {"record_processing": {"queue_batches_max": 1}}
    engine = Engine(_file(settings), on_batch=handlers[settings["handler"]], options=options)
    began_s, before_s = time.monotonic(), time.process_time()
    with engine:
        with LogReader.open(settings["log"], "0") as reader:
            while sum(ref.header.rows for ref in reader.blocks(0, reader.end().offset)) < wanted:
                time.sleep(0.02)
        captured_s, cpu_s = time.monotonic() - began_s, time.process_time() - before_s
        rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        shown = _once_fallen_back(engine) if settings["handler"] == "hangs" and settings["realtime"] else {}
        left = wanted - sum(task.polled for task in engine.view().tasks)
        released_s, released_cpu_s = time.monotonic(), time.process_time()
        goes_on.set()
        while settings["handler"] != "none" and handled[0] < wanted:
            time.sleep(0.02)
        caught_up_cpu_s = time.process_time() - released_cpu_s
    return {
        "captured_s": captured_s,
        "cpu_s": cpu_s,
        "rss_bytes": rss_bytes,
        "handled_s": handled[1] - began_s,
        "catch_up_us_a_row": 1e6 * (handled[1] - released_s) / max(left, 1),
        "catch_up_cpu_us_a_row": 1e6 * caught_up_cpu_s / max(left, 1),
        "fall_backs": shown.get("fall_backs", 0),
        "capacity_bytes": shown.get("buffer_capacity_bytes", 0),
    }


if __name__ == "__main__":
    _what, _settings = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps((_latency if _what == "latency" else _measure_costs)(_settings)))
