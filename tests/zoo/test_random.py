"""Random values of random types, by snapshot and by stream, compared with SELECT.

A failure prints how to repeat the example; `pytest --hypothesis-seed=N` takes others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from psycopg import sql

from tailrace.converters.debezium import JsonConverter
from tailrace.decode.changes import TableChanges
from tailrace.model import OWN_FORMS
from tailrace.records.group import Group
from tailrace.records.record import Record
from tailrace.transforms.factory import build
from tests.support.capture.captured import capturing
from tests.support.decode.wire import SOURCE
from tests.support.postgres import Database, Servers, fresh_database
from tests.support.zoo.expected import MODES, UNHELD, Expectation, Selected, plain, select
from tests.support.zoo.keeping import STREAMED, as_captured, both_ways
from tests.support.zoo.random_types import Filled, tables

pytestmark = pytest.mark.each_postgres("how the server writes values")

_names = itertools.count(1)


@pytest.fixture(scope="module")
def database(servers: Servers, postgres_version: int) -> Iterator[Database]:
    yield from fresh_database(servers.get(postgres_version))


@settings(max_examples=12)
@given(columns=tables())
def test_any_value_equals_selects_result(
    database: Database, tmp_path_factory: pytest.TempPathFactory, columns: list[Filled]
) -> None:
    table = f"t{next(_names)}"
    names = tuple(f"c{number}" for number in range(len(columns)))
    fill(database, table, columns)
    log = tmp_path_factory.mktemp("random") / "log"
    try:
        with capturing(database.dsn, log, tables=(f"public.{table}",)) as running:
            running.wait_for("streaming", 120)
            database.execute(f"insert into {table} select id + {STREAMED}, {', '.join(names)} from {table}")
            running.catch_up(database.query, 120)
        with as_captured(database) as connection:
            selected = select(connection, table, names)
            expected = Expectation(selected, connection, OWN_FORMS)
            for changes in both_ways(log)[table]:
                compare(changes, selected, expected)
        for modes in (OWN_FORMS, MODES):
            copied, streamed = both_ways(log, modes)[table]
            assert json_values(copied) == json_values(streamed)
            for changes in (copied, streamed):
                require_same_events(changes)
    finally:
        database.execute(f"drop table {table}")
        database.execute("drop publication if exists tailrace_t")
        database.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s",
            [database.name],
        )


def fill(database: Database, table: str, columns: list[Filled]) -> None:
    described = ", ".join(f"c{number} {column.type}" for number, column in enumerate(columns))
    database.execute(f"create table {table} (id int primary key, {described})")
    with database.connect() as connection:
        for number, row in enumerate(zip(*(column.values for column in columns), strict=True)):
            values = sql.SQL(", ").join(map(sql.Literal, (number, *row)))
            connection.execute(sql.SQL("insert into {} values ({})").format(sql.Identifier(table), values))


def compare(changes: TableChanges, selected: Selected, expected: Expectation) -> None:
    rows = changes.rows()
    rows.validate(full=True)
    ids = rows.column("id").to_pylist()
    after = [dict(row) for row in changes.envelope("0").column("after").to_pylist()]
    assert [row.pop("id") for row in after] == list(map(str, ids))
    assert after == [selected.rows[row] for row in ids]
    specials = [dict(special or ()) for special in rows.column("_special").to_pylist()]
    for column in selected.columns:
        arrow = rows.schema.field(column).type
        for row, value, special in zip(ids, plain(pa.chunked_array([rows[column]])), specials, strict=True):
            wanted = expected.value(column, row, arrow)
            assert special.get(column) == (selected.rows[row][column] if wanted is UNHELD else None), row
            if wanted is not UNHELD:
                assert value == wanted, (column, row)


class Same:
    """Returns each record with a copy of its row."""

    def apply_record(self, record: Record) -> Record:
        return record.replace(after=dict(record.after or {}))


def require_same_events(changes: TableChanges) -> None:
    """Check that events are the same from frames, from columns, record by record, and flat."""
    group = Group.of_changes("t", np.arange(changes.count), changes, SOURCE)
    wire = JsonConverter().convert(group).values.to_pylist()
    assert JsonConverter().convert(group.with_columns(group.columns)).values.to_pylist() == wire
    [single] = build([Same()]).apply(group)
    assert JsonConverter().convert(single).values.to_pylist() == wire
    [flat] = build([{"type": "flatten"}]).apply(group)
    for text, value in zip(wire, JsonConverter().convert(flat).values.to_pylist(), strict=True):
        assert f'"after":{value},"source":' in text


def json_values(changes: TableChanges) -> list[str]:
    """Return the JSON of every row's values without its id, byte for byte."""
    lines = changes.json_lines("0", SOURCE).to_pylist()
    bodies = [line.partition('"after":{"id":')[2].rpartition('},"source":')[0] for line in lines]
    return [body.partition(",")[2] for body in bodies]
