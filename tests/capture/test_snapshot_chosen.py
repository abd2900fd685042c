"""Which tables and rows the initial snapshot reads, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import Kind
from tests.support.capture.captured import capturing, run_to_end
from tests.support.capture.folded import fold, units
from tests.support.capture.resumed import RUN, SMALL, create_tables, life, until_whole
from tests.support.postgres import Database

pytestmark = pytest.mark.each_postgres("what COPY sends, and conditions")

#: As `RUN`, for some tables and rows.
CHOSEN = RUN.replace(
    "snapshot_connections=3,",
    "snapshot_connections=3, snapshot_tables=('public.pairs',), snapshot_where={'public.pairs': 'b > 1000'},",
)


def test_chosen_tables_are_read_in_order_and_all_are_streamed(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    chosen = ("public.parts", "public.p*", "public.empty")
    # One connection: with several, tables begin in this order but may end in another.
    with capturing(pg.dsn, log, snapshot_tables=chosen, **{**SMALL, "snapshot_connections": 1}) as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (77777, 1)")
        pg.execute("update pairs set n = n + 1 where b = 1")
        running.catch_up(pg.query, 60)
    tables = fold(log)
    assert tables["items"].ops == {"c": 1}
    assert tables["pairs"].ops == {"r": 2500, "u": 1}
    read = [name for unit in units(log) for name in unit["tables"]]
    order = list(dict.fromkeys(read))
    assert order[0] == "public.parts"
    assert set(order) == {"public.parts", "public.pairs", "public.plain", "public.empty"}


def test_conditions_by_table_choose_the_rows(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    where = {
        "public.items": "public.items.id > 1000 -- recent",
        "public.pl*": "id <= 10 or id = 11",
        "public.parts": "parts.id <= 7",  # by the root's name, whose partitions are read
    }
    with capturing(pg.dsn, log, snapshot_where=where, **SMALL) as running:
        running.wait_for("streaming")
        running.catch_up(pg.query, 60)
    tables = fold(log)
    assert tables["items"].ops == {"r": 2000}
    assert tables["plain"].ops == {"r": 11}
    assert tables["parts"].ops == {"r": 7}
    assert tables["pairs"].ops == {"r": 2500}


def test_a_condition_that_the_server_refuses_is_reported_before_anything_is_read(
    pg: Database, tmp_path: Path
) -> None:
    create_tables(pg)
    for table, where, named in (
        ("public.items", "no_such > 1", "no_such"),
        ("public.parts", "public.parts.id > 1", "parts"),  # its partitions have other names
    ):
        error = run_to_end(pg.dsn, tmp_path / "log", snapshot_where={table: where})
        assert error is not None
        assert error.kind is Kind.SNAPSHOT_FAILED
        assert table in error.message
        assert named in error.message
    # Corrected, it begins.
    until_whole(pg, tmp_path / "log")
    assert fold(tmp_path / "log")["items"].ops == {"r": 3000}


@pytest.mark.one_postgres
@pytest.mark.ci
def test_after_a_kill_the_snapshot_of_chosen_tables_continues(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    for point in (
        "snapshot.after_plan=kill@1",
        "snapshot.after_chunk=kill@3",
        "snapshot.before_finish=kill@1",
    ):
        assert life(pg, log, point, script=CHOSEN) in {-9, 0}, point
    assert life(pg, log, "", script=CHOSEN) == 0
    tables = fold(log)
    assert "items" not in tables or not tables["items"].ops
    assert tables["pairs"].ops == {"r": 1500}
