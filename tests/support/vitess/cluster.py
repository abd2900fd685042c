"""A real Vitess cluster for the session, started on first use; new tables for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tailrace_servers.vitess import EmbeddedVitess, find_vitess

_numbers = itertools.count(1)

VSCHEMA = {"sharded": True, "vindexes": {"h": {"type": "hash"}}, "tables": {}}

#: The columns that most tests need; rows with odd ids are mostly on another shard than those with even ids.
ORDERS = (
    "create table {name} (id bigint not null primary key, what varchar(64), amount decimal(10,2), "
    "counter int not null default 0, at timestamp(6) null)"
)


@pytest.fixture(scope="session")
def vitess() -> Iterator[EmbeddedVitess]:
    """A keyspace `shop` with the shards -80 and 80-. Tests that reshard or stop a server start another."""
    with EmbeddedVitess(find_vitess(), vschema=VSCHEMA) as cluster:
        yield cluster


def add_table(cluster: EmbeddedVitess, name: str, ddl: str = ORDERS) -> None:
    """Create a table with the key `id` on every shard."""
    cluster.ctl("ApplySchema", "--sql", ddl.format(name=name), cluster.keyspace)
    cluster.execute(f"alter vschema on {cluster.keyspace}.{name} add vindex h(id) using hash")


@pytest.fixture
def orders(vitess: EmbeddedVitess) -> str:
    """A table of `ORDERS` for one test."""
    name = f"orders_{next(_numbers)}"
    add_table(vitess, name)
    return name


def rows_of(cluster: EmbeddedVitess, table: str) -> dict[int, tuple[Any, ...]]:
    """Return the present rows of a table, by id."""
    return {row[0]: row for row in cluster.execute(f"select * from {table}")}
