"""Changes that PostgreSQL does not send are reported until a snapshot closes the gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.sources.postgres.slot import monitor
from tailrace.sources.postgres.slot.gaps import CaptureGaps
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome, SnapshotPlans
from tests.support.capture.captured import CREATE_ITEMS, SLOT, Running, capturing
from tests.support.capture.requested import await_end, request
from tests.support.changelog.frames_of import new_log
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("what the catalogue says of publications")

QUICK: dict[str, Any] = {"slot_watch": {"interval_s": 0.2}}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SOON_S", 0.2)
    monkeypatch.setattr(monitor, "NEW_TABLES_S", 0.2)


def warned(running: Running) -> dict[str, str]:
    return {concern.key: concern.repair for concern in running.task.progress().warnings}


def await_warnings(running: Running, *keys: str) -> None:
    wait_until(lambda: running.is_over or set(warned(running)) == set(keys), 150, f"the warnings {keys}")
    assert not running.is_over, running.error


def test_a_table_that_was_unlogged_is_reported_until_it_is_read_again(pg: Database, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pg.execute(CREATE_ITEMS)
    pg.execute("create unlogged table later(id int primary key)")
    pg.execute("insert into later values (1)")
    pg.execute(f"create publication {SLOT} for all tables")
    with capturing(pg.dsn, log, **QUICK) as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (1)")
        running.catch_up(pg.query)
        await_warnings(running)
        pg.execute("alter table items set unlogged")
        await_warnings(running, "table_unlogged:public.items")
        pg.execute("insert into items values (2)")
        pg.execute(warned(running)["table_unlogged:public.items"].split(" -- ")[0])
        await_warnings(running, "table_gap:public.items")
        # A table that was never captured has rows that no snapshot has read.
        pg.execute("alter table later set logged")
        await_warnings(running, "table_gap:public.items", "table_gap:public.later")
    with capturing(pg.dsn, log, **QUICK) as running:
        await_warnings(running, "table_gap:public.items", "table_gap:public.later")
        for name in ("items", "later"):
            told = warned(running)[f"table_gap:public.{name}"]
            assert await_end(running, log, request(log, told.split()[-1])).outcome is SnapshotOutcome.DONE
        await_warnings(running)


def test_a_table_published_again_is_reported_until_it_is_read_again(pg: Database, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pg.execute(CREATE_ITEMS)
    with capturing(pg.dsn, log, **QUICK) as running:
        running.wait_for("streaming")
        pg.execute(f"alter publication {SLOT} drop table items")
        wait_until(lambda: "table_left_out:public.items" in warned(running), 150, "the warning")
        pg.execute(warned(running)["table_left_out:public.items"].split(" -- ")[0])
        await_warnings(running, "table_gap:public.items")
        assert await_end(running, log, request(log, "public.items")).outcome is SnapshotOutcome.DONE
        await_warnings(running)


def test_a_table_that_left_the_published_schema_for_a_while_is_reported(pg: Database, tmp_path: Path) -> None:
    pg.execute(f"{CREATE_ITEMS}; create schema away; create publication {SLOT} for tables in schema public")
    with capturing(pg.dsn, tmp_path / "log", **QUICK) as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (1)")
        running.catch_up(pg.query)
        pg.execute("alter table items set schema away")
        for _ in range(2):  # the first look may have begun before
            before = running.task.progress().health
            wait_until(lambda seen=before: running.task.progress().health is not seen, 150, "a look")  # type: ignore[misc]
        await_warnings(running)
        pg.execute("alter table away.items set schema public")
        await_warnings(running, "table_gap:public.items")


def test_a_publication_that_excludes_operations_is_reported_while_running(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute(f"create publication {SLOT} for table items with (publish = 'insert')")
    with capturing(pg.dsn, tmp_path / "log", **QUICK) as running:
        running.wait_for("streaming")
        await_warnings(running, "operations_left_out")
        pg.execute(warned(running)["operations_left_out"].split(" -- ")[0])
        await_warnings(running)


def test_a_gap_that_an_earlier_version_noted_by_name_is_reported(tmp_path: Path) -> None:
    log = new_log(tmp_path / "log")
    log.state_write("tasks/0/gaps.state", {"tables": [["public", "items", 1], ["public", "gone", 1]]})
    published = {17: ("public", "items"), 18: ("public", "other")}
    for _ in range(2):
        (found,) = CaptureGaps(log).look((18,), published, SnapshotPlans())
        assert found.key == "table_gap:public.items"
