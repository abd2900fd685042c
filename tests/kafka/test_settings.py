"""Kafka in the pipeline file: settings of clients, refusals, and settings without effect."""

from __future__ import annotations

import json
import logging
import socket
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from pydantic import ValidationError
from structlog.testing import capture_logs

from tailrace.config import load_engine
from tailrace.config.engine_options import OffsetStorage
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.load import from_mapping
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.kafka.client.failures import error_of, failure_of
from tailrace.kafka.client.requests import answer, require_reachable
from tailrace.kafka.client.settings import ToLog
from tailrace.kafka.offsets.store import KafkaOffsetStore
from tailrace.kafka.producer.account import raise_out_of_time
from tailrace.kafka.producer.writer import AtomicWriter, PlainWriter
from tailrace.pipeline.connector import config_of
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.sinks.kafka.sink import account_of
from tailrace.sources.findings import Severity
from tailrace_servers.ports import free_port


def sink_of(**more: Any) -> KafkaSinkConfig:
    return KafkaSinkConfig.model_validate({"type": "kafka", "bootstrap_servers": "127.0.0.1:1", **more})


def settings_of(sink: KafkaSinkConfig) -> dict[str, Any]:
    """Return the settings with which the sink's producer is created."""
    account = account_of(sink, "shop")
    writer = account.writer(account.offsets())
    assert isinstance(writer, AtomicWriter | PlainWriter)
    assert writer._task.timeout_s == account.timeout_s  # of every call that waits
    return dict(writer._task.settings)


def test_a_producer_is_idempotent_and_no_record_waits_for_longer_than_its_transaction() -> None:
    found = settings_of(sink_of(atomic_source_offset_commit=True, offset_flush_timeout_ms=90_000))
    assert found["transactional.id"] == "tailrace-shop-0"
    assert (found["enable.idempotence"], found["acks"]) == (True, "all")
    assert (found["message.timeout.ms"], found["transaction.timeout.ms"]) == (90_000, 90_000)
    found = settings_of(
        sink_of(atomic_source_offset_commit=True, offset_flush_timeout_ms=5000, group="connect-cluster")
    )
    assert found["transactional.id"] == "connect-cluster-shop-0"
    assert (found["message.timeout.ms"], found["transaction.timeout.ms"]) == (60_000, 60_000)
    # A message may not outlive its transaction.
    short = {"transaction.timeout.ms": "4000"}
    assert settings_of(sink_of(atomic_source_offset_commit=True, options=short))["message.timeout.ms"] == 4000
    plain = settings_of(sink_of(atomic_source_offset_commit=False, offset_flush_timeout_ms=5000))
    assert "transactional.id" not in plain
    assert (plain["enable.idempotence"], plain["message.timeout.ms"]) == (True, 900_000)


@pytest.mark.parametrize(
    "name",
    ["transactional.id", "enable.idempotence", "acks", "isolation.level", "max.in.flight", "group.id",
     "enable.gapless.guarantee", "delivery.report.only.error", "plugin.library.paths"],
)  # fmt: skip
def test_options_that_exactly_once_depends_on_cannot_be_set(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} can't be set"):
        sink_of(options={name: "1"})


def test_settings_that_need_a_single_producer_are_refused_with_several() -> None:
    for setting, why in (
        ({"provide_transaction_metadata": True}, "counts the events of whole transactions"),
        ({"partition_by": "transaction"}, "only if one producer writes them"),
    ):
        assert sink_of(runs_on="spark", producers=1, **setting).on_spark
        with pytest.raises(ValidationError, match=f"{next(iter(setting))}: .*{why}.*: set producers: 1"):
            sink_of(runs_on="spark", producers=2, **setting)


