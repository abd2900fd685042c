"""Real PostgreSQL servers: one per version and test session, a new database for each test.

`pg` is a database, `own_pg` is a server for one test, which may kill and restart it, `make_server` makes such
servers with settings. Servers start on first use. All have the newest version, unless the test is marked
`each_postgres`: behaviour that depends on the server's version is tested on each version that `--postgres`
names. `one_postgres` exempts a test from the mark of its file. A version that this machine does not have
fails its tests under CI; elsewhere they are skipped with its name.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from tailrace_servers.install import find_install, has_install
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.wait import wait_until

#: Newest first: tests that share a server of a module have the same position in this list.
ALL_VERSIONS = (18, 16, 15)
NEWEST_VERSION = ALL_VERSIONS[0]

#: Small, and quick to notice that a client is gone.
SETTINGS = {"shared_buffers": "32MB", "max_wal_size": "512MB", "wal_sender_timeout": "20s"}

_names = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Database:
    """A database for one test, on a server that other tests use too."""

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
        """Drop the database with its slots; its clients are disconnected."""
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

        wait_until(slots_dropped, 60, f"the slots of {self.name} to go")
        server.execute(f'drop database if exists "{self.name}" with (force)')


class Servers:
    """The session's servers, which start on first use."""

    def __init__(self) -> None:
        self._running: dict[int, EmbeddedPostgres] = {}
        self._fresh: dict[int, EmbeddedPostgres] = {}

    def get(self, version: int) -> EmbeddedPostgres:
        if version not in self._running:
            require_version(version)
            self._running[version] = throw_away(version)
        return self._running[version].start()  # again, if a test left it stopped

    def copy_fresh(self, server: EmbeddedPostgres) -> None:
        """Give a server its data directory: initdb takes a second, so its result is copied.

        All servers made this way have the same system identifier.
        """
        if (version := server.version) not in self._fresh:
            self._fresh[version] = throw_away(version).start()
            self._fresh[version].stop()
        # As `shutil.copytree`, which does not copy the owner.
        subprocess.run(["cp", "-a", self._fresh[version].data, server.data], check=True)

    def close(self) -> None:
        for server in (*self._running.values(), *self._fresh.values()):
            server.close()


def throw_away(version: int, **settings: str) -> EmbeddedPostgres:
    """Return a server that is not yet started and whose data may be lost."""
    return EmbeddedPostgres(
        find_install(version), settings={**SETTINGS, **settings}, durable=False, in_memory=True
    )


def require_version(version: int) -> None:
    """Skip the test if this machine lacks the version; under CI fail it."""
    if has_install(version):
        return
    if os.environ.get("CI"):
        pytest.fail(f"PostgreSQL {version} is not installed, and CI tests every version", pytrace=False)
    pytest.skip(f"PostgreSQL {version} is not installed")


def require_since(since: int, what: str, version: int) -> None:
    """Skip the test on a server that is older than `since`, the version that added `what`."""
    if version < since:
        pytest.skip(f"PostgreSQL {version} has no {what}: they came with {since}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("tailrace").addoption(
        "--postgres",
        metavar="VERSIONS",
        default=str(NEWEST_VERSION),
        help="versions of PostgreSQL for tests marked each_postgres, or all",
    )


def versions_of(config: pytest.Config) -> tuple[int, ...]:
    """Return the chosen versions, the newest first."""
    chosen = config.option.postgres
    if chosen == "all":
        return ALL_VERSIONS
    return tuple(sorted(map(int, chosen.split(",")), reverse=True))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "postgres_version" not in metafunc.fixturenames:
        return
    versions: tuple[int, ...] = (NEWEST_VERSION,)
    if _is_of_each(metafunc.definition):
        versions = versions_of(metafunc.config)
    metafunc.parametrize("postgres_version", versions, indirect=True, ids="pg{}".format, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if NEWEST_VERSION in versions_of(config):
        return
    wanted = [item for item in items if _is_of_each(item)]
    config.hook.pytest_deselected(items=[item for item in items if not _is_of_each(item)])
    items[:] = wanted


def _is_of_each(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("each_postgres")
    if marker is not None and not marker.args:
        raise pytest.UsageError(f"{item.nodeid}: each_postgres needs a reason")
    if "postgres_version" not in getattr(item, "fixturenames", ()):
        return False
    return marker is not None and item.get_closest_marker("one_postgres") is None


def pytest_report_header(config: pytest.Config) -> str:
    versions = versions_of(config)
    here = [str(version) for version in versions if has_install(version)]
    missing = [str(version) for version in versions if not has_install(version)]
    return f"PostgreSQL: {', '.join(here) or 'none'}" + (
        f"; NOT INSTALLED, hence not tested: {', '.join(missing)}" if missing else ""
    )


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()


def fresh_database(server: EmbeddedPostgres) -> Iterator[Database]:
    database = Database(server, f"test_{next(_names)}")
    server.create_database(database.name)
    yield database
    server.start()  # the test may have stopped the server
    database.drop()


@pytest.fixture(scope="module")
def postgres_version(request: pytest.FixtureRequest) -> int:
    """The version of the test's servers; this machine has it."""
    version: int = request.param
    require_version(version)
    return version


@pytest.fixture
def pg(servers: Servers, postgres_version: int) -> Iterator[Database]:
    """A new database on a server that other tests use too."""
    yield from fresh_database(servers.get(postgres_version))


@pytest.fixture
def make_server(servers: Servers, postgres_version: int) -> Iterator[Callable[..., EmbeddedPostgres]]:
    """Makes running servers for one test: `make_server(setting="value")`.

    The servers of one test have different system identifiers.
    """
    made: list[EmbeddedPostgres] = []
    with ExitStack() as stack:

        def make(**settings: str) -> EmbeddedPostgres:
            server = throw_away(postgres_version, **settings)
            if not made:
                servers.copy_fresh(server)
            made.append(server)
            return stack.enter_context(server)

        yield make


@pytest.fixture
def own_pg(make_server: Callable[..., EmbeddedPostgres]) -> EmbeddedPostgres:
    """A running server for one test."""
    return make_server()
