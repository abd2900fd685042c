"""The ten-column table with which benchmarks measure, and a server for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from tailrace_servers.install import find_install
from tailrace_servers.postgres import EmbeddedPostgres

CREATE = """
create table orders(
    id bigint primary key, customer int, sku text, qty int, price numeric(12, 2), paid boolean,
    placed timestamptz, note text, lat float8, tag varchar(20))
"""

INSERT = """
insert into orders
select n, n %% 97, 'sku-' || n %% 1000, n %% 7, n * 1.25, n %% 2 = 0, now(),
       'note number ' || n || ' of batch ' || n / 1000, n / 3.0, 'tag' || n %% 13
from generate_series(%(first)s::bigint, %(last)s::bigint) n
"""

ROWS_A_TRANSACTION = 1_000

PUBLICATION = "tailrace_bench"

#: Longest time for which a slot may stay in use after its reader ended, in seconds.
FREE_DEADLINE_S = 30.0


#: Settings with which PostgreSQL's sender is the limit, not the disk; the same for Tailrace and its peers.
SETTINGS = {
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "synchronous_commit": "off",
    "wal_sender_timeout": "0",  # a suspended pipeline must not be disconnected
    "autovacuum": "off",
    "shared_buffers": "512MB",
}


@contextmanager
def server() -> Iterator[EmbeddedPostgres]:
    """Start an embedded PostgreSQL in a temporary directory, with the empty table published."""
    with EmbeddedPostgres(find_install(18), settings=SETTINGS, durable=False) as postgres:
        with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
            connection.execute(CREATE)
            connection.execute(f"create publication {PUBLICATION} for table orders")
        yield postgres


def load(dsn: str, rows: int, *, first: int = 1, rows_a_transaction: int = ROWS_A_TRANSACTION) -> int:
    """Insert `rows` rows from key `first` on; return the WAL position after the last commit."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for start in range(first, first + rows, rows_a_transaction):
            last = min(start + rows_a_transaction, first + rows) - 1
            connection.execute(INSERT, {"first": start, "last": last})
        connection.execute("select pg_switch_wal()")
        return wal_end(connection)


def source(dsn: str, slot: str, snapshot: str = "never") -> dict[str, Any]:
    """Return the section `source` of a pipeline that captures the table."""
    return {
        "type": "postgresql",
        "dsn": dsn,
        "tables": ["public.orders"],
        "slot": slot,
        "publication": PUBLICATION,
        "snapshot": snapshot,
    }


def wal_end(connection: psycopg.Connection) -> int:
    """Return the server's flushed WAL position."""
    row = connection.execute("select (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint").fetchone()
    assert row is not None
    return int(row[0])


def create_slot(dsn: str, name: str) -> None:
    """Create a logical slot that sends later commits."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [name])


def wait_until_read(dsn: str, name: str, stop: threading.Event) -> None:
    """Wait until a client reads from a slot, or `stop` is set."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not _is_active(connection, name):
            if stop.wait(0.05):
                return


def drop_slot(dsn: str, name: str) -> None:
    """Drop a slot once its reader has disconnected."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        deadline = time.monotonic() + FREE_DEADLINE_S
        while time.monotonic() < deadline and _is_active(connection, name):
            time.sleep(0.01)
        connection.execute("select pg_drop_replication_slot(%s)", [name])


def _is_active(connection: psycopg.Connection, name: str) -> bool:
    found = connection.execute(
        "select 1 from pg_replication_slots where slot_name = %s and active", [name]
    ).fetchone()
    return found is not None
