"""The number of a change in its transaction and table, whatever becomes of the other changes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tailrace.converters.debezium import JsonConverter
from tailrace.engine.processing.stage import Stage
from tailrace.protocol import frames
from tailrace.ranges.batches import batches_of
from tailrace.ranges.changes import DecodedBatch
from tailrace.records.group import Group
from tailrace.records.orders import TableOrders
from tailrace.transforms.factory import build
from tests.support.decode.wire import ORDERS, SOURCE, decode, insert, relation, snapshot, transaction, update

ITEMS = 77
WIDER = [("id", 23, -1), ("note", 25, -1), ("more", 25, -1)]
FRAMES = transaction(
    relation(columns=WIDER[:2]), relation(ITEMS, "items", [("id", 23, -1)]),
    insert("1", "odd"), insert("2", "even"), insert("9", oid=ITEMS), update("1", "still odd"),
    relation(columns=WIDER), insert("4", "even", None), insert("5", "odd", None), insert("8", oid=ITEMS),
) + transaction(insert("6", "even", None), insert("7", "odd", None), lsn=2000, xid=8)  # fmt: skip
NUMBERS = {"first": 1, "2": 2, "9": 1, "second": 3, "4": 4, "5": 5, "8": 2, "6": 1, "7": 2}

EVEN = {"even": {"type": "expression", "where": "after.id % 2 = 0"}}
STEPS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "split": [{"type": "set_headers", "headers": {"even": "'1'"}, "predicate": "even"}],
    "filtered": [{"type": "drop", "predicate": "even"}],
    "made columns": [{"type": "mask", "fields": ["note"], "method": "truncate", "length": 9}],
}


def in_halves(group: Group) -> list[Group]:
    """As two threads share a group, or as executors get it, pickled."""
    half = len(group) // 2
    parts = group.slice(0, half), group.slice(half, len(group))
    return [pickle.loads(pickle.dumps(part)) for part in parts]  # noqa: S301 - its own


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("cut", [in_halves, lambda group: [group]])
def test_events_of_a_batch_have_their_numbers_however_the_changes_are_split(
    steps: str, cut: Callable[[Group], list[Group]]
) -> None:
    decoded = DecodedBatch(decode(FRAMES), len(FRAMES), None)
    [batch] = batches_of({}, "log", decoded, 100, SOURCE)
    converter = JsonConverter(provide_transaction_metadata=True)
    stage = Stage(build(STEPS[steps], EVEN).apply, converter.convert, finds_keys=False)
    parts = [part for group in batch.groups for part in cut(group)]
    found, updated = {}, {"odd": "first", "still odd": "second"}
    for one in stage(parts):
        assert one.converted is not None
        for value in one.converted.values.to_pylist():
            event = json.loads(value)
            row = event["after"]
            name = updated[row["note"]] if row["id"] == 1 else str(row["id"])
            found[name] = event["transaction"]["data_collection_order"]
    gone = {"2", "8", "4", "6"} if steps == "filtered" else set()
    assert found == {name: number for name, number in NUMBERS.items() if name not in gone}


def test_numbers_of_a_transaction_continue_and_snapshot_rows_have_none() -> None:
    [changes] = decode(transaction(relation(), *[insert(str(n), "x", "1") for n in range(6)]))
    orders = TableOrders()
    parts = [orders.of(changes.part(first, first + 2)) for first in (0, 2, 4)]
    assert np.concatenate([part for part in parts if part is not None]).tolist() == [1, 2, 3, 4, 5, 6]
    assert orders.of(changes.part(0, 0)) is None
    [read] = decode(snapshot(relation(), frames.snapshot_frame(ORDERS, 0, 1, b"1\tx\t1\n")))
    assert orders.of(read) is None
