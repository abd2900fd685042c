"""An embedded server starts, is killed and starts again, with everything committed."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import psycopg
import pytest

from tailrace.errors import Kind, TailraceError
from tailrace_servers import install
from tailrace_servers.install import ServerAccount, find_install, is_reachable, within_reach
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.postgres import NEWEST_VERSION
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("the server's own programs")


def test_each_version_is_the_right_one_and_ready_for_logical_decoding(pg):
    assert int(pg.query("show server_version_num")[0][0]) // 10_000 == pg.server.version
    assert pg.query("show wal_level") == [("logical",)]
    assert pg.query("show server_encoding") == [("UTF8",)]
    pg.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")


def test_a_killed_server_restarts_on_its_port_with_everything_committed(own_pg):
    port = own_pg.port
    own_pg.execute("create table t (n int); insert into t select generate_series(1, 1000)")
    with own_pg.connect(autocommit=False) as open_transaction:
        open_transaction.execute("insert into t values (0)")
        own_pg.kill()
        assert own_pg.pid is None
        with pytest.raises(psycopg.OperationalError):
            open_transaction.execute("select 1")
        open_transaction.close()
    own_pg.start()
    assert own_pg.port == port
    assert own_pg.query("select count(*), min(n) from t") == [(1000, 1)]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_stopped_server_is_gone_and_restarts(own_pg, mode):
    own_pg.execute("create table t (n int)")
    own_pg.stop(mode)
    with pytest.raises(psycopg.OperationalError):
        own_pg.connect()
    own_pg.restart()
    assert own_pg.query("table t") == []


def test_settings_change_at_a_reload_and_alter_system_wins(own_pg):
    own_pg.settings["work_mem"] = "5MB"
    own_pg.reload()
    wait_until(lambda: own_pg.query("show work_mem") == [("5MB",)], 60, "the new work_mem")
    own_pg.execute("alter system set work_mem = '6MB'")
    own_pg.restart()
    assert own_pg.query("show work_mem") == [("6MB",)]


@pytest.mark.slow
def test_a_password_is_required_and_not_in_the_dsn():
    with EmbeddedPostgres(find_install(NEWEST_VERSION), password="it's", durable=False) as server:
        assert server.query("select 1") == [(1,)]
        assert "it's" not in server.dsn()
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            psycopg.connect(server.dsn(), connect_timeout=5)


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_temporary_directory_is_private_and_removed_at_close(in_memory):
    server = EmbeddedPostgres(find_install(NEWEST_VERSION), durable=False, in_memory=in_memory)
    with server:
        assert stat.S_IMODE(server.data.stat().st_mode) == 0o700
        assert list((server.data / "pg_dynshmem").iterdir()), "its shared memory is removed with it"
    assert not server.directory.exists()
    server.close()


@pytest.mark.parametrize("end", [EmbeddedPostgres.close, EmbeddedPostgres.stop, "its maker's"])
def test_a_server_leaves_no_shared_memory_behind(make_server, end):
    # GIVEN a server and its shared memory segment, of which a machine may have 4096
    server = make_server()
    segment = (server.data / "postmaster.pid").read_text().split("\n")[6].split()[1]
    assert segment in segments()
    # WHEN it ends in any way except a kill after which it may be started again
    if callable(end):
        end(server)
    else:
        server._at_exit()  # what the interpreter calls if it was never closed
    # THEN the segment is removed
    assert segment not in segments()


def segments() -> set[str]:
    """Return the ids of the machine's System V segments."""
    return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}


def test_a_kept_directory_is_reused_and_an_incomplete_one_is_created_again(own_pg, postgres_version):
    # GIVEN a directory in which an earlier run died while it created the data directory
    directory = own_pg.directory / "kept"
    (directory / "data.new").mkdir(parents=True)
    (directory / "data.new" / "PG_VERSION").write_text("18\n")
    own_pg.own(directory)
    # WHEN a server is created there, and another one after it
    for expected in ([], [(1,)]):
        with EmbeddedPostgres(find_install(postgres_version), directory, durable=False) as server:
            server.execute("create table if not exists t (n int)")
            assert server.query("table t") == expected
            server.execute("insert into t values (1)")
    # THEN the second has what the first committed, although close() ended it at once
    assert (directory / "data").is_dir()


def test_a_server_that_cannot_start_says_why(own_pg):
    own_pg.stop()
    own_pg.settings["wal_level"] = "imaginary"
    with pytest.raises(TailraceError, match="postgres ended with status 1") as caught:
        own_pg.start()
    assert caught.value.kind is Kind.ENVIRONMENT_UNFIT


def test_an_unknown_version_is_reported():
    with pytest.raises(TailraceError, match="PostgreSQL 9: its binaries are not installed"):
        find_install(9)


@pytest.mark.slow
def test_binaries_that_the_account_cannot_read_are_copied_and_run_from_the_copy(tmp_path, monkeypatch):
    # GIVEN an account that can't read the installation
    me = ServerAccount("me", os.getuid(), os.getgid())
    monkeypatch.setattr(install, "is_reachable", lambda *_: False)
    # WHEN the binaries are copied to where it can
    original = find_install(NEWEST_VERSION)
    copied = within_reach(original, me, tmp_path)
    # THEN the copy is complete: it finds its libraries too
    assert tmp_path in copied.bin.parents
    version = subprocess.run([copied.bin / "initdb", "--version"], capture_output=True, text=True, check=True)
    assert f"(PostgreSQL) {NEWEST_VERSION}." in version.stdout


def test_a_private_directory_is_reachable_for_its_owner_only(tmp_path):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "bin").mkdir()
    assert not is_reachable(private / "bin", ServerAccount("stranger", 64_000, 64_000))
    assert is_reachable(private / "bin", None)
