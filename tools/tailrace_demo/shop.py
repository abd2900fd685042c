"""The demo's source: a small shop whose books can be checked.

Each sale, refund and shipment is one transaction. Money only moves between accounts, so the sum
of all balances never changes, and each account counts its movements in `version`: both show
whether a change was lost or duplicated, or a transaction delivered partially.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from decimal import Decimal
from types import TracebackType
from typing import Any, Self

import psycopg

from tailrace.model import parse_lsn

#: Columns of each table in order; the first one is its primary key.
TABLES: dict[str, tuple[str, ...]] = {
    "account": ("id", "owner", "balance", "version"),
    "orders": ("id", "customer", "item", "quantity", "total", "state", "changed_at"),
    "transfer": ("id", "from_account", "to_account", "amount", "booked_at"),
}
CUSTOMERS = 200
SHOP_ACCOUNT = 1
OPENING_BALANCE = Decimal("1000.00")
LEDGER_SUM = OPENING_BALANCE * (CUSTOMERS + 1)

_PRICES = {"teapot": "19.90", "kettle": "34.50", "sieve": "4.20", "jasmine tea": "8.75", "大吉嶺": "12.00"}

_SCHEMA = f"""
create table account (
    id int primary key, owner text not null, balance numeric(12, 2) not null, version bigint not null);
create table orders (
    id bigserial primary key, customer int not null, item text not null, quantity int not null,
    total numeric(10, 2) not null, state text not null, changed_at timestamptz not null default now());
create table transfer (
    id bigserial primary key, from_account int not null, to_account int not null,
    amount numeric(10, 2) not null, booked_at timestamptz not null default now());
insert into account select g, case g when {SHOP_ACCOUNT} then 'the shop' else 'customer ' || g end,
    {OPENING_BALANCE}, 0 from generate_series(1, {CUSTOMERS + 1}) g;
"""


class Shop:
    """Threads that write to a database within the context.

    :param pause_s: pause of each writer between two transactions, in seconds.
    """

    def __init__(
        self, connect: Callable[[], psycopg.Connection[Any]], *, writers: int, pause_s: float
    ) -> None:
        self._connect = connect
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._transactions = 0
        self._changes = 0
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"shop-{number}", daemon=True)
            for number in range(writers)
        ]

    @property
    def transactions(self) -> int:
        """Number of transactions that were committed so far."""
        return self._transactions

    @property
    def changes(self) -> int:
        """Number of rows that these transactions inserted, updated or deleted."""
        return self._changes

    def open(self) -> None:
        """Create the tables and the opening balances."""
        with self._connect() as connection:
            connection.execute(_SCHEMA.encode())

    def close(self) -> None:
        """Stop each writer after its current transaction.

        :raises Exception: the error with which a writer failed.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=10)
        if self._failure is not None:
            raise self._failure

    def last_sale(self) -> int:
        """Make one more sale after the writers have stopped; return an LSN directly before it.

        A sink with a change after this LSN has this sale, and with it everything before.
        """
        with self._connect() as connection:
            lsn = connection.execute("select pg_current_wal_insert_lsn()").fetchone()
            with connection.transaction():
                changes = _sell(connection, random.Random(0))  # noqa: S311
        self._transactions += 1
        self._changes += changes
        assert lsn is not None
        return parse_lsn(lsn[0])

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self, number: int) -> None:
        chance = random.Random(number)  # noqa: S311
        try:
            with self._connect() as connection:
                while not self._stop.wait(self._pause_s):
                    act = chance.choices((_sell, _ship, _refund), (6, 3, 1))[0]
                    with connection.transaction():
                        changes = act(connection, chance)
                    if changes:
                        with self._lock:
                            self._transactions += 1
                            self._changes += changes
        except Exception as error:  # noqa: BLE001 (raised again by close)
            self._failure = error


def source_rows(connection: psycopg.Connection[Any], table: str) -> list[tuple[Any, ...]]:
    """Return a table's rows, ordered by key."""
    columns = TABLES[table]
    query = f"select {', '.join(columns)} from {table} order by {columns[0]}"
    return connection.execute(query.encode()).fetchall()


def _sell(connection: psycopg.Connection[Any], chance: random.Random) -> int:
    customer = chance.randint(2, CUSTOMERS + 1)
    item, price = chance.choice(list(_PRICES.items()))
    quantity = chance.randint(1, 3)
    total = Decimal(price) * quantity
    connection.execute(
        "insert into orders (customer, item, quantity, total, state) values (%s, %s, %s, %s, 'paid')",
        (customer, item, quantity, total),
    )
    return 1 + _pay(connection, customer, SHOP_ACCOUNT, total)


def _ship(connection: psycopg.Connection[Any], chance: random.Random) -> int:
    return connection.execute(
        "update orders set state = 'shipped', changed_at = now() where id in"
        " (select id from orders where state = 'paid' order by id limit %s for update skip locked)",
        (chance.randint(1, 3),),
    ).rowcount


def _refund(connection: psycopg.Connection[Any], _: random.Random) -> int:
    order = connection.execute(
        "delete from orders where id in"
        " (select id from orders where state = 'paid' order by id desc limit 1 for update skip locked)"
        " returning customer, total"
    ).fetchone()
    return 0 if order is None else 1 + _pay(connection, SHOP_ACCOUNT, *order)


def _pay(connection: psycopg.Connection[Any], source: int, target: int, amount: Decimal) -> int:
    connection.execute(
        "insert into transfer (from_account, to_account, amount) values (%s, %s, %s)",
        (source, target, amount),
    )
    # In the order of the accounts' numbers, to avoid deadlocks.
    for account, delta in sorted([(source, -amount), (target, amount)]):
        connection.execute(
            "update account set balance = balance + %s, version = version + 1 where id = %s", (delta, account)
        )
    return 3
