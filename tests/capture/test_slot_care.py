"""Care for the slot: WAL is freed while other databases are busy, and dangers are reported in time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from tailrace.errors import Kind
from tailrace.model import parse_lsn
from tailrace.sources.postgres.slot import health, monitor
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import (
    CREATE_ITEMS,
    SLOT,
    Running,
    capturing,
    make_task,
    read_log,
    run_to_end,
)
from tests.support.postgres import Database, require_since
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("what the server says of slots")

QUICK: dict[str, Any] = {"heartbeat": {"interval_s": 1.0}, "slot_watch": {"interval_s": 0.2}}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SOON_S", 0.2)


def positions(pg: Database) -> tuple[int, int]:
    (row,) = pg.query(
        "select restart_lsn::text, confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s",
        [SLOT],
    )
    return parse_lsn(row[0]), parse_lsn(row[1])


def keys(running: Running) -> set[str]:
    return {concern.key for concern in running.task.progress().warnings}


def test_wal_is_freed_while_only_another_database_is_busy(pg: Database, tmp_path: Path) -> None:
    """No heartbeat table and no write access are needed: the server's keepalives suffice."""
    pg.execute(CREATE_ITEMS)
    pg.server.execute("drop table if exists busy; create table busy(id int)")  # in another database
    with capturing(pg.dsn, tmp_path / "log", **QUICK) as running:
        running.wait_for("streaming")
        for _ in range(2):
            restart, confirmed = positions(pg)
            pg.server.execute("insert into busy select generate_series(1, 20000)")
            # A checkpoint writes what the server itself writes every 15 seconds while there is
            # work: the running transactions, without which restart_lsn does not move.
            pg.server.execute("checkpoint")
            busy_until = parse_lsn(pg.query("select pg_current_wal_lsn()::text")[0][0])
            assert busy_until - confirmed > 1 << 20
            wait_until(lambda: positions(pg)[1] >= busy_until, 60, "the acknowledgement")  # noqa: B023
            pg.server.execute("checkpoint")
            wait_until(lambda: positions(pg)[0] >= busy_until, 60, "the WAL to be freed")  # noqa: B023
            assert positions(pg)[0] > restart
        assert running.task.progress().reconnects == 0
    assert read_log(tmp_path / "log").ids == []
    pg.server.execute("drop table busy")


@pytest.mark.parametrize("action", ["message", "transaction"])
def test_a_heartbeats_message_is_captured(pg: Database, tmp_path: Path, action: str) -> None:
    pg.execute(CREATE_ITEMS)
    beat = {"interval_s": 0.2, "action": action}
    with capturing(pg.dsn, tmp_path / "log", heartbeat=beat) as running:
        running.wait_for("streaming")
        running.catch_up(pg.query)
        wait_until(lambda: any(b"tailrace.heartbeat" in m for m in read_log(tmp_path / "log").messages), 60)


BEATS = "create table beats(id int primary key, at timestamptz); insert into beats values (1, null)"
OF_A_FUNCTION = """
create function beat() returns void language sql as 'update public.beats set at = now()';
"""
PARTITIONED = """
create table beats(id int primary key, at timestamptz) partition by range (id);
create table beats_1 partition of beats for values from (0) to (9);
insert into beats values (1, null);
"""