@pytest.mark.parametrize(
    ("engine", "sink", "becomes", "is_ignored"),
    [
        ("true", "{type: kafka, bootstrap_servers: k}", True, False),
        ("true", "{type: kafka, bootstrap_servers: k, atomic_source_offset_commit: false}", False, False),
        ("false", "{type: kafka, bootstrap_servers: k}", False, False),
        ("false", "{type: kafka, bootstrap_servers: k, atomic_source_offset_commit: true}", True, False),
        ("true", "{type: jsonl, path: ./lines}", None, True),
        ("false", "{type: jsonl, path: ./lines}", None, False),
    ],
)
def test_atomic_source_offset_commit_of_the_engine_is_the_default_of_its_sinks(
    tmp_path: Path, engine: str, sink: str, becomes: bool | None, is_ignored: bool
) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "name: shop\nsource: {type: postgresql, host: 127.0.0.1, port: 1, dbname: shop, user: nobody}\n"
        f"log: {{path: ./log}}\nengine: {{atomic_source_offset_commit: {engine}}}\nsinks: [{sink}]\n"
    )
    (found,) = load_engine(file).sinks
    assert getattr(found, "atomic_source_offset_commit", None) is becomes
    if becomes is None:  # otherwise the check would ask the cluster
        said = [one for one in preflight(file) if "atomic_source_offset_commit is ignored" in one.message]
        assert [one.severity for one in said] == [Severity.WARNING] * is_ignored


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("batch.size", "1 MB", "batch.size"),
        ("message.timeout.ms", "a minute", "message.timeout.ms"),
        ("transaction.timeout.ms", "long", "transaction.timeout.ms"),
        ("compression.type", "zip", "compression.codec"),
        ("linger.ms", "none", "queue.buffering.max.ms"),
        ("partitioner", "mine", "partitioner"),
        ("security.protocol", "hunter 2", "security.protocol"),
        ("sasl.pasword", "hunter 2", "sasl.pasword"),
    ],
)
def test_options_that_the_client_refuses_are_reported_by_check(
    tmp_path: Path, option: str, value: str, named: str
) -> None:
    sink = sink_of(options={option: value}, offset_flush_timeout_ms=100, atomic_source_offset_commit=True)
    with pytest.raises(TailraceError) as caught:
        settings_of(sink)
    assert (caught.value.kind, "correct `options`" in caught.value.hint) == (Kind.SINK_MISCONFIGURED, True)
    assert named in caught.value.message
    assert value not in caught.value.message
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "name: shop\nsource: {type: postgresql, host: 127.0.0.1, port: 1, dbname: shop, user: nobody}\n"
        "log: {path: ./log}\nsinks: [{type: kafka, name: out, bootstrap_servers: '127.0.0.1:1', "
        f"offset_flush_timeout_ms: 100, options: {{{option}: {value}}}}}]\n"
    )
    (told,) = [one for one in preflight(file) if one.kind.startswith("sink_")]
    assert (told.kind, named in told.message) == (Kind.SINK_MISCONFIGURED, True)


def test_without_a_message_timeout_a_failed_delivery_is_not_reported_as_too_slow() -> None:
    account = account_of(sink_of(options={"message.timeout.ms": 0}), "shop")
    writer = account.writer(account.offsets())
    error = TailraceError(Kind.SINK_WRITE_FAILED, "deliver records: no answer")
    with pytest.raises(TailraceError) as raised:
        raise_out_of_time(error, writer)
    writer.close()
    assert raised.value is error


