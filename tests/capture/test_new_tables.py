"""Tables created while the engine runs: each of their rows is captured once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import structlog

from tailrace import failpoints
from tailrace.errors import Kind
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.sources.postgres.slot import monitor
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tests.support.capture.captured import NAME, SLOT, capturing
from tests.support.capture.folded import Folded, fold
from tests.support.capture.requested import await_end, request
from tests.support.capture.resumed import life
from tests.support.postgres import Database, require_since
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("publications, and what they have")

ROWS = "insert into later select n, 0 from generate_series({}, {}) n"
#: Publications that include every new table.
FOR_ALL = ["for all tables", "for tables in schema public"]


def of_source(pg: Database) -> list[tuple[str | None, ...]]:
    return [tuple(row) for row in pg.query("select id::text, n::text from later order by 1, 2")]


def all_once(later: Folded) -> bool:
    return set((later.reads + later.creates).values()) == {1}


@pytest.mark.parametrize("which", FOR_ALL)
def test_a_table_created_under_a_publication_of_all_comes_once_without_a_snapshot(
    pg: Database, tmp_path: Path, which: str
) -> None:
    if "schema" in which:
        require_since(15, "publications of schemas", pg.server.version)
    pg.execute("create table items(id int primary key)")
    pg.execute(f"create publication {SLOT} {which}")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("create table later(id int primary key, n int)")
        pg.execute(ROWS.format(1, 300))
        pg.execute("create table copied as select 1 as id")
        running.catch_up(pg.query)
    pg.execute("create table meanwhile(id int primary key)")
    pg.execute("insert into meanwhile values (1)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        pg.execute("update later set n = 1 where id < 10")
        running.catch_up(pg.query)
        # A snapshot requested nevertheless repeats what the log has by then, and loses nothing.
        asked = await_end(running, tmp_path / "log", request(tmp_path / "log", "public.later"))
        assert asked.outcome is SnapshotOutcome.DONE
    found = fold(tmp_path / "log")
    assert found["later"].ops == {"c": 300, "u": 9, "r": 300}
    assert found["later"].values == of_source(pg)
    assert found["copied"].ops == found["meanwhile"].ops == {"c": 1}


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_table_published_before_its_first_row_comes_once(pg: Database, tmp_path: Path, whose: str) -> None:
    pg.execute("create table items(id int primary key)")
    if whose == "theirs":
        pg.execute(f"create publication {SLOT} for table items")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("create table later(id int primary key, n int)")
        pg.execute(f"alter publication {SLOT} add table later")
        pg.execute(ROWS.format(1, 300))
        running.catch_up(pg.query)
    later = fold(tmp_path / "log")["later"]
    assert later.ops == {"c": 300}
    assert later.values == of_source(pg)


@pytest.mark.parametrize("by", ["kill", "DDL"])
def test_a_table_created_between_a_failed_first_start_and_the_next_is_captured(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    pg.execute("create table items(id int primary key)")
    pg.execute("insert into items select generate_series(1, 100)")

    def create() -> None:
        pg.execute("create table later(id int primary key, n int)")
        pg.execute(ROWS.format(1, 50))

    if by == "kill":
        assert life(pg, tmp_path / "log", "snapshot.after_slot=kill@1") == -9
        create()
        file = tmp_path / "pipeline.yaml"
        file.write_text(f"name: {NAME}\nsource: {{dsn: '{pg.dsn}'}}\nlog: {{path: ./log}}\n")
        assert Kind.PUBLICATION_MISMATCH not in {finding.kind for finding in preflight(file)}
    else:
        reached: list[str] = []

        def hit(name: str) -> None:
            if name == "snapshot.after_slot" and not reached:
                reached.append(name)
                create()
                pg.execute("vacuum full items")

        monkeypatch.setattr(failpoints, "hit", hit)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query)
        pg.execute(ROWS.format(51, 60))
        running.catch_up(pg.query)
    found = fold(tmp_path / "log")
    assert found["items"].ops == {"r": 100}
    assert found["later"].ops == {"r": 50, "c": 10}
    assert found["later"].values == of_source(pg)


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_an_unpublished_table_is_reported_and_stops_nothing(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    monkeypatch.setattr(monitor, "NEW_TABLES_S", 0.0)
    pg.execute("create table items(id int primary key)")
    if whose == "theirs":
        pg.execute(f"create publication {SLOT} for table items")
    watched = {"slot_watch": {"interval_s": 0.2}}

    def told(running) -> bool:
        return "table_not_captured:public.later" in {each.key for each in running.task.progress().warnings}

    with capturing(pg.dsn, tmp_path / "log", **watched) as running:
        running.wait_for("streaming")
        pg.execute("create table later(id int primary key, n int)")
        pg.execute(ROWS.format(1, 50))
        wait_until(lambda: told(running), 120)
        pg.execute("insert into items values (1)")
        running.catch_up(pg.query)
    # Nor does it stop a start: the other tables go on.
    with structlog.testing.capture_logs() as said, capturing(pg.dsn, tmp_path / "log", **watched) as running:
        pg.execute("insert into items values (2)")
        running.catch_up(pg.query)
        refused = await_end(running, tmp_path / "log", request(tmp_path / "log", "public.later"))
        assert refused.outcome is SnapshotOutcome.FAILED
        assert f'ALTER PUBLICATION "{SLOT}" ADD TABLE "public"."later"; then' in (refused.error or {})["hint"]
        [repair] = {entry["repair"] for entry in said if entry["event"].startswith("the table")}
        assert "tailrace snapshot FILE --table public.later" in repair
        wait_until(lambda: told(running), 120)
        pg.execute(repair)
        pg.execute(ROWS.format(51, 60))
        asked = await_end(running, tmp_path / "log", request(tmp_path / "log", "public.later"))
        assert asked.outcome is SnapshotOutcome.DONE
        wait_until(lambda: not told(running), 120)
    found = fold(tmp_path / "log")
    assert found["items"].ops == {"c": 2}
    assert found["later"].values == of_source(pg)
    assert len(found["later"].rows) == 60


def test_a_table_requested_twice_before_it_is_read_loses_no_change_between(
    pg: Database, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    pg.execute("create table items(id int primary key)")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
    pg.execute("create table later(id int primary key, n int)")
    pg.execute(ROWS.format(1, 400))
    pg.execute(f"alter publication {SLOT} add table later")
    request(log, "public.later")
    again = request(log, "public.later")
    with capturing(pg.dsn, log, snapshot_chunk_rows=100, snapshot_connections=1) as running:
        numbers = itertools.count(1)

        def is_read() -> bool:
            return running.is_over or bool(fold(log).get("later", Folded()).reads)

        def all_is_read_while_rows_go() -> bool:
            pg.execute("delete from later where id = %s", [next(numbers)])
            return running.is_over or running.task.caught_up(1)

        wait_until(is_read, 60)
        wait_until(all_is_read_while_rows_go, 120)
        await_end(running, log, again)
        running.catch_up(pg.query)
    assert fold(log)["later"].values == sorted(of_source(pg))


def test_a_request_for_a_part_of_a_new_table_keeps_the_changes_of_the_rest(
    pg: Database, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    pg.execute("create table items(id int primary key)")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
    pg.execute("create table later(id int primary key, n int)")
    pg.execute(ROWS.format(1, 200))
    pg.execute(f"alter publication {SLOT} add table later")
    asked = request(log, "public.later", where="id > 100")
    pg.execute("update later set n = 1 where id = 7")
    with capturing(pg.dsn, log) as running:
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        running.catch_up(pg.query)
    assert fold(log)["later"].ops == {"r": 100, "u": 1}


def test_a_table_without_a_key_is_not_read_twice(pg: Database, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pg.execute("create table items(id int primary key)")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
    pg.execute("create table later(id int, n int)")
    pg.execute("alter table later replica identity full")
    pg.execute(ROWS.format(1, 20))
    pg.execute(f"alter publication {SLOT} add table later")
    first = request(log, "public.later")
    with capturing(pg.dsn, log) as running:
        pg.execute(ROWS.format(21, 30))
        assert await_end(running, log, first).outcome is SnapshotOutcome.DONE
        second = await_end(running, log, request(log, "public.later"))
        assert second.outcome is SnapshotOutcome.FAILED
        assert "each would be there twice" in (second.error or {})["message"]
        pg.execute(ROWS.format(31, 40))
        running.catch_up(pg.query)
    later = fold(log)["later"]
    assert all_once(later)
    assert sum(later.bag.values()) == 40


def test_a_cancelled_snapshot_of_a_new_table_is_warned_of(pg: Database, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pg.execute("create table items(id int primary key)")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
    pg.execute("create table later(id int primary key, n int)")
    pg.execute(f"alter publication {SLOT} add table later")
    asked = request(log, "public.later")
    request(log, cancels=True)
    with structlog.testing.capture_logs() as said, capturing(pg.dsn, log) as running:
        assert await_end(running, log, asked).outcome is SnapshotOutcome.CANCELLED
        pg.execute(ROWS.format(1, 10))
        running.catch_up(pg.query)
    assert [entry["tables"] for entry in said if "request their snapshot again" in entry["event"]] == [
        ["public.later"]
    ]
    assert fold(log)["later"].ops == {"c": 10}
