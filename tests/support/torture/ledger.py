"""A workload whose every transaction can be checked from outside.

What each table shows:

    account   transfers; the sum of all balances never changes between transactions
    counter   `n` of a key rises by exactly 1: shows a loss, a repeat or a swap at once
    item      inserts, updates, deletes, changes of the key, a TOASTed column that most
              updates leave alone; `uid` stays with the row when its key changes
    document  as `item`, but with REPLICA IDENTITY FULL: old rows are sent whole
    scratch   bulk inserts, and a TRUNCATE now and then
    marker    one row for each transaction: its writer, its number, how many changes it made,
              with this row. A writer's numbers have no gap, so a lost transaction shows;
              the count shows an incomplete one.

Rolled-back transactions and savepoints are mixed in; they must leave no trace. Everything
is drawn from one seed. Several writers work at once, and a lost connection (the server was
killed) is a normal event: the writer looks in `marker` whether its commit took place.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import errors as pg_errors

ACCOUNTS = 40
COUNTERS = 25
OPENING_BALANCE = 1_000
LEDGER_SUM = ACCOUNTS * OPENING_BALANCE

#: Columns of each table in order; the first `KEYS[table]` of them are its primary key.
TABLES: dict[str, tuple[str, ...]] = {
    "account": ("id", "balance"),
    "counter": ("key", "n"),
    "item": ("id", "uid", "writer", "price", "body", "note"),
    "document": ("id", "uid", "writer", "price", "body", "note"),
    "scratch": ("id", "writer", "v"),
    "marker": ("writer", "seq", "changes"),
}
KEYS: dict[str, int] = {"account": 1, "counter": 1, "item": 1, "document": 1, "scratch": 1, "marker": 2}

_SCHEMA = f"""
create table account (id int primary key, balance bigint not null);
create table counter (key int primary key, n bigint not null);
create sequence uids;
create table item (
    id bigint primary key, uid bigint not null, writer int not null,
    price numeric(12, 2) not null, body text not null, note text);
create table document (like item including all);
alter table item alter column body set storage external;
alter table document alter column body set storage external;
alter table document replica identity full;
create table scratch (id bigserial primary key, writer int not null, v text not null);
create table marker (writer int, seq bigint, changes bigint not null, primary key (writer, seq));
insert into account select g, {OPENING_BALANCE} from generate_series(1, {ACCOUNTS}) g;
insert into counter select g, 0 from generate_series(1, {COUNTERS}) g;
"""


def create(dsn: str) -> None:
    """Create the tables and their opening rows in an empty database."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_SCHEMA)


def source_rows(dsn: str) -> dict[str, dict[tuple[Any, ...], dict[str, Any]]]:
    """Return every table's rows by primary key, in one snapshot."""
    state: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    with psycopg.connect(dsn) as connection:
        connection.execute("set transaction isolation level repeatable read, read only")
        for table, columns in TABLES.items():
            rows = connection.execute(f"select {', '.join(columns)} from {table}").fetchall()
            state[table] = {tuple(row[: KEYS[table]]): dict(zip(columns, row, strict=True)) for row in rows}
    return state


class RollbackWantedError(Exception):
    """Raised inside a transaction to roll it back; part of the workload."""