def test_check_asks_a_cluster_once_for_several_sources(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    names = ("one", "two", "three")
    sources = [f"{{name: {name}, host: 127.0.0.1, port: 1, dbname: {name}, user: nobody}}" for name in names]
    file.write_text(
        f"name: shop\nsources: [{', '.join(sources)}]\nlog: {{path: ./log}}\nsinks: [{{type: kafka, "
        "bootstrap_servers: '127.0.0.1:1', offset_flush_timeout_ms: 100}]\n"
    )
    kinds = [one.kind for one in preflight(file) if one.severity is Severity.ERROR]
    assert kinds == [Kind.SINK_WRITE_FAILED] + [Kind.SOURCE_UNREACHABLE] * 3


@pytest.mark.parametrize(
    "engine",
    [
        {"offset_storage": {"type": "kafka", "bootstrap_servers": "k:1", "topic": "of-the-engine"}},
        {"kafka": {"bootstrap_servers": "k:1", "offsets_topic": "of-the-engine"}},
    ],
)
def test_a_sink_refuses_records_for_the_topic_of_the_engines_offsets(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    options = {"sasl.password": "${env:KAFKA_PASSWORD}"}
    file = from_mapping(
        {
            "name": "shop",
            "source": {"type": "postgresql", "host": "127.0.0.1", "dbname": "shop"},
            "log": {"path": str(tmp_path / "log")},
            "sinks": [{"type": "kafka", "bootstrap_servers": "k:1"}],
            "engine": {key: {**value, "options": options} for key, value in engine.items()},
        }
    )
    settings = json.loads(json.dumps(file.as_settings()))
    again = config_of("shop", {name: value for name, value in settings.items() if name != "name"})
    for config in (file, again):
        (sink,) = config.pipelines[0].sinks
        assert isinstance(sink, KafkaSinkConfig)
        assert "of-the-engine" in sink.topics_refused


def test_settings_without_effect_are_reported(tmp_path: Path) -> None:
    given = {
        "offset_flush_interval_ms": ("500", "transaction_boundary: interval"),
        "transaction_topic": ("ends", "provide_transaction_metadata: true"),
        "heartbeat_topic_prefix": ("beats", "heartbeat_interval_ms: 1000"),
    }
    for name, (value, beside) in given.items():
        key, _, word = beside.partition(": ")
        assert name in sink_of(**{name: value}).without_effect
        assert sink_of(**{name: value, key: word}).without_effect == {}
    assert sink_of().without_effect == {}
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "name: shop\nsource: {type: postgresql, host: 127.0.0.1, port: 1, dbname: shop, user: nobody}\n"
        "log: {path: ./log}\nsinks: [{type: kafka, name: out, bootstrap_servers: '127.0.0.1:1', "
        "offset_flush_timeout_ms: 100, transaction_topic: ends}]\n"
    )
    (said,) = [one for one in preflight(file) if "has no effect" in one.message]
    assert "sink 'out': transaction_topic has no effect" in said.message
    assert (said.severity, said.repair.startswith("set provide_transaction_metadata: true")) == (
        Severity.WARNING, True,
    )  # fmt: skip


@pytest.mark.parametrize(("prefix", "warned"), [("", 0), ("all", 1)])
def test_check_warns_that_tables_of_several_sources_share_topics(
    tmp_path: Path, prefix: str, warned: int
) -> None:
    source = "{type: postgresql, host: 127.0.0.1, port: 1, dbname: shop, user: nobody, name: "
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"name: shop\nsources: [{source}eu}}, {source}us}}]\nlog: {{path: ./logs}}\nsinks: [{{type: kafka, "
        "name: out, bootstrap_servers: '127.0.0.1:1', offset_flush_timeout_ms: 100, "
        f"topic_prefix: '{prefix}'}}]\n"
    )
    said = [one for one in preflight(file) if "share a topic" in one.message]
    assert [one.severity for one in said] == [Severity.WARNING] * warned


def test_offsets_are_read_as_committed_unless_the_file_says_otherwise() -> None:
    assert account_of(sink_of(), "shop").isolation == "read_committed"
    assert account_of(sink_of(consumer_isolation_level="read_uncommitted"), "shop").isolation == (
        "read_uncommitted"
    )
    with pytest.raises(ValidationError, match=r"offset_flush_timeout_ms\n.*greater than 0"):
        sink_of(offset_flush_timeout_ms=0)
    with pytest.raises(ValidationError, match="consumer_isolation_level"):
        sink_of(consumer_isolation_level="serializable")
    kept = {"type": "kafka", "bootstrap_servers": "k"}
    assert OffsetStorage.model_validate(kept).consumer_isolation_level == "read_committed"
    careless = OffsetStorage.model_validate({**kept, "consumer_isolation_level": "read_uncommitted"})
    assert KafkaOffsetStore(careless, "shop", atomic=True)._account().isolation == "read_uncommitted"


