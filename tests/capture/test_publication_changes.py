"""Publications that change while a slot is created, or before the snapshot looks at their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from tailrace import failpoints
from tailrace.sources.postgres.connection import server
from tailrace.sources.postgres.connection.session import Session
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import SLOT, Running, capturing, make_task, read_log
from tests.support.capture.folded import fold
from tests.support.capture.resumed import RUN, life
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("publications that change while a slot is made")


def after_slot(monkeypatch: pytest.MonkeyPatch, pg: Database, *statements: str) -> None:
    """Have `statements` run at the first attempt, when the slot exists and nothing has been read yet."""
    reached: list[str] = []

    def hit(name: str) -> None:
        if name == "snapshot.after_slot" and not reached:
            reached.append(name)
            for statement in statements:
                pg.execute(statement)

    monkeypatch.setattr(failpoints, "hit", hit)


def test_the_list_of_tables_is_that_of_the_snapshots_moment(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in ("stays", "leaves", "comes"):
        pg.execute(f"create table {table}(id int primary key)")
        pg.execute(f"insert into {table} values (1)")
    pg.execute(f"create publication {SLOT} for table stays, leaves")
    after_slot(
        monkeypatch,
        pg,
        *(f"insert into {table} values (2)" for table in ("stays", "leaves", "comes")),
        f"alter publication {SLOT} drop table leaves",
        f"alter publication {SLOT} add table comes",
        *(f"insert into {table} values (3)" for table in ("stays", "leaves", "comes")),
    )
    with capturing(pg.dsn, tmp_path / "log", tables=("public.stays", "public.leaves")) as running:
        running.wait_for("streaming")
        running.catch_up(pg.query)
    found = fold(tmp_path / "log")
    assert found["stays"].ops == {"r": 1, "c": 2}
    assert found["leaves"].ops == {"r": 1, "c": 1}  # only what was written while published
    assert found["comes"].ops == {"c": 1}


def test_a_table_created_between_slot_and_snapshot_comes_once(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.execute("create table items(id int primary key); create table goes(id int primary key)")
    pg.execute("insert into items values (1); insert into goes values (1)")
    pg.execute(f"create publication {SLOT} for all tables")
    making = ["create table later(id int primary key)", "insert into later values (1)", "drop table goes"]
    after_slot(monkeypatch, pg, *making)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("insert into later values (2)")
        running.catch_up(pg.query)
    found = fold(tmp_path / "log")
    assert found["items"].ops == {"r": 1}
    assert sum(found["later"].ops.values()) == 2
    assert found["later"].values == [("1",), ("2",)]


@pytest.mark.parametrize("again", [False, True], ids=["first start", "renewal"])
def test_a_table_published_while_the_slot_is_created_is_streamed(
    own_pg: EmbeddedPostgres, tmp_path: Path, again: bool
) -> None:
    """PostgreSQL decodes as if it had never been published.

    On a separate server: after other slots have decoded there, a slot is created without a wait.
    """
    pg = own_pg
    pg.execute("create table items(id int primary key)")
    pg.execute("create table other(id int primary key)")
    pg.execute("insert into items values (1); insert into other values (1)")
    pg.execute(f"create publication {SLOT} for table other")
    options: dict[str, Any] = {"tables": ("public.other",), "snapshot": "when_needed"}
    if again:
        with capturing(pg.dsn(), tmp_path / "log", **options) as running:
            running.wait_for("streaming")
        pg.execute(f"select pg_drop_replication_slot('{SLOT}')")

    def slot_waits_for(xid: str) -> bool:
        waiting = "select 1 from pg_locks where not granted and transactionid::text = %s"
        return bool(pg.query(waiting, [xid]))

    with (
        psycopg.connect(pg.dsn()) as older,
        psycopg.connect(pg.dsn()) as altering,
        psycopg.connect(pg.dsn()) as writing,
    ):
        [[xid]] = older.execute("select txid_current()::text").fetchall()
        running = Running(make_task(pg.dsn(), tmp_path / "log", **options))
        wait_until(lambda: slot_waits_for(xid), 60)
        altering.execute(f"alter publication {SLOT} add table items")
        [[xid]] = altering.execute("select txid_current()::text").fetchall()
        older.commit()
        wait_until(lambda: slot_waits_for(xid), 60)
        writing.execute("insert into other values (2)")
        altering.commit()
        # With that transaction never seen, or at the second attempt.
        progress = running.task.progress
        wait_until(lambda: progress().phase == "streaming" or progress().reconnects > 0, 60, "a beginning")
        writing.execute("insert into items values (2)")
        writing.commit()
        running.wait_for("streaming", 60)
    running.catch_up(pg.query)
    pg.execute("insert into items values (3)")
    running.catch_up(pg.query)
    running.stop()
    found = read_log(tmp_path / "log")
    if again:
        assert set(found.ids) == {1, 2, 3}
        assert 3 in found.inserts
    else:
        assert sorted(found.ids) == [1, 1, 2, 2, 3]


def test_a_slot_of_a_killed_renewal_is_created_again(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown whether tables or the publication changed while it was created."""
    pg.execute("create table items(id int primary key)")
    options: dict[str, Any] = {"snapshot": "when_needed"}
    with capturing(pg.dsn, tmp_path / "log", **options) as running:
        running.wait_for("streaming")
    pg.execute(f"select pg_drop_replication_slot('{SLOT}')")
    pg.execute("insert into items values (1)")
    script = RUN.replace("status_interval_s", "snapshot='when_needed', status_interval_s")
    assert life(pg, tmp_path / "log", "snapshot.after_slot=kill@1", script=script) == -9
    dropped, drop_slot = [], server.drop_slot

    def noted(session: Session, slot: str) -> None:
        dropped.append(slot)
        drop_slot(session, slot)

    monkeypatch.setattr(server, "drop_slot", noted)
    for _ in range(2):
        with capturing(pg.dsn, tmp_path / "log", **options) as running:
            running.wait_for("streaming")
            running.catch_up(pg.query)
    # Not at the second start: that renewal was completed.
    assert dropped == [SLOT]
    assert fold(tmp_path / "log")["items"].values == [("1",)]
