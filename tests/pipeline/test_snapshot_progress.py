"""A snapshot's progress in a running engine, in the status without one, and on the display."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.format import Tail
from tailrace.cli.status import words
from tailrace.model import SourceFingerprint
from tailrace.pipeline.status.display import Pace, line
from tailrace.pipeline.status.views import (
    CaptureView,
    PipelineState,
    PipelineView,
    SourceView,
    TableView,
    tables_left,
)
from tailrace.sources.postgres.snapshot.control import SnapshotControl
from tailrace.sources.postgres.snapshot.plan import Origin, SnapshotPlan, SnapshotPlans, TableSnapshotPlan
from tailrace.sources.postgres.snapshot.state import PLANS
from tailrace.sources.progress import TableProgress

ORDERS = TableView("public.orders", 250_000, 1_000_000, 10, 2, 30.0)
WAITING = TableView("public.waiting", 0, 70, 0, 0, None)


def test_the_time_left_is_computed_from_the_pace_of_this_run() -> None:
    table = TableProgress(0, 0, done=False)
    table.plan(4, 1_000, chunks_done=1, rows=200)
    assert table.eta_s(0.0) is None
    table.add(100)
    assert table.eta_s(table.began_s + 2.0) == 14.0
    table.add(700, chunks=2)
    assert table.eta_s(table.began_s + 2.0) is None, (
        "the estimated number of rows came, but one chunk is left"
    )
    table.add(10, chunks=1)
    assert (table.done, table.eta_s(table.began_s + 3.0)) == (True, 0.0)


def test_the_rest_is_shown_table_by_table() -> None:
    task = replace(
        CaptureView.at_rest("0", Tail(100, 200, 300)), state="snapshot", snapshot=(WAITING, ORDERS)
    )
    view = PipelineView("shop", PipelineState.SNAPSHOT, (SourceView("", 0, task, ()),), None)
    document = view.as_json()
    assert document["tasks"][0]["snapshot"][1] == {
        "name": "public.orders", "rows": 250_000, "rows_estimated": 1_000_000, "chunks": 10,
        "chunks_done": 2, "eta_s": 30.0,
    }  # fmt: skip
    assert [text for text in words(document) if "snapshot of" in text] == [
        "    snapshot of public.waiting: 0 of about 70 rows",
        "    snapshot of public.orders: 250,000 of about 1,000,000 rows, 2 of 10 chunks done, about 30 s left",  # noqa: E501
    ]
    shown = line(view.state, view.sources[0], Pace())
    assert "snapshot of public.orders: 25 %, chunk 2 of 10, ETA 30 s" in shown
    assert shown.index("public.orders") < shown.index("public.waiting"), "tables under way come first"
    forged = replace(task, snapshot=(replace(ORDERS, name="public.x\n12:00:00 \x1b[2J"),))
    assert line(view.state, SourceView("", 0, forged, ()), Pace()).isprintable()


def test_without_an_engine_the_rest_is_read_from_the_agenda(tmp_path: Path) -> None:
    directory = LogDirectory.create_or_open(tmp_path, SourceFingerprint("postgresql", "1", "shop", "slot"))
    (tmp_path / "tasks" / "0").mkdir(parents=True)
    assert SnapshotControl(tmp_path).unfinished == {}
    tables = [
        TableSnapshotPlan(number, 100 + number, "public", f"t{number}", True, 500) for number in range(3)
    ]
    for table in tables[:2]:
        table.plan(2, whole=False, facts="", rows_estimated=500)
    tables[0].done, tables[1].done, tables[1].rows = {0, 1}, {1}, 240
    agenda = SnapshotPlans([SnapshotPlan("a", Origin.INITIAL, tables)])
    directory.state_write(PLANS, agenda.as_json())
    assert tables_left(SnapshotControl(tmp_path).unfinished, 0.0) == (
        TableView("public.t1", 240, 500, 2, 1, None),
        TableView("public.t2", 0, 500, 0, 0, None),
    )
