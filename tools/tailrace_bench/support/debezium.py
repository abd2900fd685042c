"""Debezium's asynchronous engine: the peer of benchmarks, and of a test of the converter `json`.
`make bench-peers` fetches it.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal, NamedTuple

from tailrace.errors import Kind, TailraceError
from tailrace_bench.support import table
from tailrace_servers.postgres import EmbeddedPostgres

#: Version of the connector; the newest available engine is 3.6.3.
VERSION = "3.7.0.Final"
JARS = Path(sys.prefix) / "share" / "tailrace" / "debezium"
DEADLINE_S = 1000.0

#: Sizes of batch and queue, larger than the defaults (2 048 and 8 192), with which it was slower.
BATCH_ROWS, QUEUE_ROWS = 16_384, 65_536
HEAP = "2g"

#: Settings of the producer in the form `kafka`: with the same durability and batch size as our own.
PRODUCER = {
    "acks": "all",
    "enable.idempotence": "true",
    "compression.type": "lz4",
    "linger.ms": "20",
    "batch.size": str(1 << 20),
    "buffer.memory": str(256 << 20),
}

#: Settings for low latency: batches of the default size, and polling without a wait.
QUICK = {"poll.interval.ms": "1", "max.batch.size": "2048", "max.queue.size": "8192"}

Format = Literal["json", "connect", "kafka"]


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One timed pass: seconds from the start of the engine, and from its first record, to the last record.

    Both exclude the start of the JVM; the second also excludes the start of the connector.
    """

    rows: int
    seconds: float
    seconds_from_first: float
    cpu_seconds: float
    characters: int


def is_here() -> bool:
    """Return whether the peer was fetched."""
    return any(JARS.glob("debezium-embedded-*.jar"))


def receive(
    postgres: EmbeddedPostgres,
    slot: str,
    rows: int,
    form: Format,
    threads: int,
    directory: Path,
    producer: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
) -> PeerRun:
    """Pass `rows` records of `slot` through Debezium's engine to a handler of batches.

    :param form: `json` without schemas; `connect`: unconverted Kafka Connect records; or `kafka`: like
        `json`, and the handler sends each batch to Kafka and waits until all of it is written.
    :param producer: for `kafka`, the settings of the producer.
    :param settings: settings that are added to those of the benchmarks, or replace them.
    :raises TailraceError: `ENVIRONMENT_UNFIT` if it fails.
    """
    given = {**_settings(postgres, slot, threads), **(settings or {})}
    given |= {f"peer.producer.{name}": value for name, value in (producer or {}).items()}
    return PeerRun(**json.loads(run(form, rows, given, directory)[-1]))


def latencies(postgres: EmbeddedPostgres, slot: str, rows: int, directory: Path) -> list[int]:
    """Return for each of `rows` records the microseconds from its commit to the peer's handler.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if it fails.
    """
    lines = run("latency", rows, {**_settings(postgres, slot, 1), **QUICK}, directory)
    found: list[int] = json.loads(next(line for line in lines if line.startswith("[")))
    return found


class PeerEvent(NamedTuple):
    """An event of the peer's handler; None: no key, a tombstone."""

    topic: str
    key: str | None
    value: str | None


def events(
    postgres: EmbeddedPostgres, slot: str, last_topic: str, settings: Mapping[str, str], directory: Path
) -> list[PeerEvent]:
    """Return the events of `slot`, as JSON, up to the batch of the first one for `last_topic`.

    :param settings: settings that are added to those of the benchmarks, or replace them.
    :raises TailraceError: `ENVIRONMENT_UNFIT` if it fails.
    """
    given = {**_settings(postgres, slot, 1), **settings, "peer.last.topic": last_topic}
    lines = run("print", 1, given, directory)[:-1]
    parts = [parts for line in lines if len(parts := line.split(" ")) == 3]
    return [PeerEvent(_decoded(topic) or "", _decoded(key), _decoded(value)) for topic, key, value in parts]


def _decoded(text: str) -> str | None:
    return None if text == "-" else base64.b64decode(text).decode()


def run(form: str, rows: int, settings: Mapping[str, str], directory: Path, jars: Path = JARS) -> list[str]:
    """Run the engine in a folder of jars for `rows` records; return the lines of its output.

    :param form: see `DebeziumPeer.java`.
    :raises TailraceError: `ENVIRONMENT_UNFIT` if it fails.
    """
    file = directory / f"peer-{form}.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    with as_file(files("tailrace_bench.support") / "DebeziumPeer.java") as source:
        command = [java, f"-Xmx{HEAP}", "-cp", f"{jars}/*", str(source), form, str(rows), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if done.returncode != 0:
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"run Debezium in {jars}: it ended with status {done.returncode}\n{done.stderr[-2000:]}",
            "it needs Java 17 or later; `make bench-peers`, for Vitess `make bench-vitess`, fetches it again",
        )
    return done.stdout.splitlines()


def engine_settings(threads: int) -> dict[str, str]:
    """Return the settings of the engine, for JSON without schemas and without stored offsets."""
    return {
        "name": "peer",
        "topic.prefix": "peer",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "offset.flush.interval.ms": "60000",
        "record.processing.threads": str(threads),
        "max.batch.size": str(BATCH_ROWS),
        "max.queue.size": str(QUEUE_ROWS),
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "converter.schemas.enable": "false",
    }


def _settings(postgres: EmbeddedPostgres, slot: str, threads: int) -> dict[str, str]:
    return engine_settings(threads) | {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "127.0.0.1",
        "database.port": str(postgres.port),
        "database.user": "postgres",
        "database.password": "unused",
        "database.dbname": "postgres",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": table.PUBLICATION,
        "publication.autocreate.mode": "disabled",
        "table.include.list": "public.orders",
        # No snapshot, not even of the schema: that would set the position past the backlog.
        "snapshot.mode": "configuration_based",
        "snapshot.mode.configuration.based.snapshot.data": "false",
        "snapshot.mode.configuration.based.snapshot.schema": "false",
        "snapshot.mode.configuration.based.start.stream": "true",
    }
