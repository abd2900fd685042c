"""Batches, groups and records over changes of the log, and over values of other sources."""

from __future__ import annotations

import datetime as dt
import pickle
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.decode.changes import TableChanges
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch
from tailrace.records.fingerprints import fingerprint_of, fingerprints
from tailrace.records.group import Group
from tailrace.records.making import SourceRecord
from tests.support.decode.wire import (
    ORDERS,
    UNCHANGED,
    decode,
    delete,
    insert,
    message,
    relation,
    transaction,
    truncate,
    update,
)  # fmt: skip

ITEMS = 77
FRAMES = transaction(
    relation(),
    relation(ITEMS, "items", [("order_id", 20, -1), ("n", 23, -1)], ["order_id", "n"]),
    insert("1", "first", "9.50"),
    insert("1", "1", oid=ITEMS),
    update("1", UNCHANGED, "10.00"),
    update("2", "moved", "10.00", key=["1", None, None]),
    message("note", b"hello"),
    delete("2", None, None),
    delete("1", "1", oid=ITEMS),
    truncate(ORDERS, ITEMS),
)  # fmt: skip


def decoded() -> Batch:
    """One transaction as a batch: positions are the changes' ordinals."""
    groups = []
    for changes in decode(FRAMES):
        topic = changes.relation.qualified_name if changes.relation else "messages"
        groups.append(Group.of_changes(topic, changes.ordinal.copy(), changes))
    polled = sum(len(group) for group in groups)
    return Batch({"slot": "s"}, tuple(groups), polled, [{"at": n + 1} for n in range(polled)])


def test_records_of_several_tables_have_the_order_of_the_source() -> None:
    batch = decoded()
    assert [(r.place, r.op, r.topic) for r in batch] == [
        (0, "c", "public.orders"),
        (1, "c", "public.items"),
        (2, "u", "public.orders"),
        (3, "u", "public.orders"),
        (4, "m", "messages"),
        (5, "d", "public.orders"),
        (6, "d", "public.items"),
        (7, "t", "public.orders"),
        (8, "t", "public.items"),
    ]
    assert len(batch) == batch.polled == 9
    assert batch.end_offset == {"at": 9}
    assert batch.places.tolist() == list(range(9))
    assert [r.place for r in batch[2:5]] == [2, 3, 4]
    assert batch[-1].place == 8
    with pytest.raises(IndexError):
        batch[9]


def test_a_record_has_the_rows_before_and_after_and_its_source() -> None:
    created, _, kept, moved, note, deleted, _, truncated, _ = decoded()
    assert created.key == {"id": 1}
    assert created.before is None
    assert created.after == {"id": 1, "note": "first", "price": Decimal("9.50")}
    assert created.source["table"] == "orders"
    assert created.source["xid"] == 7
    assert isinstance(created.source["commit_ts"], dt.datetime)
    assert (kept.after, kept.unchanged) == ({"id": 1, "note": None, "price": Decimal("10.00")}, ("note",))
    assert (moved.before, moved.key) == ({"id": 1, "note": None, "price": None}, {"id": 2})
    assert note.after == {"prefix": "note", "content": b"hello"}
    assert (deleted.key, deleted.after) == ({"id": 2}, None)
    assert (truncated.key, truncated.before, truncated.after) == (None, None, None)
    assert created.headers == {}
    assert set(created.value) == {"before", "after", "source", "op"}
    assert "first" not in repr(created)


def test_selecting_slicing_and_routing_decode_nothing() -> None:
    batch = decoded()
    orders = batch.groups[0] if batch.groups[0].topic == "public.orders" else batch.groups[1]
    chosen = orders.take(np.array([1, 2])).with_topic("elsewhere").slice(1, 2)
    assert chosen.wire is not None
    assert "columns" not in orders.__dict__
    assert chosen.keys.to_pylist() == [{"id": 2}]
    assert "columns" not in chosen.__dict__
    [record] = batch.with_groups([chosen])
    assert (record.place, record.topic, record.op, record.key) == (3, "elsewhere", "u", {"id": 2})
    assert chosen.columns.equals(orders.columns.slice(2, 1))


