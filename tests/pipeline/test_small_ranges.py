"""Small ranges are written without Spark; large ones, and those that only Spark can write, with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from tests.support.postgres import Database

TIMEOUT_S = 240
#: With it Java can't be found.
NO_JAVA = {**os.environ, "PATH": "/nowhere", "JAVA_HOME": "/nowhere"}


def pipeline_file(directory: Path, pg: Database, sinks: str, start: str = "when_needed") -> Path:
    file = directory / "pipeline.yaml"
    file.write_text(
        f"name: {pg.name}\n"
        f"source: {{host: 127.0.0.1, port: {pg.port}, user: postgres, dbname: {pg.name}}}\n"
        f"log: {{path: ./log}}\nsinks: [{sinks}]\nspark: {{master: 'local[2]', start: {start}}}\n"
    )
    return file


def run(file: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", "run", str(file), *options],
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment,
    )  # fmt: skip


def notes(folder: Path) -> dict[int, str]:
    rows = DeltaTable(str(folder / "public.orders")).to_pyarrow_table().to_pylist()
    return {row["id"]: row["note"] for row in rows}


def changed(file: Path, pg: Database, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Bring a row into a mirror, then a change of it that only Spark can merge: its key is a date."""
    pg.execute("create table days (day date primary key, note text)")
    pg.execute("insert into days values ('2026-01-31', 'new')")
    first = run(file, environment, "--until-caught-up")
    assert first.returncode == 0, first.stderr
    pg.execute("update days set note = 'changed'")
    return run(file, environment, "--until-caught-up")


def texts_of_days(folder: Path) -> list[str]:
    texts: list[str] = DeltaTable(str(folder / "public.days")).to_pyarrow_table()["note"].to_pylist()
    return texts


ALL_FOLDERS = (
    "{type: jsonl, path: ./lines}, {type: parquet, path: ./files}, "
    "{type: delta, mode: append, path: ./history}, {type: delta, mode: mirror, path: ./mirror}"
)


def test_a_pipeline_without_a_backlog_needs_no_java(pg: Database, tmp_path: Path) -> None:
    file = pipeline_file(tmp_path, pg, ALL_FOLDERS)
    pg.execute("create table orders (id int primary key, note text)")
    pg.execute("insert into orders select n, 'new' from generate_series(1, 500) n")
    for change in (
        "select 1",
        "update orders set note = 'changed' where id <= 10",
        "delete from orders where id = 11",
    ):
        pg.execute(change)
        done = run(file, NO_JAVA, "--until-caught-up")
        assert done.returncode == 0, done.stderr
    assert notes(tmp_path / "mirror") == {
        n: "changed" if n <= 10 else "new" for n in range(1, 501) if n != 11
    }
    counts = {"r": 500, "u": 10, "d": 1}
    history = DeltaTable(str(tmp_path / "history" / "public.orders")).to_pyarrow_table()
    for rows in (history, ds.dataset(tmp_path / "files" / "public.orders").to_table()):
        assert {each["values"]: each["counts"] for each in rows["_op"].value_counts().to_pylist()} == counts
    lines = [
        json.loads(line)["op"]
        for path in (tmp_path / "lines" / "public.orders").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {op: lines.count(op) for op in counts} == counts


@pytest.mark.ci
def test_a_migration_of_many_columns_needs_no_spark_job_for_each_schema_version(
    pg: Database, tmp_path: Path
) -> None:
    file = pipeline_file(
        tmp_path,
        pg,
        "{type: delta, mode: append, path: ./history}, {type: delta, mode: mirror, path: ./mirror}",
    )
    tables = [f"t{number}" for number in range(4)]
    for table in tables:
        pg.execute(f"create table {table} (id int primary key); insert into {table} values (0)")
    assert run(file, NO_JAVA, "--until-caught-up").returncode == 0
    for number in range(1, 31):
        for table in tables:
            pg.execute(f"alter table {table} add column c{number} int default {number}")
            pg.execute(f"insert into {table} values ({number})")
    migrated = run(file, NO_JAVA, "--until-caught-up")
    assert migrated.returncode == 0, migrated.stderr
    for table in tables:
        delta = DeltaTable(str(tmp_path / "mirror" / f"public.{table}"))
        columns = ["id", *(f"c{number}" for number in range(1, 31))]
        rows = delta.to_pyarrow_table(columns=columns).to_pylist()
        assert sorted(tuple(row.values()) for row in rows) == pg.query(f"select * from {table} order by id")
        assert delta.version() < 30  # a commit or two for each range, not for each schema version
        assert DeltaTable(str(tmp_path / "history" / f"public.{table}")).to_pyarrow_table().num_rows == 31


@pytest.mark.slow
def test_spark_is_started_for_a_backlog_and_for_a_merge_that_only_it_can_do(
    pg: Database, tmp_path: Path
) -> None:
    file = pipeline_file(tmp_path, pg, "{type: delta, mode: mirror, path: ./mirror}")
    pg.execute("create table orders (id int primary key, note text)")
    pg.execute("insert into orders select n, repeat('x', 100) from generate_series(1, 120000) n")
    assert changed(file, pg, dict(os.environ)).returncode == 0
    assert texts_of_days(tmp_path / "mirror") == ["changed"]
    assert len(notes(tmp_path / "mirror")) == 120_000  # a range of several splits


def test_without_java_a_sink_that_needs_spark_fails_and_the_others_go_on(
    pg: Database, tmp_path: Path
) -> None:
    file = pipeline_file(tmp_path, pg, "{type: delta, mode: mirror, path: ./mirror, retry_attempts_max: 0}")
    done = changed(file, pg, NO_JAVA)
    assert done.returncode != 0
    assert "environment_unfit" in done.stderr
    assert texts_of_days(tmp_path / "mirror") == ["new"]


def test_a_backlog_without_java_is_an_error(pg: Database, tmp_path: Path) -> None:
    file = pipeline_file(tmp_path, pg, "{type: parquet, path: ./files, retry_attempts_max: 0}")
    pg.execute("create table orders (id int primary key, note text)")
    pg.execute("insert into orders select n, repeat('x', 100) from generate_series(1, 120000) n")
    done = run(file, NO_JAVA, "--until-caught-up")
    assert done.returncode != 0
    assert "environment_unfit" in done.stderr


def test_by_default_java_is_required_at_the_start(pg: Database, tmp_path: Path) -> None:
    file = pipeline_file(tmp_path, pg, "{type: parquet, path: ./files}", start="eager")
    done = run(file, NO_JAVA, "--until-caught-up")
    assert done.returncode != 0
    assert "environment_unfit" in done.stderr
