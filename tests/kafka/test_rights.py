"""A broker with authentication: the rights that the sink needs, its errors without them, and no secrets."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace.changelog.reader import LogReader
from tailrace.config.engine_options import OffsetStorage
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.offsets.store import KafkaOffsetStore
from tailrace.model import LogRange
from tailrace.pipeline.preflight.kafka import cluster_findings, storage_findings, topic_findings
from tailrace.ranges import plan
from tailrace.sinks.build import build
from tailrace.sinks.kafka.offsets import commit_from_outside
from tailrace_servers.kafka import SASL, SASL_TLS, EmbeddedKafka
from tests.support.kafka.orders import Orders, run, written
from tests.support.kafka_cluster import Authority, Principal

CANARY = "c4n4ry-S3cret"
IDS = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(autouse=True)
def _password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", CANARY)


def orders_by(
    principal: Principal, directory: Path, kafka: EmbeddedKafka, name: str, door: str = SASL, **more: Any
) -> Orders:
    """Return a pipeline whose sink uses a secured listener."""
    options = principal.options(door, password="${env:CANARY}") | more.pop("options", {})
    return Orders(
        directory, kafka, name, bootstrap_servers=kafka.bootstrap_at(door), options=options,
        offset_flush_timeout_ms=30_000, **more,
    )  # fmt: skip


def write(orders: Orders) -> None:
    """Open a new sink and write the whole log."""
    sink = build(orders.config.sinks[0], PostgresSource(), orders.directory / "log")
    with LogReader.open(orders.directory / "log", "0") as reader:
        splits = plan.input_splits("0", reader.blocks(0, orders.ends[-1]), 0, orders.ends[-1])
    try:
        sink.open(orders.log.identity, orders.name)
        sink.write(None, orders.directory / "log", LogRange("0", 0, orders.ends[-1]), splits)
    finally:
        sink.close()


def refusal_of(orders: Orders) -> TailraceError | None:
    """Return the error with which the sink fails; None: it does not."""
    try:
        write(orders)
    except TailraceError as error:
        if error.kind is not Kind.SINK_REFUSED:
            raise
        return error
    return None


def asked_for(error: TailraceError, principal: Principal) -> set[tuple[str, str, str]]:
    """Return the rights that the command in an error's hint would grant."""
    words = shlex.split(error.hint)
    assert words[0] == "kafka-acls.sh"
    assert words[words.index("--allow-principal") + 1] == f"User:{principal.name}"
    resource, name = next((word[2:], words[at + 1]) for at, word in enumerate(words)
                          if word in ("--topic", "--transactional-id"))  # fmt: skip
    operations = [words[at + 1] for at, word in enumerate(words) if word == "--operation"]
    spelt = {"Read": "READ", "Write": "WRITE", "Create": "CREATE", "DescribeConfigs": "DESCRIBE_CONFIGS"}
    assert name in error.message
    return {(resource, name, spelt[operation]) for operation in operations}


@pytest.mark.follows("sink_refused")
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("create", [True, False])
def test_the_sink_needs_exactly_the_documented_rights_and_names_a_missing_one(
    kafka: EmbeddedKafka, principal: Principal, tmp_path: Path, topic_name: str, atomic: bool, create: bool
) -> None:
    orders = orders_by(
        principal, tmp_path, kafka, topic_name, atomic_source_offset_commit=atomic, create_topics=create
    )
    offsets = f"{topic_name}-offsets"
    needed = {("topic", offsets, operation) for operation in ("READ", "WRITE", "DESCRIBE_CONFIGS")}
    needed |= {("topic", orders.topic, "WRITE")}
    needed |= {("transactional-id", f"tailrace-{topic_name}-0", "WRITE")} if atomic else set()
    if create:
        needed |= {("topic", offsets, "CREATE"), ("topic", orders.topic, "CREATE")}
    else:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        made = [NewTopic(offsets, 2, 1, config={"cleanup.policy": "compact"}), NewTopic(orders.topic, 1, 1)]
        for done in admin.create_topics(made).values():
            done.result(60)
    # Beginning with none: each error names a right, with the command that grants it; no other is needed.
    while (refused := refusal_of(orders)) is not None:
        for right in asked_for(refused, principal):
            assert right in needed - principal.rights
            principal.allow(*right)
    assert principal.rights == needed
    assert written(kafka, orders.topic) == IDS
    # And if any one of them is missing, the error names that one.
    for right in sorted(needed) if atomic and not create else ():
        principal.revoke(*right)
        run("offsets", "reset", with_bootstrap(orders), "--yes")
        refused = refusal_of(orders)
        assert refused is not None
        assert asked_for(refused, principal) == {right}
        principal.allow(*right)


