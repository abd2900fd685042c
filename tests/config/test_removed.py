"""A key of earlier versions is refused with its replacement, at its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.document import Document
from tailrace.config.load import validate
from tailrace.config.problems import REMOVED

KAFKA = {"type": "kafka", "bootstrap_servers": "127.0.0.1:1"}
#: The place of each key: a part of a file in which it is the only problem.
PLACES: dict[str, dict[str, Any]] = {
    "source.snapshot_chunk_bytes": {"source": {"snapshot_chunk_bytes": "8 MiB"}},
    "slot_watch.safe_wal_share_warned": {"source": {"slot_watch": {"safe_wal_share_warned": 0.5}}},
    "slot_watch.transaction_age_warned_s": {"source": {"slot_watch": {"transaction_age_warned_s": 60}}},
    "source.messages": {"source": {"messages": False}},
    "log.snapshot_compression": {"log": {"snapshot_compression": "lz4"}},
    "engine.task_restarts_max": {"engine": {"task_restarts_max": 3}},
    "sinks.transaction_records": {"sinks": [KAFKA | {"transaction_records": 5}]},
    **{
        f"converter.{name}": {
            "engine": {"converter": {"type": "avro", "registry_url": "http://r:1", name: "x"}}
        }
        for name in ("registry_logical_cluster", "registry_identity_pool", "normalize_schemas")
    },
    "source.snapshot_read_on": {"source": {"snapshot_read_on": "spark"}},
    "offset_storage.type: postgresql": {"engine": {"offset_storage": {"type": "postgresql"}}},
    "offset_storage.dsn": {"engine": {"offset_storage": {"type": "log", "dsn": "postgresql://db/o"}}},
    "converter.registry_deadline_ms": {
        "engine": {"converter": {"type": "avro", "registry_url": "http://r:1", "registry_deadline_ms": 1}}
    },
    "sinks.dead_letter_value_bytes": {"sinks": [KAFKA | {"dead_letter_value_bytes": 0}]},
    "converter.mode": {"engine": {"converter": {"type": "cloudevents", "mode": "structured"}}},
    "sinks.too_large": {"sinks": [KAFKA | {"too_large": "dead_letter"}]},
    "sinks.schema_changes": {"sinks": [KAFKA | {"schema_changes": True}]},
    "sinks.heartbeat_topic": {"sinks": [KAFKA | {"heartbeat_topic": "beats"}]},
    "offset_storage.table": {"engine": {"offset_storage": {"type": "log", "table": "o"}}},
}


def with_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a file's content with a part merged into it, section by section."""
    content: dict[str, Any] = {
        "name": "shop",
        "source": {"dsn": "postgresql://cdc@db.example/shop", "tables": ["public.*"]},
        "log": {"path": "./shop.log"},
    }
    for name, section in part.items():
        content[name] = {**content.get(name, {}), **section} if isinstance(section, dict) else section
    return content


def test_each_removed_key_is_tested_here():
    assert set(PLACES) == set(REMOVED)


@pytest.mark.parametrize("key", PLACES)
def test_a_removed_key_is_refused_with_its_replacement(key: str, tmp_path: Path):
    found, problems = validate(Document(with_part(PLACES[key]), {}), tmp_path)
    assert found is None
    name = key.partition(":")[0].rpartition(".")[2]
    # Options of extensions are checked at once, and named in the message.
    kind = PLACES[key]["engine"]["converter"]["type"] if key.startswith("converter.") else ""
    inside = f"{kind}: {name}: " if kind else ""
    assert [one.message for one in problems] == [f"{inside}is not a setting any more: {REMOVED[key]}"]
    assert problems[0].path[-1] == (name if not inside else "converter")
