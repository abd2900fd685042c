"""Groups for the tests of transformations: changes as the decoder returns them, and plain columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.records.group import Group
from tailrace.transforms.factory import build
from tests.support.decode.wire import (
    ORDERS_COLUMNS,
    UNCHANGED,
    begin,
    commit,
    decode,
    delete,
    insert,
    message,
    relation,
    update,
)  # fmt: skip

COMMIT_US = 1_700_000_000_123_456

#: A table's changes of every kind: a value that was not sent, one that its type can't hold, a
#: changed key, and a delete with only its key.
ORDERS = (
    insert("1", "first", "5.00"),
    insert("2", "second", "NaN"),
    update("1", UNCHANGED, "7.50"),
    update("3", "moved", "9.00", key=("2", None, None)),
    delete("1", None, None),
)


def orders(
    *changes: bytes,
    columns: Iterable[tuple[str, int, int]] = ORDERS_COLUMNS,
    key: Iterable[str] = ("id",),
    table: str = "orders",
    identity: str = "d",
) -> Group:
    """Return changes of a table, each at the position after the one before."""
    shape = relation(table=table, columns=columns, key=key, identity=identity)
    opened = begin(1000, COMMIT_US - 946_684_800_000_000, 7)
    [found] = decode(opened + shape + b"".join(changes or ORDERS) + commit(1000))
    return Group.of_changes(f"public.{table}", np.arange(len(found)), found)


def messages(*contents: bytes) -> Group:
    data = begin(1000, 0, 7) + b"".join(message("audit", content) for content in contents) + commit(1000)
    [found] = decode(data)
    return Group.of_changes("messages", np.arange(len(found)), found)


def plain(rows: Sequence[Mapping[str, Any] | None], topic: str = "events", **columns: pa.Array) -> Group:
    """Return records with these values that are no changes."""
    batch = pa.RecordBatch.from_pydict({"value": pa.array(rows), **columns})
    return Group.of_columns(topic, np.arange(len(rows)), batch)


def applied(group: Group, *transformations: Any, **predicates: Any) -> list[Group]:
    return build(transformations, predicates).apply(group)


def only(groups: Sequence[Group]) -> Group:
    [group] = groups
    return group


def places(groups: Iterable[Group]) -> list[int]:
    return sorted(int(place) for group in groups for place in group.index)


def topics(groups: Iterable[Group]) -> dict[int, str]:
    """Return each record's topic by its position."""
    return {int(place): group.topic for group in groups for place in group.index}


def rows(groups: Iterable[Group], *names: str) -> dict[int, dict[str, Any]]:
    """Return each record's columns by its position."""
    return {
        int(place): row
        for group in groups
        for place, row in zip(
            group.index,
            group.columns.select(list(names) or group.columns.schema.names).to_pylist(),
            strict=True,
        )
    }