class Writer:
    """One connection's stream of transactions, drawn from `seed`. Not thread-safe.

    :param fault_timeout_s: how long the server may be away before the writer fails.
    """

    def __init__(self, dsn: str, number: int, seed: int, *, fault_timeout_s: float = 60) -> None:
        self.number = number
        self.committed = 0
        self._dsn = dsn
        self._random = random.Random(f"{seed}/{number}")
        self._fault_timeout_s = fault_timeout_s
        self._connection: psycopg.Connection[Any] | None = None
        self._sequence = 0

    def run_one(self) -> None:
        """Commit or roll back one transaction; reconnect first if the server went away."""
        connection = self._connected()
        try:
            with connection.transaction():
                self._transaction(connection)
        except (RollbackWantedError, pg_errors.DeadlockDetected, pg_errors.UniqueViolation):
            return
        except psycopg.OperationalError:
            # Whether the commit took place is unknown: `_connected` asks the marker table.
            self.close()
            return
        self._sequence += 1
        self.committed += 1

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> psycopg.Connection[Any]:
        deadline = time.monotonic() + self._fault_timeout_s
        while self._connection is None:
            try:
                # Deadlocks are part of the workload; waiting a second for each would take too long.
                connection = psycopg.connect(
                    self._dsn, autocommit=True, connect_timeout=5, options="-c deadlock_timeout=20ms"
                )
                row = connection.execute(
                    "select coalesce(max(seq) + 1, 0) from marker where writer = %s", (self.number,)
                ).fetchone()
                assert row is not None
                self._sequence, self._connection = row[0], connection
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        return self._connection

    def _transaction(self, connection: psycopg.Connection[Any]) -> None:
        shape = self._random.choices(("small", "bulk", "large", "truncate", "rollback"), (86, 5, 1, 2, 6))[0]
        changes = 0
        for step in self._steps(shape):
            changes += step(connection)
        if self._random.random() < 0.2:
            self._undone_savepoint(connection)
        connection.execute(
            "insert into marker values (%s, %s, %s)", (self.number, self._sequence, changes + 1)
        )
        if shape == "rollback":
            raise RollbackWantedError

    def _steps(self, shape: str) -> list[Callable[[psycopg.Connection[Any]], int]]:
        if shape == "large":
            return [self._transfer, lambda c: self._fill_scratch(c, 1_500), self._count]
        if shape == "bulk":
            return [self._transfer, lambda c: self._fill_scratch(c, self._random.randint(20, 100))]
        if shape == "truncate":
            return [self._transfer, self._empty_scratch]
        rows = [self._transfer, self._count, self._insert, self._update, self._rekey, self._delete]
        return self._random.choices(rows, (4, 4, 3, 3, 1, 1), k=self._random.randint(1, 6))

    def _undone_savepoint(self, connection: psycopg.Connection[Any]) -> None:
        try:
            with connection.transaction():
                self._transfer(connection)
                self._insert(connection)
                raise RollbackWantedError
        except RollbackWantedError:
            pass

    def _transfer(self, connection: psycopg.Connection[Any]) -> int:
        source, target = self._random.sample(range(1, ACCOUNTS + 1), 2)
        amount = self._random.randint(1, 50)
        moves = sorted([(source, -amount), (target, amount)])
        for account, delta in moves:
            connection.execute("update account set balance = balance + %s where id = %s", (delta, account))
        return len(moves)

    def _count(self, connection: psycopg.Connection[Any]) -> int:
        keys = sorted(self._random.sample(range(1, COUNTERS + 1), self._random.randint(1, 3)))
        for key in keys:
            connection.execute("update counter set n = n + 1 where key = %s", (key,))
        return len(keys)

    def _insert(self, connection: psycopg.Connection[Any]) -> int:
        body = self._random.choice(("", "tab\tnewline\nback\\slash", "€ü漢字\U0001f980", "x" * 6_000))
        return connection.execute(
            f"insert into {self._shelf()} select 10 * u + %s, u, %s, %s, %s, null"
            " from (select nextval('uids') as u) as fresh",
            (self.number % 10, self.number, self._random.randint(0, 10**8) / 100, body),
        ).rowcount

    def _update(self, connection: psycopg.Connection[Any]) -> int:
        column, value = self._random.choice(
            (("note", "changed"), ("note", None), ("price", 7), ("body", "y" * 5_000), ("body", "short"))
        )
        shelf = self._shelf()
        return connection.execute(
            f"update {shelf} set {column} = %s where id in {self._some_of(shelf, 3)}", (value,)
        ).rowcount

    def _rekey(self, connection: psycopg.Connection[Any]) -> int:
        # The new keys are negative and unique, as `uid` is: a row is moved there or back.
        shelf = self._shelf()
        return connection.execute(
            f"update {shelf} set id = -id where id in {self._some_of(shelf, 2)}"
        ).rowcount

    def _delete(self, connection: psycopg.Connection[Any]) -> int:
        shelf = self._shelf()
        return connection.execute(f"delete from {shelf} where id in {self._some_of(shelf, 2)}").rowcount

    def _fill_scratch(self, connection: psycopg.Connection[Any], rows: int) -> int:
        return connection.execute(
            "insert into scratch (writer, v) select %s, repeat(md5(g::text), 3)"
            " from generate_series(1, %s) g",
            (self.number, rows),
        ).rowcount

    def _empty_scratch(self, connection: psycopg.Connection[Any]) -> int:
        connection.execute("truncate scratch")
        return 1

    def _shelf(self) -> str:
        return self._random.choice(("item", "document"))

    def _some_of(self, shelf: str, most: int) -> str:
        # Each writer changes only its own rows: no deadlocks, and cheap plans.
        start = self._random.randint(0, 40)
        return (
            f"(select id from {shelf} where writer = {self.number}"
            f" order by uid desc offset {start} limit {most})"
        )


class Workload:
    """Writers at work on threads of their own, from `start` to `stop`.

    :param pause_s: how long each writer rests between two transactions.
    """

    def __init__(self, dsn: str, seed: int, *, writers: int = 2, pause_s: float = 0.002) -> None:
        self._writers = [Writer(dsn, number, seed) for number in range(writers)]
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._enough_at = math.inf
        self._threads: list[threading.Thread] = []
        self._failures: list[Exception] = []

    @property
    def committed(self) -> int:
        """How many transactions were committed so far, over all writers."""
        return sum(writer.committed for writer in self._writers)

    def burst(self, transactions: int) -> None:
        """Run `transactions` in this thread, the writers taking turns."""
        for turn in range(transactions):
            self._writers[turn % len(self._writers)].run_one()

    def start(self, transactions: int | None = None) -> None:
        """Start the writers; they rest after `transactions` in all.

        None: they work until `stop`. A limit keeps a round's size independent of the machine's speed.
        """
        self._stop.clear()
        self._enough_at = math.inf if transactions is None else self.committed + transactions
        self._threads = [
            threading.Thread(target=self._run, args=(writer,), name=f"writer-{writer.number}")
            for writer in self._writers
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop after the transactions under way.

        :raises Exception: the error that ended a writer.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=90)
        for writer in self._writers:
            writer.close()
        if self._failures:
            raise self._failures[0]

    def _run(self, writer: Writer) -> None:
        try:
            while not self._stop.is_set():
                if self.committed < self._enough_at:
                    writer.run_one()
                self._stop.wait(self._pause_s)
        except Exception as error:  # noqa: BLE001 (raised again by stop)
            self._failures.append(error)
