"""Set-ups that can't work, on real servers: each has its own message, and its repair works.

The SQL in a finding's repair is run unchanged, by a superuser; the problem is then gone.
"""

from __future__ import annotations

import itertools
import re
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import yaml

from tailrace.config import load
from tailrace.errors import Kind
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.sources.findings import Finding, Severity
from tailrace.sources.postgres.connection.quoting import quote_identifier
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tailrace_servers.install import find_install
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import Running
from tests.support.postgres import SETTINGS, require_since
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("what the server says of itself")

PASSWORD = "s3cret'p@ss:w/rd"
STATEMENT = re.compile(r"""(?:ALTER|CREATE|GRANT|SELECT pg_|ROLLBACK PREPARED)(?:"[^"]*"|'[^']*'|[^;"'])*;""")

_numbers = itertools.count(1)


@dataclass
class Place:
    """A database, a role and a pipeline file that work until a test breaks them."""

    server: EmbeddedPostgres
    directory: Path
    database: str
    role: str
    source: dict[str, Any] = field(default_factory=dict)
    sinks: list[dict[str, Any]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # connections that stay open during the test

    @property
    def db(self) -> str:
        return quote_identifier(self.database)

    @property
    def cdc(self) -> str:
        return quote_identifier(self.role)

    @property
    def slot(self) -> str:
        return "tailrace_shop"

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.server.execute(statement, dbname=self.database)

    def file(self) -> Path:
        source = {
            "host": "127.0.0.1", "port": self.server.port, "user": self.role, "dbname": self.database,
            "password": "${env:BROKEN_PASSWORD}", "tables": ["public.*"], "connect_timeout": 10,
            "slot": f"slot_{self.database.encode().hex()[:40]}", **self.source,
        }  # fmt: skip
        file = self.directory / "shop.yaml"
        content = {
            "name": "shop",
            "source": {name: value for name, value in source.items() if value is not None},
            "log": {"path": "log"},
            "sinks": self.sinks,
        }
        file.write_text(yaml.safe_dump(content))
        return file

    def findings(self) -> list[Finding]:
        return preflight(self.file())

    @property
    def section(self) -> Any:
        """The validated section of the source."""
        return load(self.file()).source

    def slot_name(self) -> str:
        slot: str = self.section.slot
        return slot

    def capture(self, **expect: Any) -> None:
        """Begin a log: take the snapshot and stop."""
        config = load(self.file())
        running = Running(CaptureTask(self.section, config.log.path, config.log, name="shop"))
        running.wait_for("streaming")
        running.stop()


@pytest.fixture(scope="module")
def server(postgres_version: int) -> Iterator[EmbeddedPostgres]:
    settings = {**SETTINGS, "max_prepared_transactions": "4"}
    install = find_install(postgres_version)
    with EmbeddedPostgres(install, settings=settings, durable=False, password=PASSWORD) as running:
        yield running


@pytest.fixture
def place(server: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("BROKEN_PASSWORD", PASSWORD)
    number = next(_numbers)
    place = Place(server, tmp_path, f'{number} sh"op; --\n', f"{number} c'd\"c;\\")
    password = PASSWORD.replace("'", "''")
    server.execute(f"create role {place.cdc} login replication password '{password}'")
    server.execute(f"create database {place.db} owner {place.cdc}")
    place.run("create table orders(id int primary key)", f"alter table orders owner to {place.cdc}")
    place.run(f"grant usage on schema public to {place.cdc}")
    yield place
    for connection in place.held:
        connection.finish()

    def slots_dropped() -> bool:
        server.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where not active"
        )
        return not server.query("select 1 from pg_replication_slots")

    server.execute(f"alter database {place.db} allow_connections true")
    wait_until(slots_dropped, 60)
    server.execute("alter system reset all")
    server.execute("select pg_reload_conf()")
    server.execute(f"drop database {place.db} with (force)")


@dataclass(frozen=True)
class Broken:
    """How to break a working set-up, and what the only finding about it is."""

    name: str
    kind: Kind
    says: str  # part of the message
    how: Callable[[Place], None]
    repairs: bool = True  # whether the repair's SQL resolves it
    severity: Severity = Severity.ERROR
    since: int = 0  # the version of PostgreSQL that introduced what is broken


def sql(*statements: str) -> Callable[[Place], None]:
    def run(place: Place) -> None:
        names = {"cdc": place.cdc, "db": place.db, "slot": place.slot_name()}
        place.run(*(statement.format_map(names) for statement in statements))

    return run


def begun(*statements: str) -> Callable[[Place], None]:
    def run(place: Place) -> None:
        place.capture()
        sql(*statements)(place)

    return run


def given(**source: Any) -> Callable[[Place], None]:
    return lambda place: place.source.update(source)


def refused_by_hba(place: Place) -> None:
    path = place.server.data / "pg_hba.conf"
    name = place.role.replace('"', '""')
    path.write_text(f'host all "{name}" 127.0.0.1/32 reject\n' + path.read_text())
    place.server.reload()

    def refused() -> bool:
        try:
            psycopg.connect(place.section.conninfo()).close()
        except psycopg.OperationalError:
            return True
        return False

    wait_until(refused)


def mirror(place: Place) -> None:
    place.run("create table keyless(a int)", f"alter table keyless owner to {place.cdc}")
    place.run("alter table keyless replica identity full")
    place.sinks.append({"type": "delta", "mode": "mirror", "path": "lake"})


def lost(place: Place) -> None:
    place.capture()
    place.run("alter system set max_slot_wal_keep_size = '1MB'", "select pg_reload_conf()")
    place.run("create table others(a int)")

    def is_lost() -> bool:
        place.run(
            "insert into others select generate_series(1, 20000)", "select pg_switch_wal()", "checkpoint"
        )
        return bool(place.server.query("select 1 from pg_replication_slots where wal_status = 'lost'"))

    wait_until(is_lost, 60)


def moved(place: Place) -> None:
    """The log belongs to another database."""
    place.capture()
    place.server.execute("create database elsewhere")
    place.source["dbname"] = "elsewhere"


def schema_out_of_reach(place: Place) -> None:
    place.source["tables"] = ["s;.*"]
    place.run('create schema "s;"', 'create table "s;".t(a int primary key)')
    place.run(f'alter table "s;".t owner to {place.cdc}')


def slot_of_another_database(place: Place) -> None:
    place.capture()
    name = place.slot_name()
    place.run(f"select pg_drop_replication_slot('{name}')")
    place.server.execute(f"select pg_create_logical_replication_slot('{name}', 'pgoutput')")


def in_use(place: Place) -> None:
    """Another client reads from the slot of the log."""
    place.capture()
    conninfo = place.section.conninfo(replication="database")
    connection = psycopg.pq.PGconn.connect(conninfo.encode())
    publication = place.section.publication
    connection.exec_(
        f"START_REPLICATION SLOT {place.slot_name()} LOGICAL 0/0 "
        f"(proto_version '1', publication_names '{publication}')".encode()
    )
    place.held.append(connection)


class _Pooler(socketserver.BaseRequestHandler):
    """Answers as PgBouncer before 1.23, which refuses what it does not know in a startup message."""

    def handle(self) -> None:
        length, code = struct.unpack("!ii", self.request.recv(8))
        while code in (80877103, 80877104):  # SSLRequest, GSSENCRequest
            self.request.sendall(b"N")
            length, code = struct.unpack("!ii", self.request.recv(8))
        self.request.recv(length - 8)
        fields = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"
        self.request.sendall(b"E" + struct.pack("!i", 4 + len(fields)) + fields)


def behind_a_pooler(place: Place) -> None:
    pooler = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Pooler)
    threading.Thread(target=pooler.serve_forever, daemon=True).start()
    place.source["port"] = pooler.server_address[1]
    place.held.append(SimpleNamespace(finish=lambda: (pooler.shutdown(), pooler.server_close())))


