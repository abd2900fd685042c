"""A backlog of a keyspace through the embedded engine, and through Debezium's, to a handler, as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailrace_bench.engine import EngineRun
from tailrace_bench.support import debezium
from tailrace_bench.support.passes import cores, timed
from tailrace_bench.support.process import answer_of

#: The newest connector on Maven Central, with the engine of the same release.
VERSION = "3.5.0.Final"
JARS = Path(sys.prefix) / "share" / "tailrace" / "debezium-vitess"
DEADLINE_S = 900.0


def is_here() -> bool:
    """Return whether the peer was fetched."""
    return any(JARS.glob("debezium-connector-vitess-*.jar"))


def receive(
    address: str, keyspace: str, table: str, positions: Mapping[str, str], rows: int, directory: Path
) -> debezium.PeerRun:
    """Pass `rows` records of a table through Debezium's engine to a handler of batches, as JSON.

    :param positions: the start position of each shard.
    :raises TailraceError: `ENVIRONMENT_UNFIT` if it fails.
    """
    host, _, port = address.rpartition(":")
    vgtid = [
        {"keyspace": keyspace, "shard": shard, "gtid": gtid, "table_p_ks": []}
        for shard, gtid in positions.items()
    ]
    settings = debezium.engine_settings(cores()) | {
        "connector.class": "io.debezium.connector.vitess.VitessConnector",
        "database.hostname": host,
        "database.port": port,
        "vitess.keyspace": keyspace,
        "vitess.shard": ",".join(positions),
        "vitess.vgtid": json.dumps(vgtid),
        "vitess.tablet.type": "MASTER",
        # A response may exceed the default.
        "vitess.grpc.max_inbound_message_size": str(64 << 20),
        "table.include.list": f"{keyspace}.{table}",
        "snapshot.mode": "never",
    }
    return debezium.PeerRun(**json.loads(debezium.run("json", rows, settings, directory, JARS)[-1]))


def hand_over(source: Mapping[str, Any], log_path: Path, rows: int) -> EngineRun:
    """Pass `rows` records through our engine to a handler, in a separate process.

    :param log_path: path of a log with the start positions.
    """
    found = answer_of(__name__, json.dumps(source), log_path, rows, deadline_s=DEADLINE_S)
    return EngineRun(**found)


def _hand_over_here(source: dict[str, Any], log_path: Path, rows: int) -> EngineRun:
    from tailrace import Engine, StopEngine

    count = size = 0
    ended_s = 0.0

    def take(batch: Any) -> None:
        nonlocal count, size, ended_s
        count += len(batch)
        size += batch.values.nbytes
        if count >= rows:
            ended_s = time.perf_counter()
            raise StopEngine

    engine = Engine(
        {"name": "bench", "source": source, "log": {"path": str(log_path)}},
        on_batch=take,
        converter={"type": "json", "schemas_enable": False},
    )
    started_s = time.perf_counter()
    took = timed(engine.run)
    return EngineRun(count, ended_s - started_s, took.cpu_seconds, size)


if __name__ == "__main__":
    _source, _log, _rows = sys.argv[1:]
    print(json.dumps(asdict(_hand_over_here(json.loads(_source), Path(_log), int(_rows)))))