def granted(principal: Principal, attempt: Callable[[], object]) -> None:
    """Grant the principal what the errors of `attempt` say is missing, until it succeeds."""
    while True:
        try:
            attempt()
        except TailraceError as error:
            if error.kind is not Kind.SINK_REFUSED:
                raise
            for right in asked_for(error, principal):
                principal.allow(*right)
        else:
            return


def test_commands_and_engines_need_exactly_the_documented_rights(
    kafka: EmbeddedKafka, principal: Principal, tmp_path: Path, topic_name: str
) -> None:
    orders = orders_by(principal, tmp_path, kafka, topic_name)
    offsets, own = f"{topic_name}-offsets", f"{topic_name}-engine"
    run("replay", with_bootstrap(orders), "--sink", "out")
    (shown,) = json.loads(run("offsets", "show", orders.file, "--json"))["offsets"]
    assert shown["error"]["kind"] == "sink_refused"
    principal.allow("topic", offsets, "READ")
    assert orders.shown()["log_offset"] == orders.ends[-1]
    sink: Any = orders.config.sinks[0]
    granted(principal, lambda: commit_from_outside(sink, orders.name, ["0"], None))
    expected = {("topic", offsets, operation) for operation in ("READ", "WRITE", "DESCRIBE_CONFIGS")}
    expected |= {("transactional-id", f"tailrace-{topic_name}-0", "WRITE")}
    assert principal.rights == expected
    assert orders.shown()["log_offset"] is None

    section = OffsetStorage.model_validate(
        {"type": "kafka", "bootstrap_servers": kafka.bootstrap_at(SASL), "topic": own,
         "options": principal.options(SASL, password="${env:CANARY}")}
    )  # fmt: skip

    def keep() -> None:
        store = KafkaOffsetStore(section, topic_name, atomic=True)
        try:
            store.start()
            store.write([({"server": "a"}, {"line": 1})], 30)
        finally:
            store.stop()

    assert [found.kind for found in storage_findings(section, topic_name)] == [Kind.SINK_REFUSED]
    granted(principal, keep)
    assert list(storage_findings(section, topic_name)) == []
    expected |= {("topic", own, right) for right in ("READ", "WRITE", "DESCRIBE_CONFIGS", "CREATE")}
    expected |= {("transactional-id", f"tailrace-{topic_name}-offsets", "WRITE")}
    assert principal.rights == expected


def with_bootstrap(orders: Orders) -> Path:
    """Return the pipeline's file for a user who may do everything."""
    found = json.loads(orders.file.read_text().split("sinks: [")[1].rstrip("]\n"))
    found |= {"bootstrap_servers": orders.kafka.bootstrap, "options": {}}
    file = orders.directory / "as-root.yaml"
    file.write_text(orders.file.read_text().split("sinks: [")[0] + f"sinks: [{json.dumps(found)}]\n")
    return file


def test_over_tls_the_sink_works_and_errors_come_at_once_without_secrets(
    kafka: EmbeddedKafka, authority: Authority, principal: Principal, tmp_path: Path, topic_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for right in (("READ", "WRITE", "DESCRIBE_CONFIGS", "CREATE"), ("WRITE", "CREATE")):
        for operation in right:
            name = f"{topic_name}-offsets" if "READ" in right else f"{topic_name}.public.orders"
            principal.allow("topic", name, operation)
    principal.allow("transactional-id", f"tailrace-{topic_name}-0", "WRITE")
    told = []

    def orders_with(directory: str, **options: str) -> Orders:
        (tmp_path / directory).mkdir()
        return orders_by(principal, tmp_path / directory, kafka, topic_name, SASL_TLS, options=options)

    right = orders_with("right", **{"ssl.ca.location": str(authority.certificate)})  # type: ignore[assignment]
    told.append(run("--verbose", "replay", right.file, "--sink", "out"))
    assert written(kafka, right.topic) == IDS
    for command in (("offsets", "show", right.file), ("status", right.file)):
        told += [run(*command), run(*command, "--json")]
    assert json.loads(told[2])["offsets"][0]["log_offset"] == right.ends[-1]
    told.append(run("offsets", "set", right.file, "--to", right.ends[0], "--yes", "--json"))

    stranger = orders_with("stranger", **{"ssl.ca.location": str(authority.stranger)})
    told.append(run("--verbose", "--debug", "replay", stranger.file, "--sink", "out", status=1))
    assert "sink_refused" in told[-1]
    assert "certificate" in told[-1]
    assert "ssl.ca.location" in told[-1]
    nowhere = orders_with("nowhere", **{"ssl.ca.location": "/nonexistent.pem"})
    told.append(run("--debug", "replay", nowhere.file, "--sink", "out", status=1))
    assert "sink_misconfigured" in told[-1]

    monkeypatch.setenv("CANARY", f"wrong-{CANARY}")
    told.append(run("--verbose", "--debug", "replay", right.file, "--sink", "out", status=1))
    assert "sink_refused" in told[-1]
    assert "sasl.password" in told[-1]
    assert "trying again" not in told[-1]
    told.append(run("offsets", "show", right.file, "--json"))
    assert json.loads(told[-1])["offsets"][0]["error"]["kind"] == "sink_refused"
    monkeypatch.delenv("CANARY")
    told.append(run("replay", right.file, "--sink", "out", status=2))
    assert "secret_missing" in told[-1]

    assert not [words for words in told if CANARY in words]
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()
    ]