def prepared(place: Place) -> None:
    place.run("begin; insert into orders values (1); prepare transaction 'o''ld'")


P, M, A = Kind.SOURCE_PRIVILEGE_MISSING, Kind.SOURCE_MISCONFIGURED, Kind.SOURCE_AUTH_FAILED
WARNING = Severity.WARNING
BROKEN = [
    Broken("may not replicate", P, "may not replicate", sql("alter role {cdc} noreplication")),
    Broken("may not log in", A, "not permitted to log in", sql("alter role {cdc} nologin")),
    Broken("role limited", Kind.SOURCE_UNREACHABLE, "too many connections for role",
           sql("alter role {cdc} connection limit 0")),
    Broken("database closed", M, "not currently accepting",
           lambda place: place.server.execute(f"alter database {place.db} allow_connections false")),
    Broken("no such database", M, "does not exist", given(dbname="nowhere"), repairs=False),
    Broken("no such role", A, "password authentication failed", given(user="nobody's"), repairs=False),
    Broken("wrong password", A, "password authentication failed", sql("alter role {cdc} password 'other'"),
           repairs=False),
    Broken("no password", A, "no password supplied", given(password=None), repairs=False),
    Broken("refused by pg_hba.conf", A, "pg_hba.conf rejects", refused_by_hba, repairs=False),
    Broken("server without TLS", A, "does not support SSL", given(sslmode="require"), repairs=False),
    Broken("plain text as fall-back", Kind.CONFIG_INVALID, "it falls back to plain text",
           given(host="db.example", sslmode="prefer"), repairs=False),
    Broken("nobody listens", Kind.SOURCE_UNREACHABLE, "refused", given(port=1), repairs=False),
    Broken("behind a pooler", M, "unsupported startup parameter", behind_a_pooler, repairs=False),
    Broken("a way to authenticate that is not accepted", A, "authentication method requirement",
           given(require_auth="md5"), repairs=False),
    Broken("a table that is not there", Kind.TABLE_MISSING, "no table", given(tables=["public.none"]),
           repairs=False),
    Broken("schema out of reach", P, "may not use the schema",
           schema_out_of_reach),
    Broken("table unreadable", P, "may not read the table",
           sql("alter table orders owner to postgres", "create publication tailrace_shop for table orders")),
    Broken("row security", P, "row security",
           sql("alter table orders enable row level security",
               "alter table orders force row level security")),
    Broken("database owned by another", P, "may not create the publication",
           sql("alter database {db} owner to postgres", "revoke create on database {db} from {cdc}")),
    Broken("table owned by another", P, "does not own the table",
           sql("alter table orders owner to postgres", "grant select on orders to {cdc}")),
    Broken("role whose transactions are read only", M, "default_transaction_read_only is on",
           sql("alter role {cdc} set default_transaction_read_only = on")),
    Broken("table not published", Kind.PUBLICATION_MISMATCH, "does not have this table",
           sql("create table b(id int primary key)", "alter table b owner to {cdc}",
               "create publication tailrace_shop for table orders")),
    Broken("a table that came later", Kind.PUBLICATION_MISMATCH, "this table: it is not captured",
           begun("create table b(id int primary key)", "alter table b owner to {cdc}"), severity=WARNING),
    Broken("updates not published", Kind.PUBLICATION_MISMATCH, "leaves out update",
           sql("create publication tailrace_shop for table orders with (publish = 'insert, delete')"),
           severity=WARNING),
    Broken("a row filter by more than the key", Kind.PUBLICATION_MISMATCH, "the row filter of the table",
           sql("alter table orders add v int",
               "create publication tailrace_shop for table orders where (v > 1 and id > 0)"), since=15),
    Broken("a column list without the key", Kind.PUBLICATION_MISMATCH, "does not send 'id', which",
           sql("alter table orders add v int", "create publication tailrace_shop for table orders (v)"),
           since=15),
    Broken("a generated column of whole rows", Kind.PUBLICATION_MISMATCH, "does not send 'twice', which",
           sql("alter table orders add twice int generated always as (id * 2) stored",
               "alter table orders replica identity full",
               "create publication tailrace_shop for table orders"), since=18),
    Broken("a column list of whole rows", Kind.PUBLICATION_MISMATCH, "whatever the list has",
           sql("alter table orders replica identity full",
               "create publication tailrace_shop for table orders (id)"), since=15),
    Broken("a mask without a salt", Kind.CONFIG_INVALID, "hash needs a salt",
           given(masks=[{"columns": ["public.orders.id"], "method": "hash"}]), repairs=False),
    Broken("a mask whose salt is nowhere", Kind.SECRET_MISSING, "NO_SALT",
           given(masks=[{"columns": ["public.orders.id"], "method": "hash", "salt": "${env:NO_SALT}"}]),
           repairs=False),
    Broken("a chosen key that the table has not", Kind.CONFIG_INVALID, "that the table lacks: 'no'",
           given(message_keys={"public.orders": ["no"]}), repairs=False),
    Broken("no replica identity", M, "no replica identity",
           sql("create table keyless(a int)", "alter table keyless owner to {cdc}"), severity=WARNING),
    Broken("mirror without a key", Kind.SINK_KEY_MISSING, "no key to mirror it by", mirror, repairs=False),
    Broken("slot of somebody else", Kind.SLOT_FOREIGN, "its owner is unknown",
           sql("select pg_create_logical_replication_slot('{slot}', 'pgoutput')")),
    Broken("slot of another database", Kind.SLOT_FOREIGN, "belongs to the database 'postgres'",
           slot_of_another_database, repairs=False),
    Broken("slot dropped", Kind.SLOT_MISSING, "does not exist",
           begun("select pg_drop_replication_slot('{slot}')"), repairs=False),
    Broken("slot made anew", Kind.SLOT_AHEAD_OF_LOG, "is already at",
           begun("select pg_drop_replication_slot('{slot}')", "insert into orders values (1)",
                 "select pg_create_logical_replication_slot('{slot}', 'pgoutput')"), repairs=False),
    Broken("slot given up", Kind.SLOT_INVALIDATED, "wal_removed", lost, repairs=False),
    Broken("slot in use", Kind.SLOT_IN_USE, "active for the server process", in_use),
    Broken("log of another database", Kind.SOURCE_CHANGED, "the log was made from database", moved,
           repairs=False),
    Broken("publication dropped", Kind.PUBLICATION_MISSING, "no longer exists",
           begun("drop publication tailrace_shop"), repairs=False),
    Broken("prepared transaction", Kind.TRANSACTION_OPEN, "prepared transaction \"o'ld\"", prepared,
           severity=WARNING),
    Broken("little WAL may be kept", Kind.SLOT_AT_RISK, "max_slot_wal_keep_size is 8 MiB",
           sql("alter system set max_slot_wal_keep_size = '8MB'", "select pg_reload_conf()"),
           severity=WARNING),
    Broken("slots time out", Kind.SLOT_AT_RISK, "idle_replication_slot_timeout",
           sql("alter system set idle_replication_slot_timeout = '10min'", "select pg_reload_conf()"),
           severity=WARNING, since=18),
]  # fmt: skip


