"""Data of an older version is read and continued: its log, its targets, its offsets in Kafka.

`make.py` made each archive with the version in its name. The log is longer than what the targets have:
today's sinks continue them up to the log's end.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from deltalake import DeltaTable

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import read_topic

FOLDER = Path(__file__).parent
ARCHIVES = sorted(FOLDER.glob("*.tar.gz"))
#: Operations in the whole log, counted by hand from `make.py`.
OPERATIONS = {
    "orders": Counter(r=200, u=66 + 4 + 5, d=18 + 3, c=50),
    "notes": Counter(r=5, u=2, t=1, c=1),
}


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(tmp_path)  # noqa: S202 - our own archive
    return tmp_path


def tailrace(*words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(old: Path, table: str) -> list[list[Any]]:
    found: list[list[Any]] = json.loads((old / "rows.json").read_text())[table]
    return found


@pytest.mark.slow
def test_an_old_log_is_sound_and_has_what_was_committed(old: Path) -> None:
    tailrace("log", "verify", old / "log")
    changes = [json.loads(line) for line in tailrace("log", "show", old / "log", "--json").splitlines()]
    found = {
        table: Counter(each["op"] for each in changes if each["source"]["table"] == table)
        for table in OPERATIONS
    }
    assert found == OPERATIONS
    present: dict[int, dict[str, Any]] = {}
    for change in changes:
        if change["source"]["table"] == "orders":
            if change["before"] is not None:
                present.pop(change["before"]["id"], None)
            if change["after"] is not None:
                present[change["after"]["id"]] = change["after"]
    assert sorted(present) == [row[0] for row in rows(old, "orders")]


@pytest.mark.slow
def test_old_targets_are_continued(old: Path) -> None:
    sections = yaml.safe_load((old / "pipeline.yaml").read_text())
    sections["sinks"] = [
        {"type": "parquet", "path": "./parquet"},
        {"type": "jsonl", "path": "./jsonl"},
        {"type": "delta", "mode": "append", "path": "./append"},
        {"type": "delta", "mode": "mirror", "path": "./mirror"},
    ]
    file = old / "pipeline.yaml"
    file.write_text(yaml.safe_dump(sections))
    for number in range(len(sections["sinks"])):
        tailrace("replay", file, "--sink", str(number))
    for table, operations in OPERATIONS.items():
        lines = [
            json.loads(line)
            for path in (old / "jsonl" / f"public.{table}").glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        assert Counter(line["op"] for line in lines) == operations
        files = sorted((old / "parquet" / f"public.{table}").glob("*.parquet"))
        assert Counter(op for path in files for op in pq.read_table(path)["_op"].to_pylist()) == operations
        appended = DeltaTable(str(old / "append" / f"public.{table}")).to_pyarrow_table()
        assert Counter(appended["_op"].to_pylist()) == operations
        offsets = appended["_log_offset"].to_pylist()
        assert len(set(offsets)) == len(offsets)
    mirror = DeltaTable(str(old / "mirror" / "public.orders")).to_pyarrow_table().to_pylist()
    found = sorted([row["id"], row["name"], str(row["price"]), row["note"]] for row in mirror)
    assert found == rows(old, "orders")
    notes = DeltaTable(str(old / "mirror" / "public.notes")).to_pyarrow_table().to_pylist()
    assert sorted([row["id"], row["body"]] for row in notes) == rows(old, "notes")


def test_old_offsets_in_kafka_are_continued(old: Path, kafka: EmbeddedKafka, topic_name: str) -> None:
    records = json.loads((old / "offsets.json").read_text())
    offsets_topic = f"{topic_name}-offsets"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    made = NewTopic(offsets_topic, records[0]["partitions"], 1, config={"cleanup.policy": "compact"})
    admin.create_topics([made])[offsets_topic].result(60)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for record in records:
        key, value = (base64.b64decode(record[part]) for part in ("key", "value"))
        producer.produce(offsets_topic, value, key, record["partition"])
    producer.flush(60)
    sections = yaml.safe_load((old / "pipeline.yaml").read_text())
    sections["sinks"] = [
        {
            "type": "kafka", "bootstrap_servers": kafka.bootstrap, "atomic_source_offset_commit": True,
            "offsets_topic": offsets_topic, "topic_prefix": topic_name,
        }
    ]  # fmt: skip
    file = old / "pipeline.yaml"
    file.write_text(yaml.safe_dump(sections))
    tailrace("replay", file, "--sink", "0")
    events = [message.document for message in read_topic(kafka.bootstrap, f"{topic_name}.public.orders")]
    # A change of the key is a delete and a create.
    operations = Counter((event.get("payload") or event)["op"] for event in events if event)
    assert operations == Counter(u=5, d=4 + 3, c=50 + 4)