def test_check_reports_what_the_cluster_lacks_and_creates_nothing(
    kafka: EmbeddedKafka, principal: Principal, tmp_path: Path, topic_name: str
) -> None:
    orders = orders_by(principal, tmp_path, kafka, topic_name)
    offsets = f"{topic_name}-offsets"
    tables = [("public", "orders")]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})

    def problems() -> list[Any]:
        (part,) = orders.config.pipelines
        (sink,) = part.sinks
        assert isinstance(sink, KafkaSinkConfig)
        return [*cluster_findings(sink, part), *topic_findings(sink, part, tables)]

    found = json.loads(run("check", orders.file, "--json", status=1))
    told = [problem for problem in found["problems"] if problem["kind"] == "sink_refused"]
    assert len(told) == 1
    assert offsets in told[0]["message"]
    assert told[0]["repair"].startswith("kafka-acls.sh")
    assert [finding.kind for finding in problems()] == [Kind.SINK_REFUSED] * 2
    for operation in ("READ", "WRITE", "DESCRIBE_CONFIGS", "CREATE"):
        principal.allow("topic", offsets, operation)
    for operation in ("WRITE", "CREATE"):
        principal.allow("topic", orders.topic, operation)
    assert problems() == []
    assert not {offsets, orders.topic} & set(admin.list_topics(timeout=30).topics)
    admin.create_topics([NewTopic(offsets, 1, 1)])[offsets].result(60)
    (finding,) = problems()
    assert finding.kind is Kind.SINK_MISCONFIGURED
    assert "cleanup.policy=compact" in finding.repair


@pytest.mark.parametrize("transformations", [[], [{"type": "drop_headers", "headers": ["mark"]}]])
def test_check_looks_at_the_topics_besides_those_of_tables(
    kafka: EmbeddedKafka, tmp_path: Path, topic_name: str, transformations: list[dict[str, Any]]
) -> None:
    beside: dict[str, Any] = {
        "dead_letter_topic": f"{topic_name}.dead-letter",
        "schema_changes_topic": f"{topic_name} shapes",
        "provide_transaction_metadata": True,
        "heartbeat_interval_ms": 1000,
    }
    orders = Orders(
        tmp_path, kafka, topic_name, create_topics=False, transformations=transformations, **beside
    )
    (part,) = orders.config.pipelines
    (sink,) = part.sinks
    assert isinstance(sink, KafkaSinkConfig)
    topics = [
        f"{topic_name}.dead-letter",
        f"{topic_name}_shapes",
        f"{topic_name}.transaction",
        f"__debezium-heartbeat.{topic_name}",
    ]
    found = list(topic_findings(sink, part, []))
    assert [finding.kind for finding in found] == [Kind.SINK_MISCONFIGURED] * 4
    assert all(topic in finding.message for topic, finding in zip(topics, found, strict=True))
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for made in admin.create_topics([NewTopic(topic, 1, 1) for topic in topics]).values():
        made.result(60)
    assert list(topic_findings(sink, part, [])) == []


def test_a_password_in_the_file_is_refused_and_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    for name in ("sasl.password", "ssl.key.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"):
        file.write_text(
            "name: shop\nsource: {type: postgresql, dbname: shop}\nlog: {path: ./log}\n"
            f"sinks: [{{type: kafka, bootstrap_servers: 'k:9092', options: {{{name}: {CANARY}}}}}]\n"
        )
        told = run("check", file, status=2)
        assert f"{name} must be a reference" in told
        assert CANARY not in told
