"""Random transactions over two tables, with values of many types."""

from __future__ import annotations

import random

from tests.support.postgres import Database

TABLES = """
create table orders (
    id bigint primary key, number int not null, price numeric(12, 3), at timestamptz, day date, t time,
    stamp timestamp, note text, flag boolean, ratio double precision, small smallint, u uuid, doc jsonb,
    raw bytea
);
create table items (a int, b text, what text, primary key (a, b));
alter table orders alter column note set storage external;
"""
ROW = """
insert into orders values (
    {key}, {number}, {number}.125, '2024-02-29 12:30:00.25+00', '1999-12-31', '23:59:59.5',
    '2001-01-01 01:02:03', {note}, {number} % 2 = 0, 0.1 * {number}, {number} % 100,
    '6ecd8c99-4036-403d-bf84-cf8400f67836', '{{"a": [1, 2.5, null]}}', '\\x00ff')
on conflict (id) do update set number = excluded.number, price = -excluded.price
"""


class Work:
    """Random transactions over both tables."""

    def __init__(self, pg: Database, seed: int) -> None:
        self._pg, self._random, self._number = pg, random.Random(seed), 0
        pg.execute(TABLES)

    def do(self, transactions: int) -> None:
        """Commit so many transactions."""
        for _ in range(transactions):
            statements = [self._statement() for _ in range(self._random.randint(1, 6))]
            self._pg.execute("begin; " + "; ".join(statements) + "; commit")

    def _statement(self) -> str:
        self._number += 1
        key = self._random.randrange(20)
        kind = self._random.random()
        if kind < 0.5:
            note = self._random.choice(["null", "'tab\\\t; new\nline'", "repeat('long ', 2000)"])
            return ROW.format(key=key, number=self._number, note=note)
        if kind < 0.7:
            return f"delete from orders where id = {key}"
        return (
            f"insert into items values ({key}, 'b{key % 3}', 'what {self._number}') "
            "on conflict (a, b) do update set what = excluded.what"
        )
