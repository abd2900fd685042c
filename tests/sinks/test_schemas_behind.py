"""Mirrors of tables whose schema changed several times before the capture could read any of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace.errors import Kind, TailraceError
from tests.support.postgres import Database
from tests.support.sinks.ddl_story import Cut, Nearby, Scene, make, ordered, write

TABLES = ("public.t",)


@pytest.fixture
def scene(pg: Database, tmp_path: Path) -> Iterator[Scene]:
    found = Scene(pg, tmp_path)
    yield found
    found.stop()


def changed_while_stopped(scene: Scene, *changes: str) -> tuple[Cut, Cut]:
    """Change the table while no capture runs, inserting a row after each change."""
    scene.run("create table t(id int primary key, a text)", "insert into t values (1, 'one'), (2, 'two')")
    scene.start()
    begun = scene.cut([])
    scene.stop()
    scene.run("update t set a = 'first' where id = 1")
    for row, change in enumerate(changes, 10):
        scene.run(change, f"insert into t(id) values ({row})")
    scene.start()
    return begun, scene.cut(["t"])


def test_a_column_that_takes_over_another_ones_name_keeps_its_own_values(scene: Scene, spark: Any) -> None:
    begun, done = changed_while_stopped(
        scene, "alter table t rename a to old; alter table t add a text default 'new'"
    )
    sink = make("mirror", scene.path / "lake", TABLES)
    write(sink, scene.path / "log", begun.offset)
    write(sink, scene.path / "log", done.offset, Nearby(spark))
    rows = DeltaTable(str(scene.path / "lake" / "public.t")).to_pyarrow_table().select(done.columns["t"])
    assert ordered([tuple(row.values()) for row in rows.to_pylist()]) == done.rows["t"]


@pytest.mark.parametrize(
    ("column", "changes"),
    [
        ("y", ["alter table t add x text default 'x'", "alter table t drop x, add y text"]),
        (
            "c",
            [
                "alter table t drop a, add b text; insert into t values (3, 'b')",
                "alter table t rename b to c",
            ],
        ),
        ("a", ["alter table t drop a, add a text; insert into t values (3, 'a')"]),
    ],
)
def test_a_mirror_stops_if_it_cannot_tell_which_column_was_sent(
    scene: Scene, column: str, changes: list[str]
) -> None:
    begun, done = changed_while_stopped(scene, *changes)
    sink = make("mirror", scene.path / "lake", TABLES)
    write(sink, scene.path / "log", begun.offset)
    with pytest.raises(TailraceError) as raised:
        write(sink, scene.path / "log", done.offset)
    assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert raised.value.context["column"] == column
    assert "tailrace snapshot FILE --table public.t" in raised.value.hint