@pytest.mark.parametrize("name", ["", "bad name!", "x" * 250, "..", "a\n"])
def test_an_invalid_topic_name_is_refused_with_the_file(name: str) -> None:
    with pytest.raises(ValidationError, match="not a topic's name"):
        sink_of(offsets_topic=name)
    with pytest.raises(ValidationError, match="not a topic's name"):
        OffsetStorage.model_validate({"type": "kafka", "bootstrap_servers": "k", "topic": name})


def test_repeated_messages_of_the_client_are_logged_rarely() -> None:
    seconds = [0.0]
    handler = ToLog(lambda: seconds[0])

    def say(*words: str) -> list[str]:
        with capture_logs() as logged:
            for word in words:
                handler.handle(logging.LogRecord("kafka", logging.ERROR, "", 0, word, None, None))
        return [f"{entry['says']} {entry.get('repeated', '')}" for entry in logged]

    refused = [f"FAIL [rdkafka#producer-{n}] k:9: refused (after {n}ms in state CONNECT)" for n in range(9)]
    assert say(*refused, "FAIL k:8: refused") == [f"{refused[0]} ", "FAIL k:8: refused "]
    assert say(refused[3]) == []
    seconds[0] += 31
    assert say(refused[5]) == [f"{refused[5]} 9"]
    for n in range(1000):
        say(f"FAIL k:{n}x")
    assert len(handler._said) <= 256


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        (KafkaError.TOPIC_EXCEPTION, "`routes`"),
        (KafkaError.INVALID_RECORD, "source.message_keys"),
        (KafkaError._INVALID_DIFFERENT_RECORD, "source.message_keys"),
    ],
)
def test_errors_that_no_retry_can_resolve_are_not_retried(code: int, way_out: str) -> None:
    found = failure_of(KafkaError(code), "send records", topic="shop.a")
    assert (found.kind, found.policy, found.context) == (
        Kind.SINK_MISCONFIGURED, Policy.STOP, {"topic": "shop.a"},
    )  # fmt: skip
    assert way_out in found.hint


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        (KafkaError._TIMED_OUT, "enough of their replicas are in sync"),
        (KafkaError._UNKNOWN_PARTITION, "fewer partitions"),
        (KafkaError.INVALID_PRODUCER_ID_MAPPING, "transactional.id.expiration.ms"),
        (KafkaError.NETWORK_EXCEPTION, "can be reached"),
    ],
)
def test_hints_of_errors_that_are_retried_name_the_likely_cause(code: int, way_out: str) -> None:
    found = failure_of(KafkaError(code), "commit a transaction")
    assert (found.kind, found.policy) == (Kind.SINK_WRITE_FAILED, Policy.RETRY)
    assert way_out in found.hint


class _Refusing(BaseHTTPRequestHandler):
    """A token endpoint that refuses everyone."""

    def do_POST(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"error":"invalid_client","timestamp":"2026-01-01T00:00:00Z"}')

    def log_message(self, *_: object) -> None:
        pass


def test_a_refused_token_is_final_and_an_unreachable_token_endpoint_is_retried() -> None:
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "cdc",
        "sasl.oauthbearer.client.secret": "c4n4ry",
        "log_level": 0,
    }
    with socket.create_server(("127.0.0.1", 0)) as broker, HTTPServer(("127.0.0.1", 0), _Refusing) as tokens:
        threading.Thread(target=tokens.serve_forever, daemon=True).start()
        options["bootstrap.servers"] = f"127.0.0.1:{broker.getsockname()[1]}"
        for port, kind in ((tokens.server_port, Kind.SINK_REFUSED), (free_port(), Kind.SINK_WRITE_FAILED)):
            place = {"sasl.oauthbearer.token.endpoint.url": f"http://127.0.0.1:{port}/token"}
            with pytest.raises(TailraceError, match="OAUTHBEARER token") as caught:
                require_reachable(options | place, 0.8)
            assert caught.value.kind is kind
            assert "c4n4ry" not in str(caught.value)
        tokens.shutdown()


def test_a_silent_admin_client_is_reported_as_an_unreachable_cluster() -> None:
    with pytest.raises(KafkaException) as silent:
        answer(Future(), 0.01)
    assert failure_of(error_of(silent.value), "ask").kind is Kind.SINK_WRITE_FAILED
