"""Blocks as a whole: tables apart, transactions numbered, only wanted tables, errors with names."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.decode.changes import TableChanges, decode_block
from tailrace.decode.envelope import SCHEMA
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tailrace.protocol.frames import TRANSACTION_OPEN, OpenUnit
from tests.support.decode.wire import (
    SOURCE,
    UNCHANGED,
    begin,
    block,
    commit,
    decode,
    delete,
    insert,
    message,
    only,
    relation,
    snapshot,
    transaction,
    truncate,
    update,
    xlog,
)  # fmt: skip

A, B = 11, 22
ONE = [("id", 23, -1)]
SHAPES = [relation(A, "a", ONE), relation(B, "b", ONE)]


def facts(oid: int, *key: str) -> bytes:
    return frames.control_frame(b"F", 0, 0, {"relation": oid, "primary_key": list(key)})


def ids(changes: TableChanges) -> list[int | None]:
    values: list[int | None] = changes.rows().column("id").to_pylist()
    return values


def test_interleaved_tables_keep_their_own_order() -> None:
    data = transaction(*(insert(str(n), oid=A if n % 3 else B) for n in range(9)), lsn=1000, xid=5)
    data += transaction(insert("9", oid=A), lsn=2000, xid=6)
    b, a = decode(data, SHAPES)
    assert (b.relation.table, ids(b)) == ("b", [0, 3, 6])
    assert (a.relation.table, ids(a)) == ("a", [1, 2, 4, 5, 7, 8, 9])
    assert a.ordinal.tolist() == [1, 2, 4, 5, 7, 8, 0]
    assert a.xid.tolist() == [5] * 6 + [6]
    assert a.commit_lsn.tolist() == [1000] * 6 + [2000]


def test_a_block_that_starts_in_a_transaction_continues_its_numbers() -> None:
    opened = OpenUnit(TRANSACTION_OPEN, xid=9, commit_lsn=1000, commit_time_us=7, ordinal=40)
    [changes] = decode_block(block(insert("1", oid=A) + commit(1000)), 500, opened, SHAPES)
    row = changes.rows().to_pylist()[0]
    assert (row["_ordinal"], row["_xid"], row["_commit_lsn"], row["_log_offset"]) == (40, 9, 1000, 500)


def test_a_block_that_starts_in_a_snapshot_continues_its_numbers() -> None:
    opened = OpenUnit(frames.SNAPSHOT_OPEN, xid=0, commit_lsn=1000, commit_time_us=7, ordinal=40)
    [changes] = decode_block(block(frames.snapshot_frame(A, 40, 2, b"1\n2\n")), 0, opened, SHAPES)
    assert changes.rows().select(["id", "_ordinal", "_xid"]).to_pylist() == [
        {"id": 1, "_ordinal": 40, "_xid": None},
        {"id": 2, "_ordinal": 41, "_xid": None},
    ]


def test_only_wanted_tables_are_decoded_but_all_are_numbered() -> None:
    data = transaction(
        insert("1", oid=A), truncate(A, B, A), insert("x", "y", oid=33), message("p", b""), insert("2", oid=B)
    )
    [changes] = decode(data, SHAPES, tables=frozenset({B}))
    assert changes.ordinal.tolist() == [2, 6]
    assert bytes(changes.op) == b"tc"
    assert decode(data, SHAPES, tables=frozenset({44})) == []


def test_unwanted_tables_need_no_schema_and_wanted_ones_do() -> None:
    data = transaction(insert("1", oid=33), insert("2", oid=B))
    assert len(decode(data, SHAPES, tables=frozenset({B}))) == 1
    with pytest.raises(TailraceError) as caught:
        decode(data, SHAPES)
    assert caught.value.kind is Kind.SCHEMA_MISSING
    assert caught.value.context == {"relation": 33}


def test_a_repeated_relation_message_makes_no_new_version() -> None:
    data = transaction(insert("1", oid=A), SHAPES[0], insert("2", oid=A))
    assert ids(only(data, SHAPES)) == [1, 2]


def test_a_table_that_changes_and_changes_back_has_three_versions() -> None:
    wide = relation(A, "a", [("id", 20, -1)])
    data = transaction(insert("1", oid=A), wide, insert("2", oid=A), SHAPES[0], insert("3", oid=A))
    versions = decode(data, SHAPES)
    assert [str(part.rows().schema.field("id").type) for part in versions] == ["int32", "int64", "int32"]


def test_a_renamed_table_is_another_version() -> None:
    data = transaction(insert("1", oid=A), relation(A, "renamed", ONE), insert("2", oid=A))
    assert [part.relation.table for part in decode(data, SHAPES)] == ["a", "renamed"]


def test_facts_give_the_key_of_a_table_with_full_identity() -> None:
    full = relation(A, "a", [("id", 23, -1), ("v", 25, -1)], key=("id", "v"), identity="f")
    data = transaction(update("1", UNCHANGED, oid=A, old=("1", "x")), delete("1", "x", oid=A, mark=b"O"))
    rows = only(data, [facts(A, "id"), full]).envelope("0")
    assert [dict(key) for key in rows.column("key").to_pylist()] == [{"id": "1"}] * 2
    assert dict(rows.column("after")[0].as_py()) == {"id": "1", "v": "x"}
    assert only(data, [full, facts(A, "gone")]).relation.key == ()


def test_facts_in_the_block_apply_from_there_on() -> None:
    full = relation(A, "a", ONE, identity="f")
    data = full + transaction(insert("1", oid=A)) + facts(A, "id") + transaction(insert("2", oid=A), lsn=2000)
    assert [part.relation.key for part in decode(data)] == [(), ("id",)]


def test_a_key_tuple_of_a_table_without_a_flagged_key_is_trusted() -> None:
    bare = relation(A, "a", [("id", 23, -1), ("v", 25, -1)], key=())
    changes = only(transaction(delete("1", None, oid=A)), [bare])
    assert dict(changes.envelope("0").column("before")[0].as_py()) == {"id": "1"}
    assert changes.rows().column("id").to_pylist() == [1]


def test_nulls_besides_the_key_in_a_key_tuple_are_no_values_of_the_row() -> None:
    shape = relation(A, "a", [("id", 23, -1), ("v", 25, -1)])
    rows = only(transaction(delete("1", None, oid=A)), [shape])
    assert dict(rows.envelope("0").column("before")[0].as_py()) == {"id": "1"}


def test_an_old_key_tuple_with_the_same_key_is_no_key_change() -> None:
    shape = relation(A, "a", [("id", 23, -1), ("v", 25, -1)])
    changes = only(transaction(update("1", "x", oid=A, key=("1", None))), [shape])
    assert changes.old_keys() is None
    assert dict(changes.envelope("0").column("before")[0].as_py()) == {"id": "1"}


def test_an_unchanged_toasted_key_is_taken_from_the_old_key() -> None:
    shape = relation(A, "a", [("id", 25, -1), ("v", 25, -1)])
    changes = only(transaction(update(UNCHANGED, "x", oid=A, key=("long", None))), [shape])
    assert changes.rows().column("id").to_pylist() == ["long"]
    assert changes.rows().column("_unchanged").to_pylist() == [[]]
    assert changes.old_keys() is None


def test_snapshot_and_stream_of_one_table_share_a_block() -> None:
    data = SHAPES[0] + snapshot(frames.snapshot_frame(A, 0, 1, b"1\n"), lsn=900)
    data += transaction(insert("2", oid=A))
    copied, streamed = decode(data)
    assert (ids(copied), bytes(copied.op)) == ([1], b"r")
    assert (ids(streamed), bytes(streamed.op)) == ([2], b"c")


@pytest.mark.parametrize("described", [SHAPES[0], b""], ids=["described again", "described once"])
def test_rows_of_a_snapshot_between_transactions_keep_their_positions(described: bytes) -> None:
    data = SHAPES[0]
    for number in (1, 3, 5):
        lsn = 1000 * number
        data += snapshot(described + frames.snapshot_frame(A, 0, 1, b"%d\n" % number), lsn=lsn)
        data += transaction(insert(str(number + 1), oid=A), lsn=lsn + 500)
    found = decode(data)
    assert [(ids(changes), bytes(changes.op)) for changes in found] == [
        ([number], b"c" if number % 2 == 0 else b"r") for number in range(1, 7)
    ]
    offsets = [offset for changes in found for offset in changes.log_offset.tolist()]
    assert offsets == sorted(offsets)


def test_slices_are_by_log_offset_and_half_open() -> None:
    changes = only(transaction(*(insert(str(n), oid=A) for n in range(10))), SHAPES)
    offsets = changes.log_offset.tolist()
    part = changes.slice(offsets[3], offsets[7])
    assert ids(part) == [3, 4, 5, 6]
    assert part.log_offset.tolist() == offsets[3:7]
    assert changes.slice(0, 1 << 40).count == 10
    nothing = changes.slice(5, 5)
    assert (
        nothing.rows().num_rows == nothing.envelope("0").num_rows == len(nothing.json_lines("0", SOURCE)) == 0
    )


def test_a_snapshot_may_be_sliced_before_or_after_decoding() -> None:
    text = b"".join(b"%d\ta\\tb\t\\N\n" % n for n in range(6))
    changes = only(snapshot(frames.snapshot_frame(16385, 0, 6, text)), [relation()])
    offsets = changes.log_offset.tolist()
    whole = changes.rows()
    assert changes.slice(offsets[2], offsets[4]).rows().equals(whole.slice(2, 2))
    assert whole.column("note").to_pylist() == ["a\tb"] * 6


def test_the_envelope_has_its_schema_for_every_kind_of_change() -> None:
    data = transaction(insert("1", oid=A), truncate(A), message("p", b"\xff"))
    for changes in decode(data, SHAPES):
        batch = changes.envelope("7")
        batch.validate(full=True)
        assert batch.schema == SCHEMA
        assert set(batch.column("task").to_pylist()) == {"7"}


def test_messages_have_no_rows() -> None:
    changes = only(transaction(message("p", b"x")))
    assert changes.relation is None
    with pytest.raises(TailraceError, match="belong to no table"):
        changes.rows()


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 9) | st.none()), max_size=40))
def test_a_block_has_exactly_its_changes(sent: list[tuple[int, int | None]]) -> None:
    changes = (insert(None if n is None else str(n), oid=oid) for oid, n in sent)
    found = decode(transaction(*changes), SHAPES)
    for oid in (A, B):
        expected = [n for table, n in sent if table == oid]
        assert [n for part in found if part.relation.oid == oid for n in ids(part)] == expected
    assert sorted(n for part in found for n in part.ordinal.tolist()) == list(range(len(sent)))


def test_more_tables_than_a_block_lists() -> None:
    oids = range(1, 300)
    shapes = [relation(oid, f"t{oid}", ONE) for oid in oids]
    found = decode(transaction(*(insert(str(oid), oid=oid) for oid in [*oids, *oids])), shapes)
    assert [ids(part) for part in found] == [[oid, oid] for oid in oids]


def test_a_frame_at_the_end_of_the_block_is_not_read_beyond_its_last_byte() -> None:
    data = np.frombuffer(begin() + insert("12345678", oid=A), np.uint8).copy()  # no commit after it
    assert ids(decode_block(data, 0, None, SHAPES)[0]) == [12_345_678]


def test_columns_of_nulls_and_empty_texts() -> None:
    shape = relation(columns=[("a", 25, -1), ("b", 23, -1)], key=())
    rows = only(transaction(shape, insert("", None), insert(None, "1"), insert(None, None))).rows()
    assert rows.column("a").to_pylist() == ["", None, None]
    assert rows.column("b").to_pylist() == [None, 1, None]
    assert rows.column("a").null_count == 2
    rows.validate(full=True)


def test_the_widest_table_decodes() -> None:
    shape = relation(columns=[(f"c{n}", 23, -1) for n in range(1600)], key=())
    rows = only(transaction(shape, insert(*map(str, range(1600))))).rows()
    assert [rows.column(n)[0].as_py() for n in range(1600)] == list(range(1600))


def test_origin_and_type_messages_are_skipped() -> None:
    origin = xlog(b"O" + bytes(8) + b"elsewhere\0")
    kind = xlog(b"Y" + (4242).to_bytes(4, "big") + b"public\0mood\0")
    data = begin() + origin + kind + insert("1", oid=A) + commit()
    assert ids(only(data, SHAPES)) == [1]


def test_types_of_the_metadata_columns() -> None:
    schema = only(transaction(insert("1", oid=A)), SHAPES).rows().schema
    assert schema.field("_commit_ts").type == pa.timestamp("us", tz="UTC")
    assert schema.names == [
        "id", "_op", "_commit_lsn", "_ordinal", "_xid", "_commit_ts", "_log_offset", "_unchanged", "_special",
    ]  # fmt: skip


def test_whole_old_rows_of_updates_are_typed() -> None:
    full = relation(A, "a", [("id", 23, -1), ("price", 1700, ((12 << 16) | 2) + 4)], identity="f")
    data = transaction(
        insert("1", "1.00", oid=A),
        update("1", UNCHANGED, oid=A, old=("1", "NaN")),
        update("2", "2.00", oid=A, key=("1", None)),
    )
    changes = only(data, [full])
    [row] = changes.old_rows().to_pylist()
    assert (row["id"], row["price"], dict(row["_special"])) == (1, None, {"price": "NaN"})
    assert row["_log_offset"] == changes.log_offset[1]
    assert only(transaction(insert("1", "1.00", oid=A)), [full]).old_rows() is None


def test_one_column_of_an_image_is_that_of_the_whole_image() -> None:
    shape = relation(A, "a", [("id", 23, -1), ("note", 25, -1)], key=("id",), identity="f")
    sent = (
        insert("1", "a", oid=A),
        update("1", UNCHANGED, oid=A, old=("1", "a")),
        delete("1", "a", oid=A, mark=b"O"),
        truncate(A),
    )
    for rows in (sent, sent[:1]):
        changes = only(transaction(shape, *rows))
        for image in ("key", "before", "after"):
            whole = changes.images().column(image)
            for name in ("id", "note"):
                found = changes.image_column(image, name)
                if image == "key" and name not in changes.relation.key:
                    assert found is None
                    continue
                assert found.equals(whole.flatten()[whole.type.get_field_index(name)])
        assert changes.image_column("after", "other") is None


EDGE = 256  # slots of the table of groups, for blocks of up to 64 tables


@pytest.mark.parametrize("times", [EDGE - 2, EDGE - 1, EDGE, 100 * EDGE])
def test_a_table_may_be_described_any_number_of_times_in_one_block(times: int) -> None:
    """The server sends the Relation message again after TRUNCATE, ANALYZE and migrations."""
    again = [relation(A, "a", ONE) + insert(str(n), oid=A) for n in range(times)]
    [a] = decode(b"".join(transaction(frames, lsn=100 * n) for n, frames in enumerate(again)))
    assert ids(a) == list(range(times))


@pytest.mark.parametrize("times", [EDGE - 1, EDGE, 20 * EDGE])
def test_facts_may_come_any_number_of_times_in_one_block(times: int) -> None:
    """Facts invalidate all groups, those of each table of the block."""
    again = [facts(B) + insert(str(n), oid=A) + insert(str(n), oid=B) for n in range(times)]
    a, b = decode(transaction(*again), SHAPES)
    assert ids(a) == ids(b) == list(range(times))


def test_very_many_versions_of_tables_in_one_block_are_kept_apart() -> None:
    times = 4 * EDGE
    shapes = [relation(A, "a", [("id", 23, -1), (f"c{n}", 23, -1)]) for n in range(times)]
    found = decode(transaction(*(shape + insert("1", str(n), oid=A) for n, shape in enumerate(shapes))))
    assert [changes.relation.columns[1].name for changes in found] == [f"c{n}" for n in range(times)]
    assert [changes.rows().column(1).to_pylist() for changes in found] == [[n] for n in range(times)]


@pytest.mark.parametrize("tables", [63, 64, 65, pytest.param(6400, marks=pytest.mark.slow)])
def test_a_block_may_touch_any_number_of_tables_each_described_again(tables: int) -> None:
    """65 and more are not listed: the decoder then counts by rows."""
    shapes = [relation(oid, f"t{oid}", ONE) for oid in range(1, tables + 1)]
    once = b"".join(shape + insert("1", oid=oid) for oid, shape in enumerate(shapes, 1))
    rows = snapshot(*(frames.snapshot_frame(oid, oid, 1, b"0\n") for oid in range(1, tables + 1)))
    found = decode(rows + transaction(once, once, once, message("p", b"x"), lsn=2000), shapes)
    assert len(found) == 2 * tables + 1
    assert sum(changes.count for changes in found) == 4 * tables + 1


@pytest.mark.slow
def test_one_truncate_may_name_any_number_of_tables() -> None:
    oids = range(1, 6401)
    found = decode(transaction(truncate(*oids)), [relation(oid, f"t{oid}", ONE) for oid in oids])
    assert [changes.relation.oid for changes in found] == list(oids)


@pytest.mark.parametrize("times", [2621, 2622])
def test_a_wide_table_may_be_truncated_any_number_of_times(times: int) -> None:
    """A row of a TRUNCATE has as many cells as the table has columns, but no bytes for them."""
    wide = relation(A, "a", [(f"c{n}", 23, -1) for n in range(1600)], key=())
    found = decode(transaction(wide, *(truncate(A) for _ in range(times))))
    assert sum(changes.count for changes in found) == times
    assert [number for changes in found for number in changes.ordinal.tolist()] == list(range(times))
    assert found[-1].rows().num_rows == found[-1].count
