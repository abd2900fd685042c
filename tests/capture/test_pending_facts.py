"""Facts that the catalogue does not show in time are unknown, looked up again, and never written wrongly."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.log.schemas import versions
from tailrace.sources.postgres.schema import relation_messages
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import SLOT, capturing
from tests.support.capture.requested import await_end, is_over, request
from tests.support.sinks.ddl_story import Nearby, make, write
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("what other sessions see of the catalogue")

COLUMNS = (
    "select attname::text from pg_attribute where attrelid = 'items'::regclass and attnum > 0 "
    "and not attisdropped order by attnum"
)
ALTER = "begin; alter table items rename a to aa; alter table items add b int default 7; "


def mirror(path: Path, log: Path, spark: Any = None) -> list[dict[str, object]]:
    with LogReader.open(log, "0") as reader:
        end = reader.end().offset
    write(make("mirror", path), log, end, None if spark is None else Nearby(spark))
    rows = DeltaTable(str(path / "public.items")).to_pyarrow_table().drop_columns(["_position"])
    return sorted(rows.to_pylist(), key=lambda row: row["id"])


def altering(pg: EmbeddedPostgres, statement: str, alter: str = ALTER) -> threading.Thread:
    """Begin a commit that waits for a missing standby: it is streamed, but no other session sees it."""
    pg.execute("alter system set synchronous_standby_names = 'nobody'")
    pg.execute("select pg_reload_conf()")
    # Commits wait once the checkpointer has read the setting, whatever other processes have. Each one that is
    # tried writes to the WAL: without that it would not wait.
    wait_until(lambda: committing(pg, "comment on schema public is 'x'").is_alive(), 60, "a commit to wait")
    pg.execute("select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'")
    wait_until(lambda: not is_waiting(pg), 60, "that to end")
    changing = committing(pg, alter + statement + "; commit")
    assert changing.is_alive()
    return changing


def committing(pg: EmbeddedPostgres, statements: str) -> threading.Thread:
    """Run statements in a thread that has ended, or waits for a standby."""
    thread = threading.Thread(target=pg.execute, args=(statements,))
    thread.start()
    wait_until(lambda: not thread.is_alive() or is_waiting(pg), 60, "the commit to wait for a standby")
    return thread


def is_waiting(pg: EmbeddedPostgres) -> bool:
    return bool(pg.query("select 1 from pg_stat_activity where wait_event = 'SyncRep'"))


def release(pg: EmbeddedPostgres, changing: threading.Thread) -> None:
    pg.execute("alter system set synchronous_standby_names = ''")
    pg.execute("select pg_reload_conf()")
    changing.join(60)


@pytest.mark.follows("schema_pending")
@pytest.mark.parametrize("restarted", [False, True], ids=["at once", "after a restart"])
@pytest.mark.one_postgres
def test_a_mirror_waits_for_the_facts_of_a_commit_that_waits_for_a_standby(
    own_pg: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, restarted: bool
) -> None:
    monkeypatch.setattr(relation_messages, "_VISIBLE_DEADLINE_S", 0.2)
    log, lake = tmp_path / "log", tmp_path / "lake"
    own_pg.execute("create table items(id int primary key, a int)")
    own_pg.execute("insert into items values (1, 10), (2, 20)")
    with capturing(own_pg.dsn(), log) as running:
        running.wait_for("streaming")
        own_pg.execute("insert into items values (3, 30)")
        running.catch_up(own_pg.query)
        mirror(lake, log)
        changing = altering(own_pg, "insert into items values (4, 40, 8)")
        running.catch_up(own_pg.query)
        with pytest.raises(TailraceError) as raised:
            mirror(lake, log)
        assert raised.value.kind is Kind.SCHEMA_PENDING
        assert "wait_event SyncRep in pg_stat_activity" in raised.value.hint
        assert "or take it out of synchronous_standby_names" in raised.value.hint
        assert versions(LogDirectory.open(log), "0")[-1].relation.pending
        if not restarted:
            release(own_pg, changing)
            wait_until(lambda: settled(lake, log), 60, "the facts to be known")
    if restarted:
        release(own_pg, changing)
        with capturing(own_pg.dsn(), log) as running:
            running.wait_for("streaming")
            wait_until(lambda: settled(lake, log), 60, "the facts to be known")
    require_equal(own_pg, lake, log)
    # The facts that became known replace the unknown ones, once.
    shown = versions(LogDirectory.open(log), "0")
    assert [(each.relation.pending, each.changes) for each in shown] == [
        (False, ()),
        (False, ("column a renamed to aa", "column b added (integer)")),
    ]


def require_equal(pg: EmbeddedPostgres, lake: Path, log: Path, spark: Any = None) -> None:
    columns = [name for (name,) in pg.query(COLUMNS)]
    source = pg.query(f"select {', '.join(columns)} from items order by id")
    assert mirror(lake, log, spark) == [dict(zip(columns, row, strict=True)) for row in source]


def test_a_table_that_is_not_visible_yet_is_not_taken_for_a_dropped_one(
    own_pg: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relation_messages, "_VISIBLE_DEADLINE_S", 0.2)
    log, lake = tmp_path / "log", tmp_path / "lake"
    own_pg.execute("create table other(id int primary key)")
    own_pg.execute(f"create publication {SLOT} for all tables")
    create = "begin; create table items(id int primary key, a int); alter table items replica identity full; "
    with capturing(own_pg.dsn(), log) as running:
        running.wait_for("streaming")
        creating = altering(own_pg, "insert into items values (1, 10), (2, 20)", create)
        running.catch_up(own_pg.query)
        with pytest.raises(TailraceError) as raised:
            mirror(lake, log)
        assert raised.value.kind is Kind.SCHEMA_PENDING
        release(own_pg, creating)
        wait_until(lambda: settled(lake, log), 60, "the facts to be known")
        own_pg.execute("update items set a = 21 where id = 2")
        own_pg.execute("alter table items rename a to aa")
        own_pg.execute("insert into items values (3, 30)")
        running.catch_up(own_pg.query)
    require_equal(own_pg, lake, log)


def test_a_table_is_known_once_a_later_transaction_on_it_is_visible(
    own_pg: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relation_messages, "_VISIBLE_DEADLINE_S", 0.2)
    log, lake = tmp_path / "log", tmp_path / "lake"
    own_pg.execute("create table items(id int primary key, a int)")
    with capturing(own_pg.dsn(), log) as running:
        running.wait_for("streaming")
        inserting = altering(own_pg, "insert into items values (1, 10)", "begin; ")
        running.catch_up(own_pg.query)
        with pytest.raises(TailraceError, match="not known yet"):
            mirror(lake, log)
        # It does not wait for the standby, and its ALTER needs no lock that the first transaction's would
        # block.
        with own_pg.connect(autocommit=True) as local:
            local.execute("set synchronous_commit = local")
            local.execute("alter table items set (fillfactor = 90)")
            local.execute("insert into items values (2, 20)")
        running.catch_up(own_pg.query)
        assert mirror(lake, log) == [{"id": 1, "a": 10}, {"id": 2, "a": 20}]
    release(own_pg, inserting)
    with capturing(own_pg.dsn(), log) as running:
        running.wait_for("streaming")
        own_pg.execute("insert into items values (3, 30)")
        running.catch_up(own_pg.query)
    require_equal(own_pg, lake, log)
    assert not any(each.relation.pending for each in versions(LogDirectory.open(log), "0"))


def test_several_pending_versions_become_known_in_order(
    own_pg: EmbeddedPostgres, tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relation_messages, "_VISIBLE_DEADLINE_S", 0.2)
    log, lake = tmp_path / "log", tmp_path / "lake"
    own_pg.execute("create table items(id int primary key, a int)")
    own_pg.execute("insert into items values (1, 10), (2, 20)")
    with capturing(own_pg.dsn(), log) as running:
        running.wait_for("streaming")
        mirror(lake, log)
        changing = altering(own_pg, "insert into items values (4, 40, 8)")
        running.catch_up(own_pg.query)
        # A snapshot requested meanwhile waits: readers need the version before its own.
        asked = request(log, "public.items")
        with pytest.raises(TailraceError, match="not known yet"):
            mirror(lake, log)
        assert not is_over(log, asked)()
    # No capture runs while the first becomes visible and the table is altered again.
    release(own_pg, changing)
    own_pg.execute("alter table items rename aa to aaa")
    own_pg.execute("alter table items add c int default 5")
    own_pg.execute("delete from items where id = 1")
    own_pg.execute("insert into items values (5, 50, 9, 1)")
    with capturing(own_pg.dsn(), log) as running:
        running.wait_for("streaming")
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        running.catch_up(own_pg.query)
        wait_until(lambda: settled(lake, log, spark), 60, "the facts to be known")
    require_equal(own_pg, lake, log, spark)
    # A mirror that begins now reads everything with the known facts.
    require_equal(own_pg, tmp_path / "fresh", log, spark)


def settled(lake: Path, log: Path, spark: Any = None) -> bool:
    try:
        return bool(mirror(lake, log, spark))
    except TailraceError as error:
        if error.kind is not Kind.SCHEMA_PENDING:
            raise
        return False
