"""Recorded bytes of a real PostgreSQL: stream, snapshot and SELECT must give the same rows."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from tailrace.decode.changes import TableChanges, decode_block
from tailrace.decode.types import row_schema
from tailrace.protocol import frames, metadata_frames
from tests.support.decode.wire import block, decode, json_of, snapshot, vector

TYPES = vector("types")
BYTES = bytes.fromhex(TYPES["frames"])
STREAM = {changes.relation.table: changes for changes in decode(BYTES) if changes.relation}
SCHEMA = [frame for _, frame in metadata_frames.schema_frames(block(BYTES))]

METADATA = ["_op", "_commit_lsn", "_ordinal", "_xid", "_commit_ts", "_log_offset"]


def after(changes: TableChanges) -> list[dict[str, Any]]:
    return [dict(row) for row in changes.envelope("0").column("after").to_pylist()]


def from_snapshot(table: str) -> TableChanges:
    recorded = TYPES["tables"][table]
    text = bytes.fromhex(recorded["copy"])
    rows = frames.snapshot_frame(recorded["oid"], 0, len(recorded["rows"]), text)
    [changes] = decode(snapshot(rows), SCHEMA)
    return changes


@pytest.mark.parametrize("table", TYPES["tables"])
def test_the_stream_gives_the_same_as_select(table: str) -> None:
    recorded = TYPES["tables"][table]
    expected = [dict(zip(recorded["columns"], row, strict=True)) for row in recorded["rows"]]
    assert after(STREAM[table]) == expected


@pytest.mark.parametrize("table", TYPES["tables"])
def test_a_snapshot_gives_the_same_as_the_stream(table: str) -> None:
    stream, copied = STREAM[table], from_snapshot(table)
    assert after(copied) == after(stream)
    ours, theirs = (changes.rows().drop_columns(METADATA) for changes in (copied, stream))
    assert ours.schema == theirs.schema
    for one, other in zip(ours.columns, theirs.columns, strict=True):
        assert one.to_string(window=100) == other.to_string(window=100)  # where NaN equals NaN
    assert [line["after"] for line in json_of(copied)] == [line["after"] for line in json_of(stream)]
    assert bytes(copied.op) == b"r" * copied.count
    assert copied.rows().column("_xid").null_count == copied.count


@pytest.mark.parametrize("table", TYPES["tables"])
def test_no_text_is_lost_in_typed_columns(table: str) -> None:
    changes = STREAM[table]
    rows = changes.rows()
    rows.validate(full=True)
    assert changes.relation is not None
    assert rows.schema == row_schema(changes.relation)
    for typed, text, special in zip(
        rows.column("v"), after(changes), rows.column("_special").to_pylist(), strict=True
    ):
        if special is not None:
            assert dict(special) == {"v": text["v"]}
        else:
            assert typed.is_valid == (text["v"] is not None)


def test_rows_as_text_equal_what_was_sent() -> None:
    changes = STREAM["t_numeric_12_2"]
    rows = changes.rows(as_text=["v"])
    assert rows.column("v").to_pylist() == ["0.00", "-0.01", "9999999999.99", "-9999999999.99", "NaN", None]
    assert rows.column("_special").null_count == 6
    assert rows.schema.field("v").type == "string"


def test_offsets_and_ordinals_of_a_snapshot_identify_each_line() -> None:
    recorded = TYPES["tables"]["t_text"]
    text = bytes.fromhex(recorded["copy"])
    lines = text.splitlines(keepends=True)
    parts = [
        frames.snapshot_frame(recorded["oid"], 0, 3, b"".join(lines[:3])),
        frames.snapshot_frame(recorded["oid"], 3, len(lines) - 3, b"".join(lines[3:])),
    ]
    data = snapshot(*parts)
    [changes] = decode(data, SCHEMA)
    assert changes.ordinal.tolist() == list(range(len(lines)))
    assert [data[at:].split(b"\n")[0] + b"\n" for at in changes.log_offset.tolist()] == lines
    assert after(changes) == after(STREAM["t_text"])


UPDATES = {
    changes.relation.table if changes.relation else "": changes
    for changes in decode(bytes.fromhex(vector("updates")["frames"]))
}


def images(table: str) -> list[tuple[str, Any, Any, Any]]:
    columns = UPDATES[table].envelope("0").select(["op", "key", "before", "after"]).to_pylist()
    return [
        (row["op"], *(None if row[name] is None else dict(row[name]) for name in ("key", "before", "after")))
        for row in columns
    ]


def test_an_unchanged_toast_value_is_neither_null_nor_a_value() -> None:
    update = images("toasted")[2]
    assert update == ("u", {"id": "1"}, None, {"id": "1", "small": "b"})
    rows = UPDATES["toasted"].rows()
    assert rows.column("_unchanged").to_pylist()[:4] == [[], [], ["big"], ["big"]]
    assert rows.column("big")[2].as_py() is None
    assert json_of(UPDATES["toasted"])[2]["after"]["big"] == "__debezium_unavailable_value"


def test_a_changed_key_carries_the_old_one() -> None:
    assert images("toasted")[3] == ("u", {"id": "3"}, {"id": "1"}, {"id": "3", "small": "b"})
    old = UPDATES["toasted"].old_keys()
    assert old is not None
    offsets = UPDATES["toasted"].log_offset.tolist()
    assert old.select(["id", "_log_offset"]).to_pylist() == [
        {"id": key, "_log_offset": offsets[at]} for key, at in ((1, 3), (2, 4), (3, 5))
    ]


def test_a_delete_carries_its_key() -> None:
    assert images("toasted")[6] == ("d", {"id": "12"}, {"id": "12"}, None)
    row = UPDATES["toasted"].rows().slice(6, 1).to_pylist()[0]
    assert (row["id"], row["big"], row["small"], row["_unchanged"]) == (12, None, None, [])


def test_with_full_identity_unchanged_toast_values_come_from_the_old_row() -> None:
    whole = {"id": "1", "big": "y" * 2500, "small": "a"}
    assert images("full_toasted")[2] == ("u", None, whole, {**whole, "small": "b"})
    rows = UPDATES["full_toasted"].rows()
    assert rows.column("big")[2].as_py() == "y" * 2500
    assert rows.column("_unchanged").to_pylist() == [[]] * 7
    assert images("full_toasted")[4] == ("d", None, {**whole, "small": "b"}, None)


def test_the_key_of_an_index_identity_is_the_index() -> None:
    assert images("indexed")[2] == ("u", {"b": "two"}, {"b": "one"}, {"a": "1", "b": "two", "c": "d"})
    assert images("indexed")[3] == ("d", {"b": "two"}, {"b": "two"}, None)


def test_a_truncate_of_two_tables_is_a_change_of_each() -> None:
    toasted, full = (
        UPDATES[table].rows().slice(UPDATES[table].count - 1) for table in ("toasted", "full_toasted")
    )
    for rows, ordinal in ((toasted, 0), (full, 1)):
        [row] = rows.to_pylist()
        assert (row["_op"], row["id"], row["big"], row["_ordinal"]) == ("t", None, None, ordinal)
    assert full.column("_log_offset")[0].as_py() == toasted.column("_log_offset")[0].as_py() + 4


def test_tables_without_key_or_columns_decode() -> None:
    assert images("keyless") == [("c", None, None, {"a": "1", "b": "x"})]
    assert images("no_columns") == [("c", None, None, {})]
    assert UPDATES["no_columns"].rows().num_rows == 1


def test_messages_have_prefix_and_content() -> None:
    rows = UPDATES[""].envelope("0").to_pylist()
    assert [(row["op"], row["message_prefix"], row["message_content"]) for row in rows] == [
        ("m", "outbox", b"in a transaction"),
        ("m", "outbox", b"\x00\xff\n"),
    ]
    assert rows[0]["xid"] is not None
    assert rows[1]["xid"] is None
    assert rows[1]["commit_ts"] is None
    lines = json_of(UPDATES[""])
    assert lines[1]["message"] == {"prefix": "outbox", "content": "AP8K"}
    assert lines[1]["ts_ms"] is None


def test_each_version_of_a_table_is_decoded_by_its_own_relation_message() -> None:
    found = decode(bytes.fromhex(vector("ddl")["frames"]))
    shapes = [changes for changes in found if changes.relation and changes.relation.table == "shapes"]
    own = [changes.rows().to_pylist()[0] for changes in shapes]
    named = [{name: value for name, value in row.items() if not name.startswith("_")} for row in own]
    assert named == [
        {"id": 1, "name": "a"},
        {"id": 2, "name": "b", "price": Decimal("2.25")},
        {"id": 3, "title": "c", "price": Decimal("3.00")},
        {"id": 4, "title": "d", "price": Decimal("4.0001")},
        {"id": 5, "price": Decimal("5.0000")},
    ]
    assert str(shapes[1].rows().schema.field("price").type) == "decimal128(10, 2)"
    assert str(shapes[3].rows().schema.field("price").type) == "decimal128(12, 4)"
    [steady] = [changes for changes in found if changes.relation and changes.relation.table == "steady"]
    assert steady.rows().column("id").to_pylist() == [1, 2, 3, 4]  # its message was repeated, unchanged


@pytest.mark.parametrize("name", [pytest.param("types", marks=pytest.mark.slow), "updates", "ddl"])
def test_a_block_may_be_divided_between_any_two_frames(name: str) -> None:
    raw = block(bytes.fromhex(vector(name)["frames"]))

    def lines(found: list[TableChanges]) -> list[str]:
        each = [json_of(changes) for changes in found]
        flat = [line for part in each for line in part]
        return [json.dumps(line) for line in sorted(flat, key=lambda line: line["position"]["log_offset"])]

    whole = lines(decode_block(raw, 0, None, []))
    starts = [at for at, _ in frames.each_frame(raw)]
    for at in starts[:: max(1, len(starts) // 40)]:
        state = frames.new_state()
        head = frames.summarise(raw[:at], state)
        schema = [frame for _, frame in metadata_frames.schema_frames(raw[:at])]
        first = decode_block(raw[:at], 0, None, [])
        second = decode_block(raw[at:], at, head.open_at_end, schema)
        assert lines(first + second) == whole
