"""Every type, by snapshot and by stream, equals SELECT's result, byte for byte."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from tailrace.converters.debezium import JsonConverter
from tailrace.decode.changes import TableChanges
from tailrace.model import ValueModes
from tailrace.records.group import Group
from tests.support.decode.wire import SOURCE
from tests.support.postgres import Servers, fresh_database
from tests.support.zoo.keeping import Zoo, capture

pytestmark = pytest.mark.each_postgres("the types and how the server writes them")

MODES = {
    "none": ValueModes(),
    "precise": ValueModes("precise", "adaptive", "numeric", "bytes", "json"),
    "double": ValueModes("double", "adaptive_time_microseconds", "string", "base64", "map"),
    "string": ValueModes("string", "connect", "string", "base64-url-safe", "map", money_fraction_digits=0),
    "iso": ValueModes("string", "isostring", "numeric", "hex", "json", money_fraction_digits=3),
    "micro": ValueModes("double", "microseconds", "numeric", "bytes", "map"),
    "nano": ValueModes("precise", "nanoseconds", "string", "hex", "json"),
}


@pytest.fixture(scope="module")
def zoo(servers: Servers, postgres_version: int, tmp_path_factory: pytest.TempPathFactory) -> Any:
    databases = fresh_database(servers.get(postgres_version))
    database = next(databases)
    yield capture(database, tmp_path_factory.mktemp("zoo") / "log")
    next(databases, None)


def after(changes: TableChanges) -> list[str | None]:
    return [dict(row)["v"] for row in changes.envelope("0").column("after").to_pylist()]


def json_values(changes: TableChanges) -> list[str]:
    """Return the JSON texts of `v`, byte for byte."""
    lines = changes.json_lines("0", SOURCE).to_pylist()
    return [
        line.partition('"after":{"id":')[2].partition(',"v":')[2].rpartition('},"source":')[0]
        for line in lines
    ]


def specials(rows: pa.RecordBatch) -> list[str | None]:
    return [dict(entry)["v"] if entry else None for entry in rows.column("_special").to_pylist()]


def test_snapshot_and_stream_equal_selects_result(zoo: Zoo) -> None:
    found = zoo.changes()
    assert set(found) == set(zoo.types)
    for table, ways in found.items():
        for changes in ways:
            assert after(changes) == zoo.selected[table], table


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
def test_a_row_is_the_same_by_snapshot_and_by_stream(zoo: Zoo, modes: ValueModes) -> None:
    for table, (copied, streamed) in zoo.changes(modes).items():
        assert copied.relation == dataclasses.replace(cast(Any, streamed.relation), oid=copied.relation.oid)
        assert json_values(copied) == json_values(streamed), table
        one, other = copied.rows(), streamed.rows()
        one.validate(full=True)
        assert one.schema == other.schema
        # As bytes, where NaN equals NaN and -0 differs from 0; a null has no bytes that count.
        assert ipc(one.column("v")) == ipc(other.column("v")), table
        assert one.column("_special").equals(other.column("_special")), table
        for value, text, special in zip(one.column("v"), after(copied), specials(one), strict=True):
            assert special in {None, text}
            assert value.is_valid or text is None or special == text, table
        for line, text in zip(json_values(copied), after(copied), strict=True):
            assert (json.loads(line) is None) == (text is None)


@pytest.mark.parametrize("name", ["none", "double", "nano"])
def test_events_are_the_same_from_frames_and_from_columns(zoo: Zoo, name: str) -> None:
    modes = MODES[name]
    converter = JsonConverter(schemas_enable=True)
    for table, ways in zoo.changes(modes).items():
        for changes in ways:
            group = Group.of_changes(table, np.arange(changes.count), changes, SOURCE)
            wire = converter.convert(group)
            columns = converter.convert(group.with_columns(group.columns))
            assert wire.values.to_pylist() == columns.values.to_pylist(), table
            assert wire.keys.to_pylist() == columns.keys.to_pylist(), table
            for text in wire.values.to_pylist():
                json.loads(text)


def ipc(array: pa.Array) -> bytes:
    sink = pa.BufferOutputStream()
    copied = array.take(pa.array(range(len(array))))  # the bytes after a buffer's end are arbitrary
    batch = pa.record_batch([copied], ["v"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