@pytest.mark.parametrize(
    ("made", "query"),
    [
        (BEATS, "update public.beats set at = now()"),
        (BEATS + ";" + OF_A_FUNCTION, "select public.beat()"),
        (PARTITIONED, "update public.beats_1 set at = now()"),
    ],
    ids=["statement", "function", "partition"],
)
def test_a_heartbeats_query_is_not_run_on_a_captured_table_and_the_repair_helps(
    pg: Database, tmp_path: Path, made: str, query: str
) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute(made)
    options: dict[str, Any] = {
        **QUICK,
        "heartbeat": {"interval_s": 0.2, "query": query},
        "publish_via_partition_root": True,
    }
    with capturing(pg.dsn, tmp_path / "log", **options) as running:
        running.wait_for("streaming")
        wait_until(lambda: "heartbeat_captured" in keys(running), 60)
        (concern,) = running.task.progress().warnings
        assert "public.beats" in concern.message
        pg.execute("insert into items values (1, 'x')")
        running.catch_up(pg.query)
    assert pg.query("select at from beats") == [(None,)]
    found = re.search(r"tables_exclude: \[(.*?)\], and (ALTER PUBLICATION .*?;)", concern.repair)
    assert found is not None
    excluded, command = found.groups()
    pg.execute(command)
    with capturing(pg.dsn, tmp_path / "log", **options, tables_exclude=[excluded]) as running:
        wait_until(lambda: pg.query("select at is not null from beats") == [(True,)], 60)
        wait_until(lambda: running.task.progress().health is not None, 60)
        # A partition whose root is excluded matches by its own name, and is not captured.
        assert keys(running) <= {"table_not_captured:public.beats_1"}
        running.catch_up(pg.query)
    assert read_log(tmp_path / "log").inserts == [1]


