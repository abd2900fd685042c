"""Random statements on one table; each returns how many changes the stream will have of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psycopg

from tests.support.differential.tables import Column, Table, quoted

#: Key columns whose numbers can be shifted or negated.
_NUMBERS = ("integer", "bigint", "numeric(8,2)")

Act = Callable[["Cursor"], int]


class Cursor:
    """A connection with short methods."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def execute(self, statement: str, parameters: Sequence[Any] | None = None) -> int:
        """Run a statement and return how many rows it touched."""
        return self.connection.execute(statement.encode(), parameters).rowcount

    def all(self, statement: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement.encode(), parameters).fetchall()

    def one(self, statement: str, parameters: Sequence[Any] | None = None) -> Any:
        return self.all(statement, parameters)[0][0]


def random_act(rng: random.Random, table: Table, tables: Sequence[Table]) -> Act:
    """Run one statement, or a few that belong together.

    :param tables: those that may be truncated; none: no TRUNCATE.
    """
    weights: dict[Callable[..., int], int] = {insert: 8, copy: 3}
    if table.key and not table.deferrable:
        weights[upsert] = 4
    if table.is_updatable:
        weights |= {update: 10, delete: 4}
        if table.key:
            weights |= {rekey: 2, swap: 2, come_back: 3}
            if table.column(table.key[0]).kind.sql in _NUMBERS and not table.partitioned:
                weights |= {shift: 2}
    if tables and rng.random() < 0.02:
        chosen = rng.sample(list(tables), min(len(tables), rng.randint(1, 3)))
        return partial(truncate, chosen if table in chosen else [table, *chosen])
    act = rng.choices(list(weights), list(weights.values()))[0]
    return partial(act, rng, table)


def insert(rng: random.Random, table: Table, cursor: Cursor) -> int:
    rows = [_row(rng, table.columns) for _ in range(rng.choice((1, 1, 2, 5)))]
    quiet = " on conflict do nothing" if table.key and not table.deferrable and rng.random() < 0.8 else ""
    return _insert(cursor, table, rows, quiet)


def upsert(rng: random.Random, table: Table, cursor: Cursor) -> int:
    chosen = _some(rng, [each for each in table.columns if each.name not in table.key])
    given = ", ".join(f"{quoted(each.name)} = excluded.{quoted(each.name)}" for each in chosen)
    key = ", ".join(map(quoted, table.key))
    return _insert(
        cursor, table, [_row(rng, table.columns) for _ in range(rng.choice((1, 2)))],
        f" on conflict ({key}) do update set {given}",
    )  # fmt: skip


def copy(rng: random.Random, table: Table, cursor: Cursor) -> int:
    small = [each for each in table.columns if not each.large]
    rows = [_row(rng, small) for _ in range(rng.choice((1, 5, 30, 200)))]
    if table.key:  # a row with an existing key would undo all of them
        key = [small.index(table.column(name)) for name in table.key]
        rows = list({tuple(row[at] for at in key): row for row in rows}.values())[:30]
        there = set(
            cursor.all(f"select {', '.join(f'{quoted(name)}::text' for name in table.key)} from {table.sql}")
        )
        rows = [row for row in rows if tuple(row[at] for at in key) not in there]
    names = ", ".join(quoted(each.name) for each in small)
    with cursor.connection.cursor() as writer:
        with writer.copy(f"copy {table.sql} ({names}) from stdin".encode()) as lines:
            for row in rows:
                lines.write_row(row)
        return writer.rowcount


def update(rng: random.Random, table: Table, cursor: Cursor) -> int:
    chosen = _some(rng, [each for each in table.columns if each.name not in table.key and each.name != "uid"])
    if not chosen:
        return 0
    given = ", ".join(f"{quoted(each.name)} = %s::{each.kind.sql}" for each in chosen)
    values = [_value(rng, each) for each in chosen]
    return cursor.execute(f"update {table.sql} set {given} where {_few(rng, table)}", values)


def delete(rng: random.Random, table: Table, cursor: Cursor) -> int:
    return cursor.execute(f"delete from {table.sql} where {_few(rng, table)}")


