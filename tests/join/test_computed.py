"""Keys and orders computed by expressions: what they read of messages, and which expressions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from tailrace.cli.main import app
from tailrace.errors import Kind, TailraceError
from tailrace.join.computed import ComputedFields
from tailrace.join.connector import options_of
from tailrace.join.extraction import MESSAGES, DebeziumJson, JsonFields, keyed_data
from tailrace.join.merge import UNKNOWN, DataRows
from tailrace.spark.join.options import JoinReadOptions

TOPICS = {"bootstrap_servers": "nobody:1", "data": ["lines"], "transactions": "heads"}
NOTHING = {"key": "key", "order": "", "count": "", "time_ms": ""}


def messages(*documents: Any, keys: list[bytes | None] | None = None) -> pa.RecordBatch:
    values = [each if each is None or isinstance(each, bytes) else json.dumps(each).encode()
              for each in documents]  # fmt: skip
    count = len(values)
    columns = [
        pa.array(keys or [None] * count, pa.binary()), pa.array(values, pa.binary()),
        pa.array(np.arange(count) + 40), pa.array(np.arange(count) + 1000),
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGES)


def test_expressions_read_fields_keys_and_metadata_of_messages() -> None:
    found = ComputedFields(
        {"key": "coalesce(value.of.order, key.id)", "order": "value.line::int + 1"},
        {
            "key": "case when value.kind = 'head' then lower(value.id) end",
            "order": "message.offset * 10", "count": "value.lines", "time_ms": "message.timestamp_ms",
        },
    )  # fmt: skip
    lines = messages(
        {"of": {"order": "a"}, "line": 1},
        {"schema": {"type": "struct"}, "payload": {"of": {"order": 7}, "line": "2"}},
        None,
        {"of": [], "line": None},
        {"line": "no number, and no key"},
        keys=[b'{"id": "z"}', None, b'{"id": "k"}', b'{"id": 12345678901234567890}', None],
    )
    rows = found.data(lines)
    assert rows.keys.to_pylist() == ["a", "7", "k", "12345678901234567890", None]
    assert rows.orders.tolist() == [2, 3, UNKNOWN, UNKNOWN, UNKNOWN]
    assert rows.offsets.tolist() == [40, 41, 42, 43, 44]
    heads = messages(
        {"kind": "head", "id": "A", "lines": 3},
        {"kind": "other", "id": "A", "lines": "none"},
        {"kind": "head", "id": "B"},
    )
    ones = found.transactions(heads)
    assert ones.ids.to_pylist() == ones.rows.keys.to_pylist() == ["a", "b"]
    assert ones.rows.orders is not None
    assert ones.rows.orders.tolist() == [400, 420]
    assert ones.rows.counts.tolist() == [3, UNKNOWN]
    assert ones.times_ms.to_pylist() == [1000, 1002]


def test_expressions_of_paths_return_the_same_as_fields() -> None:
    fields = JsonFields("of.order", "id", "line", one_count="at.lines", one_time_ms="at.ms")
    computed = ComputedFields(
        {"key": "value.of.order", "order": "value.line"},
        {"key": "value.id", "order": "", "count": "value.at.lines", "time_ms": "value.at.ms"},
    )
    lines = messages({"of": {"order": "a\nb"}, "line": 1}, None, {"line": 7}, {"of": {"order": "c"}})
    heads = messages({"id": "x", "at": {"ms": 5, "lines": 2}}, {"other": 1}, {"id": "y"})
    rows, expected_rows = computed.data(lines), fields.data(lines)
    assert rows.keys == expected_rows.keys
    keyed = rows.keys.is_valid().to_numpy(zero_copy_only=False)
    assert rows.orders[keyed].tolist() == expected_rows.orders[keyed].tolist()
    ones, expected = computed.transactions(heads), fields.transactions(heads)
    assert ones.ids == expected.ids
    assert ones.times_ms == expected.times_ms
    assert ones.rows.counts.tolist() == expected.rows.counts.tolist()
    assert ones.rows.orders is expected.rows.orders is None


def test_a_messages_key_does_not_depend_on_the_other_messages() -> None:
    found = ComputedFields({"key": "value.id", "order": ""}, NOTHING)
    documents = [{"id": 1}, {"id": "1"}, {"id": 1.5}, {"id": None}, {}, {"id": {"a": [1]}}, [1], "text", 4]
    together = found.data(messages(*documents)).keys.to_pylist()
    assert together == ["1", "1", "1.5", None, None, '{"a":[1]}', None, None, None]
    assert [found.data(messages(each)).keys.to_pylist()[0] for each in documents] == together


def test_a_message_of_plain_text_is_a_value() -> None:
    found = ComputedFields({"key": "left(value, 2)", "order": "substring(value, 4)"}, NOTHING)
    rows = found.data(messages(b"ab;1", b"cd;22"))
    assert rows.keys.to_pylist() == ["ab", "cd"]
    assert rows.orders.tolist() == [1, 22]


@pytest.mark.parametrize(
    ("key", "order", "document", "said"),
    [
        ("value.id", "", b"no JSON: secret", "expressions.data.key of messages: a text is not JSON"),
        ("value.id", "", b"\xff", "expressions.data.key of messages: a message is not text"),
        ("coalesce(value.id, 'x')", "value.line", {"line": "secret"},
         "data.order of messages: a value is no whole number"),
        ("coalesce(value.id, 'x')", "value.line::int", {"line": "secret"},
         "data.order of messages: at character 11 of the expression: a value is out of range"),
    ],
)  # fmt: skip
def test_the_error_of_an_expression_has_the_messages_offset_and_not_its_content(
    key: str, order: str, document: Any, said: str
) -> None:
    with pytest.raises(TailraceError) as caught:
        ComputedFields({"key": key, "order": order}, NOTHING).data(messages({"line": 1}, document))
    assert said in caught.value.message
    assert caught.value.kind is Kind.JOIN_VIOLATED
    assert caught.value.context == {"offset_first": 40, "messages": 2}
    assert "secret" not in str(caught.value.as_json())


WRONG = [
    ("value.id ||", "at character 12 of the expression: syntax error at the end"),
    ("values.id", "at character 1 of the expression: there is no 'values'"),
    ("lowr(value.id)", "did you mean 'lower'?"),
    ("value.id = 'a'", "at character 1 of the expression: a key is a text or a whole number"),
    ("value.id::numeric", "cast it"),
    (
        "case when true then message.key end",
        "at character 21 of the expression: message has offset and timestamp_ms",
    ),
    (
        "case when value.a < message.offset then value.a end",
        "at character 11 of the expression: Cannot compare values of type TEXT and type BIGINT",
    ),
    ("case when was_sent(value.a) then value.a end", "was_sent is of a change in a log"),
    ("value.a + 1", "at character 9 of the expression"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_a_wrong_expression_is_refused_before_a_message_is_read(wrong: str, said: str) -> None:
    given = {"data": {"key": wrong}, "transactions": {"key": "key"}}
    with pytest.raises(TailraceError) as caught:
        options_of({**TOPICS, "expressions": given})
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert "expressions.data.key: " in caught.value.message
    assert said in caught.value.message
    with pytest.raises(TailraceError) as caught:
        JoinReadOptions.parse(
            {"bootstrapServers": "nobody:1", "data": "lines", "transactions": "heads",
             "expressions": json.dumps(given)}
        )  # fmt: skip
    assert "the option expressions.data.key: " in caught.value.message
    assert said in caught.value.message


def test_a_wrong_expression_is_reported_with_its_line_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "joined.yaml"
    file.write_text(
        "name: joined\n"
        "source:\n"
        "  type: kafka-join\n"
        "  bootstrap_servers: nobody:1\n"
        "  data: [lines]\n"
        "  transactions: heads\n"
        "  expressions:\n"
        "    data: {key: value.id}\n"
        "    transactions:\n"
        "      key: value.id\n"
        "      count: value.lines::date\n"
        "log: {path: ./log}\n"
        "sinks: [{type: jsonl, path: ./lines}]\n"
    )
    shown = CliRunner().invoke(app, ["check", str(file)])
    assert shown.exit_code == 2, shown.output
    said = " ".join(shown.output.split())
    assert "source.expressions.transactions.count (line 11): at character 1 of the expression: " in said
    assert "this must be a whole number" in said


@pytest.mark.parametrize("other", [{"registry": {"registry_url": "http://nobody:1"}}, {"fields": None}])
def test_only_one_way_to_extract_keys_may_be_configured(other: dict[str, Any]) -> None:
    given = {"data": {"key": "value.id"}, "transactions": {"key": "value.id"}}
    fields = {"data": {"key": "id"}, "transactions": {"key": "id"}}
    other = {name: fields if value is None else value for name, value in other.items()}
    with pytest.raises(TailraceError, match="give one of them"):
        options_of({**TOPICS, "expressions": given, **other})


@pytest.mark.follows("join_violated")
def test_messages_for_which_the_key_is_null_are_not_joined() -> None:
    both = messages({"id": "a", "line": "1"}, {"id": "a", "line": "a note"}, {"id": "a", "line": "2"})
    with pytest.raises(TailraceError) as caught:
        ComputedFields({"key": "value.id", "order": "value.line::int"}, NOTHING).data(both)
    assert "have the key's expression give null for JSON that is something else" in caught.value.hint
    key = "case when value.line not like 'a%' then value.id end"
    rows = ComputedFields({"key": key, "order": "value.line::int"}, NOTHING).data(both)
    assert rows.keys.to_pylist() == ["a", None, "a"]
    assert rows.orders.tolist() == [1, UNKNOWN, 2]


class Plain:
    """A user's extraction: a message is a key, a semicolon and an order."""

    def data(self, batch: pa.RecordBatch) -> DataRows:
        parts = [value.decode().split(";") for value in batch.column("value").to_pylist()]
        keys, orders = pa.array([key for key, _ in parts]), pa.array([int(order) for _, order in parts])
        return keyed_data(batch, keys, orders)


@pytest.mark.follows("join_violated")
def test_messages_that_are_not_json_need_an_extraction_by_the_user() -> None:
    lines = messages(b"a;1", b"a;2")
    for extraction in (ComputedFields({"key": "value.id", "order": ""}, NOTHING), DebeziumJson()):
        with pytest.raises(TailraceError) as caught:
            extraction.data(lines)
        assert "an extraction of your own" in caught.value.hint
    assert Plain().data(lines).keys.to_pylist() == ["a", "a"]
