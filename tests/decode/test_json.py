"""JSON lines: Debezium's form, valid for any content of a column."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.protocol import frames
from tests.support.decode.wire import (
    SOURCE,
    UNCHANGED,
    begin,
    column,
    commit,
    decode,
    delete,
    insert,
    json_of,
    only,
    relation,
    snapshot,
    transaction,
    truncate,
    update,
)  # fmt: skip

SHAPE = relation()


def test_a_complete_change() -> None:
    data = begin(1000, 1_000_000, 7) + insert("1", 'a "b"\n', "1.50") + commit(1000)
    [line] = json_of(only(data, [SHAPE]))
    us = 946_684_801_000_000
    assert line == {
        "before": None,
        "after": {"id": 1, "note": 'a "b"\n', "price": "1.50"},
        "source": {
            "version": "1.0", "connector": "postgresql", "name": "shop", "ts_ms": us // 1000,
            "snapshot": "false", "db": "db", "sequence": '["1000","100"]', "ts_us": us, "ts_ns": us * 1000,
            "schema": "public", "table": "orders", "txId": 7, "lsn": 100, "xmin": None,
            "schema_version": None,
        },
        "transaction": None,
        "op": "c",
        "ts_ms": us // 1000, "ts_us": us, "ts_ns": us * 1000,
        "position": {"task": "0", "log_offset": len(begin()), "commit_lsn": 1000, "ordinal": 0},
    }  # fmt: skip


def test_images_of_each_operation() -> None:
    data = transaction(
        insert("1", "a", "1.00"),
        update("1", "b", UNCHANGED),
        update("2", "b", "1.00", key=("1", None, None)),
        update("2", None, "1.00", old=("2", "b", "1.00")),
        delete("2", None, None),
        truncate(16385),
    )
    lines = json_of(only(data, [SHAPE]))
    assert [(line["op"], line["before"], line["after"]) for line in lines] == [
        ("c", None, {"id": 1, "note": "a", "price": "1.00"}),
        ("u", None, {"id": 1, "note": "b", "price": "__debezium_unavailable_value"}),
        ("u", {"id": 1}, {"id": 2, "note": "b", "price": "1.00"}),
        ("u", {"id": 2, "note": "b", "price": "1.00"}, {"id": 2, "note": None, "price": "1.00"}),
        ("d", {"id": 2}, None),
        ("t", None, None),
    ]
    assert [line["position"]["ordinal"] for line in lines] == [0, 1, 2, 3, 4, 5]


def test_a_snapshot_row_is_marked_as_such() -> None:
    rows = frames.snapshot_frame(16385, 0, 1, b"1\t\\N\t2.00\n")
    [line] = json_of(only(snapshot(rows), [SHAPE]))
    assert (line["op"], line["source"]["snapshot"], line["source"]["txId"]) == ("r", "true", None)
    assert line["after"] == {"id": 1, "note": None, "price": "2.00"}


@given(st.lists(st.text() | st.none(), min_size=1))
def test_any_text_is_read_back(values: list[str | None]) -> None:
    assert [line["after"]["v"] for line in json_of(column(25, values))] == values


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60))
def test_any_name_is_read_back(name: str) -> None:
    shape = relation(columns=[(name, 23, -1)], key=())
    assert json_of(only(transaction(shape, insert("5"))))[0]["after"] == {name: 5}


@given(st.lists(st.floats(), min_size=1))
def test_any_float_is_read_back(values: list[float]) -> None:
    texts = {math.inf: "Infinity", -math.inf: "-Infinity"}
    sent = ["NaN" if math.isnan(value) else texts.get(value, repr(value)) for value in values]
    found = [line["after"]["v"] for line in json_of(column(701, sent))]
    for value, back in zip(values, found, strict=True):
        assert isinstance(back, str) != math.isfinite(value)
        assert math.isnan(value) or float(back) == value


@given(
    st.sampled_from([16, 17, 20, 700, 701, 1082, 1114, 1184, 1000, 1001, 1007, 1009, 1022, 1182, 1185]),
    st.lists(st.text('{}[],"\\x0123456789-+.eE:tfNULnaiy BC \t', max_size=40), min_size=1),
)
def test_values_in_another_form_than_their_types_are_still_valid_json(kind: int, values: list[str]) -> None:
    changes = column(kind, values)
    assert len(json_of(changes)) == len(values)
    assert changes.rows().num_rows == len(values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-01-01 10:00:00.5+00", "2024-01-01T10:00:00.5Z"),
        ("2024-01-01 10:00:00+05:30", "2024-01-01T10:00:00+05:30"),
        ("0044-03-15 00:00:00+00 BC", "-0043-03-15T00:00:00Z"),
        ("0001-03-15 00:00:00+00 BC", "0000-03-15T00:00:00Z"),
        ("12024-01-01 00:00:00+00", "+12024-01-01T00:00:00Z"),
        ("294276-12-31 23:59:59.999999+00", "+294276-12-31T23:59:59.999999Z"),
        ("infinity", "infinity"),
    ],
)
def test_timestamps_with_zone_are_iso_8601(text: str, expected: str) -> None:
    assert json_of(column(1184, [text]))[0]["after"]["v"] == expected


def test_arrays_of_any_depth_are_arrays() -> None:
    deep = "{" * 6 + "1" + "}" * 6
    assert json_of(column(1007, [deep, "{{1,2},{3,NULL}}"]))[0]["after"]["v"] == [[[[[[1]]]]]]
    very_deep = "{" * 100_000
    assert json_of(column(1007, [very_deep]))[0]["after"]["v"] == very_deep


def test_lines_end_in_newlines_and_can_be_concatenated() -> None:
    values = ["x" * 50_000, None, "\x01" * 30_000, "ü"]
    lines = column(25, values).json_lines("0", SOURCE)
    lines.validate(full=True)
    content = lines.buffers()[2].to_pybytes()
    assert content == "".join(lines.to_pylist()).encode()
    assert [json.loads(line)["after"]["v"] for line in content.split(b"\n")[:-1]] == values


def test_other_tables_and_slices_have_the_same_lines() -> None:
    data = transaction(*(insert(str(n), "é", "1.00") for n in range(50)))
    [changes] = decode(data, [SHAPE])
    whole = changes.json_lines("0", SOURCE).to_pylist()
    cut = int(changes.log_offset[20])
    first, rest = changes.slice(0, cut), changes.slice(cut, 1 << 60)
    assert first.json_lines("0", SOURCE).to_pylist() + rest.json_lines("0", SOURCE).to_pylist() == whole
