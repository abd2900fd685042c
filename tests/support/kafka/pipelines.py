"""Pipeline files for Kafka."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.postgres import Database


def pipeline(directory: Path, pg: Database, kafka: EmbeddedKafka, **sink: Any) -> Path:
    """Write a file with one Kafka sink, whose topics begin with the database's name."""
    all_of_it = {
        "type": "kafka",
        "bootstrap_servers": kafka.bootstrap,
        "topic_prefix": pg.name,
        "group": pg.name,
        "offsets_topic": f"{pg.name}-offsets",
        "atomic_source_offset_commit": True,
        "retry_attempts_max": 0,
        **sink,
    }
    source = {"type": "postgresql", "dsn": pg.dsn, "tables": ["public.*"]}
    file = directory / "pipeline.yaml"
    file.write_text(
        json.dumps({"name": pg.name, "source": source, "log": {"path": "./log"}, "sinks": [all_of_it]})
    )
    return file