def test_headers_are_kept_beside_undecoded_changes_and_other_columns_replace_them() -> None:
    orders = next(group for group in decoded().groups if group.topic == "public.orders")
    headers = pa.array([{"from": "test", "n": n if n % 2 else None} for n in range(len(orders))])
    with_headers = orders.with_headers(headers)
    assert with_headers.wire is not None
    taken = with_headers.take(np.array([1, 2]))
    records = Batch({}, (taken,), 9, [{}] * 9)
    assert [r.headers for r in records] == [{"from": "test", "n": 1}, {"from": "test"}]
    other = taken.with_column("op", pa.array(["x", "y"]))
    assert other.wire is None
    assert [r.op for r in Batch({}, (other,), 9, [{}] * 9)] == ["x", "y"]
    assert other.column("headers").equals(taken.column("headers"))
    plain = Group.of_columns("t", np.arange(1), pa.record_batch({"value": pa.array([5])}))
    assert not plain.is_change
    assert [r.value for r in Batch({}, (plain,), 1, [{}])] == [5]
    with pytest.raises(ValueError, match="2 rows for 1 places"):
        Group.of_columns("t", np.arange(1), taken.columns)


def test_values_are_the_same_record_by_record_and_in_runs() -> None:
    count = 5000
    columns = pa.record_batch({"key": pa.array([{"id": n} for n in range(count)])})
    group = Group.of_columns("t", np.arange(count), columns)
    assert [group.value_at("key", n)["id"] for n in (4999, 0, 4998, 17, 1, 4999)] == [
        4999,
        0,
        4998,
        17,
        1,
        4999,
    ]
    assert [r.key["id"] for r in Batch({}, (group,), count, range(count))] == list(range(count))  # type: ignore[arg-type]


def test_only_what_is_read_of_records_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = decoded()
    whole = {
        name: [getattr(record, name) for record in batch]
        for name in ("op", "key", "before", "after", "source", "unchanged")
        if [group.columns for group in batch.groups]
    }
    read: list[str] = []
    image = TableChanges.image

    def watched(changes: TableChanges, name: str) -> Any:
        read.append(name)
        return image(changes, name)

    monkeypatch.setattr(TableChanges, "image", watched)
    for name, values in whole.items():
        batch = decoded()
        records = list(batch)
        assert not read
        assert [getattr(record, name) for record in records] == values
        assert read == [name] * len(batch.groups)
        assert not any("columns" in group.__dict__ for group in batch.groups)
        read.clear()


def test_values_dropped_from_the_cache_are_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.records.group._RUNS_MAX", 2)
    count = 5000
    columns = pa.record_batch({"key": pa.array(range(count)), "op": pa.array(["c"] * count)})
    group = Group.of_columns("t", np.arange(count), columns)
    batch = Batch({}, (group,), count, range(count))  # type: ignore[arg-type]
    for _ in range(2):
        assert [(r.key, r.op) for r in batch] == [(n, "c") for n in range(count)]


def test_a_batch_without_records_still_has_an_offset() -> None:
    batch = Batch({}, (), 0, [], {"at": 5})
    assert (len(batch), list(batch), batch.end_offset, batch.places.tolist()) == (0, [], {"at": 5}, [])
    assert Batch({}, (), 0, []).end_offset is None


def test_a_batch_keeps_its_number_through_transformations_and_pickling() -> None:
    batch = Batch.of_records([SourceRecord(topic="t", offset={"n": 1}, value=1)])
    assert batch.with_groups([]).number == batch.number
    back = pickle.loads(pickle.dumps(batch))  # noqa: S301 - its own
    assert (back.number, back[0].value, back.offsets[0]) == (batch.number, 1, {"n": 1})
    assert Batch.of_records([]).number != batch.number


def made(**values: Any) -> SourceRecord:
    return SourceRecord(topic="t", offset={}, **values)


