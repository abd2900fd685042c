"""Events from the rows of an outbox table."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import structlog

from tailrace.converters.debezium import JsonConverter
from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tests.support.decode.wire import delete, insert, update
from tests.support.transforms.groups import applied, only, orders, places, rows, topics

UUID, TEXT, JSONB, INTEGER = 2950, 25, 3802, 23
COLUMNS = [
    ("id", UUID, -1),
    ("aggregatetype", TEXT, -1),
    ("aggregateid", TEXT, -1),
    ("type", TEXT, -1),
    ("payload", JSONB, -1),
    ("part", INTEGER, -1),
]
IDS = [f"00000000-0000-0000-0000-{n:012}" for n in range(4)]


def outbox(*changes: bytes) -> Group:
    return orders(*changes, columns=COLUMNS, table="outbox")


def events() -> Group:
    return outbox(
        insert(IDS[0], "Order", "1", "Created", '{"n": 1}', "3"),
        insert(IDS[1], "Customer", "7", "Moved", '"a"', "4"),
        delete(IDS[0], None, None, None, None, None),
        insert(IDS[2], "Order", "1", "Paid", None, None),
    )


def test_inserted_rows_become_events() -> None:
    found = applied(events(), {"type": "outbox"})
    assert topics(found) == {0: "outbox.event.Order", 1: "outbox.event.Customer", 3: "outbox.event.Order"}
    read = {place: (row["key"], row["value"], row["headers"]) for place, row in rows(found).items()}
    assert read == {
        0: ("1", '{"n": 1}', {"id": IDS[0]}),
        1: ("7", '"a"', {"id": IDS[1]}),
        3: ("1", None, {"id": IDS[2]}),
    }
    assert not any(group.is_change for group in found)


def test_more_columns_are_put_into_headers_the_envelope_and_the_partition() -> None:
    additional = [
        "type:header:eventType",
        "type:envelope",
        "aggregateid:envelope:aggregate",
        "part:partition",
    ]
    found = rows(applied(events(), {"type": "outbox", "additional": additional}))
    assert found[0]["value"] == {"payload": '{"n": 1}', "type": "Created", "aggregate": "1"}
    assert found[0]["headers"] == {"id": IDS[0], "eventType": "Created"}
    assert (found[0]["partition"], found[3]["partition"]) == (3, None)
    assert found[3]["value"] == {"payload": None, "type": "Paid", "aggregate": "1"}
    found = rows(
        applied(events(), {"type": "outbox", "additional": additional, "tombstone_on_empty_payload": True})
    )
    assert found[3]["value"] is None


def test_payloads_are_written_as_json() -> None:
    columns = [*COLUMNS[:4], ("payload", TEXT, -1)]
    texts = ['{"a": [1, 2]}', 'no "json"\n\\', "", None]
    changes = [insert(IDS[0], "x", "1", "t", text) for text in texts]
    group = orders(*changes, columns=columns, table="outbox")
    expand = {"type": "outbox", "expand_json_payload": True}
    value = only(applied(group, expand)).column("value")
    assert value.type == pa.json_(pa.string())
    read = [None if text is None else json.loads(text) for text in value.cast(pa.string()).to_pylist()]
    assert read == [{"a": [1, 2]}, texts[1], "", None]
    found = only(applied(group, {**expand, "tombstone_on_empty_payload": True}))
    assert found.column("value").is_null().to_pylist() == [False, False, True, True]


def test_payloads_of_white_space_or_no_bytes_are_empty() -> None:
    for oid, payloads in ((TEXT, [" \n", "", None, " x "]), (17, ["\\x", "\\x", None, "\\x20"])):
        changes = [insert(IDS[0], "x", "1", "t", payload) for payload in payloads]
        group = orders(*changes, columns=[*COLUMNS[:4], ("payload", oid, -1)], table="outbox")
        value = only(applied(group, {"type": "outbox", "tombstone_on_empty_payload": True})).column("value")
        assert value.is_null().to_pylist() == [True, True, True, False]


def test_columns_have_the_form_that_they_have_in_events() -> None:
    stamp, of_key = ("2018-06-20 15:13:16.945", 1114, 3), ("1.5", 1700, -1)
    columns = [*COLUMNS[:2], ("aggregateid", *of_key[1:]), *COLUMNS[3:5], ("at", *stamp[1:])]
    row = insert(IDS[0], "Order", of_key[0], "Created", '{"n": 1}', stamp[0])
    group = orders(row, columns=columns, table="outbox")
    converter = JsonConverter(schemas_enable=True)
    event = json.loads(converter.convert(group).values[0].as_py())
    after = event["payload"]["after"]
    schemas = {field["field"]: field for field in event["schema"]["fields"][1]["fields"]}

    made = converter.convert(only(applied(group, {"type": "outbox", "additional": ["at:envelope:time"]})))
    assert made.keys is not None
    key, value = json.loads(made.keys[0].as_py()), json.loads(made.values[0].as_py())
    assert key["payload"] == after["aggregateid"]
    assert value["payload"] == {"payload": '{"n": 1}', "time": after["at"]}
    names = [field["name"] for field in value["schema"]["fields"]]
    assert names == [schemas["payload"]["name"], schemas["at"]["name"]]
    alone = converter.convert(only(applied(group, {"type": "outbox"}))).values[0].as_py()
    assert json.loads(alone)["schema"]["name"] == schemas["payload"]["name"]


def test_the_options_determine_the_topics() -> None:
    route = {
        "type": "outbox",
        "route_by": "type",
        "route_topic_regex": "(?<first>[A-C])(.*)",
        "route_topic_replacement": "${first}-$2",
    }
    assert topics(applied(events(), route)) == {0: "C-reated", 1: "Moved", 3: "Paid"}


@pytest.mark.parametrize("behaviour", ["warn", "error", "fatal"])
def test_an_update_is_no_event(behaviour: str) -> None:
    group = outbox(insert(IDS[0], "a", "1", "t", "{}", "1"), update(IDS[0], "a", "1", "t", "{}", "2"))
    given: dict[str, Any] = {"type": "outbox", "on_update": behaviour}
    if behaviour == "fatal":
        with pytest.raises(TailraceError, match="1 of its rows were updated") as caught:
            applied(group, given)
        assert caught.value.kind is Kind.TRANSFORM_FAILED
        return
    with structlog.testing.capture_logs() as logs:
        assert places(applied(group, given)) == [0]
    expected = {"warn": "warning", "error": "error"}[behaviour]
    assert [(line["event"], line["log_level"], line["updates"]) for line in logs] == [
        ("outbox_updates_skipped", expected, 1)
    ]


def test_other_tables_and_other_columns() -> None:
    group = orders()
    assert only(applied(group, {"type": "outbox"})) is group
    with pytest.raises(TailraceError, match="no column 'id2'"):
        applied(events(), {"type": "outbox", "event_id": "id2"})
    with pytest.raises(TailraceError, match="1 rows have no value in 'aggregatetype'"):
        applied(outbox(insert(IDS[0], None, "1", "t", "{}", "1")), {"type": "outbox"})
    with pytest.raises(TailraceError, match="not 32-bit numbers"):
        applied(events(), {"type": "outbox", "additional": ["type:partition"]})
    with pytest.raises(TailraceError, match="must be column:header"):
        applied(events(), {"type": "outbox", "additional": ["type:body"]})


@pytest.mark.parametrize(
    "given",
    [{"event_key": "price"}, {"payload": "price"}, {"event_id": "price"}, {"additional": ["price:envelope"]}],
)
def test_a_value_that_its_type_cannot_hold_does_not_become_null_in_an_event(given: dict[str, Any]) -> None:
    columns = [*COLUMNS, ("price", 1700, (12 << 16) + 2 + 4)]
    group = orders(insert(IDS[0], "a", "1", "t", "{}", "1", "NaN"), columns=columns, table="outbox")
    with pytest.raises(TailraceError, match="'price' has a value that its type can't hold") as caught:
        applied(group, {"type": "outbox", **given})
    assert caught.value.kind is Kind.TRANSFORM_FAILED
    as_text = {"type": "cast", "fields": {"price": "text"}}
    [event] = rows(applied(group, as_text, {"type": "outbox", **given})).values()
    assert "NaN" in str(event)


def test_the_json_converter_writes_a_json_payload_unchanged() -> None:
    expand = {"type": "outbox", "expand_json_payload": True}
    cases: list[tuple[dict[str, Any], Any]] = [({}, {"n": 1}), ({"schemas_enable": True}, '{"n": 1}')]
    for options, payload in cases:
        converter = JsonConverter(**options)
        group = events().take(np.array([0, 3]))
        found = converter.convert(only(applied(group, expand)))
        read = [None if text is None else json.loads(text) for text in found.values.to_pylist()]
        plain = [value["payload"] if value is not None and options else value for value in read]
        assert plain == [payload, None]
        inside = converter.convert(only(applied(group, {**expand, "additional": ["type:envelope"]})))
        value = json.loads(inside.values.to_pylist()[0])
        assert (value["payload"] if options else value) == {"payload": payload, "type": "Created"}
