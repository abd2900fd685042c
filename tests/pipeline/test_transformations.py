"""`tailrace run` with transformations: each sink has the values that PostgreSQL computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from tailrace.pipeline.preflight.preflight import preflight
from tests.support.postgres import Database

TIMEOUT_S = 240
#: With it Java can't be found: small ranges need none.
NO_JAVA = {**os.environ, "PATH": "/nowhere", "JAVA_HOME": "/nowhere"}
ALL_FOLDERS = (
    "{type: jsonl, path: ./lines}, {type: parquet, path: ./files}, "
    "{type: delta, mode: append, path: ./history}, {type: delta, mode: mirror, path: ./mirror}"
)

STEPS = """\
predicates: {of_orders: {type: table, tables: [public.orders]}}
transformations:
  - {type: rename, fields: {note: remark}, predicate: of_orders}
  - type: add_fields
    predicate: of_orders
    static: {region: eu}
    computed: {total: "after.price * after.qty"}
  - {type: mask, fields: [mail], value: hidden}
  - {type: cast, fields: {qty: text}, predicate: of_orders}
  - {type: drop_fields, fields: [secret]}
"""
EXPECTED = "select id, qty::text, price, note, 'hidden', 'eu', price * qty from orders order by id"
NAMES = ("id", "qty", "price", "remark", "mail", "region", "total")


def pipeline_file(directory: Path, pg: Database, sinks: str, beside: str) -> Path:
    file = directory / "pipeline.yaml"
    file.write_text(
        f"{beside}name: {pg.name}\n"
        f"source: {{host: 127.0.0.1, port: {pg.port}, user: postgres, dbname: {pg.name}}}\n"
        f"log: {{path: ./log}}\nsinks: [{sinks}]\nspark: {{start: when_needed}}\n"
    )
    return file


def run(file: Path, environment: dict[str, str] = NO_JAVA) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", "run", str(file), "--until-caught-up"],
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment,
    )  # fmt: skip


def values(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in NAMES)


def latest(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The last row of each key of a history, without deleted ones, by key."""
    last = {row["id"]: row for row in sorted(rows, key=lambda row: row["_log_offset"])}
    return [values(last[key]) for key in sorted(last) if last[key]["_op"] != "d"]


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [
        {
            **(line["after"] or line["before"]),
            "_op": line["op"],
            "_log_offset": line["position"]["log_offset"],
        }
        for line in found
    ]


def test_every_sink_has_what_postgresql_computes(pg: Database, tmp_path: Path) -> None:
    file = pipeline_file(tmp_path, pg, ALL_FOLDERS, STEPS)
    pg.execute(
        "create table orders (id int primary key, qty int, price numeric(10, 2), note text, mail text, "
        "secret text)"
    )
    pg.execute(
        "insert into orders select n, n % 7, n / 4.0, 'note ' || n, n || '@example.org', 's' "
        "from generate_series(1, 300) n"
    )
    for change in (
        "select 1",
        "update orders set qty = qty + 10, note = 'changed' where id % 5 = 0",
        "delete from orders where id % 9 = 0",
    ):
        pg.execute(change)
        done = run(file)
        assert done.returncode == 0, done.stderr
    expected = [tuple(map(str, row)) for row in pg.query(EXPECTED)]
    assert len(expected) == 267
    history = DeltaTable(str(tmp_path / "history" / "public.orders")).to_pyarrow_table()
    files = ds.dataset(tmp_path / "files" / "public.orders").to_table()
    mirror = DeltaTable(str(tmp_path / "mirror" / "public.orders")).to_pyarrow_table().sort_by("id")
    for table in (history, files, mirror):
        assert "secret" not in table.column_names
        assert "note" not in table.column_names
    assert latest(history.to_pylist()) == expected
    assert latest(files.to_pylist()) == expected
    assert [values(row) for row in mirror.to_pylist()] == expected
    found = latest(lines(tmp_path / "lines" / "public.orders"))
    assert [row[:2] + row[3:6] for row in found] == [row[:2] + row[3:6] for row in expected]
    assert pa.types.is_decimal(mirror.schema.field("total").type)


@pytest.mark.slow
def test_spark_computes_a_large_range_although_the_database_for_expressions_is_open_when_it_starts(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table orders (id int primary key, qty int, price numeric(10, 2), note text)")
    pg.execute(
        "insert into orders select n, n % 7, n / 4.0, repeat('x', 200) from generate_series(1, 200000) n"
    )
    steps = 'transformations: [{type: add_fields, computed: {total: "after.price * after.qty"}}]\n'
    file = pipeline_file(tmp_path, pg, "{type: delta, mode: mirror, path: ./mirror}", steps)
    assert run(file).returncode != 0, "it needs no Spark"
    done = run(file, dict(os.environ))
    assert done.returncode == 0, done.stderr
    mirror = DeltaTable(str(tmp_path / "mirror" / "public.orders")).to_pyarrow_table(columns=["id", "total"])
    ((rows, total),) = pg.query("select count(*), sum(price * qty) from orders")
    assert (mirror.num_rows, pc.sum(mirror["total"]).as_py()) == (rows, total)


def test_a_transformation_that_would_lose_a_mirrors_key_is_refused_before_anything_is_written(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table orders (id int primary key, note text)")
    steps = "transformations: [{type: drop_fields, fields: [id]}]\n"
    file = pipeline_file(tmp_path, pg, "{type: delta, mode: mirror, path: ./mirror}", steps)
    (found,) = [each for each in preflight(file) if "a mirror's table" in each.message]
    assert found.table == "public.orders"
    assert "'id'" in found.message
    assert "mode: append" in found.repair


@pytest.mark.parametrize("mode", ["append", "mirror"])
def test_check_reports_a_missing_salt(mode: str, pg: Database, tmp_path: Path) -> None:
    step = "{type: mask, fields: [note], method: hash, salt: '${env:TAILRACE_NO_SUCH}'}"
    sink = f"{{type: delta, mode: {mode}, path: ./lake}}"
    file = pipeline_file(tmp_path, pg, sink, f"transformations: [{step}]\n")
    (found,) = [each for each in preflight(file) if each.kind == "secret_missing"]
    assert "TAILRACE_NO_SUCH" in found.message
