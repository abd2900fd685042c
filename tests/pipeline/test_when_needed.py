"""`snapshot: when_needed`: once changes are lost, all tables are read again, and mirrors equal the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.errors import Kind
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.sources.findings import Severity
from tailrace.sources.postgres.snapshot.plan import Origin, SnapshotOutcome
from tailrace.sources.postgres.snapshot.state import kept_plans
from tests.support.capture.captured import NAME, SLOT, Running, capturing, make_task, read_log, run_to_end
from tests.support.capture.requested import KEYED, request
from tests.support.capture.resumed import RUN, SMALL, create_tables, life, writers_at_work
from tests.support.postgres import Database
from tests.support.wait import wait_until

WHEN_NEEDED = {**SMALL, "snapshot": "when_needed"}
SCRIPT = RUN.replace("snapshot_connections=3,", "snapshot_connections=3, snapshot='when_needed',")


def drop(pg: Database) -> None:
    pg.execute("select pg_drop_replication_slot(%s)", [SLOT])


def recreate(pg: Database) -> None:
    drop(pg)
    pg.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [SLOT])


def advance(pg: Database) -> None:
    pg.execute("select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", [SLOT])


def await_idle_slot(pg: Database) -> None:
    active = "select active from pg_replication_slots where slot_name = %s"
    wait_until(lambda: pg.query(active, [SLOT]) == [(False,)], 30, "the server to notice the kill")


def create(pg: Database) -> None:
    create_tables(pg)
    pg.execute("drop table plain")
    pg.execute("create table later(id int primary key, n int)")
    pg.execute("insert into later values (7, 8)")


def change_unseen(pg: Database) -> None:
    """Change tables while the slot does not see it."""
    pg.execute("delete from items where id % 3 = 0")
    pg.execute("update items set n = -1 where id % 5 = 1")
    pg.execute("insert into items values (999999, 7)")
    pg.execute("delete from pairs")
    pg.execute("truncate parts_low")
    pg.execute("alter table later rename n to number")
    pg.execute("insert into later values (1, 2)")


def snapshots(log: Path) -> list[tuple[Origin, SnapshotOutcome]]:
    agenda = kept_plans(LogDirectory.open(log))
    return [(each.origin, each.outcome) for each in (*agenda.finished, *agenda.open)]


@pytest.mark.parametrize("lose", [drop, recreate, advance])
def test_after_a_loss_a_mirror_equals_the_source(
    place: SimpleNamespace, lose: Callable[[Database], None]
) -> None:
    pg, log = place.pg, place.log
    create(pg)
    tables = ("items", "pairs", "parts", "later")
    with capturing(pg.dsn, log, **WHEN_NEEDED) as running:
        running.wait_for("streaming")
        running.catch_up(pg.query)
    lake = place.mirror(tables=None)
    lake.follow()
    lake.require_equal(pg, *tables)
    change_unseen(pg)
    if lose is not advance:
        pg.execute(
            f"select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = '{SLOT}'"
        )
    lose(pg)
    pg.execute("insert into later values (2, 3)")
    # By default this is refused, and nothing is changed.
    error = run_to_end(pg.dsn, log, **SMALL)
    assert error is not None
    assert error.kind in {Kind.SLOT_MISSING, Kind.SLOT_AHEAD_OF_LOG}
    with writers_without_plain(pg), capturing(pg.dsn, log, **WHEN_NEEDED) as running:
        running.wait_for("streaming")
        lake.follow()
        wait_until(
            lambda: running.is_over or snapshots(log)[-1] == (Origin.NEEDED, SnapshotOutcome.DONE),
            120,
            "the snapshot",
        )
        assert not running.is_over, running.error
    with capturing(pg.dsn, log, **WHEN_NEEDED) as running:
        running.wait_for("streaming")
        running.catch_up(pg.query, 60)
    assert [origin for origin, _ in snapshots(log)] == [
        Origin.INITIAL,
        Origin.NEEDED,
    ]  # once, not at each start
    lake.follow()
    lake.require_equal(pg, *tables)
    fresh = place.mirror("fresh", tables=None)
    fresh.follow()
    fresh.require_equal(pg, *tables)


def writers_without_plain(pg: Database) -> Any:
    pg.execute("create table if not exists plain(id int primary key, n int not null default 0)")
    return writers_at_work(pg, 6)


@pytest.mark.ci
def test_kills_and_another_loss_meanwhile_leave_a_mirror_that_equals_the_source(
    place: SimpleNamespace,
) -> None:
    pg, log = place.pg, place.log
    create(pg)
    assert life(pg, log, "", script=SCRIPT) == 0
    lake = place.mirror(tables=None)
    lake.follow()
    change_unseen(pg)
    drop(pg)
    for point in ("after_plan@1", "after_slot@1", "after_handover@1", "in_window@2", "after_chunk@4"):
        assert life(pg, log, f"snapshot.{point.replace('@', '=kill@')}", script=SCRIPT) == -9, point
        pg.execute("delete from items where id in (select id from items order by id limit 50)")
        lake.follow()
    pg.execute("delete from items where id % 7 = 0")
    await_idle_slot(pg)
    drop(pg)
    pg.execute("delete from parts where id % 2 = 0")
    assert life(pg, log, "snapshot.after_chunk=kill@2", script=SCRIPT) == -9
    assert life(pg, log, "", script=SCRIPT) == 0
    assert snapshots(log)[-1] == (Origin.NEEDED, SnapshotOutcome.DONE)
    lake.follow()
    lake.require_equal(pg, "items", "pairs", "parts", "later")


def test_a_slot_lost_before_the_initial_snapshot_was_complete(place: SimpleNamespace) -> None:
    pg, log = place.pg, place.log
    create(pg)
    assert life(pg, log, "snapshot.after_chunk=kill@3", script=SCRIPT) == -9
    lake = place.mirror(tables=None)
    lake.follow()
    change_unseen(pg)
    pg.execute("insert into pairs values ('z', 1)")
    await_idle_slot(pg)
    drop(pg)
    assert life(pg, log, "", script=SCRIPT) == 0
    lake.follow()
    lake.require_equal(pg, *("items", "pairs", "parts"))


def test_a_table_that_cannot_be_read_again_stops_the_start_and_check_reports_it_before(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table keyless(id int)")
    pg.execute("alter table keyless replica identity full")
    pg.execute("insert into keyless values (1)")
    log = tmp_path / "log"
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"name: {NAME}\nsource:\n  host: 127.0.0.1\n  port: {pg.port}\n  user: postgres\n"
        f"  dbname: {pg.name}\n  snapshot: when_needed\nlog: {{path: ./log}}\n"
    )
    [finding] = preflight(file)
    assert (finding.kind, finding.severity, finding.table) == (
        Kind.SINK_KEY_MISSING, Severity.WARNING, "public.keyless",
    )  # fmt: skip
    with capturing(pg.dsn, log, snapshot="when_needed") as running:
        running.wait_for("streaming")
    drop(pg)
    error = run_to_end(pg.dsn, log, snapshot="when_needed")
    assert error is not None
    assert error.kind is Kind.SINK_KEY_MISSING
    assert "public.keyless" in error.message
    assert "does not exist" in error.message
    assert not pg.query("select 1 from pg_replication_slots where slot_name = %s", [SLOT])
    # With the key that the error asks for, it goes on.
    [lost] = [each for each in preflight(file) if each.kind is Kind.SLOT_MISSING]
    assert lost.severity is Severity.WARNING
    assert "reads all tables again" in lost.repair
    running = Running(
        make_task(pg.dsn, log, snapshot="when_needed", message_keys={"public.keyless": ("id",)})
    )
    wait_until(
        lambda: running.is_over or snapshots(log)[-1] == (Origin.NEEDED, SnapshotOutcome.DONE),
        60,
        "the snapshot",
    )
    running.stop()


def test_a_requested_snapshot_is_taken_as_well(pg: Database, tmp_path: Path) -> None:
    create(pg)
    log = tmp_path / "log"
    assert life(pg, log, "", script=SCRIPT) == 0
    request(log, *KEYED)
    drop(pg)
    assert life(pg, log, "", script=SCRIPT) == 0
    assert sorted(origin for origin, outcome in snapshots(log) if outcome is SnapshotOutcome.DONE) == [
        Origin.INITIAL, Origin.NEEDED, Origin.REQUESTED,
    ]  # fmt: skip


@pytest.mark.each_postgres("what the server says of slots")
def test_a_slot_that_the_server_invalidated_is_recreated(own_pg: Any, tmp_path: Path) -> None:
    own_pg.execute("create table items(id int primary key); create table others(id int)")
    own_pg.execute("insert into items select generate_series(1, 10)")
    log, options = tmp_path / "log", {"tables": ("public.items",), "snapshot": "when_needed"}
    with capturing(own_pg.dsn(), log, **options) as running:
        running.wait_for("streaming")
    own_pg.execute("insert into items select generate_series(11, 20)")
    own_pg.execute("alter system set max_slot_wal_keep_size = '1MB'")
    own_pg.execute("select pg_reload_conf()")

    def lost() -> bool:
        own_pg.execute("insert into others select generate_series(1, 20000)")
        own_pg.execute("select pg_switch_wal()")
        own_pg.execute("checkpoint")
        return own_pg.query("select wal_status from pg_replication_slots where slot_name = %s", [SLOT]) == [
            ("lost",)
        ]

    wait_until(lost, 60, "the slot to be lost")
    own_pg.execute("alter system reset max_slot_wal_keep_size")
    own_pg.execute("select pg_reload_conf()")
    with capturing(own_pg.dsn(), log, **options) as running:
        wait_until(
            lambda: running.is_over or snapshots(log)[-1] == (Origin.NEEDED, SnapshotOutcome.DONE),
            60,
            "the snapshot",
        )
        running.wait_for("streaming")
        own_pg.execute("insert into items values (21)")
        running.catch_up(own_pg.query)
    found = read_log(log)
    assert found.snapshot == [*range(1, 11), *range(1, 21)]
    assert found.inserts == [21]
