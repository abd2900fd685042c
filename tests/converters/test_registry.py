"""Converters with a schema registry, over real HTTP: ids, subjects, and errors."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from tailrace.config import ColumnPolicy
from tailrace.config.kafka import KafkaSinkConfig as KafkaConfig
from tailrace.config.source.postgres import PostgresSource
from tailrace.converters.contract import Converter
from tailrace.converters.debezium import JsonConverter
from tailrace.converters.with_registry import AvroConverter, JsonSchemaConverter
from tailrace.decode.column_policy import TablePolicy
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.pipeline.preflight.preflight import converter_findings
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.records.group import Group
from tailrace.sinks.build import build
from tests.support.converters.avro import decoded
from tests.support.converters.customers import FACTS, groups, groups_of, transaction
from tests.support.converters.registry import FakeRegistry, Fault
from tests.support.decode.wire import decode, delete, insert, relation
from tests.support.kafka_cluster import Authority
from tests.support.transforms.groups import applied
from tests.support.wait import wait_until

BASE = [("id", 23, -1), ("name", 25, -1)]


def of_columns(columns: list[tuple[str, int, int]], *values: str) -> Group:
    [group] = groups(transaction(insert(*values)), [relation(16385, "customers", columns, ("id",))])
    return group.with_topic("shop.public.customers")


def ids(values: pa.Array) -> set[int]:
    return {int.from_bytes(value[1:5], "big") for value in values.to_pylist() if value is not None}


def refused(converter: Converter, group: Group) -> TailraceError:
    with pytest.raises(TailraceError) as caught:
        converter.convert(group)
    return caught.value


def test_schemas_are_registered_once_under_the_topics_subjects() -> None:
    with FakeRegistry() as registry:
        converter = AvroConverter(registry_url=registry.url)
        for case in ("create", "delete", "key_change"):
            [group] = groups_of(case)
            events = converter.convert(group.with_topic("shop.public.customers"))
            assert ids(events.values) == {1}
            assert events.keys is not None
            assert ids(events.keys) == {2}
        assert registry.subjects == {"shop.public.customers-value": [1], "shop.public.customers-key": [2]}
        assert registry.requests == {"POST /subjects": 2}
        tombstones = [value for value in events.values.to_pylist() if value is None]
        assert len(tombstones) == 1
        value = decoded(events.values[0].as_py(), registry.schema(1))
        assert (value["op"], value["before"]["id"]) == ("d", 1)
        assert decoded(events.keys[2].as_py(), registry.schema(2)) == {"id": 2}


@pytest.mark.parametrize(
    ("strategy", "subjects"),
    [
        ("topic", {"t-key", "t-value"}),
        ("record", {"PostgreSQL_server.public.customers.Key", "PostgreSQL_server.public.customers.Envelope"}),
        ("topic_record", {"t-PostgreSQL_server.public.customers.Key",
                          "t-PostgreSQL_server.public.customers.Envelope"}),
    ],
)  # fmt: skip
def test_subjects_are_named_by_topic_or_record(strategy: str, subjects: set[str]) -> None:
    [group] = groups_of("create")
    for make in (AvroConverter, JsonSchemaConverter):
        with FakeRegistry() as registry:
            make(registry_url=registry.url, key_subject=strategy, value_subject=strategy).convert(
                group.with_topic("t")
            )
            assert set(registry.subjects) == subjects


def test_json_schema_events_are_json_after_an_id() -> None:
    with FakeRegistry() as registry:
        [group] = groups_of("create")
        events = JsonSchemaConverter(registry_url=registry.url, keys="json").convert(group)
        assert events.keys is not None
        assert events.keys.to_pylist() == ['{"id":1}']
        [value] = events.values.to_pylist()
        assert value[:5] == b"\x00\x00\x00\x00\x01"
        assert json.loads(value[5:])["after"]["first_name"] == "Anne"
        assert registry.schemas[0][0] == "JSON"
        assert registry.schema(1)["properties"]["op"] == {"type": "string", "connect.index": 4}


def test_the_error_of_an_incompatible_schema_has_the_registrys_reason() -> None:
    for make in (AvroConverter, JsonSchemaConverter):
        with FakeRegistry() as registry:
            make(registry_url=registry.url).convert(of_columns(BASE, "1", "a"))
            error = refused(
                make(registry_url=registry.url), of_columns([("id", 23, -1), ("name", 20, -1)], "1", "2")
            )
            assert error.kind is Kind.SCHEMA_REFUSED
            assert "'shop.public.customers-value': the schema is not compatible" in error.message
            assert "incompatible with an earlier schema; ['TYPE_MISMATCH: " in error.message
            assert "PUT /config/shop.public.customers-value" in error.hint
            assert error.context["subject"] == "shop.public.customers-value"
            registry.level = "NONE"
            assert ids(make(registry_url=registry.url).convert(
                of_columns([("id", 23, -1), ("name", 20, -1)], "1", "2")).values) == {3}  # fmt: skip


def test_a_new_nullable_column_is_compatible() -> None:
    with FakeRegistry() as registry:
        converter = AvroConverter(registry_url=registry.url)
        converter.convert(of_columns(BASE, "1", "a"))
        wider = converter.convert(of_columns([*BASE, ("more", 20, -1)], "1", "a", "5"))
        assert ids(wider.values) == {3}
        assert registry.subjects["shop.public.customers-value"] == [1, 3]


def test_a_new_column_in_json_schema_needs_the_level_forward() -> None:
    wider = of_columns([*BASE, ("more", 20, -1)], "1", "a", "5")
    with FakeRegistry() as registry:
        JsonSchemaConverter(registry_url=registry.url).convert(of_columns(BASE, "1", "a"))
        error = refused(JsonSchemaConverter(registry_url=registry.url), wider)
        assert "PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL: more" in error.message
        registry.levels["shop.public.customers-value"] = "FORWARD"
        assert ids(JsonSchemaConverter(registry_url=registry.url).convert(wider).values) == {3}


def test_a_transitive_level_compares_all_versions() -> None:
    wider, again = (of_columns([*BASE, ("more", oid, -1)], "1", "a", "5") for oid in (20, 25))
    with FakeRegistry() as registry:
        for shape in (wider, of_columns(BASE, "1", "a")):  # add a column, drop it; another type follows
            AvroConverter(registry_url=registry.url).convert(shape)
        before = dict(registry.subjects)
        AvroConverter(registry_url=registry.url).check_shape(again)  # the newest version does not have it
        registry.level = "BACKWARD_TRANSITIVE"
        with pytest.raises(TailraceError, match="the schema is not compatible") as caught:
            AvroConverter(registry_url=registry.url).check_shape(again)
        assert caught.value.kind is Kind.SCHEMA_REFUSED
        assert "TYPE_MISMATCH: Value.more" in refused(AvroConverter(registry_url=registry.url), again).message
        registry.compares_all = False  # so there is no finding, but the registration fails
        AvroConverter(registry_url=registry.url).check_shape(again)
        assert registry.subjects == before


def test_without_auto_register_unknown_schemas_are_refused() -> None:
    with FakeRegistry() as registry:
        strict = AvroConverter(registry_url=registry.url, auto_register_schemas=False)
        error = refused(strict, of_columns(BASE, "1", "a"))
        assert error.kind is Kind.SCHEMA_REFUSED
        assert "the subject does not exist" in error.message
        AvroConverter(registry_url=registry.url).convert(of_columns(BASE, "1", "a"))
        assert ids(strict.convert(of_columns(BASE, "1", "a")).values) == {1}
        error = refused(strict, of_columns([*BASE, ("more", 20, -1)], "1", "a", "5"))
        assert "it does not have this schema" in error.message
        assert "auto_register_schemas" in error.hint


def test_credentials_are_references_and_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "s3cr3t-canary")
    with FakeRegistry(username="cdc", password="s3cr3t-canary") as registry:
        given: dict[str, Any] = {"registry_url": registry.url, "registry_username": "cdc"}
        right = AvroConverter(**given, registry_password="${env:REGISTRY_PASSWORD}")
        assert ids(right.convert(of_columns(BASE, "1", "a")).values) == {1}
        copy = pickle.loads(pickle.dumps(right))  # noqa: S301 - its own
        assert b"s3cr3t-canary" not in pickle.dumps(right)
        assert ids(copy.convert(of_columns(BASE, "1", "a")).values) == {1}
        error = refused(AvroConverter(**given), of_columns(BASE, "1", "a"))
        assert (error.kind, error.policy) == (Kind.REGISTRY_REFUSED, Policy.STOP)
        assert "401" in error.message
        registry.password = "another"
        error = refused(copy, of_columns([*BASE, ("more", 20, -1)], "1", "a", "5"))
        assert "401 Unauthorized: Basic ***" in error.message
    for wrong in ({"registry_password": "in-clear"}, {"registry_url": "http://user:pass@r:1"}, {"url": "x"}):
        with pytest.raises(TailraceError) as caught:
            AvroConverter(**cast(Any, {"registry_url": "http://r:1", **wrong}))
        assert caught.value.kind is Kind.CONFIG_INVALID
        assert "in-clear" not in str(caught.value)
        assert "user:pass" not in str(caught.value)


@pytest.mark.slow
def test_requests_are_repeated_after_retriable_errors_only() -> None:
    with FakeRegistry(faults=[Fault(503), Fault(429)]) as registry:
        converter = AvroConverter(registry_url=registry.url, keys="json")
        assert ids(converter.convert(of_columns(BASE, "1", "a")).values) == {1}
        assert registry.requests["POST /subjects"] == 3
        registry.faults = [Fault(500, times=1000)]
        error = refused(AvroConverter(registry_url=registry.url), of_columns(BASE, "1", "a"))
        assert (error.kind, error.policy) == (Kind.REGISTRY_UNREACHABLE, Policy.RETRY)
        assert "it answered 500 on demand" in error.message
        assert registry.requests["POST /subjects"] == 6
        registry.faults = [Fault(silent_s=0.6, times=3)]
        slow = AvroConverter(registry_url=registry.url, registry_timeout_ms=200)
        error = refused(slow, of_columns(BASE, "1", "a"))
        assert (error.kind, "timed out" in error.message) == (Kind.REGISTRY_UNREACHABLE, True)
        for code, hint in ((42201, "exclude the table"), (42205, "`PUT /mode/")):  # invalid, read-only
            registry.faults = [Fault(422, code=code)]
            error = refused(AvroConverter(registry_url=registry.url), of_columns(BASE, "1", "a"))
            assert (error.kind, hint in error.hint) == (Kind.SCHEMA_REFUSED, True)


@pytest.mark.slow
def test_the_next_address_is_used_if_one_does_not_answer() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with FakeRegistry() as registry:
            either = AvroConverter(registry_url=[gone, registry.url])
            assert ids(either.convert(of_columns(BASE, "1", "a")).values) == {1}
        error = refused(AvroConverter(registry_url=[gone, gone]), of_columns(BASE, "1", "a"))
        assert (error.kind, error.context["registry"]) == (Kind.REGISTRY_UNREACHABLE, f"{gone}, {gone}")


def test_credentials_that_were_exchanged_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first-one")
    with FakeRegistry(username="cdc", password="first-one") as registry:
        converter = AvroConverter(
            registry_url=registry.url, registry_username="cdc", registry_password=f"${{file:{file}}}"
        )
        converter.convert(of_columns(BASE, "1", "a"))
        registry.password = "second-one"
        wider = of_columns([*BASE, ("more", 25, -1)], "1", "a", "b")
        assert refused(converter, wider).kind is Kind.REGISTRY_REFUSED
        file.write_text("second-one")
        assert ids(converter.convert(wider).values) == {3}


def test_a_value_that_does_not_fit_is_reported_with_its_record() -> None:
    shape = [relation(16385, "customers", [("id", 23, -1), ("on", 1082, -1)], ("id",))]
    [group] = groups(transaction(insert("1", "2024-01-01"), insert("2", "infinity")), shape)
    with FakeRegistry() as registry:
        error = refused(AvroConverter(registry_url=registry.url), group)
        assert (error.kind, error.context["row"], error.context["member"]) == (
            Kind.CONVERSION_FAILED, 1, "after.on",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("oid", "modifier", "value"),
    [(1007, -1, "{{1,2},{3,4}}"), (1009, -1, "[0:1]={a,b}"), (1082, -1, "infinity"), (1700, 655366, "NaN")],
)
def test_a_value_that_does_not_fit_is_written_after_a_cast_as_the_hint_says(
    oid: int, modifier: int, value: str
) -> None:
    group = of_columns([("id", 23, -1), ("of", oid, modifier)], "1", value)
    with FakeRegistry() as registry:
        error = refused(AvroConverter(registry_url=registry.url), group)
        assert "cast the column to text by a transformation (type: cast)" in error.hint
        [cast_group] = applied(group, {"type": "cast", "fields": {"of": "text"}})
        events = AvroConverter(registry_url=registry.url).convert(cast_group)
        [event] = events.values.to_pylist()
        assert decoded(event, registry.schema(int.from_bytes(event[1:5], "big")))["after"]["of"] == value


@pytest.mark.parametrize(("logical_types", "stands"), [("connect", ""), ("avro", UUID(int=0))])
def test_readers_can_read_what_stands_for_an_unsent_uuid(logical_types: str, stands: Any) -> None:
    columns = tuple(
        ColumnFacts(name, number, type_oid=oid, base_oid=oid, not_null=True)
        for number, (name, oid) in enumerate((("id", 23), ("uid", 2950)), 1)
    )
    facts = Facts(16385, "public", "customers", ("id",), columns)
    told = frames.control_frame(frames.FACTS, 0, 0, facts.as_json())
    described = relation(16385, "customers", [("id", 23, -1), ("uid", 2950, -1)], ("id",))
    uid = UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")
    [group] = groups(transaction(insert("1", str(uid)), delete("1", None)), [told, described])
    with FakeRegistry() as registry:
        events = AvroConverter(registry_url=registry.url, logical_types=logical_types).convert(group)
        created, deleted, _ = events.values.to_pylist()
        schema = registry.schema(1)
        assert str(decoded(created, schema)["after"]["uid"]) == str(uid)
        assert decoded(deleted, schema)["before"]["uid"] == stands


def test_a_value_of_a_flat_row_that_does_not_fit_is_reported_with_its_column() -> None:
    shape = [relation(16385, "customers", [("id", 23, -1), ("on", 1082, -1)], ("id",))]
    [group] = groups(transaction(insert("1", "2024-01-01"), insert("2", "infinity")), shape)
    hoist = {"type": "hoist_field", "field": "of", "apply_to": "row"}
    with FakeRegistry() as registry:
        for steps, member in (([{"type": "flatten"}], "on"), ([{"type": "flatten"}, hoist], "of.on")):
            [flat] = applied(group, *steps)
            error = refused(AvroConverter(registry_url=registry.url), flat)
            assert (error.kind, error.context["row"], error.context["member"]) == (
                Kind.CONVERSION_FAILED, 1, member,
            )  # fmt: skip


@pytest.mark.parametrize(
    "step",
    [{"static": {"of": None}}, {"computed": {"of": "after.nothing"}, "missing": "null"}],
)
def test_a_column_that_was_added_to_a_key_may_be_null(step: dict[str, Any]) -> None:
    to_key = {"type": "value_to_key", "fields": ["id", "of"]}
    [group] = applied(of_columns(BASE, "1", "a"), {"type": "add_fields", **step}, to_key)
    with FakeRegistry() as registry:
        events = AvroConverter(registry_url=registry.url).convert(group)
        assert events.keys is not None
        [key] = events.keys.to_pylist()
        schema = registry.schema(int.from_bytes(key[1:5], "big"))
        assert decoded(key, schema) == {"id": 1, "of": None}


@pytest.mark.parametrize("masks", [[], [{"columns": ["*.*.*"], "method": "hash", "salt": "${env:SALT}"}]])
def test_a_column_of_a_chosen_key_may_be_null_if_it_may_be_in_the_table(
    masks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALT", "salt")
    columns = tuple(
        ColumnFacts(name, number, type_oid=25, base_oid=25, not_null=name == "of")
        for number, name in enumerate(("of", "n"), 1)
    )
    facts = Facts(16385, "public", "log", (), columns)
    told = frames.control_frame(frames.FACTS, 0, 0, facts.as_json())
    described = relation(16385, "log", [("of", 25, -1), ("n", 25, -1)], ("of", "n"), "f")
    policy = ColumnPolicy.model_validate({"message_keys": {"public.log": ["of", "n"]}, "masks": masks})
    [changes] = decode(transaction(insert("a", None)), [told, described], table_policy=TablePolicy.of(policy))
    group = Group.of_changes("shop.public.log", np.arange(1), changes, FACTS)
    events = JsonConverter(schemas_enable=True).convert(group)
    schemas = [json.loads(texts[0].as_py())["schema"] for texts in (events.keys, events.values)]
    for schema in (schemas[0], schemas[1]["fields"][1]):
        fields = [(field["field"], field["optional"]) for field in schema["fields"]]
        assert fields == [("of", False), ("n", True)]
    with FakeRegistry() as registry:
        [key] = AvroConverter(registry_url=registry.url).convert(group).keys.to_pylist()
        assert decoded(key, registry.schema(int.from_bytes(key[1:5], "big")))["n"] is None


def test_the_former_topic_in_a_key_is_never_null() -> None:
    route = {"type": "route", "regex": ".*", "replacement": "all", "key_field": "was"}
    [group] = applied(of_columns(BASE, "1", "a"), route)
    [key] = JsonConverter(schemas_enable=True).convert(group).keys.to_pylist()
    fields = json.loads(key)["schema"]["fields"]
    assert [(field["field"], field["optional"]) for field in fields] == [("id", False), ("was", False)]


@pytest.mark.parametrize(
    ("steps", "required"),
    [
        ([], [["id"], ["id"]]),
        ([{"type": "rename", "fields": {"id": "no"}}], [["no"], ["no"]]),
        ([{"type": "rename", "fields": {"id": "no", "name": "id"}, "apply_to": "row"}], [["id"], []]),
        ([{"type": "add_fields", "static": {"id": None}}], [["id"], []]),
        ([{"type": "value_to_key", "fields": ["name"]}], [[], ["id"]]),
    ],
)
def test_of_a_flat_row_the_tables_key_is_required(
    steps: list[dict[str, Any]], required: list[list[str]]
) -> None:
    [group] = applied(of_columns(BASE, "1", "a"), {"type": "flatten"}, *steps)
    events = JsonConverter(schemas_enable=True).convert(group)
    schemas = [json.loads(texts[0].as_py())["schema"] for texts in (events.keys, events.values)]
    assert [[one["field"] for one in each["fields"] if not one["optional"]] for each in schemas] == required
    with FakeRegistry() as registry:
        avro = AvroConverter(registry_url=registry.url).convert(group)
        key = avro.keys[0].as_py()
        assert (
            decoded(key, registry.schema(int.from_bytes(key[1:5], "big")))
            == json.loads(events.keys[0].as_py())["payload"]
        )


def test_records_that_are_no_changes_have_schemas_too() -> None:
    value = pa.array([{"id": 1, "tags": ["a", None], "part": {"x": 1.5}}, None])
    columns = pa.record_batch({"key": pa.array(["k", None]), "value": value})
    group = Group.of_columns("orders.events", np.arange(2), columns, origin=FACTS)
    with FakeRegistry() as registry:
        events = AvroConverter(registry_url=registry.url).convert(group)
        first, nothing = events.values.to_pylist()
        assert nothing is None
        assert decoded(first, registry.schema(1)) == {"id": 1, "tags": ["a", None], "part": {"x": 1.5}}
        assert events.keys is not None
        assert events.keys.to_pylist() == [b"\x00\x00\x00\x00\x02\x02k", None]
        error = refused(AvroConverter(registry_url=registry.url, key_subject="record"), group)
        assert error.kind is Kind.CONVERSION_FAILED


def test_a_column_of_the_key_that_a_mask_makes_null_is_refused_with_the_mask_in_the_hint() -> None:
    [group] = applied(of_columns(BASE, "1", "a"), {"type": "mask", "method": "null", "fields": ["id"]})
    with FakeRegistry() as registry:
        error = refused(AvroConverter(registry_url=registry.url), group)
    assert error.kind is Kind.CONVERSION_FAILED
    assert "`mask` with `method: null` does, choose another method" in error.hint


def asked(registry_url: str, **more: Any) -> AvroConverter:
    return AvroConverter(registry_url=registry_url, registry_timeout_ms=2000, **more)


def test_access_over_tls_by_token_password_or_certificate_and_the_errors_without(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "t0ken-canary")
    monkeypatch.setenv("PASSWORD", "passw0rd-canary")
    group, tls = of_columns(BASE, "1", "a"), {"registry_ca_file": str(authority.certificate)}
    token = {"registry_token": "${env:TOKEN}"}
    told: list[str] = []

    def refusal(registry: FakeRegistry, **options: Any) -> TailraceError:
        url = options.pop("registry_url", registry.url)
        for use in ("check", "convert"):  # the same in `check` and in use, and at once
            converter = asked(url, **options)
            with pytest.raises(TailraceError) as caught:
                converter.check() if use == "check" else converter.convert(group)
            told.append(repr(caught.value) + str(caught.value) + str(caught.value.context))
        assert caught.value.policy is Policy.STOP
        return caught.value

    with FakeRegistry(token="t0ken-canary", keystore=authority.keystore) as registry:
        asked(registry.url, **tls, **token).check()
        assert ids(asked(registry.url, **tls, **token).convert(group).values) == {1}
        monkeypatch.setenv("TOKEN", "wrong-canary")
        error = refusal(registry, **tls, **token)
        assert (error.kind, "answered 401 Unauthorized: Bearer ***" in error.message) == (
            Kind.REGISTRY_REFUSED, True,
        )  # fmt: skip
        assert "registry_token" in error.hint
        monkeypatch.setenv("TOKEN", "two\nlines-canary")
        error = refusal(registry, **tls, **token)
        assert (error.kind, "no header can" in error.message) == (Kind.CONFIG_INVALID, True)
        monkeypatch.setenv("TOKEN", "t0ken-canary")
        for roots in ({}, {"registry_ca_file": str(authority.stranger)}):
            error = refusal(registry, **roots, **token)
            assert (error.kind, "certificate can't be verified" in error.message) == (
                Kind.REGISTRY_REFUSED, True,
            )  # fmt: skip
            assert "registry_ca_file" in error.hint
        with monkeypatch.context() as roots_of_system:
            roots_of_system.setenv("SSL_CERT_FILE", str(authority.certificate))
            asked(registry.url, **token).check()
            roots_of_system.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
            assert "SSL_CERT_FILE" in refusal(registry, **token).message
        rubbish = tmp_path / "rubbish.pem"
        rubbish.write_text("none")
        for file in (rubbish, tmp_path / "missing.pem"):
            error = refusal(registry, registry_ca_file=str(file), **token)
            assert (error.kind, error.context["file"]) == (Kind.CONFIG_INVALID, str(file))
        with pytest.raises(TailraceError) as caught:
            asked(registry.url.replace("https:", "http:")).check()
        assert caught.value.kind is Kind.REGISTRY_UNREACHABLE
        assert "whether registry_url is its address, with http or https" in caught.value.hint

    basic = {"registry_username": "cdc", "registry_password": "${env:PASSWORD}"}
    keystore, authorities = authority.keystore, authority.certificate
    with FakeRegistry(
        username="cdc", password="passw0rd-canary", keystore=keystore, clients=authorities
    ) as registry:
        certificate = {"registry_certificate_file": str(authority.keystore)}
        asked(registry.url, **tls, **basic, **certificate).check()
        with pytest.raises(TailraceError) as caught:
            asked(registry.url, **tls, **basic).check()
        assert caught.value.kind in (Kind.REGISTRY_REFUSED, Kind.REGISTRY_UNREACHABLE)  # closed, or told
        locked = tmp_path / "locked.pem"
        subprocess.run(
            ["openssl", "genrsa", "-aes128", "-passout", "pass:1234", "-out", locked, "2048"],
            check=True, capture_output=True,
        )  # fmt: skip
        error = refusal(registry, **tls, **certificate, registry_key_file=str(locked))
        assert (error.kind, "key without a password" in error.hint) == (Kind.CONFIG_INVALID, True)
    with FakeRegistry() as registry:
        error = refusal(registry, registry_url=registry.url.replace("http:", "https:"))
        assert (error.kind, "TLS failed" in error.message) == (Kind.REGISTRY_REFUSED, True)
    assert not [words for words in told if "canary" in words]


def test_check_shape_finds_what_would_be_refused_and_registers_nothing() -> None:
    wider = of_columns([("id", 23, -1), ("name", 20, -1)], "1", "2")
    for make in (AvroConverter, JsonSchemaConverter):
        with FakeRegistry() as registry:
            converter, strict = (
                make(registry_url=registry.url, auto_register_schemas=free) for free in (True, False)
            )
            converter.check_shape(of_columns(BASE, "1", "a"))
            with pytest.raises(TailraceError, match="the subject does not exist"):
                strict.check_shape(of_columns(BASE, "1", "a"))
            assert registry.subjects == {}
            converter.convert(of_columns(BASE, "1", "a"))
            strict.check_shape(of_columns(BASE, "1", "a"))
            known = dict(registry.subjects)
            with pytest.raises(TailraceError) as caught:
                converter.check_shape(wider)
            beforehand, in_earnest = caught.value, refused(converter, wider)
            assert beforehand.kind is in_earnest.kind is Kind.SCHEMA_REFUSED
            assert "PUT /config/shop.public.customers-value" in beforehand.hint
            with pytest.raises(TailraceError, match="it does not have this schema"):
                strict.check_shape(wider)
            registry.level = "NONE"
            converter.check_shape(wider)
            assert registry.subjects == known


def test_an_address_without_a_registry_is_reported() -> None:
    with FakeRegistry(faults=[Fault(404)]) as registry, pytest.raises(TailraceError) as caught:
        asked(registry.url).check()
    assert (caught.value.kind, "that of a schema registry" in caught.value.hint) == (
        Kind.SCHEMA_REFUSED, True,
    )  # fmt: skip


def test_exclusive_ways_of_authentication_are_refused() -> None:
    for wrong, said in (
        ({"registry_token": "${env:T}", "registry_username": "u"}, "give either"),
        ({"registry_password": "${env:T}"}, "needs registry_username"),
        ({"registry_key_file": "/k.pem"}, "needs registry_certificate_file"),
        ({"registry_url": "https://a:1,https://b:1"}, "several are a list"),
    ):
        with pytest.raises(TailraceError, match=said):
            asked(**{"registry_url": "https://registry:1", **wrong})


@pytest.mark.parametrize("tells_all", [True, False])
def test_a_schema_is_registered_once_by_several_threads(tells_all: bool) -> None:
    group, got = of_columns(BASE, "1", "a"), []
    with FakeRegistry(tells_all=tells_all, faults=[Fault(silent_s=0.3)]) as registry:
        converter = AvroConverter(registry_url=registry.url, keys="json")
        threads = [
            threading.Thread(target=lambda: got.append(ids(converter.convert(group).values)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (got, registry.requests) == ([{1}] * 4, {"POST /subjects": 1})


@pytest.mark.slow
def test_connections_are_reused_and_one_closed_by_the_registry_is_replaced() -> None:
    shapes = [of_columns([*BASE, (f"c{n}", 20, -1)], "1", "a", "5") for n in range(4)]
    with FakeRegistry(idle_s=0.5) as registry:
        converter = AvroConverter(registry_url=registry.url, keys="json")
        converter.convert(shapes[0])
        converter.convert(shapes[1])
        assert registry.connected == 1
        wait_until(lambda: registry.open == 0)
        converter.convert(shapes[2])
        assert (registry.connected, registry.requests["POST /subjects"]) == (2, 3)
        registry.faults = [Fault(is_cut=True)]  # just when it is used again
        converter.convert(shapes[3])
        assert (registry.connected, registry.requests["POST /subjects"]) == (3, 5)
        assert len(registry.schemas) == 4


@pytest.mark.parametrize("end", ["close", "forget"])
def test_connections_are_closed(end: str) -> None:
    with FakeRegistry() as registry:
        converter = AvroConverter(registry_url=registry.url)
        converter.check()
        converter.check_shape(of_columns(BASE, "1", "a"))
        converter.convert(of_columns(BASE, "1", "a"))
        assert (registry.connected, registry.open) == (1, 1)
        if end == "close":
            converter.close()
            wait_until(lambda: registry.open == 0)
            converter.check()
            assert registry.open == 1
        del converter
        gc.collect()
        wait_until(lambda: registry.open == 0)


def test_preflight_and_sinks_close_the_converters_that_they_create(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[AvroConverter] = []

    def close(converter: AvroConverter) -> None:
        closed.append(converter)

    monkeypatch.setattr(AvroConverter, "close", close)
    with FakeRegistry() as registry:
        converter = {"type": "avro", "registry_url": registry.url}
        config = KafkaConfig.model_validate(
            {"type": "kafka", "name": "k", "bootstrap_servers": "127.0.0.1:1", "converter": converter}
        )
        assert list(converter_findings("avro", config.converter_options())) == []
        assert len(closed) == 1
        sink = build(config, PostgresSource(), tmp_path)
        assert len(closed) == 1
        sink.close()
        assert len(closed) == 2


@pytest.mark.slow
def test_an_answer_of_something_else_than_a_registry_is_not_cached() -> None:
    group = of_columns(BASE, "1", "a")
    pages = [(0, page) for page in (b"<html>", b"[]", b"{}", b'"x"', b"null", b'{"id": "one"}')]
    for status, page in (*pages, (302, b"<html>"), (404, b"default backend")):
        with FakeRegistry(faults=[Fault(status, page=page)]) as registry:
            converter = AvroConverter(registry_url=registry.url, keys="json")
            assert refused(converter, group).kind is Kind.REGISTRY_UNREACHABLE
            assert ids(converter.convert(group).values) == {1}
            registry.faults = [Fault(status, page=page, times=1000)]
            for use in (AvroConverter.convert, AvroConverter.check_shape):
                with pytest.raises(TailraceError) as caught:
                    use(asked(registry.url, keys="json"), group)
                assert caught.value.kind is Kind.REGISTRY_UNREACHABLE
                assert "does not come from a registry" in caught.value.message


def test_no_secret_is_in_the_log_lines_of_the_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET", "s3cr3t-canary")
    group = of_columns(BASE, "1", "a")
    for given, way in (
        (
            {"registry_username": "cdc", "registry_password": "${env:SECRET}"},
            {"username": "cdc", "password": "s3cr3t-canary"},
        ),
        ({"registry_token": "${env:SECRET}"}, {"token": "s3cr3t-canary"}),
    ):
        with FakeRegistry(**way) as registry, caplog.at_level(logging.DEBUG):  # type: ignore[arg-type]
            converter = AvroConverter(registry_url=registry.url, **cast(Any, given))
            converter.convert(group)
            authorization = registry.headers[0]["authorization"].split()[1]
    said = caplog.text + "".join(capfd.readouterr())
    assert "httpx2" in said
    assert not [one for one in ("canary", authorization) if one in said]


def test_an_unusable_proxy_is_reported_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for proxy in ("socks5://u:canary@p:1", "ftp://u:canary@p:1", "http://u:canary@p:x"):
        monkeypatch.setenv("ALL_PROXY", proxy)
        with pytest.raises(TailraceError, match="NO_PROXY") as caught:
            asked("https://registry:1").check()
        assert caught.value.kind is Kind.CONFIG_INVALID
        assert "canary" not in str(caught.value)


_QUIET = """
import sys
import tailrace.cli.main
from tailrace.cli.conversation import configure_logs
from tailrace.converters.with_registry import AvroConverter
configure_logs("debug")
converter = AvroConverter(registry_url=sys.argv[1])
early = {name.split(".")[0] for name in sys.modules} & {"authlib", "httpx2", "confluent_kafka"}
converter.check()
print(sorted(early), "httpx2" in sys.modules)
"""


@pytest.mark.slow
def test_the_client_is_loaded_when_needed_and_prints_nothing() -> None:
    with FakeRegistry() as registry:
        done = subprocess.run(
            [sys.executable, "-c", _QUIET, registry.url], check=True, capture_output=True, text=True
        )
    assert (done.stdout, done.stderr) == ("[] True\n", "")