def test_values_of_other_sources_become_a_batch() -> None:
    when = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    batch = Batch.of_records(
        [
            SourceRecord(topic="a", offset={"n": 1}, key={"id": 1}, value={"name": "x", "at": when}),
            SourceRecord(topic="b", offset={"n": 2}, key="k", value=b"raw", headers={"h": 1}),
            SourceRecord(topic="a", offset={"n": 3}, key={"id": 2}, value={"name": None, "more": [1, 2]}),
            SourceRecord(topic="a", offset={"n": 4}, key={"id": 3}),
            SourceRecord(topic="c", offset={"n": 5}, op="c", key={"id": 1}, after={"id": 1}),
            SourceRecord(
                topic="c", offset={"n": 6}, op="d", key={"id": 1}, before={"id": 1}, ends_transaction=False
            ),
        ],
        {"server": "x"},
    )
    assert len(batch.groups) == 3
    assert [(r.topic, r.key, r.headers) for r in batch] == [
        ("a", {"id": 1}, {}),
        ("b", "k", {"h": 1}),
        ("a", {"id": 2}, {}),
        ("a", {"id": 3}, {}),
        ("c", {"id": 1}, {}),
        ("c", {"id": 1}, {}),
    ]
    assert [r.value for r in batch[:4]] == [
        {"name": "x", "at": when, "more": None},
        b"raw",
        {"name": None, "at": None, "more": [1, 2]},
        None,
    ]
    assert [(r.op, r.before, r.after) for r in batch[4:]] == [("c", None, {"id": 1}), ("d", {"id": 1}, None)]
    assert batch.end_offset == {"n": 6}
    assert batch.transaction_ends is not None
    assert batch.transaction_ends.tolist() == [True] * 5 + [False]
    only_deletes = Batch.of_records([made(op="d", key=1, before={"id": 1})])
    assert only_deletes[0].after is None


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([made(value=1), made(value="secret")], "`value` is int first, and str in record 1"),
        (
            [made(value={"a": 1}), made(), made(value={"a": "secret"})],
            "`value.a` is int first, and str in record 2",
        ),
        (
            [made(key={"k": {"deep": 1}}), made(key={"k": {"deep": [1]}})],
            "`key.k.deep` is int first, and list",
        ),
        ([made(value=1 << 70)], "no Arrow type holds all values of `value`, which are of type int"),
        (
            [made(key={"id": uuid.UUID(int=1)})],
            "no Arrow type holds all values of `key.id`, which are of type UUID",
        ),
        ([made(value=object())], "no Arrow type holds all values of `value`, which are of type object"),
    ],
)
def test_incompatible_values_are_reported_but_not_shown(records: list[SourceRecord], words: str) -> None:
    with pytest.raises(TailraceError) as raised:
        Batch.of_records(records)
    assert raised.value.kind is Kind.RECORD_INVALID
    assert words in raised.value.message
    assert "secret" not in str(raised.value)
    assert raised.value.context == {"topic": "t"}


def test_equal_values_have_equal_fingerprints_at_any_offset() -> None:
    when = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    columns: list[pa.Array] = [
        pa.array([1, 2, None, 2, 1]),
        pa.array(["a", "bc", None, "bc", "a"]),
        pa.array([b"a", b"", None, b"", b"a"]),
        pa.array([when, None, when.replace(year=2000), None, when]),
        pa.array([Decimal("1.50"), Decimal(2), None, Decimal(2), Decimal("1.50")]),
        pa.array([[1], [2, 3], None, [2, 3], [1]]),
        pa.array([{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, None, {"a": 1, "b": "y"}, {"a": 1, "b": "x"}]),
        pa.array([True, False, None, False, True]),
    ]
    for values in columns:
        prints = fingerprints(values)
        assert (prints[0], prints[1]) == (prints[4], prints[3])
        assert len(set(prints.tolist())) == 3, values.type
        assert fingerprints(values.slice(2)).tolist() == prints[2:].tolist()
    assert (
        fingerprints(pa.array([7], pa.int16())).tolist() == fingerprints(pa.array([7], pa.int64())).tolist()
    )
    assert fingerprint_of("bc") == fingerprints(columns[1])[1]
    assert len(set(fingerprints(pa.array(range(100_000))).tolist())) == 100_000
    pairs = pa.array([{"a": "x", "b": ""}, {"a": "", "b": "x"}])
    assert len(set(fingerprints(pairs).tolist())) == 2
    assert fingerprints(pa.nulls(0)).tolist() == []


def test_a_pickled_group_has_only_its_own_bytes() -> None:
    [many] = decode(transaction(relation(), *(insert(str(n), "x" * 1000, "1.00") for n in range(100))))
    whole = Group.of_changes("public.orders", np.arange(100), many)
    columns = Group.of_columns("public.orders", np.arange(100), whole.columns)
    headers = columns.with_headers(pa.array([{"n": n} for n in range(100)]))
    rows = np.array([3, 40, 41, 99])
    for group in (*decoded().groups, whole.slice(20, 24), whole.take(rows), columns.slice(7, 9), headers):
        there = pickle.loads(pickle.dumps(group))  # noqa: S301 - made here
        assert (there.wire is None) == (group.wire is None)
        assert there.columns == group.columns
        assert (there.topic, there.relation, there.index.tolist()) == (
            group.topic, group.relation, group.index.tolist(),
        )  # fmt: skip
    for part in (whole.take(rows), whole.slice(20, 24), columns.slice(20, 24)):
        assert len(pickle.dumps(part)) < 12_000
