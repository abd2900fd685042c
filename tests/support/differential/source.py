"""The rows of the source as PostgreSQL's texts, all tables in one snapshot."""

from __future__ import annotations

from collections.abc import Iterable

import psycopg

from tests.support.differential.history import Row
from tests.support.differential.tables import Table, quoted

_SETTINGS = (
    "-c DateStyle=ISO -c IntervalStyle=postgres -c TimeZone=UTC -c extra_float_digits=3 -c bytea_output=hex"
)


def rows_of(dsn: str, tables: Iterable[Table]) -> dict[int, list[Row]]:
    """Return each table's rows."""
    found = {}
    with psycopg.connect(dsn, options=_SETTINGS) as connection:
        connection.execute("set transaction isolation level repeatable read, read only")
        for table in tables:
            names = ", ".join(map(quoted, table.names))
            # By libpq itself: no driver converts the values.
            result = connection.pgconn.exec_(f"select {names} from {table.sql}".encode())
            found[table.oid] = [
                {
                    name: None if (text := result.get_value(at, column)) is None else text.decode()
                    for column, name in enumerate(table.names)
                }
                for at in range(result.ntuples)
            ]
    return found
