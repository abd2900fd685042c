"""Capture from real servers: starting, resuming, stopping, and every way to lose a connection."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from tailrace import failpoints
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import parse_lsn
from tailrace.protocol.frames import XLOG_PAYLOAD_AT
from tailrace.sources.postgres.connection.server import start_command
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.connection.transport import NOTHING, Received, SocketTransport
from tailrace.sources.postgres.streaming import capture_task
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tailrace.sources.postgres.streaming.stream import Stream
from tailrace_servers.install import find_install, has_install
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import CREATE_ITEMS, SLOT, capturing, read_log, run_to_end
from tests.support.postgres import Database, require_since
from tests.support.proxy import Proxy
from tests.support.torture import disk
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("slots, publications and the replication protocol")

INSERT = "insert into items select n, 'note ' || n from generate_series(%s::bigint, %s::bigint) n"


def confirmed(pg: Database) -> int:
    rows = pg.query("select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [SLOT])
    return parse_lsn(rows[0][0])


def kind_of(error: object) -> Kind | None:
    return getattr(error, "kind", None)


def test_rows_and_changes_come_once_and_are_acknowledged(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute(INSERT, [1, 1000])
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute(INSERT, [1001, 1100])
        pg.execute("select pg_logical_emit_message(false, 'p', 'hello')")
        pg.execute(INSERT, [1101, 1101])
        running.catch_up(pg.query)
        position = running.task.progress().durable.position
        wait_until(lambda: confirmed(pg) >= position, 60, "the acknowledgement")
    assert confirmed(pg) == running.task.progress().durable.position
    # and again from there
    pg.execute(INSERT, [1102, 1200])
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query)
    found = read_log(tmp_path / "log")
    assert found.snapshot == list(range(1, 1001))
    assert found.inserts == list(range(1001, 1201))
    assert len(found.messages) == 1
    assert found.facts[0]["primary_key"] == ["id"]
    assert len(found.facts) == 1  # they did not change


def test_a_server_that_can_stream_uncommitted_changes_sends_us_whole_transactions(
    pg: Database, tmp_path: Path, postgres_version: int
) -> None:
    asked = start_command(PostgresSource(dsn=pg.dsn, slot=SLOT, publication=SLOT), 0, 180_000)
    assert "proto_version '1'" in asked  # streaming begins with 2
    assert "streaming" not in asked
    pg.execute(f"alter database {pg.name} set logical_decoding_work_mem = '64kB'")
    if postgres_version >= 16:
        pg.execute(f"alter database {pg.name} set debug_logical_replication_streaming = 'immediate'")
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        with pg.connect(autocommit=False) as session:
            session.execute(INSERT, [1, 2000])
            session.execute("savepoint s")
            session.execute(INSERT, [2001, 4000])
            session.execute("rollback to s")
            session.execute(INSERT, [4001, 5000])
            session.commit()
            session.execute(INSERT, [5001, 9000])
            session.rollback()
        running.catch_up(pg.query)
    assert read_log(tmp_path / "log").inserts == [*range(1, 2001), *range(4001, 5001)]


def test_snapshot_never_takes_changes_from_now_on(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute(INSERT, [1, 10])
    with capturing(pg.dsn, tmp_path / "log", snapshot="never") as running:
        running.wait_for("streaming")
        pg.execute(INSERT, [11, 20])
        running.catch_up(pg.query)
    found = read_log(tmp_path / "log")
    assert (found.snapshot, found.inserts) == ([], list(range(11, 21)))
    assert [facts["table"] for facts in found.facts] == ["items"]


def test_snapshot_only_ends_by_itself_and_leaves_no_slot(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute(INSERT, [1, 10])
    for _ in range(2):  # the second time nothing is left to do
        assert run_to_end(pg.dsn, tmp_path / "log", snapshot="only") is None
        assert read_log(tmp_path / "log").ids == list(range(1, 11))
    wait_until(lambda: not pg.query("select 1 from pg_replication_slots where slot_name = %s", [SLOT]), 60)


def encrypt(server: EmbeddedPostgres, directory: Path) -> None:
    """Give the server a self-signed certificate, and turn on TLS."""
    command = ["openssl", "req", "-new", "-x509", "-days", "2", "-nodes", "-subj", "/CN=localhost"]
    key, certificate = directory / "server.key", directory / "server.crt"
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    for path in (key, certificate):
        target = Path(server.query("show data_directory")[0][0]) / path.name
        target.write_bytes(path.read_bytes())
        owner = target.parent.stat()
        os.chown(target, owner.st_uid, owner.st_gid)
        target.chmod(0o600)
    server.execute("alter system set ssl = on")
    server.restart()


@pytest.fixture
def tls_pg(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server of a version built with TLS; the embedded ones lack it."""
    if not has_install(15):
        pytest.skip("PostgreSQL 15 is not installed")
    with EmbeddedPostgres(find_install(15), durable=False) as server:
        encrypt(server, tmp_path)
        yield server


