"""PostgreSQL through the embedded engine to a handler, alternating with Debezium's on the same backlog."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from tailrace_bench.support import backlog, debezium, table
from tailrace_bench.support import pg_recvlogical as peer
from tailrace_bench.support.passes import cores, timed
from tailrace_bench.support.process import answer_of
from tailrace_bench.support.report import Result, machine

log = structlog.get_logger(__name__)

ROWS = 1_000_000
DEADLINE_S = 900.0

#: The form of the handler's records: Debezium's JSON without schemas, or unconverted.
JSON, PLAIN = "json", "plain"

#: Share of the speed of PostgreSQL's own client from which on the server's sender is the limit of a run.
OF_SENDER = 0.9


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One timed pass: from the call of `run` to the handler's return for the last record.

    The time excludes the start of the interpreter and its imports; it includes connecting, the log with its
    fsyncs and committing.
    """

    rows: int
    seconds: float
    cpu_seconds: float
    bytes: int  # of the documents


def measure(rows: int | None = None) -> Result:
    """Receive `rows` rows with `pg_recvlogical`, with our engine and with the peer, as JSON and unconverted.

    Without the peer (`make bench-peers` fetches it) the ratio is to `pg_recvlogical`.
    """
    rows = rows or ROWS
    theirs: dict[str, debezium.PeerRun] = {}
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        directory, dsn = Path(name), postgres.dsn()
        with_peer = debezium.is_here()
        if not with_peer:
            log.warning("the peer is not installed: the ratio is to pg_recvlogical", hint="make bench-peers")
        for slot in ("recvlogical", *(("peer_json", "peer_connect") if with_peer else ())):
            table.create_slot(dsn, slot)
        for how in (JSON, PLAIN):
            backlog.prepare(dsn, f"ours_{how}", directory / f"log-{how}")
        end = table.load(dsn, rows)
        reference = peer.receive(postgres, "recvlogical", end)
        log.info("pg_recvlogical has received the backlog", seconds=round(reference.seconds, 1))
        ours = {}
        forms: tuple[tuple[str, debezium.Format], ...] = ((JSON, "json"), (PLAIN, "connect"))
        for how, form in forms:
            ours[how] = _run(dsn, how, directory, rows)
            log.info("the engine has processed it", how=how, seconds=round(ours[how].seconds, 1))
            if with_peer:
                theirs[how] = debezium.receive(postgres, f"peer_{form}", rows, form, cores(), directory)
                log.info("Debezium's engine has, too", how=how, seconds=round(theirs[how].seconds, 1))
    return _result(rows, reference, ours, theirs)


def _result(
    rows: int,
    reference: peer.ReceiverRun,
    ours: dict[str, EngineRun],
    theirs: dict[str, debezium.PeerRun],
) -> Result:
    rates = {how: rows / run.seconds for how, run in ours.items()}
    sender = rows / reference.seconds
    peers = {how: rows / run.seconds_from_first for how, run in theirs.items()}
    details: dict[str, Any] = {"pg_recvlogical_rows_s": round(sender)}
    for how, rate in rates.items():
        details[f"{how}_rows_s"] = round(rate)
        details[f"{how}_cpu_us_a_row"] = round(ours[how].cpu_seconds / rows * 1e6, 2)
        details[f"{how}_to_pg_recvlogical"] = round(rate / sender, 2)
        if how in theirs:
            details[f"peer_{how}_rows_s"] = round(peers[how])
            details[f"peer_{how}_cpu_us_a_row"] = round(theirs[how].cpu_seconds / rows * 1e6, 2)
            details[f"{how}_to_peer"] = round(rate / peers[how], 2)
    is_senders = rates[JSON] >= OF_SENDER * sender
    return Result(
        name="engine",
        value=rates[JSON],
        unit="records/s",
        ratio=rates[JSON] / (peers[JSON] if peers else sender),
        reference=f"Debezium {debezium.VERSION}, as JSON"
        if peers
        else "pg_recvlogical: no peer, see `make bench-peers`",
        limit="PostgreSQL's sender, which decodes and sends row by row on one core"
        if is_senders
        else "the cores, which the server, capture, and writing the documents share",
        setup=machine()
        | {
            "rows": rows,
            "rows_a_transaction": table.ROWS_A_TRANSACTION,
            "postgresql": 18,
            "threads": cores(),
            "peer_batch": debezium.BATCH_ROWS if peers else None,
            "peer_queue": debezium.QUEUE_ROWS if peers else None,
        },
        details=details,
    )


def _run(dsn: str, how: str, directory: Path, rows: int) -> EngineRun:
    log_path = directory / f"log-{how}"
    return EngineRun(**answer_of(__name__, dsn, how, log_path, rows, deadline_s=DEADLINE_S))


class _Counting:
    """A handler that counts rows and bytes, and stops the engine after the last row."""

    def __init__(self, rows: int) -> None:
        self.rows = self.bytes = 0
        self.ended_s = 0.0
        self._wanted = rows

    def take(self, batch: Any) -> None:
        from tailrace import StopEngine

        self.rows += len(batch)
        values = getattr(batch, "values", None)
        self.bytes += 0 if values is None else values.nbytes
        if self.rows >= self._wanted:
            self.ended_s = time.perf_counter()
            raise StopEngine


def _run_here(dsn: str, how: str, log_path: Path, rows: int) -> EngineRun:
    from tailrace import Engine

    handler = _Counting(rows)
    engine = Engine(
        {
            "name": "bench",
            "source": table.source(dsn, f"ours_{how}"),
            "log": {"path": str(log_path)},
        },
        on_batch=handler.take,
        converter={"type": "json", "schemas_enable": False} if how == JSON else None,
    )
    started_s = time.perf_counter()
    took = timed(engine.run)
    return EngineRun(handler.rows, handler.ended_s - started_s, took.cpu_seconds, handler.bytes)


if __name__ == "__main__":
    _dsn, _how, _log, _rows = sys.argv[1:]
    print(json.dumps(asdict(_run_here(_dsn, _how, Path(_log), int(_rows)))))
