"""The command, with tables that are altered between its runs and while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable

from tests.support.postgres import Database

#: For a busy machine.
TIMEOUT_S = 240


def tailrace(*arguments: Any, check: int = 0) -> str:
    command = [sys.executable, "-m", "tailrace", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == check, done.stdout + done.stderr
    return done.stdout


def write_file(directory: Path, pg: Database, **more: Any) -> Path:
    file = directory / "pipeline.yaml"
    host, port = "127.0.0.1", pg.port
    source = {"host": host, "port": port, "user": "postgres", "dbname": pg.name}
    sinks = [
        {"name": "lines", "type": "jsonl", "path": "./lines"},
        {"name": "files", "type": "parquet", "path": "./files"},
        {"name": "history", "type": "delta", "path": "./history", **more},
        {"name": "mirror", "type": "delta", "mode": "mirror", "path": "./mirror", **more},
    ]
    settings = {"name": pg.name, "source": source, "log": {"path": "./log"}, "sinks": sinks}
    # So few rows need no Spark, which would start in each run.
    file.write_text(yaml.safe_dump({**settings, "spark": {"master": "local[2]", "start": "when_needed"}}))
    return file


def rows_of(folder: Path) -> list[dict[str, Any]]:
    table = DeltaTable(str(folder)).to_pyarrow_table()
    if "_position" in table.column_names:
        table = table.drop_columns(["_position"])
    return sorted(table.to_pylist(), key=lambda row: (row.get("_log_offset", 0), row["id"]))


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_schema_change_stops_only_the_sinks_that_cannot_follow_it_until_the_user_chooses(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table orders (id int primary key, what text, n int)")
    pg.execute("create table others (id int primary key, what text)")
    pg.execute("insert into orders select g, g::text, g from generate_series(1, 5) g")
    pg.execute("insert into others select g, 'x' from generate_series(1, 5) g")
    file = write_file(tmp_path, pg)
    tailrace("run", file, "--until-caught-up")

    # Altered while nothing runs, several times, in a transaction and between others.
    pg.execute("update orders set n = 10 where id = 1")
    pg.execute("alter table orders add more text default 'given'")
    pg.execute("begin; update orders set n = 20 where id = 2; alter table orders rename n to number; commit")
    pg.execute("insert into orders values (6, '6', 6, 'own')")
    pg.execute("insert into others values (6, 'x')")
    tailrace("run", file, "--until-caught-up")
    expected = [(1, "1", 10), (2, "2", 20), (3, "3", 3), (4, "4", 4), (5, "5", 5), (6, "6", 6)]
    assert rows_of(tmp_path / "mirror" / "public.orders") == [
        {"id": id_, "what": what, "number": n, "more": "own" if id_ == 6 else "given"}
        for id_, what, n in expected
    ]
    assert len(rows_of(tmp_path / "mirror" / "public.others")) == 6

    # Changes that files accept, but no mirror and no column of a history.
    pg.execute("alter table orders alter what type int using length(what)")
    pg.execute("insert into orders values (7, 7, 7, 'own')")
    pg.execute("update others set what = 'y' where id = 6")
    tailrace("run", file, "--until-caught-up", check=1)
    found = {sink["name"]: sink for sink in json.loads(tailrace("status", file, "--json"))["sinks"]}
    assert {name: (sink["state"], sink["lag_bytes"] == 0) for name, sink in found.items()} == {
        "lines": ("stopped", True),
        "files": ("stopped", True),
        "history": ("failed", False),
        "mirror": ("failed", False),
    }
    for name in ("history", "mirror"):
        error = found[name]["error"]
        assert error["kind"] == "sink_schema_refused"
        assert "'what'" in error["message"]
        assert "on_type_change: follow" in error["hint"]
    lines = [
        json.loads(line)
        for path in (tmp_path / "lines/public.orders").iterdir()
        for line in path.read_text("utf-8").split("\n")[:-1]
    ]
    assert 7 in {line["after"]["what"] for line in lines}
    files = [pq.read_schema(path).field("what").type for path in (tmp_path / "files/public.orders").iterdir()]
    assert {str(kind) for kind in files} == {"string", "int32"}

    # The choice is made, and the rows that PostgreSQL did not send are updated.
    write_file(tmp_path, pg, on_type_change="follow")
    pg.execute("update orders set what = what")
    tailrace("run", file, "--until-caught-up")
    selected = pg.query("select id, what, number, more from orders order by id")
    assert [tuple(row.values()) for row in rows_of(tmp_path / "mirror" / "public.orders")] == selected
    history = rows_of(tmp_path / "history" / "public.orders")
    assert [row["what"] for row in history if row["id"] == 7] == ["7", "7"]
    assert [row["what"] for row in history if row["id"] == 2] == ["2", "2", "1"]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_renamed_table_is_read_again_while_its_only_sink_is_stopped(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table orders (id int primary key, what text)")
    pg.execute("insert into orders select g, g::text from generate_series(1, 5) g")
    file = write_file(tmp_path, pg)
    settings = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**settings, "sinks": settings["sinks"][-1:]}))
    tailrace("run", file, "--until-caught-up")
    pg.execute("alter table orders rename to bills")
    pg.execute("update bills set what = 'renamed' where id = 1")
    tailrace("run", file, "--until-caught-up", check=1)
    error = json.loads(tailrace("status", file, "--json"))["sinks"][0]["error"]
    assert "`tailrace snapshot FILE --table public.bills`" in error["hint"]
    tailrace("snapshot", file, "--table", "public.bills")
    tailrace("run", file, check=1)  # the sink stops at once, and the run ends once the snapshot is taken
    listed = json.loads(tailrace("snapshot", file, "--list", "--json"))["snapshots"]
    assert [each["state"] for each in listed if each["origin"] != "initial"] == ["done"]
    tailrace("run", file, "--until-caught-up")
    rows = [tuple(row.values()) for row in rows_of(tmp_path / "mirror" / "public.bills")]
    assert rows == pg.query("select id, what from bills order by id")