def rekey(rng: random.Random, table: Table, cursor: Cursor) -> int:
    """Give a row another key; in a partitioned table it may have to move."""
    column = table.column(rng.choice(table.key))
    found = cursor.all(f"select tableoid, ctid::text from {table.sql} where {_few(rng, table, 1)}")
    if not found:
        return 0
    moved = cursor.all(
        f"update {table.sql} set {quoted(column.name)} = %s::{column.kind.sql}"
        " where tableoid = %s and ctid = %s::tid returning tableoid",
        [column.kind.make(rng), *found[0]],
    )
    return len(moved) + (moved[0][0] != found[0][0] if moved else 0)


def swap(rng: random.Random, table: Table, cursor: Cursor) -> int:
    """Swap the keys of two rows, by way of a third key."""
    key = [table.column(name) for name in table.key]
    texts = ", ".join(f"{quoted(each.name)}::text" for each in key)
    rows = cursor.all(f"select {texts} from {table.sql} order by {texts} offset {rng.randint(0, 5)} limit 2")
    if len(rows) < 2 or table.partitioned:
        return 0
    between = tuple(each.kind.make(rng) for each in key)
    set_to = ", ".join(f"{quoted(each.name)} = %s::{each.kind.sql}" for each in key)
    where = " and ".join(f"{quoted(each.name)} = %s::{each.kind.sql}" for each in key)
    moves = [(between, rows[0]), (rows[0], rows[1]), (rows[1], between)]
    return sum(
        cursor.execute(f"update {table.sql} set {set_to} where {where}", [*new, *old]) for new, old in moves
    )


def shift(rng: random.Random, table: Table, cursor: Cursor) -> int:
    """Shift keys by one, or negate them: rows take keys that others have or had."""
    name = quoted(table.key[0])
    step = rng.choice((f"{name} + 1", f"{name} - 1", f"-{name}"))
    many = rng.choice((2, 5, 40))
    where = f"{name} between -{many} and {many}"
    return cursor.execute(f"update {table.sql} set {name} = {step} where {where}")


def come_back(rng: random.Random, table: Table, cursor: Cursor) -> int:
    """Delete a row and insert another under the same key."""
    texts = ", ".join(f"{quoted(name)}::text" for name in table.key)
    gone = cursor.all(f"delete from {table.sql} where {_few(rng, table, 1)} returning {texts}")
    if not gone:
        return 0
    row = _row(rng, table.columns)
    for name, text in zip(table.key, gone[0], strict=True):
        row[table.names.index(name)] = text
    return 1 + _insert(cursor, table, [row], "")


def truncate(tables: Sequence[Table], cursor: Cursor) -> int:
    cursor.execute(f"truncate {', '.join(table.sql for table in tables)}")
    return len(tables)


def _insert(cursor: Cursor, table: Table, rows: list[list[str | None]], more: str) -> int:
    names = ", ".join(map(quoted, table.names))
    row = ", ".join(f"%s::{each.kind.sql}" for each in table.columns)
    values = ", ".join([f"({row})"] * len(rows))
    statement = f"insert into {table.sql} ({names}) values {values}{more}"
    return cursor.execute(statement, [value for row in rows for value in row])


def _row(rng: random.Random, columns: Sequence[Column]) -> list[str | None]:
    return [_value(rng, column) for column in columns]


def _value(rng: random.Random, column: Column) -> str | None:
    if not column.required and rng.random() < 0.15:
        return None
    return column.kind.make(rng)


def _some(rng: random.Random, columns: list[Column]) -> list[Column]:
    return rng.sample(columns, rng.randint(1, min(3, len(columns)))) if columns else []


def _few(rng: random.Random, table: Table, most: int | None = None) -> str:
    """Return a condition that holds for a few rows, always the same ones of the same table."""
    start, limit = rng.randint(0, 30), most or rng.choice((1, 1, 2, 5))
    few = f"select tableoid, ctid from {table.sql} order by uid offset {start} limit {limit}"
    return f"(tableoid, ctid) in ({few})"