def test_rows_and_changes_come_over_tls(tls_pg: EmbeddedPostgres, tmp_path: Path) -> None:
    own_pg = tls_pg
    own_pg.execute(CREATE_ITEMS)
    own_pg.execute(INSERT, [1, 20_000])
    dsn = own_pg.dsn()
    with capturing(dsn, tmp_path / "log", sslmode="require") as running:
        running.wait_for("streaming")
        used = own_pg.query(
            "select bool_and(s.ssl) from pg_stat_ssl s join pg_stat_replication r using (pid)"
        )
        assert used == [(True,)]
        own_pg.execute(INSERT, [20_001, 40_000])
        running.catch_up(own_pg.query)
        own_pg.execute(INSERT, [40_001, 40_001])
        own_pg.stop("fast")
        own_pg.start()
        own_pg.execute(INSERT, [40_002, 40_002])
        running.catch_up(own_pg.query)
        own_pg.execute("drop publication tailrace_t")
        own_pg.execute(INSERT, [40_003, 40_003])
        running.join()
        assert kind_of(running.error) is Kind.PUBLICATION_MISSING
        running.error = None
    found = read_log(tmp_path / "log")
    assert found.snapshot == list(range(1, 20_001))
    assert found.inserts == list(range(20_001, 40_003))


def test_acknowledgements_never_exceed_what_is_durable(
    pg: Database, tmp_path: Path, proxy: Callable[[int], Proxy]
) -> None:
    between = proxy(pg.port)
    pg.execute(CREATE_ITEMS)
    dsn = pg.dsn.replace(f":{pg.port}", f":{between.port}")
    failpoints.arm("log.before_fsync=sleep:500@3")
    try:
        with capturing(dsn, tmp_path / "log", status_interval_s=0.05) as running:
            running.wait_for("streaming")
            for k in range(20):
                pg.execute(INSERT, [k + 1, k + 1])
                acknowledged = running.task.progress().acknowledged
                assert acknowledged <= running.task.progress().durable.position
            running.catch_up(pg.query)
    finally:
        failpoints.arm("")
    statuses = between.standby_statuses()
    commits = {0, *read_log(tmp_path / "log").commits}
    assert {status.flushed for status in statuses} & commits
    assert all(s.written == s.flushed == s.applied for s in statuses)
    flushed = [status.flushed for status in statuses]
    assert flushed == sorted(flushed)
    assert flushed[-1] == running.task.progress().durable.position