def seen(place: Place, broken: Broken) -> list[Finding]:
    return [each for each in place.findings() if each.kind is broken.kind and broken.says in each.message]


@pytest.mark.follows(
    "publication_mismatch",
    "slot_at_risk",
    "slot_foreign",
    "slot_in_use",
    "source_auth_failed",
    "source_misconfigured",
    "source_privilege_missing",
    "source_unreachable",
    "transaction_open",
)
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_each_broken_set_up_has_its_own_message_and_repair(place: Place, broken: Broken) -> None:
    require_since(broken.since, broken.says, place.server.version)
    assert place.findings() == []
    broken.how(place)
    found = wait_until(lambda: seen(place, broken), 60)
    assert {finding.severity for finding in found} == {broken.severity}
    for finding in found:
        assert finding.repair
        assert PASSWORD not in finding.message + finding.repair
    if broken.repairs:
        for finding in found:
            statements = STATEMENT.findall(finding.repair)
            assert statements, finding.repair
            # Not in the database itself: it may be closed.
            at = "postgres" if statements[0].startswith("ALTER DATABASE") else place.database
            place.server.execute(statements[0], dbname=at)
            for statement in statements[1:]:
                if statement.startswith("SELECT pg_reload_conf"):
                    place.run(statement)
        wait_until(lambda: not seen(place, broken), 60)


