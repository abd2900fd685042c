"""The zoo as one table, with a column for each type and each array of it, captured."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from psycopg import sql

from tests.support.capture.captured import capturing
from tests.support.postgres import Database
from tests.support.zoo.expected import Selected, select
from tests.support.zoo.keeping import STREAMED, as_captured, populate

#: Maximum number of values of a type, with NULL.
ROWS = 21


@dataclass(frozen=True)
class Wide:
    """A log that has each row from the snapshot and from the stream, then an update of the former."""

    log: Path
    snapshot_end: int  # log offset
    selected: Selected
    database: Database


def capture(pg: Database, log: Path) -> Wide:
    """Capture `wide`: every row, every row again with another id, then updates of the first ones with the
    values in reverse order.
    """
    types = populate(pg)
    columns = [sql.Identifier(name) for name in types]
    every = sql.SQL(", ").join(columns)
    described = [sql.SQL("{} {}").format(sql.Identifier(n), sql.SQL(kind)) for n, kind in types.items()]
    values = [sql.SQL("(select v from {} t where t.id = ids.id)").format(column) for column in columns]
    pg_run = functools.partial(_run, pg, every=every, rows=sql.Literal(ROWS - 1))
    pg_run("create table wide (id int primary key, {described})", described=sql.SQL(", ").join(described))
    pg_run(
        "insert into wide select ids.id, {values} from generate_series(0, {rows}) ids(id)",
        values=sql.SQL(", ").join(values),
    )
    with capturing(pg.dsn, log, tables=("public.wide",)) as running:
        running.wait_for("streaming", 120)
        middle = running.task.progress().durable.offset
        pg_run(f"insert into wide select id + {STREAMED}, {{every}} from wide")
        pg_run(
            "update wide set ({every}) = "
            "(select {every} from wide other where other.id = {rows} - wide.id) "
            f"where id < {STREAMED}"
        )
        running.catch_up(pg.query, 120)
    with as_captured(pg) as connection:
        return Wide(log, middle, select(connection, "wide", tuple(types)), pg)


def _run(pg: Database, statement: str, **parts: sql.Composable) -> None:
    with pg.connect() as connection:
        connection.execute(sql.SQL(statement).format(**parts))
