"""A cast to text gives PostgreSQL's text, for every type and value, unusual ones too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tailrace.converters.debezium import JsonConverter
from tailrace.decode.changes import TableChanges
from tailrace.records.group import Group
from tailrace.records.record import Record
from tailrace.transforms.factory import build
from tests.support.decode.wire import decode, vector

TYPES = vector("types")
STREAM = {
    changes.relation.table: changes for changes in decode(bytes.fromhex(TYPES["frames"])) if changes.relation
}
JSON = JsonConverter(schemas_enable=False)
CAST = {"type": "cast", "fields": {"v": "text"}}
#: A step before the cast that makes the row decoded: it adds a column.
ADDED = {"type": "add_fields", "static": {"one": 1}}


def expected(table: str) -> list[str | None]:
    recorded = TYPES["tables"][table]
    texts = [dict(zip(recorded["columns"], row, strict=True))["v"] for row in recorded["rows"]]
    # A cast of a boolean gives another text than the value's.
    return [{"t": "true", "f": "false"}.get(text, text) for text in texts] if table == "t_bool" else texts


def cast(changes: TableChanges, steps: list[dict[str, Any]]) -> list[Any]:
    group = Group.of_changes("t", np.arange(len(changes)), changes)
    found = list(build(steps).apply(group))
    records = [Record(each, row, {}) for each in found for row in range(len(each))]
    texts = [record.after["v"] for record in records]
    # The same as columns, and as JSON.
    assert [row["v"] for each in found for row in each.column("after").to_pylist()] == texts
    values = [value for each in found for value in JSON.convert(each).values.to_pylist()]
    assert [json.loads(value)["after"]["v"] for value in values] == texts
    return texts


@pytest.mark.parametrize("table", STREAM)
@pytest.mark.parametrize("steps", [[CAST], [{**CAST, "apply_to": "row"}]], ids=["both", "row"])
def test_casts_of_values_that_the_source_sent(table: str, steps: list[dict[str, Any]]) -> None:
    assert cast(STREAM[table], steps) == expected(table)


@pytest.mark.parametrize("table", STREAM)
def test_casts_of_decoded_values(table: str) -> None:
    assert cast(STREAM[table], [ADDED, CAST]) == expected(table)


@pytest.mark.parametrize("table", STREAM)
def test_casts_in_expressions(table: str) -> None:
    steps = [{"type": "add_fields", "computed": {"v": "after.v::text"}}]
    assert cast(STREAM[table], steps) == expected(table)
