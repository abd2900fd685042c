"""Offsets that don't fit the log: refused, and the way out that the hint names."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tailrace import Engine
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.errors import Kind, TailraceError
from tests.support.capture.captured import capturing
from tests.support.postgres import Database
from tests.support.wait import wait_until


@pytest.mark.follows("offsets_foreign")
def test_offsets_of_another_log_are_refused_and_their_removal_helps(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table orders(id bigserial primary key)")
    given = settings(pg, tmp_path)
    assert delivered(pg, given, 2) == ["public.orders"] * 2
    given["log"]["path"] = str(tmp_path / "other")
    pg.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s", [pg.name]
    )
    error = refused(given)
    assert error.kind is Kind.OFFSETS_FOREIGN
    assert "of a file, also the one beside it that ends in .previous" in error.hint
    for path in (tmp_path / "offsets", tmp_path / "offsets.previous"):
        path.unlink()
    assert delivered(pg, given, 3)[-3:] == ["public.orders"] * 3


@pytest.mark.follows("log_range_gone")
def test_a_log_without_what_a_handler_needs_is_followed_by_a_new_one(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table orders(id bigserial primary key)")
    given = settings(pg, tmp_path)
    delivered(pg, given, 2)
    source = given["source"]
    for _ in range(3):
        pg.execute("insert into orders default values")
        with capturing(pg.dsn, tmp_path / "log", slot=source["slot"], publication="p") as running:
            running.catch_up(pg.query)
    apply(LogDirectory.open(tmp_path / "log"), "0", RetentionRules(size_bytes=1, on_slow_reader="drop"))
    error = refused(given)
    assert error.kind is Kind.LOG_RANGE_GONE
    assert (
        "begin a new log, with a new snapshot: set log.path to a new directory, drop the slot" in error.hint
    )
    given["log"]["path"] = str(tmp_path / "other")
    pg.execute("select pg_drop_replication_slot(%s)", [source["slot"]])
    assert "remove the offsets (of a file, also the one beside it that ends in .previous" in error.hint
    for path in (tmp_path / "offsets", tmp_path / "offsets.previous"):
        path.unlink()
    assert "or set log.retention.on_slow_reader to hold" in error.hint
    given["log"]["retention"] = {"size_bytes": 1 << 20, "on_slow_reader": "hold"}
    ids: list[int] = []
    rows = [row[0] for row in pg.query("select id from orders")]
    with Engine(given, on_record=lambda record: ids.append(record.after["id"])):
        wait_until(lambda: len(ids) >= len(rows), 60, "the rows")
    assert sorted(ids) == rows


def settings(pg: Database, tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "shop",
        "source": {
            "type": "postgresql",
            "dsn": pg.dsn,
            "tables": ["public.*"],
            "slot": f"s_{pg.name}",
            "publication": "p",
        },
        "log": {"path": str(tmp_path / "log")},
        "engine": {
            "offset_storage": {"type": "file", "path": str(tmp_path / "offsets")},
            "offset_commit": {"policy": "always"},
        },
    }


def refused(given: dict[str, Any]) -> TailraceError:
    """Return why an engine fails."""
    with pytest.raises(TailraceError) as raised:
        Engine(given, on_record=lambda _: None).run()
    return raised.value


def delivered(pg: Database, given: dict[str, Any], rows: int) -> list[str]:
    """Insert rows, each once the offset of the one before is stored; return the topics of what came."""
    topics: list[str] = []

    def came(engine: Engine, enough: int) -> bool:
        tasks = engine.view().tasks
        return topics.count("public.orders") >= enough and all(
            task.committed == task.processed == task.polled for task in tasks
        )

    with Engine(given, on_record=lambda record: topics.append(record.topic)) as engine:
        for number in range(rows):
            pg.execute("insert into orders default values")
            # The offsets of all records so far are stored; only then the next row is inserted.
            arrived = functools.partial(came, engine, number + 1)
            wait_until(arrived, 60, "the row and its offset")
    return topics
