"""Hints of errors about data in sinks: each is done as it is printed, and the sink compared with the source.

Names, SQL, settings and commands are taken out of the printed text.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltalake import DeltaTable
from typer.testing import CliRunner

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.prune import apply
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention import RetentionRules
from tailrace.cli.main import app
from tailrace.config import PipelineConfig, load
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.build import build
from tailrace.sources.postgres.slot.recovery_hints import with_way_out
from tailrace.sources.postgres.snapshot.plan import SnapshotPlans
from tailrace.sources.postgres.snapshot.requests import waiting
from tailrace.sources.postgres.snapshot.state import agenda_name
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tests.support.capture.captured import Running
from tests.support.postgres import Database
from tests.support.sinks.ddl_story import Nearby, selected, write
from tests.support.sinks.mirrored import mirrored
from tests.support.wait import wait_until

pytestmark = pytest.mark.any_postgres("what is followed are hints about the log and sinks")


class Shop:
    """A pipeline file, a database, and what a person does who reads a hint."""

    def __init__(self, pg: Database, spark: Any, root: Path) -> None:
        self.pg, self.root = pg, root
        self._spark = spark
        self.file = root / "shop.yaml"
        self.source: dict[str, Any] = {
            "host": "127.0.0.1", "port": pg.port, "user": "postgres", "dbname": pg.name,
            "reconnect_delay_s": 0.05, "status_interval_s": 1.0,
        }  # fmt: skip
        self.log: dict[str, Any] = {"path": "./log"}
        self.sink: dict[str, Any] = {"name": "lake", "type": "delta", "mode": "mirror", "path": "./lake"}

    @property
    def lake(self) -> Path:
        return self.root / self.sink["path"]

    def config(self) -> PipelineConfig:
        sections = {"name": "shop", "source": self.source, "log": self.log, "sinks": [self.sink]}
        self.file.write_text(yaml.safe_dump(sections))
        return load(self.file)

    def capture(self) -> None:
        """Capture until all that is committed, and every snapshot that was asked for, is in the log."""
        config = self.config()
        task = CaptureTask(config.source, config.log.path, config.log, name=config.name)
        running = Running(task)
        try:
            wait_until(lambda: running.is_over or task.progress().phase == "streaming", 60, "streaming")
            wait_until(lambda: running.is_over or self._is_whole(config.log.path), 60, "the snapshots")
            if not running.is_over:
                running.catch_up(self.pg.query)
        finally:
            task.stop()
            running.join()
        if running.error is not None:
            raise running.error

    def feed(self) -> None:
        """Bring the sink to the log's end."""
        config = self.config()
        with LogReader.open(config.log.path, "0") as reader:
            end = reader.end().offset
        (given,) = config.sinks
        sink = build(given, config.source.disclosure, config.source.value_modes, config.log.path)
        write(sink, config.log.path, end, Nearby(self._spark))

    def run(self) -> None:
        self.capture()
        self.feed()

    def refused(self, kind: Kind) -> TailraceError:
        """Run, and return the error that stops it."""
        with pytest.raises(TailraceError) as raised:
            self.run()
        assert raised.value.kind is kind, raised.value
        return raised.value

    def command(self, words: str) -> None:
        """Run a command that was printed."""
        program, *arguments = [str(self.file) if word == "FILE" else word for word in shlex.split(words)]
        assert program == "tailrace"
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output

    def begin_with_a_new_log(self) -> None:
        """As hints say: a new log, with a new snapshot, and an empty path for the sink."""
        for section, name in ((self.log, "log"), (self.sink, "lake")):
            section["path"] = f"./new {name}"
        slot = self.config().source.slot
        self.pg.execute("select pg_drop_replication_slot(%s)", [slot])

    def require_equal(self, *tables: str) -> None:
        for table in tables:
            assert mirrored(self.lake, f"public.{table}") == selected(self.pg, table), table

    def _is_whole(self, path: Path) -> bool:
        log = LogDirectory.open(path)
        content = log.state_read(agenda_name("0"))
        agenda = None if content is None else SnapshotPlans.from_json(content)
        return not waiting(log, "0") and (agenda is None or not agenda.open)