def test_a_heartbeat_without_effect_or_that_fails_is_reported_and_stops_nothing(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute("create table beats(id int primary key, at timestamptz)")
    beat = {"interval_s": 0.2, "query": "update public.beats set at = now()"}
    options = {**QUICK, "heartbeat": beat, "tables_exclude": ["public.beats"]}
    with capturing(pg.dsn, tmp_path / "log", **options) as running:
        wait_until(lambda: "heartbeat_without_effect" in keys(running), 60)
        pg.execute("insert into beats values (1)")
        wait_until(lambda: not keys(running), 60)
        pg.execute("drop table beats")
        wait_until(lambda: "heartbeat_failed" in keys(running), 60)
        pg.execute("insert into items values (1, 'x')")
        running.catch_up(pg.query)
    assert read_log(tmp_path / "log").inserts[-1] == 1


def test_a_slot_close_to_its_limit_is_reported_before_it_is_lost(
    make_server: Callable[..., EmbeddedPostgres], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "SAFE_WAL_SHARE_WARNED", 1.0)
    server = make_server(max_slot_wal_keep_size="48MB", max_prepared_transactions="4")
    server.execute(CREATE_ITEMS)
    server.execute("create table others(id int)")
    monkeypatch.setattr(health, "TRANSACTION_AGE_WARNED_S", 0.0)
    watch = {"interval_s": 0.2}
    # An open transaction holds restart_lsn, whatever is acknowledged.
    with (
        structlog.testing.capture_logs() as said,
        capturing(
            server.dsn(), tmp_path / "log", tables=("public.items",), **{**QUICK, "slot_watch": watch}
        ) as running,
        server.connect(autocommit=False, application_name="forgotten\x1b[31m") as idle,
    ):
        running.wait_for("streaming")
        idle.execute("insert into others values (0)")
        server.execute("begin; insert into others values (0); prepare transaction 'it''s'", dbname="postgres")
        for _ in range(3):
            server.execute("insert into others select generate_series(1, 200000)")
            server.execute("select pg_switch_wal()")
        pid = idle.info.backend_pid
        wait_until(lambda: {f"wal_held:{pid}", "wal_held:it's"} <= keys(running), 60)
        wait_until(lambda: keys(running) & {"slot_near_limit", "slot_unreserved"}, 60)
        found = {concern.key: concern for concern in running.task.progress().warnings}
        assert f"process {pid}" in found[f"wal_held:{pid}"].message
        assert "\x1b" not in found[f"wal_held:{pid}"].message
        assert "idle in transaction" in found[f"wal_held:{pid}"].message
        now = running.task.progress().health
        assert now is not None
        assert now.retained_bytes > max(16 << 20, now.details["unconfirmed_bytes"])
        # Each repair works.
        server.execute(found["wal_held:it's"].repair.partition("can't: ")[2])
        server.execute(found[f"wal_held:{pid}"].repair.partition("can't: ")[2])
        worst = found.get("slot_near_limit") or found["slot_unreserved"]
        for statement in worst.repair.split(";")[:2]:
            server.execute(statement)
        server.execute("checkpoint")
        wait_until(lambda: not any(key.startswith("wal_held") for key in keys(running)), 60)
        idle.close()
    assert any(str(entry["event"]).startswith("process ") for entry in said)


def lose(server: EmbeddedPostgres) -> None:
    """Write until the server invalidates the slot."""
    server.execute("alter system set max_slot_wal_keep_size = '1MB'")
    server.execute("select pg_reload_conf()")

    def lost() -> bool:
        server.execute(
            "insert into items select n, 'x' from generate_series(1, 20000) n on conflict do nothing"
        )
        server.execute("select pg_switch_wal()")
        server.execute("checkpoint")
        status = server.query("select wal_status from pg_replication_slots where slot_name = %s", [SLOT])
        return bool(status[0][0] == "lost")

    wait_until(lost, 60, "the slot to be lost")


def test_a_slot_lost_while_streaming_stops_with_its_reason(own_pg: EmbeddedPostgres, tmp_path: Path) -> None:
    own_pg.execute(CREATE_ITEMS)
    running = Running(
        make_task(own_pg.dsn(), tmp_path / "log", reconnect_delay_s=5.0, reconnect_delay_s_max=5.0)
    )
    running.wait_for("streaming")
    # Disconnected for long: the walsender is terminated, and the next check finds the slot lost.
    own_pg.execute("select pg_terminate_backend(active_pid) from pg_replication_slots")
    lose(own_pg)
    running.join(60)
    assert getattr(running.error, "kind", None) is Kind.SLOT_INVALIDATED
    assert "wal_removed" in str(running.error)
    assert "max_slot_wal_keep_size" in str(running.error)


def test_what_a_new_slot_waits_for_is_reported_within_seconds(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    with pg.connect(autocommit=False, application_name="report") as idle:
        idle.execute("insert into items values (1, 'not yet')")
        pid = idle.info.backend_pid
        with capturing(pg.dsn, tmp_path / "log", **QUICK) as running:
            wait_until(lambda: f"slot_creation:{pid}" in keys(running), 60)
            (concern,) = running.task.progress().warnings
            assert "report" in concern.message
            assert running.task.progress().phase == "snapshot"
            idle.commit()
            running.wait_for("streaming", 60)
            wait_until(lambda: not keys(running), 60)
    assert read_log(tmp_path / "log").snapshot == [1]


def test_a_table_removed_from_the_publication_is_reported_while_running_and_afterwards(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute('create table "o\'th;er ""x"(id int primary key)')
    key = "table_left_out:public.o'th;er \"x"
    with capturing(pg.dsn, tmp_path / "log", **QUICK) as running:
        running.wait_for("streaming")
        pg.execute('alter publication tailrace_t drop table "o\'th;er ""x"')
        wait_until(lambda: key in keys(running), 60)
    with capturing(pg.dsn, tmp_path / "log", **QUICK) as running:
        wait_until(lambda: key in keys(running), 60)
        (concern,) = running.task.progress().warnings
        pg.execute(concern.repair)
        # The missed changes stay a warning until it is read again.
        wait_until(lambda: {each.partition(":")[0] for each in keys(running)} == {"table_gap"}, 60)


def test_partitions_published_through_their_root_are_not_reported_as_removed(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table events (id bigint, at int, primary key (id, at)) partition by range (at)")
    for year in (1, 2):
        pg.execute(f"create table events_{year} partition of events for values from ({year}) to ({year + 1})")
    with capturing(pg.dsn, tmp_path / "log", **QUICK, publish_via_partition_root=True) as running:
        running.wait_for("streaming")

        def after_a_change(key: int) -> set[str]:
            pg.execute("insert into events values (%s, 1), (%s, 2)", [key, key])
            running.catch_up(pg.query)
            seen = running.task.progress().health
            for _ in range(2):  # one check may have been under way; two checks may have found the same
                wait_until(lambda: running.task.progress().health is not seen, 60)  # noqa: B023
                seen = running.task.progress().health
            return keys(running)

        publication = pg.query("select pubname from pg_publication")[0][0]
        assert after_a_change(1) == set()
        # By the partitions' own names all of it is still published.
        pg.execute(f"alter publication {publication} set (publish_via_partition_root = false)")
        assert after_a_change(2) == set()
        # Once removed, it is reported once, under the name that includes all of it again.
        pg.execute("create table other (id int primary key)")
        pg.execute(f"alter publication {publication} set table other")
        wait_until(lambda: keys(running) == {"table_left_out:public.events"}, 60)
        repair = running.task.progress().warnings[0].repair
        pg.execute(repair.partition(";")[0])
        # The missed changes stay a warning until it is read again.
        wait_until(lambda: {each.partition(":")[0] for each in keys(running)} == {"table_gap"}, 60)


def test_a_detached_partition_is_not_reported_as_removed(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table events (id int primary key) partition by list (id)")
    for place in (1, 2):
        pg.execute(f"create table events_{place} partition of events for values in ({place})")
    options: dict[str, Any] = {**QUICK, "publish_via_partition_root": True, "tables": ("public.events",)}
    with capturing(pg.dsn, tmp_path / "log", **options) as running:
        running.wait_for("streaming")
        pg.execute("insert into events values (1), (2)")
        running.catch_up(pg.query)
        pg.execute("alter table events detach partition events_1")
        seen = running.task.progress().health
        for _ in range(2):  # one check may have been under way
            wait_until(lambda: running.task.progress().health is not seen, 60)  # noqa: B023
            seen = running.task.progress().health
        assert keys(running) == set()


def test_the_slot_watch_survives_its_connection_and_capture_survives_the_watch(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, tmp_path / "log", **QUICK) as running:
        running.wait_for("streaming")
        wait_until(lambda: running.task.progress().health is not None, 60)
        before = running.task.progress().health
        pg.server.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = %s and backend_type = 'client backend'",
            [pg.name],
        )
        pg.execute("insert into items values (1, 'x')")
        wait_until(lambda: running.task.progress().health is not before, 60)
        running.catch_up(pg.query)
        assert running.task.progress().reconnects == 0


def test_a_failover_slot_is_created_and_an_older_one_becomes_one(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    if pg.server.version < 17:
        error = run_to_end(pg.dsn, tmp_path / "log", slot_failover=True)
        assert error is not None
        assert error.kind is Kind.SOURCE_MISCONFIGURED
        assert "17" in error.message
        return
    failover = "select failover from pg_replication_slots where slot_name = %s"
    with capturing(pg.dsn, tmp_path / "plain") as running:
        running.wait_for("streaming")
        assert pg.query(failover, [SLOT]) == [(False,)]
    with capturing(pg.dsn, tmp_path / "plain", slot_failover=True) as running:
        running.wait_for("streaming")
        assert pg.query(failover, [SLOT]) == [(True,)]
    pg.execute("select pg_drop_replication_slot(%s)", [SLOT])
    with capturing(pg.dsn, tmp_path / "new", slot_failover=True) as running:
        running.wait_for("streaming")
        assert pg.query(failover, [SLOT]) == [(True,)]


def test_a_standby_that_delays_everything_is_reported(own_pg: EmbeddedPostgres, tmp_path: Path) -> None:
    server = own_pg
    require_since(17, "failover slots", server.version)
    server.execute(CREATE_ITEMS)
    options = {**QUICK, "slot_failover": True}
    with capturing(server.dsn(), tmp_path / "log", **options) as running:
        running.wait_for("streaming")
        server.execute("alter system set synchronized_standby_slots = 'gone'")
        server.execute("select pg_reload_conf()")
        wait_until(lambda: "standby_waited:gone" in keys(running), 60)
        repair = running.task.progress().warnings[0].repair.partition("slots: ")[2]
        for statement in repair.split(";")[:2]:
            server.execute(statement)
        server.execute("insert into items values (1, 'x')")
        wait_until(lambda: not keys(running), 60)
        running.catch_up(server.query)
    assert read_log(tmp_path / "log").inserts == [1]
