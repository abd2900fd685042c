"""Ordering keys of records, by which the keyed dispatcher keeps order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.engine.processing.ordering_keys import in_order, moved_of, ordering_keys_of
from tailrace.engine.processing.stage import ReadyBatch, Stage
from tailrace.protocol import frames
from tailrace.records.batch import Batch
from tailrace.records.fingerprints import fingerprint_of, fingerprints
from tailrace.records.group import Group
from tailrace.transforms.factory import build
from tests.support.decode.wire import ORDERS, decode, delete, insert, relation, transaction, truncate, update

KEYLESS = 5
FRAMES = frames.control_frame(b"F", 0, 0, {"relation": ORDERS, "primary_key": ["id"]}) + transaction(
    relation(identity="f"),
    relation(KEYLESS, "keyless", [("v", 25, -1)], []),
    insert("1", "a", "1"),
    insert("x", oid=KEYLESS),
    update("1", "b", "1", old=["1", "a", "1"]),
    update("2", "b", "1", old=["1", "b", "1"]),
    update("-2", "b", "1", old=["2", "b", "1"]),
    delete("-2", "b", "1", mark=b"O"),
    truncate(ORDERS),
)


def key_of(key: int) -> int:
    return int(fingerprints(pa.array([{"id": key}]))[0])


def test_a_changed_key_has_both_ordering_keys_and_a_truncate_has_all() -> None:
    found = {changes.relation.table: changes for changes in decode(FRAMES) if changes.relation}
    orders = Group.of_changes("public.orders", found["orders"].ordinal.copy(), found["orders"])
    columns = Group.of_columns(orders.topic, orders.index, orders.columns, orders.relation)
    for group in (orders, columns):
        keys = ordering_keys_of(group, moved_of(group))
        assert keys.own[:5].tolist() == [key_of(1), key_of(1), key_of(2), key_of(-2), key_of(-2)]
        assert keys.other[:5].tolist() == [key_of(1), key_of(1), key_of(1), key_of(2), key_of(-2)]
        assert keys.in_all.tolist() == [False] * 5 + [True]
        # A dropped record changes no other one's keys, and the rest is found by position.
        part = ordering_keys_of(group.take(np.array([0, 3])), moved_of(group))
        assert part.other.tolist() == [key_of(1), key_of(2)]


def test_a_record_without_a_key_has_the_ordering_key_of_its_table() -> None:
    found = {changes.relation.table: changes for changes in decode(FRAMES) if changes.relation}
    keyless = Group.of_changes("elsewhere", found["keyless"].ordinal.copy(), found["keyless"])
    assert ordering_keys_of(keyless, moved_of(keyless)).own.tolist() == [fingerprint_of("public.keyless")]
    plain = Group.of_columns("outbox", np.arange(2), pa.record_batch({"value": pa.array([1, 2])}))
    assert moved_of(plain) is None
    assert ordering_keys_of(plain, None).own.tolist() == [fingerprint_of("outbox")] * 2


HASH = {"type": "mask", "fields": ["id"], "method": "hash", "salt": "${env:KEYS_SALT}"}


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize(
    ("step", "waits_for_all"),
    [
        (HASH, False),
        ({**HASH, "apply_to": "key"}, True),
        ({"type": "cast", "fields": {"id": "text"}}, False),
        ({"type": "rename", "fields": {"id": "number"}}, False),
        ({"type": "rename", "fields": {"id": "number"}, "apply_to": "key"}, False),
        ({"type": "add_fields", "static": {"region": "eu"}, "apply_to": "both"}, False),
        ({"type": "add_fields", "computed": {"twice": "key.id * 2"}, "apply_to": "key"}, True),
        ({"type": "flatten"}, False),
    ],
    ids=str,
)
def test_a_changed_key_that_is_transformed_has_the_ordering_keys_of_both_records(
    step: dict[str, Any], waits_for_all: bool, converts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS_SALT", "some salt")
    for group in orders_twice():
        own, other, in_all = staged_keys(group, step, converts=converts)
        # The third and the fourth change the key of the record before each.
        assert len(set(own[1:4].tolist())) == 3
        waits = in_all[2:4].tolist()
        assert waits == [waits_for_all and not converts] * 2
        assert all(waits) or other[2:4].tolist() == own[1:3].tolist()
        assert in_all[[0, 1, 4]].tolist() == [False] * 3


def test_a_key_computed_from_the_row_has_the_ordering_keys_of_both_rows() -> None:
    for group in orders_twice():
        own, other, _ = staged_keys(group, {"type": "value_to_key", "fields": ["note"]}, converts=True)
        assert own[0] != own[1] == own[2]
        assert other[:3].tolist() == own[[0, 0, 2]].tolist()


def orders_twice() -> list[Group]:
    found = {changes.relation.table: changes for changes in decode(FRAMES) if changes.relation}
    orders = Group.of_changes("public.orders", np.arange(len(found["orders"])), found["orders"])
    return [orders, Group.of_columns(orders.topic, orders.index, orders.columns, orders.relation)]


def staged_keys(group: Group, step: dict[str, Any], *, converts: bool) -> tuple[Any, Any, Any]:
    chain = build([step], splits_updates=converts)
    staged = Stage(chain.apply, None, finds_keys=True)([group])
    ready = ReadyBatch.of(Batch({}, (group,), len(group), [{}] * len(group)), staged)
    return in_order(ready.ordering_keys, ready.batch.rows)
