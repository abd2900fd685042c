"""Keys and orders extracted from messages by fields, and the errors for missing ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.config.converters import RegistryAddress
from tailrace.errors import Kind, TailraceError
from tailrace.join.avro import DebeziumAvro
from tailrace.join.connector import options_of
from tailrace.join.extraction import MESSAGES, DebeziumJson, JsonFields
from tailrace.join.merge import UNKNOWN, Position
from tailrace.join.partition import JoinPartition, TransactionWindow
from tests.support.converters.registry import FakeRegistry


def messages(*documents: Any) -> pa.RecordBatch:
    values = [
        None if each is None else each if isinstance(each, bytes) else json.dumps(each).encode()
        for each in documents
    ]
    numbers = pa.array(np.arange(len(values)))
    columns = [pa.nulls(len(values), pa.binary()), pa.array(values, pa.binary()), numbers, numbers]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGES)


@pytest.mark.parametrize("as_number", [False, True])
def test_fields_of_any_document_are_joined(as_number: bool) -> None:
    def key(number: int) -> int | str:
        return number if as_number else f"order {number}"

    fields = JsonFields("of.order", "id", "line", one_count="at.all.lines", one_time_ms="at.all.ms")
    lines = messages(
        {"of": {"order": key(1)}, "line": 1, "note": "a\nb"}, None, {"of": {"order": key(1)}, "line": 2},
        {"line": 7}, {"of": {"order": key(2), "more": [1]}, "line": 1},
    )  # fmt: skip
    heads = messages({"id": key(1), "at": {"all": {"ms": 5, "lines": 2}}}, {"other": 1}, {"id": key(2)})
    partition = JoinPartition("joined", {"topic": "lines", "partition": "0"}, Position())
    window = TransactionWindow(0)
    found = fields.transactions(heads)
    window.add(found)
    partition.add_transactions(found.rows)
    partition.add_data(lines, fields)
    taken = partition.take_rows(window)
    assert taken is not None
    facts = taken.facts.to_pylist()
    assert [each and each["id"] for each in facts] == [
        str(key(1)), None, str(key(1)), None, str(key(2)),
    ]  # fmt: skip
    assert facts[0] is not None
    assert (facts[0]["event_count"], facts[0]["ts_ms"]) == (2, 5)
    assert [each and each["total_order"] for each in facts] == [1, None, 2, None, 1]


def test_keys_of_both_kinds_may_be_in_one_topic() -> None:
    fields = JsonFields("key", "key", "line", one_count="lines")
    found = fields.data(messages({"key": "a", "line": 1}, {"key": 5, "line": 1}, None, {"key": "5"}, {}))
    assert found.keys.to_pylist() == ["a", "5", None, "5", None]
    assert found.orders.tolist() == [1, 1, UNKNOWN, UNKNOWN, UNKNOWN]
    heads = fields.transactions(messages({"key": 5, "lines": 2}, {"other": 1}, {"key": "a"}))
    assert heads.rows.keys.to_pylist() == ["5", "a"]
    assert heads.rows.counts.tolist() == [2, UNKNOWN]
    with pytest.raises(TailraceError) as caught:
        fields.data(messages({"key": "a"}, {"key": 1}, {"key": [1]}, {"key": 2}))
    assert caught.value.context == {"offset_first": 2, "messages": 1}


def test_one_field_may_be_key_and_order() -> None:
    fields = JsonFields("id", "id", one_order="id")
    found = fields.transactions(messages({"id": 5}, {}, {"id": 7}))
    assert found.rows.orders is not None
    assert (found.rows.keys.to_pylist(), found.rows.orders.tolist()) == (["5", "7"], [5, 7])
    with pytest.raises(TailraceError) as caught:
        fields.transactions(messages({"id": "x7"}))
    assert caught.value.kind is Kind.JOIN_VIOLATED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": ["a", "b", "a"]}, "data: a topic is named twice"),
        (
            {"fields": {"data": {"key": "of", "order": "of.line"}, "transactions": {"key": "id"}}},
            "of.line: is a field of of",
        ),
    ],
)
def test_settings_that_contradict_themselves_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TailraceError) as caught:
        options_of({"bootstrap_servers": "b:1", "data": ["a"], "transactions": "t", **changes})
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert said in caught.value.message


@pytest.mark.parametrize("schema", ['"string"', '["null","string"]', '{"type":"array","items":"int"}'])
def test_an_avro_schema_that_is_no_record_is_refused(schema: str) -> None:
    with FakeRegistry() as registry:
        registry.schemas += [("AVRO", schema)]
        avro = DebeziumAvro(RegistryAddress(registry_url=registry.url))
        for take in (avro.data, avro.transactions):
            with pytest.raises(TailraceError, match="schema 1 of the registry is no record") as caught:
                take(messages(b"\0\0\0\0\1\2a"))
            assert caught.value.kind is Kind.JOIN_VIOLATED


def test_what_a_registry_has_not_or_that_is_no_change_is_reported() -> None:
    flat = {"type": "record", "name": "Flat", "fields": [{"name": "op", "type": "int"}]}
    open_ended = {"type": "record", "name": "Whole", "fields": [{"name": "of", "type": "shop.Elsewhere"}]}
    with FakeRegistry() as registry:
        registry.schemas += [("AVRO", json.dumps(each)) for each in (flat, open_ended)]
        avro = DebeziumAvro(RegistryAddress(registry_url=registry.url))
        with pytest.raises(TailraceError, match="members of other types than Debezium's") as caught:
            avro.data(messages(None, b"\0\0\0\0\1\2"))
        assert (caught.value.kind, caught.value.context["offset"]) == (Kind.JOIN_VIOLATED, 1)
        with pytest.raises(TailraceError, match="schema 2 of the registry is not complete in itself"):
            avro.data(messages(b"\0\0\0\0\2\2"))
        with pytest.raises(TailraceError, match="it has no schema 3") as caught:
            avro.data(messages(b"\0\0\0\0\3\2"))
        assert "the registry with which the topic was written" in caught.value.hint


def test_documents_over_several_lines_and_with_schemas_are_read() -> None:
    event = {
        "transaction": {"id": "7:120", "total_order": 3}, "source": {"sequence": json.dumps(["90", "120"])},
    }  # fmt: skip
    event["source"] = {"sequence": '["90","120"]'}
    pretty = json.dumps({"schema": {"type": "struct"}, "payload": event}, indent=2).encode()
    rows = DebeziumJson().data(messages(event, pretty, None))
    assert rows.keys.to_pylist() == ["7", "7", None]
    assert rows.follows.tolist() == [90, 90, UNKNOWN]
    assert rows.orders.tolist() == [3, 3, UNKNOWN]


@pytest.mark.parametrize("value", [b"no JSON", b'{"a": 1}\n{"b": 2}', b"", b"[1]"])
def test_a_message_that_is_no_document_is_an_error_with_its_offset(value: bytes) -> None:
    with pytest.raises(TailraceError) as caught:
        DebeziumJson().data(messages({"transaction": None}, value))
    assert caught.value.kind is Kind.JOIN_VIOLATED
    assert caught.value.context == {"offset_first": 0, "messages": 2}


def test_rows_without_an_order_have_no_step() -> None:
    data = [{"op": op, "source": {}, "transaction": {"id": "7:100"}} for op in "cud"]
    rows = DebeziumJson().data(messages(*data))
    assert rows.steps is not None
    assert rows.orders.tolist() == rows.steps.tolist() == [UNKNOWN] * 3


def test_the_two_events_of_a_changed_key_have_one_order_and_a_repeated_event_is_still_found() -> None:
    """In topics of Tailrace's sink. A transformation dropped the transaction's first change."""
    found = DebeziumJson().transactions(messages({"status": "END", "id": "7:200", "event_count": 4}))
    window = TransactionWindow(0)
    window.add(found)

    def take(position: Position, rows: pa.RecordBatch) -> tuple[Position, list[Any]]:
        partition = JoinPartition("joined", {"topic": "t", "partition": "0"}, position)
        partition.add_transactions(found.rows)
        partition.add_data(rows, DebeziumJson())
        taken = partition.take_rows(window)
        assert taken is not None
        return partition.merge.position, taken.facts.drop_null().to_pylist()

    data = [
        each and {"op": each[0], "source": {}, "transaction": {"id": "7:100", "total_order": each[1]}}
        for each in (("u", 2), ("d", 3), None, ("c", 3), ("u", 4))
    ]
    for cut in range(1, len(data)):
        position, facts = take(Position(), messages(*data[:cut]))
        facts += take(position, messages(*data).slice(cut))[1]
        assert [each["total_order"] for each in facts] == [2, 3, 3, 4]
        assert [each["partition_complete"] for each in facts] == [False, False, False, True]
        if data[cut - 1] is not None:
            with pytest.raises(TailraceError, match="a row comes again"):
                take(position, messages(*data[:cut], data[cut - 1]).slice(cut))
