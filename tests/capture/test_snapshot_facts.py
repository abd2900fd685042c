"""What a snapshot beside the stream says of its tables in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tests.support.capture.captured import SLOT, capturing, read_log
from tests.support.capture.folded import fold
from tests.support.capture.requested import await_end, request
from tests.support.postgres import Database

pytestmark = pytest.mark.each_postgres("what the catalogue says of tables that go")


def test_all_of_a_table_was_read_also_when_the_partition_that_was_missing_went(
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


def test_a_table_that_a_snapshot_finds_under_anothers_name_says_what_became_of_that(
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
