"""A pipeline from a log made by hand into a real broker: it needs neither a source nor Spark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer.testing

from tailrace import config
from tailrace.cli.main import app
from tailrace.config import EngineConfig
from tailrace.kafka.producer.account import Account
from tailrace.sinks.kafka.sink import account_of
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import read_topic
from tests.support.orders_log import LogOfOrders


def run(*arguments: object, status: int = 0) -> str:
    done = typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == status, done.output + done.stderr
    return done.stdout if status == 0 and "--verbose" not in arguments else done.stdout + done.stderr


def written(kafka: EmbeddedKafka, topic: str) -> list[int]:
    """Return the ids of the orders in a topic with one partition, in order."""
    return [message.document["after"]["id"] for message in read_topic(kafka.bootstrap, topic)]


class Orders:
    """A pipeline whose log holds four transactions, and its file."""

    def __init__(
        self,
        directory: Path,
        kafka: EmbeddedKafka,
        name: str,
        *,
        engine: Mapping[str, Any] | None = None,
        **sink: Any,
    ) -> None:
        self.kafka, self.name = kafka, name
        self.directory = directory
        self.file = directory / "pipeline.yaml"
        section = {
            "type": "kafka",
            "name": "out",
            "bootstrap_servers": kafka.bootstrap,
            "offsets_topic": f"{name}-offsets",
            "atomic_source_offset_commit": True,
            "converter": {"type": "json", "schemas_enable": False},
            **sink,
        }
        self.file.write_text(
            f"name: {name}\n"
            "source: {type: postgresql, host: 127.0.0.1, port: 1, dbname: shop, user: nobody}\n"
            "log: {path: ./log}\n"
            f"engine: {json.dumps(engine or {})}\n"
            f"sinks: [{json.dumps(section)}]\n"  # JSON is YAML
        )
        log = LogOfOrders(directory / "log")
        self.ends = [log.insert(1, 2), log.insert(3), log.insert(4, 5, 6), log.insert(7)]
        log.close()
        self.log = log.directory
        self.log_id = log.directory.identity.log_id
        self.task_path = log.directory.task_path("0")

    @property
    def topic(self) -> str:
        return f"{self.name}.public.orders"

    @property
    def config(self) -> EngineConfig:
        return config.load_engine(self.file)

    @property
    def account(self) -> Account:
        sink: Any = self.config.sinks[0]
        return account_of(sink, self.name)

    def shown(self) -> dict[str, Any]:
        (entry,) = json.loads(run("offsets", "show", self.file, "--json"))["offsets"]
        assert entry["error"] is None
        return entry

    def replay(self) -> list[int]:
        """Bring the sink to the log's end; return the topic's content then."""
        run("replay", self.file, "--sink", "out")
        return written(self.kafka, self.topic)
