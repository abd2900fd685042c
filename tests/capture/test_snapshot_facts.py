"""What a snapshot beside the stream records about its tables in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace import failpoints
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tailrace.sources.postgres.snapshot.state import SnapshotState
from tailrace.sources.postgres.snapshot.watermark import StreamEnded
from tests.support.capture.captured import SLOT, capturing, read_log
from tests.support.capture.folded import fold
from tests.support.capture.requested import await_end, request
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("what the catalogue says of tables that go")


def test_a_table_counts_as_read_completely_if_its_missing_partition_was_dropped(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.execute("create table parts(id int primary key) partition by range (id)")
    pg.execute("create table a partition of parts for values from (0) to (100)")
    pg.execute("create table b partition of parts for values from (100) to (200)")
    pg.execute("insert into parts select generate_series(1, 199)")
    pg.execute(f"create publication {SLOT} for table parts with (publish_via_partition_root)")
    windows: list[str] = []

    def hit(name: str) -> None:
        if name == "snapshot.after_window":
            windows.append(name)
            if len(windows) == 1:
                pg.execute("drop table b")

    log = tmp_path / "log"
    with capturing(pg.dsn, log, snapshot_connections=1, tables=("public.parts",)) as running:
        running.wait_for("streaming")
        monkeypatch.setattr(failpoints, "hit", hit)
        assert await_end(running, log, request(log, "public.parts")).outcome is SnapshotOutcome.DONE
        running.catch_up(pg.query)
    assert len(windows) == 2
    *_, last = read_log(log).facts
    assert last["read_from"] > 0
    assert fold(log)["parts"].ops["r"] == 199 + 2 * 99


def test_a_partition_detached_and_attached_again_is_read(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.execute("create table parts(id int primary key) partition by range (id)")
    for n in range(4):
        pg.execute(f"create table p{n} partition of parts for values from ({n}00) to ({n + 1}00)")
    pg.execute(f"create publication {SLOT} for table parts with (publish_via_partition_root)")
    windows: list[str] = []

    def hit(name: str) -> None:
        if name == "snapshot.before_window":
            windows.append(name)
            if len(windows) == 2:
                pg.execute("alter table parts detach partition p2")
            if len(windows) == 3:
                pg.execute("alter table parts attach partition p2 for values from (200) to (300)")

    log = tmp_path / "log"
    with capturing(pg.dsn, log, snapshot_connections=1, tables=("public.parts",)) as running:
        running.wait_for("streaming")
        pg.execute("insert into parts select generate_series(0, 399)")
        running.catch_up(pg.query)
        monkeypatch.setattr(failpoints, "hit", hit)
        assert await_end(running, log, request(log, "public.parts")).outcome is SnapshotOutcome.DONE
    assert set(read_log(log).snapshot) == set(range(400))


def test_a_partition_attached_just_before_a_kill_is_read(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.execute("create table parts(id int primary key) partition by range (id)")
    for n in range(2):
        pg.execute(f"create table p{n} partition of parts for values from ({n}00) to ({n + 1}00)")
    pg.execute("create table p2(id int primary key)")
    pg.execute("insert into p2 select generate_series(200, 299)")
    pg.execute(f"create publication {SLOT} for table parts with (publish_via_partition_root)")
    keep_plan = SnapshotState.keep_plan
    cut: list[int] = []

    def keep(self: SnapshotState, *plan: Any) -> None:
        keep_plan(self, *plan)
        if len(plan[3]) == 3 and not cut:
            cut.append(1)
            raise StreamEnded  # the thread ends before the plans are written

    def hit(name: str) -> None:
        if name == "snapshot.after_window" and pg.query("select 1 from pg_inherits having count(*) < 5"):
            monkeypatch.setattr(failpoints, "hit", lambda _: None)
            pg.execute("alter table parts attach partition p2 for values from (200) to (300)")

    log = tmp_path / "log"
    options: dict[str, Any] = {"snapshot_connections": 1, "tables": ("public.parts",)}
    with capturing(pg.dsn, log, **options) as running:
        running.wait_for("streaming")
        monkeypatch.setattr(SnapshotState, "keep_plan", keep)
        monkeypatch.setattr(failpoints, "hit", hit)
        asked = request(log, "public.parts")
        wait_until(lambda: bool(cut), 30, "the cut")
    with capturing(pg.dsn, log, **options) as running:
        running.wait_for("streaming")
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
    assert set(read_log(log).snapshot) == set(range(200, 300))


def test_the_facts_of_a_table_with_anothers_former_name_tell_what_became_of_the_other(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table t(id int primary key); insert into t values (1)")
    pg.execute("create table gone(id int primary key); insert into gone values (1)")
    log = tmp_path / "log"
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
        pg.execute("alter table t rename to old_t; drop table gone")
        pg.execute("create table t(id int primary key); insert into t values (2)")
        pg.execute("create table gone(id int primary key); insert into gone values (2)")
        pg.execute(f"alter publication {SLOT} add table t, gone")
        assert (
            await_end(running, log, request(log, "public.t", "public.gone")).outcome is SnapshotOutcome.DONE
        )
    facts = {each["table"]: each for each in read_log(log).facts}
    assert facts["t"]["replaced_name"] == ["public", "old_t"]
    assert facts["gone"]["replaced"] > 0
    assert "replaced_name" not in facts["gone"]