@pytest.fixture
def shop(pg: Database, spark: Any, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(pg, spark, tmp_path)
    yield made
    for row in pg.query("select slot_name from pg_replication_slots where database = %s", [pg.name]):
        pg.execute("select pg_drop_replication_slot(%s)", list(row))


def setting_in(hint: str) -> dict[str, str]:
    """Return the sink's setting that a hint names."""
    found = re.search(r"`(\w+): (\w+)` for the sink", hint)
    assert found is not None, hint
    return {found[1]: found[2]}


# ---------------------------------------------------------------------- tables without a key


def keyless(shop: Shop) -> str:
    """Have a mirror stop at a table without a key; return the hint."""
    shop.pg.execute("create table visits(host text, n int)")
    shop.pg.execute("create table items(id int primary key, n int)")
    shop.pg.execute("insert into visits values ('a', 1), ('a', 1), ('b', 2)")
    shop.pg.execute("insert into items values (1, 1)")
    shop.source["tables"] = ["public.visits", "public.items"]
    error = shop.refused(Kind.SINK_KEY_MISSING)
    shop.pg.execute("insert into visits values ('c', 3)")
    return error.hint


def test_a_table_that_is_given_a_key_is_mirrored_by_it(shop: Shop) -> None:
    hint = keyless(shop)
    found = re.search(r"\((ALTER TABLE \S+ ADD PRIMARY KEY) …\)", hint)
    assert found is not None
    shop.pg.execute("create table twice as select distinct * from visits; truncate visits")
    shop.pg.execute("insert into visits select * from twice; drop table twice")
    shop.pg.execute(f"{found[1]} (host)")
    assert "begin with a new log, a new snapshot and an empty path" in hint
    shop.begin_with_a_new_log()
    shop.run()
    shop.pg.execute("update visits set n = 4 where host = 'c'")
    shop.run()
    shop.require_equal("visits", "items")


def test_a_table_is_mirrored_by_columns_that_tell_its_rows_apart(shop: Shop) -> None:
    hint = keyless(shop)
    shop.pg.execute("truncate visits; insert into visits values ('a', 1), ('b', 2)")
    found = re.search(r"name columns that tell its rows apart in source\.(\w+), and start again", hint)
    assert found is not None
    shop.source[found[1]] = {"public.visits": ["host"]}
    shop.run()
    shop.require_equal("visits", "items")


def test_a_table_is_mirrored_by_whole_rows(shop: Shop) -> None:
    hint = keyless(shop)
    found = re.search(r"\((ALTER TABLE \S+ REPLICA IDENTITY FULL), and", hint)
    assert found is not None
    shop.pg.execute(found[1])
    shop.sink |= setting_in(hint)
    shop.pg.execute("update visits set n = 4 where host = 'c'")
    shop.pg.execute("delete from visits where ctid = (select min(ctid) from visits where host = 'a')")
    shop.run()
    shop.require_equal("visits", "items")


def test_a_table_without_a_key_is_left_out(shop: Shop) -> None:
    hint = keyless(shop)
    assert "leave it out of the sink's `tables`" in hint
    shop.sink["tables"] = ["public.items"]
    shop.run()
    shop.require_equal("items")


# ---------------------------------------------------------------------- changes of schema


ALTERED = {
    "rewritten": "alter table items alter what type int using length(what)",
    "values of their own": "alter table items add more float8 default random()",
}


def altered(shop: Shop, case: str) -> str:
    """Have a mirror stop at a change that it can't follow; return the hint."""
    shop.pg.execute("create table items(id int primary key, what text)")
    shop.pg.execute("create table others(id int primary key)")
    shop.pg.execute("insert into items select n, repeat('x', n) from generate_series(1, 5) n")
    shop.run()
    shop.pg.execute(ALTERED[case])
    shop.pg.execute("insert into items(id) values (6)")
    shop.pg.execute("insert into others values (1)")
    hint = shop.refused(Kind.SINK_SCHEMA_REFUSED).hint
    shop.pg.execute("delete from items where id = 2")
    return hint


@pytest.mark.parametrize("case", ALTERED)
def test_a_mirror_follows_as_far_as_it_can_and_then_reads_again(shop: Shop, case: str) -> None:
    hint = altered(shop, case)
    shop.sink |= setting_in(hint)
    shop.run()
    found = re.search(r"`(tailrace snapshot .*?)`", hint)
    assert found is not None
    shop.command(found[1])
    shop.run()
    shop.require_equal("items", "others")


@pytest.mark.parametrize("case", ALTERED)
def test_a_mirror_that_can_not_follow_begins_with_a_new_log(shop: Shop, case: str) -> None:
    hint = altered(shop, case)
    assert "begin with a new log, a new snapshot and an empty path" in hint
    shop.begin_with_a_new_log()
    shop.run()
    shop.require_equal("items", "others")


def test_a_table_that_can_not_be_followed_is_left_out(shop: Shop) -> None:
    hint = altered(shop, "rewritten")
    assert "leave the table out of the sink's `tables`" in hint
    shop.sink["tables"] = ["public.others"]
    shop.run()
    shop.require_equal("others")


# ---------------------------------------------------------------------- settings that were changed

SALT = "0123456789abcdef"

#: Settings of the source before and after, each of which stops a mirror of `public.people`.
CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask": (
        {"masks": [{"columns": ["public.people.note"], "method": "truncate", "length": 2}]},
        {"masks": [{"columns": ["public.people.note"], "method": "fixed"}]},
    ),
    "salt": (
        {"masks": [{"columns": ["public.people.note"], "method": "hash", "salt": "${env:SALT_BEFORE}"}]},
        {"masks": [{"columns": ["public.people.note"], "method": "hash", "salt": "${env:SALT_AFTER}"}]},
    ),
    "mask taken away": ({"masks": [{"columns": ["public.people.note"], "method": "fixed"}]}, {"masks": []}),
    "key": ({"message_keys": {}}, {"message_keys": {"public.people": ["note"]}}),
    "handling mode": ({"time_precision_mode": "adaptive"}, {"time_precision_mode": "nanoseconds"}),
}


