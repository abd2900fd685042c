"""Offsets that don't fit the log are refused, and following the hint helps."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tailrace import Engine
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.cli.main import app
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.offsets.commands import chosen_holder
from tests.support.capture.captured import capturing
from tests.support.orders_log import LogOfOrders
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
def test_a_log_that_lacks_what_a_handler_needs_is_replaced_by_a_new_one(pg: Database, tmp_path: Path) -> None:
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


class Offset:
    """A fake offset of a sink or an engine."""

    def __init__(self, role: str, name: str) -> None:
        self.role, self.name, self.given = role, name, [0]

    def places(self) -> list[Any]:
        return []

    def put(self, tasks: tuple[str, ...], log_id: str, log_offset: int | None) -> None:
        self.given.append(log_offset or 0)


@pytest.mark.follows("log_range_gone")
@pytest.mark.parametrize(("role", "source"), [("sink", ""), ("engine", ""), ("sink", "eu")])
def test_after_a_reset_of_an_offset_the_hint_sets_it_to_the_logs_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, source: str
) -> None:
    server = "type: postgresql, host: 127.0.0.1, port: 1, dbname: shop, user: nobody"
    named = f"sources: [{{name: {source}, {server}}}]" if source else f"source: {{{server}}}"
    sinks = [f"{{type: kafka, name: {name}, group: {name}, bootstrap_servers: k}}" for name in ("a", "out")]
    storage = "offset_storage: {type: kafka, bootstrap_servers: k}"
    file = tmp_path / "shop.yaml"
    file.write_text(
        f"name: shop\n{named}\nlog: {{path: ./log}}\nsinks: [{', '.join(sinks)}]\nengine: {{{storage}}}\n"
    )
    log = LogOfOrders(tmp_path / "log" / source, segment_bytes=1 << 16)
    while len(log.directory.segments("0")) < 3:
        log.insert(*range(500))
    apply(log.directory, "0", RetentionRules(size_bytes=1))
    log.close()
    offset = Offset(role, "out" if role == "sink" else "shop")

    def chosen(loaded: Any, pipeline: Any, sink: str | None, engine: bool) -> Offset:
        found = chosen_holder(loaded, pipeline, sink, engine)
        assert (found.role, found.name) == (offset.role, offset.name)
        return offset

    monkeypatch.setattr("tailrace.pipeline.offsets.commands.chosen_holder", chosen)

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["offsets", *words, "--yes"])
        assert done.exit_code == 0, done.output
        return done.output

    mine = ["--engine"] if role == "engine" else ["--sink", "out"]
    told = run("reset", str(file), *mine, *(["--source", source] if source else []))
    command = re.search(r"`tailrace offsets (.+?)` lets it begin there", " ".join(told.split()))
    assert command is not None, told
    run(*[str(file) if word == "FILE" else word for word in command[1].split()])
    assert offset.given == [0, 0, log.directory.segments("0")[0]]
    assert offset.given[-1] > 0


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
    """Return the error with which an engine fails."""
    with pytest.raises(TailraceError) as raised:
        Engine(given, on_record=lambda _: None).run()
    return raised.value


def delivered(pg: Database, given: dict[str, Any], rows: int) -> list[str]:
    """Insert rows, each once the offset of the one before is stored; return the delivered topics."""
    topics: list[str] = []

    def came(engine: Engine, enough: int) -> bool:
        tasks = engine.view().tasks
        return topics.count("public.orders") >= enough and all(
            task.committed == task.processed == task.polled for task in tasks
        )

    with Engine(given, on_record=lambda record: topics.append(record.topic)) as engine:
        for number in range(rows):
            pg.execute("insert into orders default values")
            # The offsets of all records so far are stored before the next row is inserted.
            arrived = functools.partial(came, engine, number + 1)
            wait_until(arrived, 60, "the row and its offset")
    return topics
