"""Snapshots requested while the stream goes on, and tables added later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import structlog

from tailrace import failpoints
from tailrace.changelog.directory import LogDirectory
from tailrace.errors import Kind, TailraceError
from tailrace.sources import snapshot_requests
from tailrace.sources.postgres.connection.errors import connection_lost
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema import catalog
from tailrace.sources.postgres.snapshot import chunk_readers, incremental, requests
from tailrace.sources.postgres.snapshot.control import SnapshotControl
from tailrace.sources.postgres.snapshot.plan import (
    Origin,
    SnapshotOutcome,
    SnapshotPlan,
    TableSnapshotPlan,
)
from tailrace.sources.postgres.snapshot.state import PLANS, kept_plans
from tailrace.sources.snapshot_requests import waiting
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import SLOT, capturing
from tests.support.capture.folded import fold
from tests.support.capture.requested import KEYED, await_end, found, is_over, request
from tests.support.capture.resumed import (
    SMALL,
    create_tables,
    judge,
    life,
    until_whole,
    writers_at_work,
)
from tests.support.postgres import Database
from tests.support.wait import wait_until


@pytest.mark.each_postgres("snapshots beside the stream")
def test_tables_are_read_again_among_writers_with_no_row_lost_or_out_of_order(
    pg: Database, tmp_path: Path
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    with writers_at_work(pg), capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        first = request(log, *KEYED)
        second = request(log, "public.items", where="n > 0")
        assert await_end(running, log, first).outcome is SnapshotOutcome.DONE
        assert await_end(running, log, second).outcome is SnapshotOutcome.DONE
    until_whole(pg, log)
    tables = judge(pg, log)
    for table in ("items", "pairs", "parts"):
        assert tables[table].ops["r"] > 1.5 * len(tables[table].rows) / 2
    assert waiting(LogDirectory.open(log)) == []


@pytest.mark.ci
def test_kills_in_a_requested_snapshot_neither_lose_nor_repeat_it(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    pg.execute("create table still(id int primary key)")
    pg.execute("insert into still select generate_series(1, 2500)")
    log = tmp_path / "log"
    until_whole(pg, log)
    asked = request(log, *KEYED)
    of_some = request(log, "public.still", where="id > 900")
    with writers_at_work(pg, 5):
        for point in ("before_window", "in_window@2", "after_chunk@2", "after_window", "before_finish"):
            name, _, count = point.partition("@")
            assert life(pg, log, f"snapshot.{name}=kill@{count or 1}") in {-9, 0}, point
    until_whole(pg, log)
    assert judge(pg, log)["still"].ops == {"r": 2500 + 1600}
    for id_ in (asked, of_some):
        snapshot = found(log, id_)
        assert snapshot is not None
        assert snapshot.outcome is SnapshotOutcome.DONE


def test_a_table_added_while_nothing_ran_comes_once_and_completely(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)
    pg.execute("create table later(id int primary key, n int not null default 0)")
    pg.execute("insert into later select n, 0 from generate_series(1, 400) n")
    pg.execute(f"alter publication {SLOT} add table later")
    pg.execute("insert into later select n, 0 from generate_series(401, 450) n")
    asked = request(log, "public.later")
    with capturing(pg.dsn, log, **SMALL) as running:
        number = 1000
        while not is_over(log, asked)():
            assert not running.is_over, running.error
            number += 1
            pg.execute(f"insert into later values ({number})")
            pg.execute(f"update later set n = n + 1 where id = {number - 990}")
        running.catch_up(pg.query, 60)
    later = fold(log)["later"]
    assert set((later.reads + later.creates).values()) == {1}
    rows = pg.query("select id::text, n::text from later")
    assert later.values == sorted(tuple(row) for row in rows)


@pytest.mark.parametrize(
    ("file", "table", "outcome"),
    [
        ("/snapshot-", "public.items", SnapshotOutcome.DONE),
        ("/snapshot.state", "public.items", SnapshotOutcome.DONE),
        ("/snapshot.state", "public.nothing", SnapshotOutcome.FAILED),
    ],
)
def test_a_request_waits_until_the_full_disk_has_space_for_its_record(
    file: str,
    table: str,
    outcome: SnapshotOutcome,
    pg: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)
    write, refused = LogDirectory.state_write, []
    remove_file, removed = snapshot_requests.remove, []

    def short_of_room(directory: LogDirectory, name: str, content: dict[str, Any]) -> None:
        if file in name and asked in str((name, content)) and len(refused) < 2:
            refused.append(name)
            raise TailraceError(Kind.LOG_FULL, f"write {name}: No space left on device")
        write(directory, name, content)

    def remove(path: Path) -> None:
        removed.append(found(log, path.stem) is not None)
        remove_file(path)

    asked = request(log, table)
    monkeypatch.setattr(LogDirectory, "state_write", short_of_room)
    monkeypatch.setattr(snapshot_requests, "remove", remove)
    with capturing(pg.dsn, log, **SMALL) as running:
        assert await_end(running, log, asked).outcome is outcome
    # A process killed after the removal knows of the snapshot by its plans.
    assert removed == [True]
    assert len(refused) == 2
    assert list((log / "tasks" / "0").glob("snapshot-*")) == []
    judge(pg, log)


def test_a_cancelled_snapshot_ends_and_another_and_the_stream_go_on(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)
    begun, waits, stays = request(log, *KEYED[:2]), request(log, KEYED[1]), request(log, KEYED[2])
    windows = []

    def hit(name: str) -> None:
        if name == "snapshot.after_window" and not windows:
            windows.append(name)
            request(log, KEYED[1], cancels=True)  # those with only this table

    monkeypatch.setattr(failpoints, "hit", hit)
    with capturing(pg.dsn, log, **SMALL) as running:
        for id_, outcome in (
            (begun, SnapshotOutcome.CANCELLED),
            (waits, SnapshotOutcome.CANCELLED),
            (stays, SnapshotOutcome.DONE),
        ):
            assert await_end(running, log, id_).outcome is outcome
        pg.execute("insert into items values (77777, 1)")
        running.catch_up(pg.query, 60)
        assert all(table.done for table in running.task.progress().snapshot.values())
    tables = judge(pg, log)
    assert tables["items"].ops["r"] > 3000
    assert tables["pairs"].ops["r"] == 2500
    assert tables["parts"].ops["r"] == 2 * 2900
    again = request(log, *KEYED[:2])
    with capturing(pg.dsn, log, **SMALL) as running:
        assert await_end(running, log, again).outcome is SnapshotOutcome.DONE
    assert judge(pg, log)["pairs"].ops["r"] == 2 * 2500


#: Invalid conditions and conditions that do more than read; and the error.
BAD_CONDITIONS = [
    ("no_such > 1", "no_such"),
    ("n >", "syntax"),
    ("1 / (n - n) = 1", "hold data"),
    ("n = 'x'", "hold data"),
    ("n::no_such > 1", "no_such"),
    ("n > currval('public.counter')", "currval"),
    ("n > nextval('public.counter')", "hold data"),
    ("true) TO STDOUT; DROP TABLE victim; COPY (SELECT 1, 1, 1 WHERE (true", "syntax"),
    ("true)) TO STDOUT; DROP TABLE victim; --", "syntax"),
    ("true)) TO STDOUT; COMMIT; DROP TABLE victim; COPY (SELECT 1 WHERE ((true", "syntax"),
    ("true); DROP TABLE victim; SELECT 1 WHERE (true", "multiple commands"),
    ("true)) TO PROGRAM 'true' --", "syntax"),
    ("true /*", "comment"),
    ("'", "unterminated"),
    ("public.writes() > 0", "hold data"),
]


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.each_postgres("what the server refuses")
def test_a_bad_condition_fails_alone_and_changes_nothing(
    pg: Database, tmp_path: Path, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encrypted:  # what libpq decrypts is read through libpq
        monkeypatch.setattr(Session, "encrypted", True)
    create_tables(pg)
    pg.execute("create sequence counter")
    pg.execute("create table victim(id int primary key)")
    pg.execute(
        "create function writes() returns int language sql as "
        "'insert into public.victim values (1) returning id'"
    )
    log = tmp_path / "log"
    with capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        asked = [request(log, "public.items", where=where) for where, _ in BAD_CONDITIONS]
        good = request(log, "public.items", where="id <= 10 -- the first ones")
        assert await_end(running, log, good).outcome is SnapshotOutcome.DONE
        warned = {concern.key for concern in running.task.progress().warnings}
        pg.execute("insert into items values (77777, 1)")
        running.catch_up(pg.query, 60)
        assert running.task.progress().reconnects == 0
    assert pg.query("select count(*) from victim") == [(0,)]
    for id_, (where, said) in zip(asked, BAD_CONDITIONS, strict=True):
        snapshot = found(log, id_)
        assert snapshot is not None
        assert snapshot.outcome is SnapshotOutcome.FAILED, where
        assert snapshot.error is not None
        assert snapshot.error["kind"] == Kind.SNAPSHOT_FAILED, where
        assert said in snapshot.error["message"], (where, snapshot.error)
        assert "correct the condition" in snapshot.error["hint"]
    # The good one covers the same table, so no warning is left.
    assert not {key for key in warned if key.startswith("snapshot_failed")}
    until_whole(pg, log)
    assert judge(pg, log)["items"].ops == {"r": 3010, "c": 1}, "it began again"


def test_a_condition_that_computes_for_ever_does_not_hold_the_stream_for_ever(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    monkeypatch.setattr(chunk_readers, "CONDITION_S_MAX", 1.0)
    with capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        asked = request(log, "public.items", where="pg_sleep(600) is not null")
        snapshot = await_end(running, log, asked)
        assert snapshot.outcome is SnapshotOutcome.FAILED
        assert snapshot.error is not None
        assert "nothing came for 1 s" in snapshot.error["message"]
        pg.execute("insert into items values (77777, 1)")
        running.catch_up(pg.query, 60)


def test_a_condition_that_ends_its_connection_delays_no_other_request(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    with capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        bad = request(log, "public.items", where="pg_terminate_backend(pg_backend_pid())")
        good = request(log, "public.items", where="id <= 10")
        assert await_end(running, log, good).outcome is SnapshotOutcome.DONE
        pg.execute("insert into items values (77777, 1)")
        running.catch_up(pg.query, 60)
        assert running.task.progress().reconnects == 0
    snapshot = found(log, bad)
    assert snapshot is not None
    assert snapshot.outcome is SnapshotOutcome.FAILED
    assert snapshot.error is not None
    assert "broke 5 times in a row" in snapshot.error["message"]
    assert "correct the condition" in snapshot.error["hint"]


def test_a_request_with_a_condition_waits_for_a_wal_sender(
    make_server: Callable[..., EmbeddedPostgres], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incremental, "AGAIN_S", 0.02)
    monkeypatch.setattr(incremental, "AGAIN_S_MAX", 0.02)
    server, log = make_server(max_wal_senders="2"), tmp_path / "log"
    server.execute("create table items(id int primary key)")
    server.execute("insert into items values (1), (2)")
    with capturing(server.dsn(), log) as running, structlog.testing.capture_logs() as said:
        running.wait_for("streaming")
        with psycopg.connect(psycopg.conninfo.make_conninfo(server.dsn(), replication="database")):
            asked = request(log, "public.items", where="id > 1")
            again = "a snapshot was interrupted; trying again"
            tries = 2 * incremental.BREAKS_MAX
            wait_until(
                lambda: is_over(log, asked)() or sum(each["event"] == again for each in said) > tries, 60
            )
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE


def test_a_cancel_ends_no_later_request(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)
    request(log, cancels=True)
    first, second = request(log, "public.items"), request(log, "public.pairs")
    looked, published = [], catalog.published_oids

    def breaking(*args: Any) -> Any:
        looked.append(args)
        if len(looked) == 2:
            raise connection_lost("look at the second request", "the connection broke")
        return published(*args)

    monkeypatch.setattr(requests, "published_oids", breaking)
    with capturing(pg.dsn, log, **SMALL) as running:
        outcomes = [await_end(running, log, asked).outcome for asked in (first, second)]
    assert outcomes == [SnapshotOutcome.DONE, SnapshotOutcome.DONE]
    assert len(looked) > 2


def test_a_bad_request_accepted_by_an_older_version_fails_alone_after_a_restart(
    pg: Database, tmp_path: Path
) -> None:
    """It was put into the agenda by a version that did not check conditions."""
    create_tables(pg)
    pg.execute("create table victim(id int primary key)")
    log = tmp_path / "log"
    until_whole(pg, log)
    where = "true)) TO STDOUT; DROP TABLE victim; COPY (SELECT 1 WHERE ((true"
    items = TableSnapshotPlan(
        0, pg.query("select 'items'::regclass::oid::int")[0][0], "public", "items", fresh=False
    )
    directory = LogDirectory.open(log)
    agenda = kept_plans(directory)
    agenda.open.append(SnapshotPlan("bad", Origin.REQUESTED, [items], where))
    directory.state_write(PLANS, agenda.as_json())
    behind = request(log, "public.pairs")
    with capturing(pg.dsn, log, **SMALL) as running:
        assert await_end(running, log, "bad").outcome is SnapshotOutcome.FAILED
        assert await_end(running, log, behind).outcome is SnapshotOutcome.DONE
        warned = [c for c in running.task.progress().warnings if c.key == "snapshot_failed:bad"]
        assert "public.items" in warned[0].message
        assert "--cancel --table public.items" in warned[0].repair
    assert pg.query("select count(*) from victim") == [(0,)]
    control = SnapshotControl(directory.path)
    assert [concern.key for concern in control.warnings] == ["snapshot_failed:bad"]
    request(log, "public.items", cancels=True)
    with capturing(pg.dsn, log, **SMALL) as running:
        wait_until(lambda: running.is_over or not control.warnings, 60, "the warning to go")
        assert not running.is_over, running.error


@pytest.mark.ci
def test_an_unexpected_error_ends_only_the_request(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)

    def hit(name: str) -> None:
        if name == "snapshot.in_window":
            raise ValueError("of a row")

    monkeypatch.setattr(failpoints, "hit", hit)
    asked = request(log, "public.items")
    with capturing(pg.dsn, log, **SMALL) as running:
        snapshot = await_end(running, log, asked)
        assert snapshot.outcome is SnapshotOutcome.FAILED
        assert snapshot.error is not None
        assert "ValueError in hit" in snapshot.error["message"]
        assert "of a row" not in snapshot.error["message"]
        monkeypatch.undo()
        assert await_end(running, log, request(log, "public.items")).outcome is SnapshotOutcome.DONE


@pytest.mark.parametrize(
    ("table", "where"), [("public.a", "n = '\udc80'"), ("public.a", "n = '\0'"), ("a", "")]
)
@pytest.mark.each_postgres("what the server refuses")
def test_a_request_that_no_server_could_accept_is_refused_at_once(
    pg: Database, tmp_path: Path, table: str, where: str
) -> None:
    create_tables(pg)
    until_whole(pg, tmp_path / "log")
    with pytest.raises(TailraceError) as raised:
        request(tmp_path / "log", table, where=where)
    assert raised.value.kind is Kind.CONFIG_INVALID
    assert waiting(LogDirectory.open(tmp_path / "log")) == []


@pytest.mark.parametrize(
    ("tables", "where", "told"),
    [(("public.nowhere",), "", "public.nowhere"), (("public.items", "public.nowhere"), "", "public.nowhere")],
)
@pytest.mark.each_postgres("what the server refuses")
def test_a_request_that_cannot_be_fulfilled_fails_with_the_reason_and_the_stream_goes_on(
    pg: Database, tmp_path: Path, tables: tuple[str, ...], where: str, told: str
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    with capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        snapshot = await_end(running, log, request(log, *tables, where=where))
        pg.execute("insert into items values (77777, 1)")
        running.catch_up(pg.query, 60)
    assert snapshot.outcome is SnapshotOutcome.FAILED
    assert snapshot.error is not None
    assert told in snapshot.error["message"]
    until_whole(pg, log)
    assert judge(pg, log)["items"].ops == {"r": 3000, "c": 1}, "it began again"