@pytest.mark.one_postgres
def test_connections_cut_at_random_bytes_lose_and_repeat_nothing(
    pg: Database, tmp_path: Path, proxy: Callable[[int], Proxy]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - reproduces a failure
    rng = random.Random(seed)
    between = proxy(pg.port)
    pg.execute(CREATE_ITEMS)
    dsn = pg.dsn.replace(f":{pg.port}", f":{between.port}")
    with capturing(dsn, tmp_path / "log", segment_bytes=256 * 1024) as running:
        running.wait_for("streaming")
        last = 0
        for _ in range(12):
            between.cut_after(rng.randrange(1, 400_000))
            for _ in range(6):
                count = rng.choice([1, 10, 2000])
                pg.execute(INSERT, [last + 1, last + count])
                last += count
        between.resume()
        running.catch_up(pg.query, 60)
        assert running.task.progress().reconnects > 0
    assert read_log(tmp_path / "log").inserts == list(range(1, last + 1))


@pytest.mark.parametrize("way", ["fast", "immediate", "kill"])
def test_a_restart_of_the_server_loses_and_repeats_nothing(
    own_pg: EmbeddedPostgres, tmp_path: Path, way: Any
) -> None:
    own_pg.execute(CREATE_ITEMS)
    with capturing(own_pg.dsn(), tmp_path / "log") as running:
        running.wait_for("streaming")
        last = 0
        for _ in range(2):
            own_pg.execute(INSERT, [last + 1, last + 5000])
            last += 5000
            began = time.monotonic()
            own_pg.kill() if way == "kill" else own_pg.stop(way)
            assert time.monotonic() - began < 10  # a fast stop waits for our acknowledgement
            own_pg.start()
        last = own_pg.query("select max(id) from items")[0][0]  # the last one may be lost without fsync
        running.catch_up(own_pg.query)
    assert running.task.progress().reconnects >= 2
    assert read_log(tmp_path / "log").inserts == list(range(1, last + 1))


@pytest.mark.follows("source_shutting_down")
@pytest.mark.one_postgres
def test_an_idle_server_stops_quickly_and_its_slot_follows(own_pg: EmbeddedPostgres, tmp_path: Path) -> None:
    own_pg.execute(CREATE_ITEMS)
    own_pg.execute("create table others(id int)")
    with (
        structlog.testing.capture_logs() as said,
        capturing(own_pg.dsn(), tmp_path / "log", tables=("public.items",)) as running,
    ):
        running.wait_for("streaming")
        for _ in range(3):
            own_pg.execute("insert into others select generate_series(1, 100000)")
        wait_until(
            lambda: (
                running.task.progress().durable.position > running.task.progress().source_end - (20 << 20)
            ),
            60,
        )
        began = time.monotonic()
        own_pg.stop("fast", timeout_s=20)
        assert time.monotonic() - began < 10
        wait_until(lambda: "source_shutting_down" in str(said), 10, "the capture to notice")
        assert "it is tried again until the server is back" in str(said)
        own_pg.start()
        own_pg.execute(INSERT, [1, 5])
        running.catch_up(own_pg.query)
    assert read_log(tmp_path / "log").inserts == [1, 2, 3, 4, 5]


@pytest.mark.one_postgres
def test_a_short_sender_timeout_is_kept_while_the_disk_is_slow(
    own_pg: EmbeddedPostgres, tmp_path: Path
) -> None:
    own_pg.execute(CREATE_ITEMS)
    own_pg.execute("alter system set wal_sender_timeout = '1s'")
    own_pg.execute("select pg_reload_conf()")
    failpoints.arm("capture.before_append=sleep:4000@3")
    try:
        with capturing(own_pg.dsn(), tmp_path / "log", status_interval_s=0.2) as running:
            running.wait_for("streaming")
            own_pg.execute(INSERT, [1, 20_000])
            own_pg.execute(INSERT, [20_001, 40_000])
            running.catch_up(own_pg.query)
            assert running.task.progress().reconnects == 0
    finally:
        failpoints.arm("")
    assert read_log(tmp_path / "log").inserts == list(range(1, 40_001))


@pytest.mark.one_postgres
def test_capture_waits_while_the_disk_is_full(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        writer = running.task._log.appender._writer
        append, full = writer.append, threading.Event()
        full.set()

        def refuse(chunk, summary):
            if full.is_set():
                from tailrace.errors import TailraceError

                raise TailraceError(Kind.LOG_FULL, "append: no space left")
            append(chunk, summary)

        writer.append = refuse  # type: ignore[method-assign]
        pg.execute(INSERT, [1, 1000])
        running.wait_for("waiting_for_disk")
        pg.execute(INSERT, [1001, 2000])
        full.clear()
        running.catch_up(pg.query)
        assert running.task.progress().phase == "streaming"
        assert running.task.progress().reconnects == 0
    assert read_log(tmp_path / "log").inserts == list(range(1, 2001))


@pytest.mark.one_postgres
@pytest.mark.skipif(not disk.can_mount(), reason="mounts a small disk, which needs root")
def test_a_start_on_a_full_disk_waits_for_space(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with disk.small_disk(tmp_path / "disk", 8) as small:
        with capturing(pg.dsn, small / "log") as running:
            running.wait_for("streaming")
        ballast = disk.fill(small)
        with capturing(pg.dsn, small / "log") as running:
            wait_until(lambda: running.task.progress().reconnects > 0, 60)
            error = running.task.progress().error
            assert error is not None
            assert error.kind is Kind.LOG_FULL
            ballast.unlink()
            pg.execute(INSERT, [1, 10])
            running.catch_up(pg.query)
        assert read_log(small / "log").inserts == list(range(1, 11))


@pytest.mark.one_postgres
def test_stopping_in_a_transaction_is_quick_and_loses_nothing(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute(INSERT, [1, 300_000])
        wait_until(lambda: running.task.progress().bytes > 1_000_000, 60)
        began = time.monotonic()
        running.stop()
        assert time.monotonic() - began < 5
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query, 60)
    assert read_log(tmp_path / "log").inserts == list(range(1, 300_001))


def test_silence_ends_in_a_new_connection(
    pg: Database, tmp_path: Path, proxy: Callable[[int], Proxy]
) -> None:
    between = proxy(pg.port)
    pg.execute(CREATE_ITEMS)
    dsn = pg.dsn.replace(f":{pg.port}", f":{between.port}")
    options = {"receive_timeout_s": 1.0, "status_interval_s": 0.3, "connect_timeout": 2}
    with capturing(dsn, tmp_path / "log", **options) as running:
        running.wait_for("streaming")
        between.pause()
        wait_until(lambda: running.task.progress().reconnects > 0, 60)
        between.cut_now()
        between.resume()
        pg.execute(INSERT, [1, 10])
        running.catch_up(pg.query)
    assert read_log(tmp_path / "log").inserts == list(range(1, 11))


def test_the_timeout_for_a_silent_server_grows_until_a_transaction_comes(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server before 16 is after it answered, while it decodes a large transaction without our tables."""
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    answered: set[SocketTransport] = set()
    patience: list[float] = []
    receive, is_silent = SocketTransport.receive, True

    def silent(transport: SocketTransport, wait_s: float) -> Received:
        if is_silent and transport in answered:
            time.sleep(0.01)
            return NOTHING
        received = receive(transport, wait_s)
        if received.keepalive is not None:
            answered.add(transport)
        return received

    def stream(*args: Any, silence_s: float, **options: Any) -> Stream:
        patience.append(silence_s)
        return Stream(*args, silence_s=silence_s, **options)

    monkeypatch.setattr(SocketTransport, "receive", silent)
    monkeypatch.setattr(capture_task, "Stream", stream)
    options = {"receive_timeout_s": 0.1, "slot_watch": {"interval_s": 0}}
    with capturing(pg.dsn, tmp_path / "log", **options) as running:
        wait_until(lambda: len(patience) == 4, 60)
        is_silent = False
        pg.execute(INSERT, [1, 10])
        running.catch_up(pg.query)
        is_silent = True
        wait_until(lambda: len(patience) == 5, 60)
    assert patience == [0.1, 0.2, 0.4, 0.8, 0.1]
    assert read_log(tmp_path / "log").inserts == list(range(1, 11))


def test_a_row_that_takes_longer_than_the_timeout_keeps_its_connection(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = SocketTransport._receive_some

    def slowly(transport: SocketTransport) -> int:
        time.sleep(0.02)
        whole, have = transport._view, transport._have
        transport._view = whole[: have + 32 * 1024]
        try:
            return receive(transport)
        finally:
            transport._view = whole

    pg.execute(CREATE_ITEMS)
    options = {"receive_timeout_s": 0.4, "status_interval_s": 0.1}
    with capturing(pg.dsn, tmp_path / "log", **options) as running:
        running.wait_for("streaming")
        monkeypatch.setattr(SocketTransport, "_receive_some", slowly)
        pg.execute("insert into items values (1, repeat('x', 2000000))")
        running.catch_up(pg.query)
        assert running.task.progress().reconnects == 0
    assert read_log(tmp_path / "log").inserts == [1]


def test_a_slot_in_use_is_waited_for_and_then_reported(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        error = run_to_end(pg.dsn, tmp_path / "log")
        assert kind_of(error) is Kind.LOG_LOCKED
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / "identity.json").write_bytes((tmp_path / "log" / "identity.json").read_bytes())
        task = copy / "tasks" / "0"
        task.mkdir(parents=True)
        for name in (tmp_path / "log" / "tasks" / "0").iterdir():
            (task / name.name).write_bytes(name.read_bytes())
        error = run_to_end(pg.dsn, copy, reconnect_s_max=1.0)
        assert kind_of(error) is Kind.SLOT_IN_USE
        assert error is not None
        assert error.context["pid"]


def test_a_slot_that_we_did_not_create_is_refused(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [SLOT])
    assert kind_of(run_to_end(pg.dsn, tmp_path / "log")) is Kind.SLOT_FOREIGN


def test_a_dropped_or_recreated_slot_stops_with_its_own_error(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    pg.execute("select pg_drop_replication_slot(%s)", [SLOT])
    assert kind_of(run_to_end(pg.dsn, tmp_path / "log")) is Kind.SLOT_MISSING
    pg.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [SLOT])
    assert kind_of(run_to_end(pg.dsn, tmp_path / "log")) is Kind.SLOT_AHEAD_OF_LOG


def test_a_slot_lost_to_the_wal_limit_stops_with_its_own_error(
    own_pg: EmbeddedPostgres, tmp_path: Path
) -> None:
    own_pg.execute(CREATE_ITEMS)
    with capturing(own_pg.dsn(), tmp_path / "log") as running:
        running.wait_for("streaming")
    own_pg.execute("alter system set max_slot_wal_keep_size = '1MB'")
    own_pg.execute("select pg_reload_conf()")

    def lost() -> bool:
        own_pg.execute(
            "insert into items select n, 'x' from generate_series(1, 20000) n on conflict do nothing"
        )
        own_pg.execute("select pg_switch_wal()")
        own_pg.execute("checkpoint")
        status = own_pg.query("select wal_status from pg_replication_slots where slot_name = %s", [SLOT])
        return bool(status[0][0] == "lost")

    wait_until(lost, 60, "the slot to be lost")
    assert kind_of(run_to_end(own_pg.dsn(), tmp_path / "log")) is Kind.SLOT_INVALIDATED


def test_a_broken_session_reports_that_in_every_call(pg: Database) -> None:
    source = PostgresSource(dsn=pg.dsn)
    with closing(Session.connect(source, threading.Event())) as session:
        pg.execute("select pg_terminate_backend(%s)", [session.backend_pid])
        # libpq closes its socket when it notices; from then on it has none to wait for.
        for use in (
            lambda: session.run("select 1", "ask"),
            lambda: session.run("select 1", "ask"),
            lambda: session.copying(1000, "copy").start(b"copy (select 1) to stdout", 10),
            lambda: session.streaming(1000),
        ):
            with pytest.raises(TailraceError) as raised:
                use()
            assert raised.value.kind in {Kind.SOURCE_UNREACHABLE, Kind.SOURCE_SHUTTING_DOWN}


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("select lastval()", Kind.SOURCE_QUERY_FAILED),
        ("select 'no_such'::regtype", Kind.SOURCE_QUERY_FAILED),
        ("select pg_read_file('/no/such')", Kind.SOURCE_UNREACHABLE),
        ("do $$ begin raise using errcode = 'XX000'; end $$", Kind.SOURCE_UNREACHABLE),
    ],
)
def test_a_failed_query_is_no_lost_slot(pg: Database, statement: str, kind: Kind) -> None:
    with (
        Session.connect(PostgresSource(dsn=pg.dsn), threading.Event()) as session,
        pytest.raises(TailraceError) as raised,
    ):
        session.run(statement, "ask")
    assert raised.value.kind is kind


@pytest.mark.follows("source_privilege_missing")
def test_a_policy_that_hides_rows_is_named(pg: Database, tmp_path: Path) -> None:
    role = f"owner_{pg.name}"
    pg.execute(CREATE_ITEMS)
    pg.execute(INSERT, [1, 10])
    pg.execute(f"create role {role} login replication; alter table items owner to {role}")
    pg.execute(f"create publication {SLOT} for table items")
    pg.execute("alter table items enable row level security, force row level security")
    try:
        dsn = pg.server.dsn(pg.name, user=role)
        error = run_to_end(dsn, tmp_path / "log")
        assert error is not None
        assert "ALTER TABLE … NO FORCE ROW LEVEL SECURITY;" in error.hint
        pg.execute("alter table items no force row level security")
        with capturing(dsn, tmp_path / "log") as running:
            running.wait_for("streaming")
    finally:
        pg.execute(f"reassign owned by {role} to postgres; drop owned by {role}; drop role {role}")
    assert read_log(tmp_path / "log").ids == list(range(1, 11))


@pytest.mark.follows("source_query_failed")
def test_a_failed_statement_leads_to_its_error_in_the_servers_log(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute(
        "create function refuse() returns event_trigger language plpgsql as "
        "$$ begin raise exception 'nobody may publish what is secret'; end $$"
    )
    pg.execute(
        "create event trigger refuse on ddl_command_start when tag in ('CREATE PUBLICATION') "
        "execute function refuse()"
    )
    error = run_to_end(pg.dsn, tmp_path / "log")
    assert error is not None
    assert error.kind is Kind.SOURCE_QUERY_FAILED
    assert "secret" not in str(error)
    assert "the server's log has the whole message and the statement" in error.hint
    said = pg.server.log_path.read_text()
    assert "nobody may publish what is secret" in said
    assert "STATEMENT:  CREATE PUBLICATION" in said
    pg.execute("drop event trigger refuse")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")


@pytest.mark.follows("protocol_violation")
def test_a_damaged_message_is_requested_again(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = SocketTransport.receive

    def damaged(transport: SocketTransport, wait_s: float) -> Received:
        received = receive(transport, wait_s)
        data = bytearray(received.data)
        if b"note 7" in data:
            data[XLOG_PAYLOAD_AT] = ord("?")  # the first message's type letter
        return replace(received, data=np.frombuffer(data, np.uint8))

    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    pg.execute(INSERT, [1, 10])
    with monkeypatch.context() as patched:
        patched.setattr(SocketTransport, "receive", damaged)
        error = run_to_end(pg.dsn, tmp_path / "log")
    assert error is not None
    assert error.kind is Kind.PROTOCOL_VIOLATION
    assert "nothing of it was stored or acknowledged: start again" in error.hint
    assert read_log(tmp_path / "log").inserts == []
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query)
    assert read_log(tmp_path / "log").inserts == list(range(1, 11))


def test_another_server_that_answers_after_the_checks_is_not_streamed_from(
    make_server: Callable[..., EmbeddedPostgres], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_server(), make_server()
    for each in (first, second):
        each.execute(CREATE_ITEMS)
        each.execute("create publication tailrace_t for all tables")
    second.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [SLOT])
    proxy = Proxy(first.port)
    proxy.start()
    dsn = first.dsn().replace(str(first.port), str(proxy.port))
    with capturing(dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    second.execute(INSERT, [1, 10])

    def fail_over(*_: object) -> None:
        proxy.upstream_port = second.port

    monkeypatch.setattr(CaptureTask, "_keep_failover", fail_over)
    try:
        assert kind_of(run_to_end(dsn, tmp_path / "log")) is Kind.SOURCE_CHANGED
    finally:
        proxy.close()
    assert read_log(tmp_path / "log").inserts == []


def test_a_database_other_than_the_logs_is_refused(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    pg.server.create_database(f"{pg.name}_other")
    try:
        other = pg.server.dsn(f"{pg.name}_other")
        assert kind_of(run_to_end(other, tmp_path / "log")) is Kind.SOURCE_CHANGED
    finally:
        pg.server.execute(f'drop database "{pg.name}_other" with (force)')


def test_mismatched_publications_are_reported_with_the_sql(pg: Database, tmp_path: Path) -> None:
    assert kind_of(run_to_end(pg.dsn, tmp_path / "none")) is Kind.TABLE_MISSING
    pg.execute(CREATE_ITEMS)
    error = run_to_end(pg.dsn, tmp_path / "missing", tables=("public.items", "public.nothing"))
    assert kind_of(error) is Kind.TABLE_MISSING
    pg.execute("create table second(id int primary key)")
    pg.execute("create publication tailrace_t for table items")
    error = run_to_end(pg.dsn, tmp_path / "mistyped", tables=("public.items", "public.nothing"))
    assert kind_of(error) is Kind.TABLE_MISSING
    error = run_to_end(pg.dsn, tmp_path / "matchless", tables=("public.n*",))
    assert kind_of(error) is Kind.TABLE_MISSING
    error = run_to_end(pg.dsn, tmp_path / "log")
    assert error is not None
    assert error.kind is Kind.PUBLICATION_MISMATCH
    assert 'ALTER PUBLICATION "tailrace_t" ADD TABLE "public"."second"' in error.hint
    pg.execute(error.hint)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    pg.execute("drop publication tailrace_t")
    assert kind_of(run_to_end(pg.dsn, tmp_path / "log")) is Kind.PUBLICATION_MISSING


def test_a_pattern_that_no_longer_matches_is_reported_at_a_later_start(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    with (
        structlog.testing.capture_logs() as logs,
        capturing(pg.dsn, tmp_path / "log", tables=("public.items", "public.nothing")) as running,
    ):
        running.wait_for("streaming")
    assert [each["pattern"] for each in logs if "no table matches" in each["event"]] == ["public.nothing"]


@pytest.mark.parametrize("tables", ["all tables", "tables in schema public"])
def test_a_root_without_partitions_is_in_a_publication_of_everything(
    pg: Database, tmp_path: Path, tables: str
) -> None:
    if tables != "all tables":
        require_since(15, "publications of schemas", pg.server.version)
    pg.execute(CREATE_ITEMS)
    pg.execute("create table parts(id int primary key) partition by range (id)")
    pg.execute(f"create publication {SLOT} for {tables}")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("create table parts_1 partition of parts for values from (0) to (10)")
        pg.execute("insert into parts values (7)")
        running.catch_up(pg.query)
    assert read_log(tmp_path / "log").inserts == [7]


def test_a_publication_dropped_while_streaming_stops_with_its_own_error(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("drop publication tailrace_t")
        pg.execute(INSERT, [1, 1])
        running.join()
        assert kind_of(running.error) is Kind.PUBLICATION_MISSING
        running.error = None


def test_a_password_is_in_no_error(pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "canary-in-the-mine")
    dsn = pg.dsn.replace(f":{pg.port}", ":1")
    error = run_to_end(dsn, tmp_path / "log", password="${env:CANARY}", reconnect_s_max=0.2)
    assert kind_of(error) is Kind.SOURCE_UNREACHABLE
    assert "canary" not in str(error)


def test_tables_that_match_later_are_reported_and_not_added(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    pg.execute('create table "late ""one"""(id int primary key)')
    with structlog.testing.capture_logs() as said, capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    [repair] = {entry["repair"] for entry in said if entry["event"].startswith("the table")}
    assert repair.startswith('ALTER PUBLICATION "tailrace_t" ADD TABLE "public"."late ""one"""; --')
    assert repair.endswith("tailrace snapshot FILE --table 'public.late \"one\"'")
    tables = pg.query("select tablename from pg_publication_tables where pubname = 'tailrace_t'")
    assert tables == [("items",)]
