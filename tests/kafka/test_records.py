"""The records that `tailrace run` writes: their topics, partitions and counts, and records that are too
large.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from tailrace.cli.main import app
from tailrace.kafka.producer.partitioner import partition_of
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.converters.avro import decoded
from tests.support.converters.registry import FakeRegistry
from tests.support.kafka.pipelines import pipeline
from tests.support.kafka.reading import QUIET, Message, read_topic
from tests.support.kafka_cluster import Authority
from tests.support.postgres import Database
from tests.support.wait import wait_until

TIMEOUT_S = 240


def run(file: Path, *, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "run", str(file), "--until-caught-up"],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "canary" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def problems(file: Path) -> list[dict[str, Any]]:
    """Return the errors that `tailrace check` finds."""
    done = typer.testing.CliRunner().invoke(app, ["check", str(file), "--json"])
    assert "canary" not in done.stdout + done.stderr
    return [found for found in json.loads(done.stdout)["problems"] if found["severity"] == "error"]


def sink_status(file: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "status", str(file), "--json"],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    (sink,) = json.loads(done.stdout)["sinks"]
    return dict(sink)


@pytest.mark.slow
def test_transactions_are_counted_and_each_is_in_one_partition(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    pg.execute("create table orders (id int primary key, what text)")
    pg.execute("create table items (id int primary key, what text)")
    pg.execute("insert into orders values (1, 'of the snapshot')")
    file = pipeline(
        tmp_path, pg, kafka,
        provide_transaction_metadata=True,
        transaction_topic=f"{pg.name} ends",  # a space becomes `_`
        partition_by="transaction",
        schema_changes_topic=pg.name,
        heartbeat_interval_ms=1,
        topics=[{"tables": ["public.*"], "partitions": 5, "settings": {"retention.ms": "7200000"}}],
        routes=[{"tables": ["public.items"], "topic": "{prefix}.things"}],
        transformations=[{"type": "set_headers", "headers": {"origin": "'shop'"}, "predicate": "of_items"}],
        predicates={"of_items": {"type": "table", "tables": ["public.items"]}},
    )  # fmt: skip
    run(file)
    pg.execute("insert into orders select n, 'x' from generate_series(10, 400) n")
    pg.execute(
        "begin; insert into items select n, 'y' from generate_series(1, 30) n; update orders set what = 'z' "
        "where id <= 12; delete from items where id = 30; update items set id = 31 where id = 1; "
        "select pg_logical_emit_message(true, 'note', 'in it'); commit; "
        "select pg_logical_emit_message(false, 'note', 'beside')"
    )
    run(file)
    pg.execute("alter table orders add column more int")
    pg.execute("insert into items values (500, 'after')")
    run(file)
    pg.execute("insert into orders values (500, 'x', 7)")
    run(file)
    shapes = read_topic(kafka.bootstrap, pg.name)
    assert Counter((one.document["type"], one.document["tableName"]) for one in shapes) == {
        ("CREATE", "orders"): 1, ("CREATE", "items"): 1, ("ALTER", "orders"): 1,
    }  # fmt: skip
    altered = shapes[-1]
    assert altered.key_document == {"databaseName": pg.name, "schemaName": "public", "tableName": "orders"}
    assert altered.document["keyColumnNames"] == ["id"]
    assert altered.document["lsn"] > max(one.document["lsn"] for one in shapes[:-1]) > 0
    assert [(one["name"], one["typeName"], one["optional"]) for one in altered.document["columns"]] == [
        ("id", "int4", False), ("what", "text", True), ("more", "int4", True),
    ]  # fmt: skip
    beats = read_topic(kafka.bootstrap, f"__debezium-heartbeat.{pg.name}")
    assert {one.key_document["serverName"] for one in beats} == {pg.name}
    assert [one.document["ts_ms"] for one in beats] == sorted(one.document["ts_ms"] for one in beats)
    assert len(beats) >= 4
    boundaries = [message.document for message in read_topic(kafka.bootstrap, f"{pg.name}_ends")]
    assert [one["status"] for one in boundaries] == ["BEGIN", "END"] * 4
    events = {name: read_topic(kafka.bootstrap, f"{pg.name}.{name}") for name in ("public.orders", "things")}
    notes = read_topic(kafka.bootstrap, f"{pg.name}.message")
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for name, messages in [("public.orders", events["public.orders"]), ("public.items", events["things"]),
                           ("", notes)]:  # fmt: skip
        for message in messages:
            if message.value is not None and message.document["transaction"] is not None:
                xid = message.document["transaction"]["id"].partition(":")[0]
                counted[xid][name] += 1
                assert name == "" or message.partition == partition_of(xid.encode(), 5)
    ends = boundaries[1::2]
    for begin, end in zip(boundaries[::2], ends, strict=True):
        assert begin["id"].partition(":")[0] == end["id"].partition(":")[0]
        of_tables = {one["data_collection"]: one["event_count"] for one in end["data_collections"]}
        assert of_tables == dict(counted[end["id"].partition(":")[0]])
        assert end["event_count"] == sum(of_tables.values())
    # Thirty inserts, a delete, and the two events of a changed key; a tombstone does not count.
    assert {one["data_collection"]: one["event_count"] for one in ends[1]["data_collections"]} == {
        "public.orders": 4, "public.items": 33, "": 1,
    }  # fmt: skip
    assert [note.document["message"]["prefix"] for note in notes] == ["note", "note"]
    assert [note.document["transaction"] is None for note in notes] == [False, True]
    assert {message.headers["origin"] for message in events["things"]} == {"shop"}
    assert not any("origin" in message.headers for message in events["public.orders"])
    read = [message for message in events["public.orders"] if message.document["op"] == "r"]
    assert [message.document["transaction"] for message in read] == [None]
    assert _setting(kafka, f"{pg.name}.public.orders", "retention.ms") == "7200000"


def test_a_record_that_is_too_large_stops_the_sink_or_becomes_a_dead_letter(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    pg.execute("create table files (id int primary key, content text)")
    settings = [{"tables": ["public.*"], "settings": {"max.message.bytes": "100000"}}]
    stopping = pipeline(tmp_path, pg, kafka, topics=settings)
    run(stopping)
    # Random text, so that compression does not make it small.
    pg.execute(
        "insert into files select n, string_agg(md5(random()::text), '') from generate_series(1, 6) n, "
        "lateral generate_series(1, case when n % 3 = 0 then 4000 else 10 * n end) group by n order by n"
    )
    said = run(stopping, status=1)
    assert "sink_record_too_large" in said
    assert "table=public.files" in said
    assert "log_offset=" in said
    assert "max.message.bytes" in said
    assert _rows(kafka, f"{pg.name}.public.files") == []
    letting = pipeline(
        tmp_path, pg, kafka, topics=settings,
        dead_letter_topic=f"{pg.name} graves",  # a space becomes `_`
    )  # fmt: skip
    run(letting)
    assert _rows(kafka, f"{pg.name}.public.files") == [1, 2, 4, 5]
    graves = read_topic(kafka.bootstrap, f"{pg.name}_graves")
    assert [grave.key_document for grave in graves] == [{"id": 3}, {"id": 6}]
    assert [grave.headers["tailrace.table"] for grave in graves] == ["public.files"] * 2
    assert all(int(grave.headers["tailrace.size"]) > 128_000 for grave in graves)
    assert [grave.value for grave in graves] == [None] * 2
    # Records of 90 kB each: the client's batches must fit the topic, too.
    pg.execute(
        "insert into files select 10 + n, string_agg(md5(random()::text), '') from generate_series(1, 12) n, "
        "lateral generate_series(1, 2800) group by n order by n"
    )
    run(letting)
    assert len(_rows(kafka, f"{pg.name}.public.files")) == 16


def _rows(kafka: EmbeddedKafka, topic: str) -> list[int]:
    return [message.document["after"]["id"] for message in _present(read_topic(kafka.bootstrap, topic))]


def _present(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message.value is not None]


def _setting(kafka: EmbeddedKafka, topic: str, name: str) -> str:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, **QUIET})
    return str(admin.describe_configs([resource])[resource].result(60)[name].value)


def test_avro_uses_the_topics_subjects_and_a_refused_schema_stops_the_sink(
    pg: Database, kafka: EmbeddedKafka, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.execute("create type mood as enum ('dear', 'cheap')")
    pg.execute("create table prices (id int primary key, price numeric(10,2), what mood not null)")
    pg.execute("insert into prices values (1, 12.5, 'dear'), (2, null, 'cheap')")
    monkeypatch.setenv("TOKEN", "t0ken-canary")
    (tmp_path / "roots.pem").write_bytes(authority.certificate.read_bytes())
    with FakeRegistry(token="t0ken-canary", keystore=authority.keystore) as registry:
        converter = {
            "type": "avro", "registry_url": registry.url, "registry_token": "${env:TOKEN}",
            "registry_ca_file": "roots.pem",
        }  # fmt: skip

        def made(**more: Any) -> Path:
            return pipeline(
                tmp_path, pg, kafka, converter={**converter, **more}, provide_transaction_metadata=True
            )

        assert {found["kind"] for found in problems(made(auto_register_schemas=False))} == {"schema_refused"}
        monkeypatch.setenv("TOKEN", "wrong-canary")
        (found,) = problems(made())
        assert (found["kind"], "registry_token" in found["repair"]) == ("registry_refused", True)
        monkeypatch.setenv("TOKEN", "t0ken-canary")
        file = made()
        assert problems(file) == []
        assert registry.subjects == {}
        wait_until(lambda: registry.open == 0)
        assert "HTTP Request" not in run(file)
        # Exactly the schemas that were checked before are registered.
        assert problems(made(auto_register_schemas=False)) == []
        file = made()
        pg.execute("delete from prices where id = 2")
        run(file)
        topic = f"{pg.name}.public.prices"
        events = [
            (_decoded(one.key, registry), _decoded(one.value, registry))
            for one in read_topic(kafka.bootstrap, topic)
        ]
        assert [key for key, _ in events] == [{"id": 1}, {"id": 2}, {"id": 2}, {"id": 2}]
        assert [value and value["op"] for _, value in events] == ["r", "r", "d", None]
        assert str(events[0][1]["after"]["price"]) == "12.50"
        ends = [
            _decoded(one.value, registry) for one in read_topic(kafka.bootstrap, f"{pg.name}.transaction")
        ]
        assert [(one["status"], one["event_count"]) for one in ends] == [("BEGIN", None), ("END", 1)]
        assert {f"{topic}-key", f"{topic}-value", f"{pg.name}.transaction-value"} <= set(registry.subjects)
        pg.execute("alter table prices alter column price type text")
        (found,) = problems(file)
        assert found["kind"] == "schema_refused"
        assert f"'{topic}-value': the schema is not compatible" in found["message"]
        assert f"PUT /config/{topic}-value" in found["repair"]
        pg.execute("insert into prices values (3, 'much', 'dear')")
        said = run(file, status=1)
        assert "schema_refused" in said
        assert "TYPE_MISMATCH: Value.price" in said
        registry.level = "NONE"
        run(file)
        assert _decoded(read_topic(kafka.bootstrap, topic)[-1].value, registry)["after"]["price"] == "much"


def _decoded(value: bytes | None, registry: FakeRegistry) -> Any:
    return None if value is None else decoded(value, registry.schema(int.from_bytes(value[1:5], "big")))
