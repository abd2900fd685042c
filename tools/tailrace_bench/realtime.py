"""Commit to handler: how long after PostgreSQL's commit an engine's handler is called with the row.

From memory and from the log, and through Debezium's engine, one after another while rows are written. In
the same way until a subscriber in another process has the row, and a reader of committed records in Kafka.
Then, on a backlog, what real time costs: with a handler that keeps up, and with one that hangs and is let go.
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
#: Enough that the start of an engine, which differs from one to the next, is a small part of a pass.
BACKLOG_ROWS = 2_000_000
#: Of a backlog, each with a pass of every way.
TURNS = 3
#: Of a handler that hangs: the backlog does not fit, so that memory is given up while capture goes on.
SMALL_BUFFER_BYTES = 16 << 20
PICTURE = Path("docs") / "realtime-latency.svg"
#: The peer writes for so long after the reader's end.
PEER_LONGER_S = 10.0
#: The status learns of a fall-back within a second or two.
_SHOWN_S = 10.0
_START_DEADLINE_S = 60.0
_RUN_DEADLINE_S = 300.0


def measure(rows: int | None = None) -> Result:
    """Measure at `rows` rows a second, each way for twenty seconds after five of warm-up."""
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
    """Rows are written at a rate, and taken each time from a separate slot."""

    def __init__(self, postgres: EmbeddedPostgres, directory: Path, rate: int) -> None:
        self._postgres, self._directory, self._rate = postgres, directory, rate
        self._times = {"warm_up_s": WARM_UP_S, "measured_s": MEASURED_S}
        self._places = itertools.count()

    def handled(self, cpu: dict[str, float], *, realtime: bool = False) -> np.ndarray:
        """Return the milliseconds to an engine's handler; into `cpu` goes what a row took."""
        with self._written() as settings:
            found = _child("latency", {**settings, "realtime": realtime, **self._times})
        cpu["cpu_us_a_row_from_memory" if realtime else "cpu_us_a_row_from_the_log"] = found["cpu_us_a_row"]
        return np.array(found["ms"])

    def peer(self) -> np.ndarray:
        """Return those to the handler of Debezium's engine."""
        with self._written(prepared=False) as settings:
            theirs = debezium.latencies(self._postgres, settings["slot"], self._peer_rows, self._directory)
        return np.array(theirs[int(self._rate * WARM_UP_S) :]) / 1e3

    def served(self) -> np.ndarray:
        """Return those to a subscriber, of the server in the process that captures."""
        port = free_port()
        with self._written() as settings:
            document = _file(settings) | {"subscriptions": {"port": port}}
            with self._run(document):
                wait_until_served(port)
                return arrivals.at("subscriber", str(port), **self._times)

    def in_kafka(self) -> dict[str, np.ndarray]:
        """Return those to a reader of committed records, of a sink that is exactly once and of the peer."""
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
        # It ends with its last row: some more than the reader takes.
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
        """Have rows written beside, with keys of their own, from when somebody reads the slot: no backlog.

        :param prepared: with a log that has begun.
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
    """Return how fast a backlog is captured and handled, to capture alone, by the wall clock and by CPU.

    All ways take turns: the server's own rate differs more from one pass to the next than they do.
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
        # Once it is let go: what a handler that hung from memory reads from the log, to one that never was.
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
    """Return what the handler's real time shows when the log has taken over."""
    until_s = time.monotonic() + _SHOWN_S
    while True:
        (shown,) = engine.realtime_status()
        if shown.get("fall_backs") or time.monotonic() > until_s:
            return shown
        time.sleep(0.1)


def _measure_costs(settings: dict[str, Any]) -> dict[str, Any]:
    """Capture a backlog beside a handler; return seconds from the first look on."""
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
    # A short queue: what waits in it when the handler is let go was read before.
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