def test_every_broken_set_up_has_a_different_message() -> None:
    assert len({broken.says + str(broken.kind) for broken in BROKEN}) >= len(BROKEN) - 1 >= 30


def test_an_open_transaction_is_reported_with_its_process(place: Place) -> None:
    opened, done = threading.Event(), threading.Event()

    def hold() -> None:
        with psycopg.connect(place.section.conninfo(application_name="re\nport")) as connection:
            connection.execute("insert into orders values (7)")
            opened.set()
            done.wait(60)
            connection.rollback()

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        assert opened.wait(60)
        (finding,) = [each for each in place.findings() if each.kind is Kind.TRANSACTION_OPEN]
    finally:
        done.set()
        holding.join()
    assert re.search(r"process \d+ \(user .*, database .*idle in transaction", finding.message)
    assert "\n" not in finding.message


def test_repairs_that_need_a_restart_say_so_and_work(
    make_server: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    server = make_server(wal_level="replica", max_replication_slots="0", max_wal_senders="0")
    server.execute("create table t (id int primary key)")
    place = Place(server, tmp_path, "postgres", "postgres", {"password": None})
    found = place.findings()
    assert len(found) == 3
    for finding in found:
        assert "restart" in finding.repair
        # This server's own settings are in a file that is read after the one of ALTER SYSTEM.
        for statement in STATEMENT.findall(finding.repair):
            server.execute(statement)
    server.restart()
    assert place.findings() == []
    place.source["slot_failover"] = True
    refused = [finding.message for finding in place.findings()]
    assert ["17" in message for message in refused] == [True] * (server.version < 17)
