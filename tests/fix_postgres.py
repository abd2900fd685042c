"""Real PostgreSQL servers: one per version and test session, a fresh database per test.

`pg` is a database on the default version, `each_pg` runs the test on every version, `own_pg` is
a server of the test's own, to be killed and restarted. Servers start when they are first asked
for. A version that is not on this machine fails its tests under CI and is named elsewhere.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from fix_wait import wait_until
from tailrace.embedded.install import find_install, has_install
from tailrace.embedded.postgres import EmbeddedPostgres

VERSIONS = (15, 16, 18)
DEFAULT_VERSION = 18

#: Small, and quick to notice a client that is gone.
SETTINGS = {"shared_buffers": "32MB", "max_wal_size": "512MB", "wal_sender_timeout": "20s"}

_names = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Database:
    """A database of the test's own on a server that others use too."""

    server: EmbeddedPostgres
    name: str

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    @property
    def port(self) -> int:
        return self.server.port

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        return self.server.connect(self.name, **options)

    def execute(self, statement: str, parameters: Any = None) -> None:
        self.server.execute(statement, parameters, dbname=self.name)

    def query(self, statement: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        return self.server.query(statement, parameters, dbname=self.name)

    def drop(self) -> None:
        """Drop the database with its slots; whoever is connected to it is thrown out."""
        server = self.server
        server.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots "
            "where database = %s and active",
            [self.name],
        )

        def slots_dropped() -> bool:
            server.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots "
                "where database = %s and not active",
                [self.name],
            )
            left = server.query("select 1 from pg_replication_slots where database = %s", [self.name])
            return not left

        wait_until(slots_dropped, 10, f"the slots of {self.name} to go")
        server.execute(f'drop database if exists "{self.name}" with (force)')


class Servers:
    """The session's servers, started when they are first asked for."""

    def __init__(self) -> None:
        self._running: dict[int, EmbeddedPostgres] = {}

    def get(self, version: int) -> EmbeddedPostgres:
        if version not in self._running:
            if not has_install(version):
                _report_missing(version)
            self._running[version] = EmbeddedPostgres(find_install(version), settings=SETTINGS, durable=False)
        return self._running[version].start()  # again, if a test left it stopped

    def close(self) -> None:
        for server in self._running.values():
            server.close()


def _report_missing(version: int) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"PostgreSQL {version} is not installed, and CI tests every version", pytrace=False)
    pytest.skip(f"PostgreSQL {version} is not installed")


def pytest_report_header() -> str:
    here = [str(version) for version in VERSIONS if has_install(version)]
    missing = [str(version) for version in VERSIONS if not has_install(version)]
    return f"PostgreSQL: {', '.join(here) or 'none'}" + (
        f"; NOT INSTALLED, hence not tested: {', '.join(missing)}" if missing else ""
    )


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()


def _fresh_database(server: EmbeddedPostgres) -> Iterator[Database]:
    database = Database(server, f"test_{next(_names)}")
    server.create_database(database.name)
    yield database
    server.start()  # the test may have stopped it
    database.drop()


@pytest.fixture
def pg(servers: Servers) -> Iterator[Database]:
    """A fresh database on the default version."""
    yield from _fresh_database(servers.get(DEFAULT_VERSION))


@pytest.fixture(params=VERSIONS, ids=lambda version: f"pg{version}")
def each_pg(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Database]:
    """A fresh database, on each version in turn."""
    yield from _fresh_database(servers.get(request.param))


@pytest.fixture
def own_pg() -> Iterator[EmbeddedPostgres]:
    """A running server that no other test knows of."""
    with EmbeddedPostgres(find_install(DEFAULT_VERSION), settings=SETTINGS, durable=False) as server:
        yield server
