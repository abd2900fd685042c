"""A real standby is promoted: what the log has, what the new primary has, and what is reported."""

from __future__ import annotations

import functools
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.errors import Kind
from tailrace.model import parse_lsn
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tailrace.sources.postgres.streaming.task_log import capture_state
from tailrace_servers.install import server_account
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
from tests.support.capture.folded import fold
from tests.support.capture.requested import await_end, request
from tests.support.pipeline.shop import Shop
from tests.support.postgres import Database, require_since, throw_away
from tests.support.proxy import Proxy
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("standbys, promotion and failover slots")

STANDBY_SLOT = "standby"
INSERT = "insert into items select g, 'x' from generate_series({}, {}) g"
SYNCED = f"select synced and not temporary from pg_replication_slots where slot_name = '{SLOT}'"


@pytest.fixture
def copy_of(postgres_version: int) -> Iterator[Callable[..., EmbeddedPostgres]]:
    """Makes servers from base backups, not yet started: `copy_of(primary, *options, **settings)`."""
    with ExitStack() as stack:

        def make(primary: EmbeddedPostgres, *options: str, **settings: str) -> EmbeddedPostgres:
            server = throw_away(postgres_version, **settings)
            stack.callback(server.close)
            account = server_account()
            as_account: dict[str, Any] = {}
            if account is not None:
                as_account = {"user": account.uid, "group": account.gid, "extra_groups": []}
            command: list[Any] = [
                server.bin / "pg_basebackup",
                "-D",
                server.data,
                "-d",
                primary.dsn(),
                "-c",
                "fast",
            ]
            subprocess.run(
                [*command, *options], check=True, capture_output=True, cwd=server.directory, **as_account
            )
            return server

        yield make


@pytest.fixture
def primary(make_server: Callable[..., EmbeddedPostgres]) -> EmbeddedPostgres:
    server = make_server()
    server.execute(CREATE_ITEMS)
    server.execute(INSERT.format(1, 100))
    return server


def standby_of(primary: EmbeddedPostgres, copy_of: Callable[..., EmbeddedPostgres]) -> EmbeddedPostgres:
    """Return a running standby that has everything of the primary."""
    settings = {"hot_standby_feedback": "on"}
    if primary.version >= 17:
        settings["sync_replication_slots"] = "on"
    standby = copy_of(primary, "-R", "-C", "-S", STANDBY_SLOT, **settings).start()
    if primary.version >= 17:
        primary.execute(f"alter system set synchronized_standby_slots = '{STANDBY_SLOT}'")
        primary.execute("select pg_reload_conf()")
    follow(primary, standby)
    return standby


