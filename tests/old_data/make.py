"""Makes the data of `test_old_data.py`: a log, targets that lag behind it, and the offsets topic of Kafka.

    python tests/old_data/make.py NAME

Run it once, with the version whose data is to be kept, never with the one that is to read it. It writes
`tests/old_data/NAME.tar.gz`, which is never made again.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka import Consumer

from tailrace_servers.install import find_install
from tailrace_servers.kafka import EmbeddedKafka, find_jars
from tailrace_servers.postgres import EmbeddedPostgres

NAME = "old"
OFFSETS_TOPIC = "old-offsets"
SINKS: list[dict[str, Any]] = [
    {"type": "parquet", "path": "./parquet"},
    {"type": "jsonl", "path": "./jsonl"},
    {"type": "delta", "mode": "append", "path": "./append"},
    {"type": "delta", "mode": "mirror", "path": "./mirror"},
    {"type": "kafka", "atomic_source_offset_commit": True, "offsets_topic": OFFSETS_TOPIC},
]

BEFORE = """
create table orders (id int primary key, what text, price numeric(12, 2), at timestamptz);
create table notes (id int primary key, body text);
alter table notes alter body set storage external;
insert into orders select i, 'thing ' || i, i / 7.0, '2026-01-01 00:00:00Z'::timestamptz + i * interval '1 h'
  from generate_series(1, 200) i;
insert into notes select i, repeat('x', 5000) || i from generate_series(1, 5) i;
"""
CHANGES = """
update orders set what = what || '!' where id % 3 = 0;
delete from orders where id % 11 = 0;
update notes set id = id + 100 where id = 3;
"""
AFTER = """
insert into orders select i, 'late ' || i, i, now() from generate_series(1001, 1050) i;
update orders set id = id + 5000 where id <= 4;
alter table orders add column note text default 'none';
alter table orders rename column what to name;
update orders set name = 'named' where id between 20 and 25;
update notes set id = id + 200 where id = 5;
delete from orders where id between 30 and 33;
truncate notes;
insert into notes values (7, 'the last');
"""
TABLES = {"orders": "id, name, price::text, note", "notes": "id, body"}


def main() -> None:
    """Make the data with the version that runs this."""
    name = sys.argv[1]
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedPostgres(find_install(18)) as server,
        EmbeddedKafka(find_jars()) as kafka,
    ):
        root = Path(folder)
        server.create_database("old")
        server.execute(BEFORE, dbname="old")
        _run(root, server.port, SINKS, kafka.bootstrap)
        server.execute(CHANGES, dbname="old")
        _run(root, server.port, SINKS, kafka.bootstrap)
        server.execute(AFTER, dbname="old")
        _run(root, server.port, [], kafka.bootstrap)  # only the log goes on
        rows = {
            table: server.query(f"select {columns} from {table} order by id", dbname="old")
            for table, columns in TABLES.items()
        }
        (root / "rows.json").write_text(json.dumps(rows))
        (root / "offsets.json").write_text(json.dumps(_records(kafka.bootstrap, OFFSETS_TOPIC)))
        target = Path(__file__).with_name(f"{name}.tar.gz")
        with tarfile.open(target, "w:gz") as archive:
            for each in sorted(root.iterdir()):
                archive.add(each, each.name)
    print(target)  # noqa: T201 (it talks to a person)


def sections(port: int, sinks: list[dict[str, Any]], bootstrap: str) -> dict[str, Any]:
    """Return the pipeline's file."""
    return {
        "name": NAME,
        "source": {"type": "postgresql", "dsn": f"postgresql://postgres@127.0.0.1:{port}/old"},
        "log": {"path": "./log", "segment_bytes": 65536},
        "sinks": [
            each | ({"bootstrap_servers": bootstrap} if each["type"] == "kafka" else {}) for each in sinks
        ],
        "spark": {"master": "local[2]"},
    }


def _run(root: Path, port: int, sinks: list[dict[str, Any]], bootstrap: str) -> None:
    file = root / "pipeline.yaml"
    file.write_text(yaml.safe_dump(sections(port, sinks, bootstrap)))
    subprocess.run([sys.executable, "-m", "tailrace", "run", str(file), "--until-caught-up"], check=True)


def _records(bootstrap: str, topic: str) -> list[dict[str, Any]]:
    """Return all records of a topic: partition, key, value and headers, bytes as base64."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap, "group.id": str(uuid.uuid4()), "auto.offset.reset": "earliest",
            "isolation.level": "read_committed", "enable.partition.eof": True,
        }
    )  # fmt: skip
    partitions = consumer.list_topics(topic, 30).topics[topic].partitions
    consumer.subscribe([topic])
    found, ended = [], 0
    while ended < len(partitions):
        message = consumer.poll(30)
        assert message is not None, "the broker does not answer"
        if message.error():
            ended += 1
            continue
        found.append(
            {
                "partition": message.partition(),
                "partitions": len(partitions),
                "key": _text(message.key()),
                "value": _text(message.value()),
                "headers": [[name, _text(value)] for name, value in message.headers() or []],  # type: ignore[arg-type]
            }
        )
    consumer.close()
    return found


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


if __name__ == "__main__":
    main()
