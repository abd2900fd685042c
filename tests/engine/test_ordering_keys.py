"""Where records stand when order is kept for each key."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tailrace.engine.processing.ordering_keys import moved_of, ordering_keys_of
from tailrace.protocol import frames
from tailrace.records.fingerprints import fingerprint_of, fingerprints
from tailrace.records.group import Group
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


def test_a_changed_key_has_both_ordering_keys_and_a_truncate_all_from_wire_and_columns_alike() -> None:
    found = {changes.relation.table: changes for changes in decode(FRAMES) if changes.relation}
    orders = Group.of_changes("public.orders", found["orders"].ordinal.copy(), found["orders"])
    columns = Group.of_columns(orders.topic, orders.index, orders.columns, orders.relation)
    for group in (orders, columns):
        keys = ordering_keys_of(group, moved_of(group))
        assert keys.own[:5].tolist() == [key_of(1), key_of(1), key_of(2), key_of(-2), key_of(-2)]
        assert keys.other[:5].tolist() == [key_of(1), key_of(1), key_of(1), key_of(2), key_of(-2)]
        assert keys.in_all.tolist() == [False] * 5 + [True]
        # What was dropped moves nothing, and what is left is found by its place.
        part = ordering_keys_of(group.take(np.array([0, 3])), moved_of(group))
        assert part.other.tolist() == [key_of(1), key_of(2)]


def test_what_has_no_key_has_the_ordering_key_of_its_table() -> None:
    found = {changes.relation.table: changes for changes in decode(FRAMES) if changes.relation}
    keyless = Group.of_changes("elsewhere", found["keyless"].ordinal.copy(), found["keyless"])
    assert ordering_keys_of(keyless, moved_of(keyless)).own.tolist() == [fingerprint_of("public.keyless")]
    plain = Group.of_columns("outbox", np.arange(2), pa.record_batch({"value": pa.array([1, 2])}))
    assert moved_of(plain) is None
    assert ordering_keys_of(plain, None).own.tolist() == [fingerprint_of("outbox")] * 2