@pytest.mark.parametrize("way", ["restored", "empty path"])
@pytest.mark.parametrize("case", CHANGED)
def test_a_setting_that_was_changed_under_a_mirror(
    shop: Shop, case: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALT_BEFORE", SALT)
    monkeypatch.setenv("SALT_AFTER", SALT[::-1])
    before, after = CHANGED[case]
    shop.pg.execute("create table people(id int primary key, note text not null, at time)")
    shop.pg.execute("alter table people replica identity full")
    shop.pg.execute("insert into people select n, 'note ' || n, '01:02:03' from generate_series(1, 4) n")
    shop.source |= before
    shop.run()
    shop.source |= after
    shop.pg.execute("update people set note = 'later' where id = 1")
    shop.pg.execute("insert into people values (5, 'new', '04:05:06')")
    hint = shop.refused(Kind.SINK_SCHEMA_REFUSED).hint
    if way == "restored":
        assert "restore the" in hint
        shop.source |= before
    else:
        assert "give the sink a new, empty path, so that it reads the log from its start" in hint
        shop.sink["path"] = "./new lake"
    shop.pg.execute("delete from people where id = 2")
    shop.run()
    found = everything(shop, "people")
    # A mirror that never had other settings is what it is to be.
    shop.sink["path"] = "./fresh"
    shop.run()
    assert found == everything(shop, "people")
    assert [row["id"] for row in found] == [1, 3, 4, 5]


def everything(shop: Shop, table: str) -> list[dict[str, Any]]:
    rows = DeltaTable(str(shop.lake / f"public.{table}")).to_pyarrow_table().drop_columns(["_position"])
    return sorted(rows.to_pylist(), key=lambda row: row["id"])


# ---------------------------------------------------------------------- the target


def test_a_feature_that_somebody_gave_a_table_of_a_mirror(shop: Shop, spark: Any) -> None:
    shop.pg.execute("create table items(id int primary key, n int)")
    shop.pg.execute("insert into items select n, n from generate_series(1, 5) n")
    shop.run()
    table = f"delta.`{shop.lake}/public.items`"
    spark.sql(f"alter table {table} set tblproperties ('delta.enableDeletionVectors' = 'true')")
    shop.pg.execute("alter table items rename n to number")
    shop.pg.execute("alter table items add more int default 7")
    shop.pg.execute("insert into items values (6, 6, 6)")
    error = shop.refused(Kind.SINK_SCHEMA_REFUSED)
    assert "deletionVectors" in error.message
    assert error.hint == "give the sink a new, empty path and let it read the log from its start"
    shop.sink["path"] = "./new lake"
    shop.run()
    shop.require_equal("items")


def test_tables_whose_position_is_gone(shop: Shop) -> None:
    shop.pg.execute("create table items(id int primary key, n int)")
    shop.pg.execute("insert into items select n, n from generate_series(1, 5) n")
    shop.run()
    shutil.copytree(shop.lake / "_tailrace", shop.root / "backup")
    shop.pg.execute("delete from items where id = 1")
    shop.run()
    shutil.rmtree(shop.lake / "_tailrace")
    shop.pg.execute("delete from items where id = 2")
    error = shop.refused(Kind.SINK_FOREIGN)
    assert "or move these tables away" in error.hint
    (shop.root / "away").mkdir()
    (shop.lake / "public.items").rename(shop.root / "away" / "public.items")
    shop.run()
    shop.require_equal("items")


# ---------------------------------------------------------------------- slots and logs


def orders(shop: Shop) -> None:
    shop.pg.execute("create table orders(id int primary key, n int)")
    shop.pg.execute("insert into orders select n, n from generate_series(1, 5) n")


@pytest.mark.parametrize("way", ["dropped", "another name"])
@pytest.mark.parametrize("kind", ["logical", "physical"])
def test_a_slot_that_somebody_else_made(shop: Shop, kind: str, way: str) -> None:
    orders(shop)
    slot = shop.config().source.slot
    plugin = ", 'pgoutput'" if kind == "logical" else ""
    shop.pg.execute(f"select pg_create_{kind}_replication_slot(%s{plugin})", [slot])
    error = shop.refused(Kind.SLOT_FOREIGN)
    found = re.search(r"(SELECT pg_drop_replication_slot\(.*?\));", error.hint)
    assert found is not None
    if way == "dropped":
        shop.pg.execute(found[1])
    else:
        assert "name another one in source.slot, and a new directory in log.path" in error.hint
        shop.source["slot"] = f"{slot}_own"
        shop.log["path"] = "./own log"
    shop.pg.execute("delete from orders where id = 1")
    shop.run()
    shop.require_equal("orders")
    if way != "dropped":
        shop.pg.execute(found[1])


#: What loses changes to the log, with the kind of error.
LOST = {
    "slot dropped": Kind.SLOT_MISSING,
    "slot made again": Kind.SLOT_AHEAD_OF_LOG,
    "publication dropped": Kind.PUBLICATION_MISSING,
}


@pytest.mark.parametrize("case", LOST)
def test_a_log_that_lost_changes_is_followed_by_a_new_one(shop: Shop, case: str) -> None:
    orders(shop)
    shop.run()
    slot = shop.config().source.slot
    if case == "publication dropped":
        shop.pg.execute(f'drop publication "{shop.config().source.publication}"')
    else:
        shop.pg.execute("select pg_drop_replication_slot(%s)", [slot])
    shop.pg.execute("delete from orders where id = 1")
    if case == "slot made again":
        shop.pg.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    error = with_way_out(shop.refused(LOST[case]), shop.config())
    steps = [step.strip() for step in re.split(r"\(\d\) ", error.hint.partition("Run: ")[2]) if step.strip()]
    assert steps.pop().startswith("start the pipeline again")
    for step in steps:
        if step.startswith("in the database: "):
            shop.pg.execute(step.removeprefix("in the database: "))
        else:
            subprocess.run(step, shell=True, check=True, cwd=shop.root)  # noqa: S602 - a person would type it
    shop.run()
    shop.require_equal("orders")


def test_a_log_of_another_database(shop: Shop) -> None:
    orders(shop)
    shop.run()
    other = Database(shop.pg.server, f"{shop.pg.name}_2")
    shop.pg.server.create_database(other.name)
    try:
        shop.source["dbname"] = other.name
        other.execute("create table orders(id int primary key, n int); insert into orders values (7, 7)")
        error = shop.refused(Kind.SOURCE_CHANGED)
        assert "set log.path to a new directory" in error.hint
        shop.log["path"] = "./log 2"
        shop.source["slot"] = "of_the_other"
        error = shop.refused(Kind.SINK_FOREIGN)
        assert "path" in error.hint, error.hint
        shop.sink["path"] = "./lake 2"
        shop.run()
        assert mirrored(shop.lake, "public.orders") == selected(other, "orders")
        other.execute("select pg_drop_replication_slot('of_the_other')")
    finally:
        other.drop()


# ---------------------------------------------------------------------- histories that begin later


def tailrace(shop: Shop, words: str, status: int = 0) -> str:
    """Run a command that was printed, or `run`, in a process of its own: it needs a Spark of its own."""
    shop.config()
    given = [str(shop.file) if word == "FILE" else word for word in shlex.split(words)]
    assert given[0] == "tailrace"
    command = [sys.executable, "-m", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def history(shop: Shop, table: str) -> dict[int, Any]:
    """Return the second column of the last row of each key in the history."""
    rows = DeltaTable(str(shop.lake / f"public.{table}")).to_pyarrow_table().sort_by("_log_offset")
    first, second = rows.column_names[:2]
    return dict(zip(rows[first].to_pylist(), rows[second].to_pylist(), strict=True))


@pytest.mark.slow
def test_a_history_begins_in_a_new_path_where_the_log_has_the_new_type(shop: Shop) -> None:
    shop.sink["mode"] = "append"
    shop.pg.execute("create table items(id int primary key, what text)")
    shop.pg.execute("insert into items select n, repeat('x', n) from generate_series(1, 5) n")
    shop.run()
    shop.pg.execute("insert into items values (6, 'six')")
    shop.pg.execute("alter table items alter what type int using length(what)")
    shop.pg.execute(
        "begin; update items set what = 10 where id <= 3; insert into items values (7, 7); commit"
    )
    hint = shop.refused(Kind.SINK_SCHEMA_REFUSED).hint
    way = "give the sink a new, empty path and let it begin where the log has the new type"
    assert f"{way} (`tailrace log schemas`, `tailrace replay --from`)" in hint
    shop.sink["path"] = "./new lake"
    shown = json.loads(tailrace(shop, f"tailrace log schemas {shlex.quote(str(shop.root / 'log'))} --json"))
    tailrace(shop, f"tailrace replay FILE --sink lake --from {shown['schemas'][-1]['log_offset']}")
    shop.pg.execute("update items set what = 11 where id = 4")
    shop.run()
    assert history(shop, "items") == dict(
        shop.pg.query("select id, what from items where id in (1, 2, 3, 4, 7)")
    )


@pytest.mark.slow
def test_a_history_begins_where_a_log_without_its_start_does(shop: Shop) -> None:
    shop.sink["mode"] = "append"
    orders(shop)
    for n in range(6, 9):
        shop.capture()
        shop.pg.execute("insert into orders values (%s, %s)", [n, n])
    shop.capture()
    log = LogDirectory.open(shop.root / "log")
    apply(log, "0", RetentionRules(size_bytes=1))
    said = tailrace(shop, "tailrace run FILE --until-caught-up", status=1)
    assert "log_range_gone" in said
    found = re.search(r"in a new or emptied target: `(tailrace replay .*?)`", said)
    assert found is not None
    tailrace(shop, found[1])
    shop.pg.execute("update orders set n = 0 where id = 1")
    shop.run()
    ids = history(shop, "orders")
    assert {1, 8} <= set(ids)
    assert ids == dict(shop.pg.query("select id, n from orders where id = any(%s)", [list(ids)]))
