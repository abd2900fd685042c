"""The zoo in a database, captured: each row once by the snapshot and once by the stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq, sql

from tailrace.changelog.reader import LogReader
from tailrace.decode.changes import TableChanges
from tailrace.model import OWN_FORMS, Op, ValueModes
from tailrace.ranges import plan
from tailrace.ranges.changes import decoded_batches
from tailrace.sources.postgres.connection.session import SESSION_SETTINGS
from tests.support.capture.captured import capturing
from tests.support.postgres import Database
from tests.support.zoo.animals import ANIMALS, EXTENSION_OF, EXTENSIONS, SETUP, STAND_IN, STAND_INS, Animal

_IS_ARRAY = """
select 1 from pg_type t left join pg_type b on b.oid = t.typbasetype
 where t.oid = %s::regtype and 'A' in (t.typcategory, b.typcategory)
"""

#: Added to the id of a row that came by the stream.
STREAMED = 1000


@dataclass(frozen=True)
class Zoo:
    """A log that has every row twice, and the rows as SELECT returns them."""

    log: Path
    types: dict[str, str]  # table to the type of its column `v`
    selected: dict[str, list[str | None]]  # table to the texts, by id
    database: Database

    def changes(self, modes: ValueModes = OWN_FORMS) -> dict[str, tuple[TableChanges, TableChanges]]:
        """Return the rows of each table from the snapshot and from the stream."""
        return both_ways(self.log, modes)


def both_ways(log: Path, modes: ValueModes = OWN_FORMS) -> dict[str, tuple[TableChanges, TableChanges]]:
    """Return the rows of each table of a small log from the snapshot and from the stream."""
    found: dict[str, dict[str, TableChanges]] = {}
    with LogReader.open(log, "0") as reader:
        start, end = reader.start, reader.end().offset
        splits = plan.input_splits("0", reader.blocks(start, end), start, end)
    for split in splits:
        for decoded in decoded_batches(log, split, modes=modes):
            for changes in decoded.changes:
                way = "snapshot" if changes.op[0] == ord(Op.READ) else "stream"
                ways = found.setdefault(changes.relation.table, {})
                assert way not in ways, "a table of the zoo is small"
                ways[way] = changes
    return {table: (ways["snapshot"], ways["stream"]) for table, ways in found.items()}


def populate(pg: Database) -> dict[str, str]:
    """Create the tables that this server can have; return the type of each one's column."""
    version = pg.query("show server_version_num")[0][0]
    major = int(version) // 10_000
    pg.execute(SETUP)
    available = {row[0] for row in pg.query("select name from pg_available_extensions")}
    animals = [animal for animal in ANIMALS if animal.since <= major]
    for name, delimiter in STAND_INS.items():
        if name in available:
            pg.execute(f"create extension {name} schema public")
        else:
            pg.execute(STAND_IN.format(name=name, delimiter=delimiter))
    for name, values in EXTENSIONS.items():
        extension = EXTENSION_OF.get(name, name)
        if extension in available:
            pg.execute(f"create extension {extension} schema public")
            animals.append(Animal(name, f"public.{name}", values))
    types: dict[str, str] = {}
    for animal in animals:
        with pg.connect() as connection:
            try:
                types |= _house(connection, animal)
            except psycopg.errors.FeatureNotSupported:
                assert animal.name == "xml"  # the server was built without libxml
                connection.rollback()
    return types


def _house(connection: psycopg.Connection[Any], animal: Animal) -> dict[str, str]:
    table = f"z_{animal.name}"
    connection.execute(f'create table "{table}" (id int primary key, v {animal.type})')
    for number, value in enumerate((*animal.values, None)):
        connection.execute(
            sql.SQL("insert into {} values ({}, {})").format(
                sql.Identifier(table), number, sql.Literal(value)
            )
        )
    if not animal.array:
        return {table: animal.type}
    arrays = f"{table}_array"
    connection.execute(f'create table "{arrays}" (id int primary key, v {animal.type}[])')
    # The last row, NULL, is an item as well; the server formats the arrays.
    made: tuple[str, ...] = (
        f'select 0, array_agg(v order by id) from "{table}"',
        f'select 1, array[v] from "{table}" where id = 0',
        f'select 2, array[array[v, null], array[v, v]] from "{table}" where id = 0',
        f'select 3, array_fill(v, array[2], array[5]) from "{table}" where id = 0',
        f'select 4, array[array[array[v]]] from "{table}" where id = 0',
        f"select 5, '{{}}'::{animal.type}[]",
        f"select 6, null::{animal.type}[]",
        f"select 7, array[null]::{animal.type}[]",
    )
    if connection.execute(_IS_ARRAY, [animal.type]).fetchone():
        made = (made[5], made[6])  # array[…] of arrays would make one array of them
    for statement in made:
        connection.execute(f'insert into "{arrays}" {statement}')
    return {table: animal.type, arrays: f"{animal.type}[]"}


def capture(pg: Database, log: Path) -> Zoo:
    """Create the zoo, capture it, and insert every row again while the capture streams."""
    types = populate(pg)
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming", 120)
        with pg.connect() as connection:
            for table in types:
                connection.execute(f'insert into "{table}" select id + {STREAMED}, v from "{table}"')
        running.catch_up(pg.query, 120)
    return Zoo(log, types, _selected(pg, types), pg)


def _selected(pg: Database, types: dict[str, str]) -> dict[str, list[str | None]]:
    found = {}
    with as_captured(pg) as connection:
        for table in types:
            rows = texts(connection, f'select v from public."{table}" where id < {STREAMED} order by id')
            found[table] = [value for [value] in rows]
    return found


def as_captured(pg: Database) -> psycopg.Connection[Any]:
    """Connect with the settings of capture's own connections."""
    options = " ".join(f"-c {name}={value}" for name, value in SESSION_SETTINGS.items())
    return pg.connect(options=options, client_encoding="UTF8")


def texts(connection: psycopg.Connection[Any], query: str) -> list[list[str | None]]:
    """Return the output functions' text, as COPY and the stream have it: a cast to text differs for
    "char" and char(n).
    """
    result = connection.pgconn.exec_(query.encode())
    assert result.status == pq.ExecStatus.TUPLES_OK, result.error_message
    values = [[result.get_value(row, at) for at in range(result.nfields)] for row in range(result.ntuples)]
    return [[None if value is None else value.decode() for value in row] for row in values]