def follow(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    end = parse_lsn(primary.query("select pg_current_wal_flush_lsn()::text")[0][0])
    replayed = "select pg_last_wal_replay_lsn()::text"
    wait_until(lambda: parse_lsn(standby.query(replayed)[0][0]) >= end, 60, "the standby to follow")


def promote(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    """Promote the standby after the primary was killed."""
    primary.kill()
    assert standby.query("select pg_promote()") == [(True,)]


def ids(server: EmbeddedPostgres) -> list[int]:
    return [row[0] for row in server.query("select id from items order by id")]


def test_a_promoted_standby_without_the_slot_is_reported(
    primary: EmbeddedPostgres, copy_of: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    with capturing(primary.dsn(), tmp_path / "log") as running:
        running.wait_for("streaming")
        standby = standby_of(primary, copy_of)
    # The standby has everything that the log has, and its history continues from there.
    follow(primary, standby)
    promote(primary, standby)
    error = run_to_end(standby.dsn(), tmp_path / "log")
    assert error is not None
    assert (error.kind, error.context["slot"]) == (Kind.SLOT_MISSING, SLOT)
    assert "failover" in error.hint
    # Nothing was created on it instead.
    assert standby.query("select slot_name from pg_replication_slots where slot_type = 'logical'") == []
    assert sorted(read_log(tmp_path / "log").ids) == ids(standby)


def test_a_standby_promoted_too_early_lacks_changes_of_the_log(
    primary: EmbeddedPostgres, copy_of: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    standby = copy_of(primary, "-R", "-C", "-S", STANDBY_SLOT).start()
    with capturing(primary.dsn(), tmp_path / "log") as running:
        running.wait_for("streaming")
        follow(primary, standby)
        standby.stop()
        primary.execute(INSERT.format(101, 200))
        running.catch_up(primary.query)
    primary.kill()
    standby.start()
    assert standby.query("select pg_promote()") == [(True,)]
    # Whatever it writes from now on, its history left the log's timeline before the log's end.
    for more in (False, True):
        if more:
            standby.execute(INSERT.format(301, 9000))
        error = run_to_end(standby.dsn(), tmp_path / "log")
        assert error is not None
        assert error.kind is Kind.SOURCE_TIMELINE_CHANGED
        assert "on timeline 1, which the server left already at" in error.message
        assert "lost transactions that the log has" in error.hint
    assert sorted(read_log(tmp_path / "log").ids) == list(range(1, 201))


def test_a_server_restored_from_a_backup_is_behind_the_log(
    primary: EmbeddedPostgres, copy_of: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    with capturing(primary.dsn(), tmp_path / "log") as running:
        running.wait_for("streaming")
        restored = copy_of(primary)
        primary.execute(INSERT.format(101, 200))
        running.catch_up(primary.query)
    primary.kill()
    restored.start()  # on the same timeline, at an earlier time
    error = run_to_end(restored.dsn(), tmp_path / "log")
    assert error is not None
    assert error.kind is Kind.SOURCE_BEHIND_LOG
    assert "restored backup" in error.hint
    assert len(ids(restored)) == 100


def test_a_standby_that_answers_for_a_moment_is_not_taken_for_the_primary(
    primary: EmbeddedPostgres,
    copy_of: Callable[..., EmbeddedPostgres],
    proxy: Callable[[int], Proxy],
    tmp_path: Path,
) -> None:
    standby = copy_of(primary, "-R", "-C", "-S", STANDBY_SLOT).start()
    address = proxy(primary.port)
    dsn = primary.dsn().replace(str(primary.port), str(address.port))
    with capturing(dsn, tmp_path / "log", snapshot="when_needed") as running:
        running.wait_for("streaming")
        running.catch_up(primary.query)
        follow(primary, standby)
        address.upstream_port = standby.port
        address.cut_now()
        wait_until(
            lambda: running.is_over or "is a standby without it" in str(running.task.progress().error),
            60,
            "the refusal",
        )
        address.upstream_port = primary.port
        primary.execute(INSERT.format(101, 110))
        running.catch_up(primary.query)
    assert sorted(read_log(tmp_path / "log").ids) == ids(primary)
    assert standby.query("select slot_name from pg_replication_slots where slot_type = 'logical'") == []


@pytest.mark.ci
def test_a_restored_server_stays_refused_when_its_wal_has_reached_the_logs_end(
    primary: EmbeddedPostgres, tmp_path: Path
) -> None:
    def copied(source: Path, target: Path) -> None:
        primary.stop()
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", source, target], check=True)
        primary.start()

    def wal_end() -> int:
        return parse_lsn(primary.query("select pg_current_wal_flush_lsn()::text")[0][0])

    with capturing(primary.dsn(), tmp_path / "log") as running:
        running.wait_for("streaming")
        running.catch_up(primary.query)
    copied(primary.data, tmp_path / "earlier")
    with capturing(primary.dsn(), tmp_path / "log") as running:
        primary.execute(INSERT.format(101, 9000))
        for _ in range(3):
            running.catch_up(primary.query)
            # Servers before 17 save a slot when its restart_lsn advances, not at each shutdown.
            primary.execute("checkpoint")
    end = wal_end()
    copied(primary.data, tmp_path / "later")
    copied(tmp_path / "earlier", primary.data)
    assert wal_end() < end
    for number in range(2):
        if number == 1:
            missing = end + 65536 - wal_end()
            primary.execute(f"select pg_logical_emit_message(true, 'other', repeat('y', {missing}))")
            assert wal_end() > end
        error = run_to_end(primary.dsn(), tmp_path / "log")
        assert error is not None
        assert error.kind is Kind.SOURCE_BEHIND_LOG
        assert ("at an earlier start" in error.message) is (number == 1)
    # A later state, as the hint says.
    copied(tmp_path / "later", primary.data)
    with capturing(primary.dsn(), tmp_path / "log") as running:
        primary.execute(INSERT.format(9001, 9010))
        running.catch_up(primary.query)
    assert sorted(read_log(tmp_path / "log").ids) == ids(primary) == list(range(1, 9011))


@pytest.mark.ci
def test_a_pipeline_with_a_failover_slot_continues_after_a_promotion_and_loses_nothing(
    primary: EmbeddedPostgres,
    copy_of: Callable[..., EmbeddedPostgres],
    proxy: Callable[[int], Proxy],
    tmp_path: Path,
) -> None:
    require_since(17, "failover slots", primary.version)
    standby = standby_of(primary, copy_of)
    address = proxy(primary.port)  # the address that clients use, wherever the primary is
    dsn = primary.dsn().replace(str(primary.port), str(address.port))
    options = {"slot_failover": True, "reconnect_s_max": 120}
    with capturing(dsn, tmp_path / "log", **options) as running:
        running.wait_for("streaming")
        primary.execute(INSERT.format(101, 200))
        running.catch_up(primary.query)
        wait_until(lambda: standby.query(SYNCED) == [(True,)], 120, "the slot on the standby")
        # What is committed between the last synchronisation and the end is sent again.
        for number in range(201, 301):
            primary.execute(INSERT.format(number, number))
        follow(primary, standby)
        promote(primary, standby)
        address.upstream_port = standby.port
        standby.execute(INSERT.format(301, 400))
        running.catch_up(standby.query, 120)
        assert running.task.progress().reconnects > 0
    found = read_log(tmp_path / "log")
    assert sorted(found.ids) == ids(standby) == list(range(1, 401))
    # The log continues on the new timeline: a second start reports nothing.
    again = Running(make_task(dsn, tmp_path / "log", **options))
    again.wait_for("streaming")
    standby.execute(INSERT.format(401, 401))
    again.catch_up(standby.query)
    again.stop()
    assert sorted(read_log(tmp_path / "log").ids) == list(range(1, 402))


@pytest.mark.follows("source_misconfigured")
def test_a_standby_is_captured_with_a_snapshot_beside_its_stream(
    primary: EmbeddedPostgres, copy_of: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    require_since(16, "decoding on standbys", primary.version)
    primary.execute("create role cdc superuser login")
    primary.execute("alter role cdc set default_transaction_isolation = 'serializable'")
    standby = standby_of(primary, copy_of)
    dsn = standby.dsn(user="cdc")
    primary.execute(INSERT.format(101, 3000))
    refused = run_to_end(dsn, tmp_path / "none")
    assert refused is not None
    assert refused.kind is Kind.SOURCE_MISCONFIGURED
    where, _, statement = refused.hint.partition(": ")
    assert where.startswith("on the primary")
    primary.execute(statement)
    follow(primary, standby)
    log = tmp_path / "log"
    with writing(primary), capturing(dsn, log, snapshot_chunk_rows=500) as running:
        running.wait_for("streaming", 120)
        assert await_end(running, log, request(log, "public.items")).outcome is SnapshotOutcome.DONE
    follow(primary, standby)
    with logging_its_state(primary), capturing(dsn, log) as running:
        position = parse_lsn(primary.query("select pg_current_wal_flush_lsn()::text")[0][0])
        wait_until(lambda: running.is_over or running.task.caught_up(position), 120, "the log to catch up")
    items = fold(log)["items"]
    assert sorted(int(row["id"] or 0) for row in items.rows.values()) == ids(primary)
    assert set(items.creates.values()) == {1}
    assert items.ops["r"] > 5000


def test_a_snapshot_on_a_standby_that_waits_for_the_primary_does_not_delay_the_stream(
    primary: EmbeddedPostgres, copy_of: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    require_since(16, "decoding on standbys", primary.version)
    primary.execute(f"create table other(id int); create publication {SLOT} for table items")
    standby, log = standby_of(primary, copy_of), tmp_path / "log"
    made = "select 1 from pg_replication_slots where temporary"
    with (
        psycopg.connect(primary.dsn()) as older,
        logging_its_state(primary),
        capturing(standby.dsn(), log) as running,
    ):
        running.wait_for("streaming", 60)
        older.execute("insert into other values (1)")
        primary.execute(INSERT.format(101, 101))
        wait_until(lambda: 101 in read_log(log).ids, 30, "a row from before")
        asked = request(log, "public.items")
        wait_until(lambda: bool(standby.query(made)), 30, "a slot that waits")
        for number in range(102, 105):
            primary.execute(INSERT.format(number, number))
            wait_until(
                functools.partial(lambda wanted: wanted in read_log(log).ids, number),
                30,
                "the stream to go on",
            )
        assert standby.query(made)
        older.commit()
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
    assert set(fold(log)["items"].creates.values()) == {1}


@contextmanager
def logging_its_state(primary: EmbeddedPostgres) -> Iterator[None]:
    """Let the primary log its running transactions all the time: a standby creates no slot before it gets
    them.
    """
    over = threading.Event()

    def tell() -> None:
        while not over.wait(0.1):
            primary.execute("select pg_log_standby_snapshot()")

    telling = threading.Thread(target=tell)
    telling.start()
    try:
        yield
    finally:
        over.set()
        telling.join()


@contextmanager
def writing(primary: EmbeddedPostgres) -> Iterator[None]:
    """As `logging_its_state`, and insert rows all the time."""
    over = threading.Event()

    def write() -> None:
        number = 100_000
        while not over.is_set():
            number += 1
            primary.execute(INSERT.format(number, number))

    inserting = threading.Thread(target=write)
    inserting.start()
    try:
        with logging_its_state(primary):
            yield
    finally:
        over.set()
        inserting.join()


def test_a_captured_standby_that_was_restarted_and_replays_is_waited_for(
    primary: EmbeddedPostgres, copy_of: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    require_since(16, "decoding on a standby", primary.version)
    primary.execute(f"create publication {SLOT} for table items")
    standby, log = standby_of(primary, copy_of), tmp_path / "log"
    with capturing(standby.dsn(), log) as running:
        with logging_its_state(primary):
            running.wait_for("streaming")
        primary.execute(INSERT.format(101, 20000))
        running.catch_up(primary.query)
    standby.execute("alter system set recovery_min_apply_delay = '1h'")  # so that the replay takes long
    standby.restart("immediate")
    with capturing(standby.dsn(), log) as running:
        wait_until(lambda: "has replayed" in str(running.task.progress().error), 60, "the refusal")
        standby.execute("alter system reset recovery_min_apply_delay")
        standby.reload()
        primary.execute(INSERT.format(20001, 20010))
        running.catch_up(primary.query)
    assert sorted(read_log(log).ids) == list(range(1, 20011))


@pytest.mark.parametrize("ending", ["reconnect", "restart"])
def test_a_captured_standby_goes_on_after_its_promotion_and_is_recognised(
    primary: EmbeddedPostgres,
    copy_of: Callable[..., EmbeddedPostgres],
    proxy: Callable[[int], Proxy],
    tmp_path: Path,
    ending: str,
) -> None:
    require_since(16, "logical decoding on standbys", primary.version)
    primary.execute(f"create publication {SLOT} for table items")
    standby = standby_of(primary, copy_of)
    address = proxy(standby.port)
    dsn = standby.dsn().replace(str(standby.port), str(address.port))
    with logging_its_state(primary):
        running = Running(make_task(dsn, tmp_path / "log", reconnect_s_max=60))
        running.wait_for("streaming", 60)
    primary.execute(INSERT.format(101, 200))
    wait_until(lambda: 200 in read_log(tmp_path / "log").ids, 60, "what the primary wrote")
    promote(primary, standby)
    standby.execute(INSERT.format(201, 300))
    # The log has a part of the new timeline, and the connection breaks at once.
    wait_until(lambda: 300 in read_log(tmp_path / "log").ids, 60, "what the new primary wrote")
    if ending == "reconnect":
        address.cut_now()
        wait_until(
            lambda: running.is_over or running.task.progress().reconnects > 0, 60, "the next connection"
        )
    else:
        running.task.stop()
        running.join()
        running = Running(make_task(dsn, tmp_path / "log", reconnect_s_max=60))
    running.wait_for("streaming", 60)
    standby.execute(INSERT.format(301, 400))
    running.catch_up(standby.query, 60)
    running.stop()
    found = read_log(tmp_path / "log")
    assert sorted(found.ids) == ids(standby) == list(range(1, 401))
    state = capture_state(LogDirectory.open(tmp_path / "log"))
    assert state is not None
    assert state.timeline == 2


@pytest.mark.parametrize("begins", ["first start", "renewal"])
def test_a_standby_that_is_promoted_while_its_slot_is_created_is_captured(
    primary: EmbeddedPostgres, copy_of: Callable[..., EmbeddedPostgres], tmp_path: Path, begins: str
) -> None:
    require_since(16, "logical decoding on standbys", primary.version)
    primary.execute(f"create publication {SLOT} for table items")
    standby, log = standby_of(primary, copy_of), tmp_path / "log"
    options = {"snapshot": "when_needed", "reconnect_s_max": 60}
    if begins == "renewal":
        with logging_its_state(primary), capturing(standby.dsn(), log, **options) as running:
            running.wait_for("streaming", 60)
        standby.execute(f"select pg_drop_replication_slot('{SLOT}')")
    primary.kill()  # so that the creation waits
    with capturing(standby.dsn(), log, **options) as running:
        waiting = f"select 1 from pg_replication_slots where slot_name = '{SLOT}' and active"
        wait_until(lambda: running.is_over or bool(standby.query(waiting)), 60, "a slot that waits")
        assert standby.query("select pg_promote()") == [(True,)]
        running.wait_for("streaming", 60)
        standby.execute(INSERT.format(101, 110))
        running.catch_up(standby.query, 60)
    items = fold(log)["items"]
    assert sorted(int(row["id"] or 0) for row in items.rows.values()) == ids(standby)


def captured_shop(server: EmbeddedPostgres, spark: Any, root: Path) -> Shop:
    """Return a shop whose mirror has everything of the server."""
    shop = Shop(Database(server, "postgres"), spark, root)
    shop.source["slot"] = SLOT
    shop.run()
    return shop


def connect_to(shop: Shop, server: EmbeddedPostgres) -> None:
    shop.pg = Database(server, "postgres")
    shop.source["port"] = server.port


@pytest.mark.follows("source_timeline_changed")
@pytest.mark.parametrize("way", ["another server", "new log"])
@pytest.mark.one_postgres
def test_a_mirror_with_changes_that_a_failover_lost_is_repaired(
    primary: EmbeddedPostgres,
    copy_of: Callable[..., EmbeddedPostgres],
    spark: Any,
    tmp_path: Path,
    way: str,
) -> None:
    standby = copy_of(primary, "-R", "-C", "-S", STANDBY_SLOT).start()
    follow(primary, standby)
    standby.stop()
    shop = captured_shop(primary, spark, tmp_path)
    primary.execute(INSERT.format(101, 200))
    shop.run()
    primary.kill()
    standby.start()
    assert standby.query("select pg_promote()") == [(True,)]
    connect_to(shop, standby)
    standby.execute("delete from items where id <= 10")
    error = shop.refused(Kind.SOURCE_TIMELINE_CHANGED)
    if way == "new log":
        assert "the failover lost transactions that the log has" in error.hint
        shop.follow_steps(error)
    else:
        primary.start()
        connect_to(shop, primary)
        primary.execute("delete from items where id <= 20")
    shop.run()
    shop.require_equal("items")


@pytest.mark.follows("source_behind_log")
@pytest.mark.parametrize("way", ["a later state", "new log"])
@pytest.mark.one_postgres
def test_a_mirror_of_a_server_restored_from_a_backup_is_repaired(
    primary: EmbeddedPostgres,
    copy_of: Callable[..., EmbeddedPostgres],
    spark: Any,
    tmp_path: Path,
    way: str,
) -> None:
    restored = copy_of(primary)
    shop = captured_shop(primary, spark, tmp_path)
    primary.execute(INSERT.format(101, 200))
    shop.run()
    primary.kill()
    restored.start()
    connect_to(shop, restored)
    restored.execute("delete from items where id <= 10")
    error = shop.refused(Kind.SOURCE_BEHIND_LOG)
    if way == "new log":
        shop.follow_steps(error)
    else:
        assert "restore a later state of it; or" in error.hint
        primary.start()
        connect_to(shop, primary)
    shop.run()
    shop.require_equal("items")
