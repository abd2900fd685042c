"""Schema changes of a real server's tables, captured and written by each sink in ranges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace import failpoints
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.contract import Sink
from tests.support.postgres import Database, Servers, require_since
from tests.support.sinks.ddl_story import (
    COLUMNS,
    DISPLACED,
    FOLLOWED,
    MORE_COLUMNS,
    MORE_ROWS,
    MORE_TYPES,
    NO_COMMON_TYPE,
    REFUSED,
    ROWS,
    TABLE_CHANGES,
    TASK,
    TOUCH,
    Cut,
    Nearby,
    Scene,
    make,
    plain,
    selected,
    write,
    write_and_die,
)
from tests.support.sinks.mirrored import Rows, finite, mirrored
from tests.support.sinks.rig import offsets

ALTERED = {**FOLLOWED, **{name: statements for name, (statements, _) in REFUSED.items()}}
TABLES = {name: f"t{number:02}" for number, name in enumerate(ALTERED)}
#: Columns that a target renames, with their names there.
HELD = {
    "two words, {and}; (more)=~": "two~20words~2c~20~7band~7d~3b~20~28more~29~3d~7e",
    "A": "A~~559aead0",
    "_position": "_position~own",
    "_op": "_op~own",
}


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.fixture(scope="module")
def base(
    servers: Servers, postgres_version: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    pg = Database(servers.get(postgres_version), "altered")
    pg.server.create_database(pg.name)
    scene = Scene(pg, tmp_path_factory.mktemp("altered"))
    yield scene
    scene.stop()
    pg.drop()


@pytest.fixture(autouse=True)
def _what_the_server_sends(request: pytest.FixtureRequest) -> None:
    case = getattr(request.node, "callspec", None)
    if case is not None and case.params.get("name") == "generated":
        require_since(18, "generated columns in a publication", case.params["postgres_version"])


@dataclass
class Story:
    """The table of each case, altered, and the source's rows at each cut."""

    log: Path
    path: Path
    begun: Cut
    altered: Cut
    done: Cut


@pytest.fixture(scope="module")
def story(base: Scene) -> Story:
    base.run("create type mood as enum ('good', 'bad')")
    for table in TABLES.values():
        made = (*MORE_TYPES, f"create table {{t}}({MORE_COLUMNS})", f"insert into {{t}} {MORE_ROWS}")
        base.run(*(statement.format(t=table) for statement in made))
    base.start()
    begun = base.cut([])
    firsts = {}
    for name, table in TABLES.items():
        base.run(*(statement.format(t=table) for statement in (*TOUCH, *ALTERED[name])))
        (first, *_), _ = selected(base.pg, table)
        firsts[table] = first
        base.run(f"update {table} set {first} = {first} where {first} % 2 = 0")
    altered = base.cut([*TABLES.values()])
    for table, first in firsts.items():
        base.run(f"delete from {table} where {first} % 5 = 0")
    done = base.cut([*TABLES.values()])
    return Story(base.path / "log", base.path, begun, altered, done)


def public(*names: str) -> tuple[str, ...]:
    return tuple(f"public.{TABLES[name]}" for name in names)


def history(kind: str, folder: Path) -> list[dict[str, Any]]:
    if kind == "append":
        delta = DeltaTable(str(folder))
        for uri in delta.file_uris():  # delta-rs does not notice a column that occurs twice
            names = pq.read_schema(unquote(uri.removeprefix("file://"))).names
            assert len(set(names)) == len(names)
        tables = [delta.to_pyarrow_table()]
    else:
        tables = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    rows = []
    for table in tables:
        columns = {name: finite(table[name]).to_pylist() for name in table.column_names}
        rows += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return sorted(rows, key=lambda row: row["_log_offset"])


# ---------------------------------------------------------------------- mirrors


@pytest.fixture(scope="module")
def followed(story: Story, spark: Any) -> dict[str, dict[str, Rows]]:
    """Write mirrors of the changes that can be followed; read them at each cut, and after a single range."""
    nearby, found = Nearby(spark), {}
    for kind, ends in (
        ("altered", [story.altered, story.done]),
        ("in one range", [story.done]),
    ):
        lake = story.path / f"mirror {kind}"
        sink = make("mirror", lake, public(*FOLLOWED))
        write(sink, story.log, story.begun.offset)
        for cut in ends:
            write(sink, story.log, cut.offset, nearby, in_small_splits=len(ends) == 1)
            name = kind if cut is story.altered or len(ends) == 1 else "done"
            found[name] = {case: mirrored(lake, f"public.{TABLES[case]}") for case in FOLLOWED}
    return found


@pytest.mark.parametrize("place", ["altered", "done", "in one range"])
@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.slow
def test_a_mirror_follows_a_schema_change(
    name: str, place: str, story: Story, followed: dict[str, dict[str, Rows]]
) -> None:
    cut, table = story.altered if place == "altered" else story.done, TABLES[name]
    columns, rows = followed[place][name]
    assert columns == [HELD.get(column, column) for column in cut.columns[table]]
    assert rows == cut.rows[table]


# ---------------------------------------------------------------------- histories


def written(kind: str, story: Story) -> Path:
    names = [name for name in ALTERED if kind != "append" or name not in NO_COMMON_TYPE]
    sink = make(kind, story.path / kind, public(*names))
    write(sink, story.log, story.begun.offset)
    write(sink, story.log, story.done.offset)
    return story.path / kind


@pytest.fixture(scope="module")
def json_lines(story: Story) -> Path:
    return written("jsonl", story)


@pytest.fixture(scope="module")
def histories(story: Story) -> dict[str, Path]:
    return {kind: written(kind, story) for kind in ("append", "parquet")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("append", name) for name in ALTERED if name not in NO_COMMON_TYPE]
    + [("parquet", name) for name in ALTERED],
)
def test_a_history_has_the_rows_of_the_source(
    kind: str, name: str, story: Story, histories: dict[str, Path]
) -> None:
    table = TABLES[name]
    # Files keep any column name except those of their own columns.
    held = HELD if kind == "append" else {"_op": HELD["_op"]}
    columns = [held.get(column, column) for column in story.altered.columns[table]]
    last = {
        row[columns[0]]: tuple(plain(row.get(column)) for column in columns)
        for row in history(kind, histories[kind] / f"public.{table}")
        if row["_op"] != "d" and columns[0] in row
    }
    expected = [row for row in story.altered.rows[table] if row[0] % 2 == 0]
    assert expected
    assert [last[row[0]] for row in expected] == expected


@pytest.mark.parametrize("name", ALTERED)
@pytest.mark.each_postgres("what the catalogue says of altered tables")
def test_json_names_the_columns_of_each_change(name: str, story: Story, json_lines: Path) -> None:
    table = TABLES[name]
    lines = [
        json.loads(line)
        for path in (json_lines / f"public.{table}").glob("*.jsonl")
        for line in path.read_text("utf-8").split("\n")[:-1]
    ]
    lines.sort(key=lambda line: line["position"]["log_offset"])
    columns = story.altered.columns[table]
    last = {line["after"].get(columns[0]): line["after"] for line in lines if line["after"]}
    texts = [at for at, column in enumerate(columns) if column in ("b", "bee", "d", "dee")]
    for row in story.altered.rows[table]:
        if row[0] % 2 == 0:
            assert list(last[row[0]]) == columns
            assert [str(last[row[0]][columns[at]]) for at in texts] == [str(row[at]) for at in texts]


@pytest.mark.parametrize("kind", ["append", "parquet"])
def test_histories_have_the_same_changes(
    kind: str, story: Story, histories: dict[str, Path], json_lines: Path
) -> None:
    for name in ALTERED:
        if name not in NO_COMMON_TYPE:
            folder = f"public.{TABLES[name]}"
            found = [row["_log_offset"] for row in history(kind, histories[kind] / folder)]
            assert found == offsets("jsonl", json_lines / folder)


# ---------------------------------------------------------------------- what can't be followed


def stopped(sink: Sink, story: Story, column: str) -> None:
    """Check that the sink stops, names the column and has changed nothing."""
    before = sink_state(sink, story)
    with pytest.raises(TailraceError) as raised:
        write(sink, story.log, story.done.offset)
    assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert raised.value.context["column"] == column
    assert "choose" in raised.value.hint
    assert "on_type_change: follow" in raised.value.hint
    assert sink_state(sink, story) == before


def sink_state(sink: Sink, story: Story) -> tuple[Any, ...]:
    sink.open(LogDirectory.open(story.log).identity, "shop")
    try:
        return sink.position(TASK), sink.reach(TASK)
    finally:
        sink.close()


@pytest.mark.parametrize("name", REFUSED)
def test_a_mirror_stops_at_a_type_change_it_cannot_follow_unless_told_to_follow(
    name: str, story: Story, spark: Any
) -> None:
    lake, table, column = story.path / "refused" / TABLES[name], TABLES[name], REFUSED[name][1]
    sink = make("mirror", lake, public(name))
    write(sink, story.log, story.begun.offset)
    stopped(sink, story, column)
    write(make("mirror", lake, public(name), "follow"), story.log, story.done.offset, Nearby(spark))
    columns, rows = mirrored(lake, f"public.{table}")
    assert columns == story.done.columns[table]
    at = columns.index(column)
    for row, expected in zip(rows, story.done.rows[table], strict=True):
        assert row[:at] + row[at + 1 :] == expected[:at] + expected[at + 1 :]
        if row[0] % 2 == 0:  # rows sent after the change
            assert row == expected


@pytest.mark.parametrize("name", NO_COMMON_TYPE)
def test_a_history_stops_at_a_type_change_without_a_common_type_or_becomes_text(
    name: str, story: Story, spark: Any
) -> None:
    lake, table, column = story.path / "mixed" / TABLES[name], TABLES[name], NO_COMMON_TYPE[name]
    sink = make("append", lake, public(name))
    write(sink, story.log, story.begun.offset)
    stopped(sink, story, column)
    write(make("append", lake, public(name), "follow"), story.log, story.done.offset)
    rows = [row for row in history("append", lake / f"public.{table}") if row["_op"] in "rcu"]
    first = {row["id"]: row for row in rows if row["_op"] == "r"}
    last = {row["id"]: row for row in rows}
    at = story.altered.columns[table].index(column)
    assert first[2][column] == {"a": "2", "b": "b2", "c": "2.25"}[column]
    for row in story.altered.rows[table]:
        if row[0] % 2 == 0:
            text = (
                {True: "true", False: "false", None: None}.get(row[at])
                if isinstance(row[at], bool)
                else row[at]
            )
            assert last[row[0]][column] == (text if text is None else str(text))


# ---------------------------------------------------------------------- whole tables


@dataclass
class Tables:
    """Tables that were renamed, or dropped and created again, some while no capture ran, then read again.

    `changed` is the log's end before the tables whose names changed are read again.
    """

    log: Path
    path: Path
    begun: Cut
    changed: int
    done: Cut
    there: list[str]


@pytest.fixture(scope="module")
def tables(
    servers: Servers, postgres_version: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tables]:
    pg = Database(servers.get(postgres_version), "renamed")
    pg.server.create_database(pg.name)
    scene = Scene(pg, tmp_path_factory.mktemp("renamed"))
    scene.run("create type mood as enum ('good', 'bad')", "create schema other")
    names = {f"n{number}": name for number, name in enumerate(TABLE_CHANGES)}
    # The same changes again, while the pipeline is stopped.
    names |= {f"w{number}": name for number, name in enumerate(TABLE_CHANGES)}
    there = []
    for prefix in names:
        for table in (f"{prefix}_1", f"{prefix}_2"):
            scene.run(f"create table {table}({COLUMNS})", f"insert into {table} {ROWS}")
    try:
        scene.start()
        begun = scene.cut([])
        for prefix, name in names.items():
            if prefix == "w0":
                scene.stop()
            statements, left = TABLE_CHANGES[name]
            scene.run(*(statement.format(t=prefix) for statement in statements))
            there += [table.format(t=prefix) for table in left]
        scene.start()
        changed = scene.end()
        scene.read_again(
            tuple(table.format(t=prefix) for prefix in names for table in DISPLACED[names[prefix]])
        )
        yield Tables(scene.path / "log", scene.path, begun, changed, scene.cut(there), there)
    finally:
        scene.stop()
        pg.drop()


def require_tables(lake: Path, tables: Tables, prefix: str = "") -> None:
    """Check that there is a mirror of each table, with its columns and rows in the source."""
    wrong = {}
    for table in tables.there:
        schema, _, name = table.rpartition(".")
        if not name.startswith(prefix):
            continue
        found = mirrored(lake, f"{schema or 'public'}.{name}")
        if found != (tables.done.columns[table], tables.done.rows[table]):
            wrong[table] = found
    assert wrong == {}


def test_mirrors_follow_renamed_tables_that_are_read_again(tables: Tables, spark: Any) -> None:
    lake = tables.path / "followed"
    sink = make("mirror", lake)
    for upto in (tables.begun.offset, tables.changed, tables.done.offset):
        write(sink, tables.log, upto, Nearby(spark))
    require_tables(lake, tables)


def test_mirrors_follow_renamed_tables_in_ranges_of_one_transaction(tables: Tables, spark: Any) -> None:
    lake = tables.path / "swapped"
    sink = make("mirror", lake, ("public.n1_*",))
    write(sink, tables.log, tables.begun.offset)
    with LogReader.open(tables.log, TASK) as reader:
        at = tables.begun.offset
        while at < tables.done.offset:
            at = reader.boundary_within(at, 1, 1, tables.done.offset)
            write(sink, tables.log, at, Nearby(spark))
    for table in ("n1_1", "n1_2"):
        assert mirrored(lake, f"public.{table}") == (tables.done.columns[table], tables.done.rows[table])


def test_histories_continue_under_the_new_name(tables: Tables) -> None:
    sink = make("append", tables.path / "histories", ("public.n0*",))
    write(sink, tables.log, tables.begun.offset)
    write(sink, tables.log, tables.changed)
    folder = tables.path / "histories"
    assert len(history("append", folder / "public.n0_1")) == 20
    assert [row["b"] for row in history("append", folder / "public.n0_new")] == ["new"] * 4


# ---------------------------------------------------------------------- interrupted


@pytest.mark.parametrize(
    ("point", "count", "prefix"),
    [
        # "n" are the tables altered during capture, "w" those altered while it was stopped: both kinds
        # are interrupted at both commits.
        ("sink.before_commit", 1, "n"),
        ("sink.before_commit", 4, "w"),
        ("sink.after_commit", 1, "w"),
        ("sink.after_commit", 6, "n"),
        ("sink.after_publish", 1, "n"),
        ("sink.before_position", 1, "w"),
    ],
)
def test_a_mirror_that_fails_between_renamed_tables_is_completed(
    point: str, count: int, prefix: str, tables: Tables, spark: Any
) -> None:
    lake, wanted = tables.path / f"failed {point} {count}", (f"public.{prefix}*", f"other.{prefix}*")
    sink = make("mirror", lake, wanted)
    write(sink, tables.log, tables.begun.offset)
    failpoints.arm(f"{point}=error@{count}")
    with pytest.raises(failpoints.FailpointError):
        write(sink, tables.log, tables.changed)
    failpoints.arm("")
    write(make("mirror", lake, wanted), tables.log, tables.done.offset, Nearby(spark))
    require_tables(lake, tables, prefix)


#: Cases whose table is rewritten, gets columns, or has two keys within the range.
STRUCK = (
    "added with defaults", "names swapped", "int to bigint", "less scale", "another key", "wider key",
    "truncated", "many at once", "in one transaction",
)  # fmt: skip


@pytest.mark.parametrize("point", ["sink.in_task", "sink.before_commit@5", "sink.after_commit@3"])
@pytest.mark.parametrize("kind", ["mirror", "append"])
@pytest.mark.ci
def test_a_sink_that_is_killed_in_a_range_with_schema_changes_is_completed(
    kind: str, point: str, story: Story, histories: dict[str, Path]
) -> None:
    lake = story.path / f"killed {kind} {point}"
    sink = make(kind, lake, public(*STRUCK))
    write(sink, story.log, story.begun.offset)
    name, _, count = point.partition("@")
    tables = public(*STRUCK)
    write_and_die(kind, lake, story.log, story.done.offset, list(tables), f"{name}=kill@{count or 1}")
    write(make(kind, lake, tables), story.log, story.done.offset)
    for case in STRUCK:
        table = TABLES[case]
        if kind == "mirror":
            assert mirrored(lake, f"public.{table}") == (story.done.columns[table], story.done.rows[table])
        else:
            found = history("append", lake / f"public.{table}")
            assert found == history("append", histories["append"] / f"public.{table}")


# ---------------------------------------------------------------------- masks


def masking(table: str, *columns: str) -> ColumnPolicy:
    names = [f"public.{table}.{column}" for column in columns]
    return ColumnPolicy.model_validate({"masks": [{"columns": names, "method": "fixed", "value": "hidden"}]})


def test_a_mask_follows_a_renamed_column_and_hides_the_values_of_old_rows(story: Story) -> None:
    table = TABLES["renamed"]
    lake, rules = story.path / "masked", masking(table, "b", "bee")
    for cut in (story.begun, story.done):
        write(make("mirror", lake, public("renamed"), rules=rules), story.log, cut.offset)
    columns, rows = mirrored(lake, f"public.{table}")
    assert "bee" in columns
    assert {row[columns.index("bee")] for row in rows} == {"hidden"}

    table = TABLES["added with defaults"]
    rules = masking(table, "y")
    for cut in (story.begun, story.done):
        write(make("mirror", lake / "2", public("added with defaults"), rules=rules), story.log, cut.offset)
    columns, rows = mirrored(lake / "2", f"public.{table}")
    assert {row[columns.index("y")] for row in rows} == {"hidden"}


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "append", "mirror"])
@pytest.mark.parametrize("named", ["b", "bee"], ids=["before", "after"])
def test_a_rule_follows_a_column_through_renames_also_for_older_rows(
    named: str, kind: str, story: Story, tmp_path: Path
) -> None:
    table = TABLES["renamed"]
    left_out = ColumnPolicy.model_validate({"columns_exclude": [f"public.{table}.{named}"]})
    for rules in (masking(table, named), left_out):
        # One sink continues across the rename, another begins after it.
        for cuts in ((story.begun, story.done), (story.done,)):
            lake = tmp_path / f"{len(cuts)} {len(rules.masks)}"
            for cut in cuts:
                write(make(kind, lake, public("renamed"), rules=rules), story.log, cut.offset)
            values = column_values(kind, lake / f"public.{table}", {"b", "bee"})
            assert values == ({"hidden"} if rules.masks else set())


def column_values(kind: str, folder: Path, names: set[str]) -> set[Any]:
    """Return all non-null values of some columns in a target, including those of old rows."""
    if kind in ("append", "mirror"):
        rows = DeltaTable(str(folder)).to_pyarrow_table().to_pylist()
    elif kind == "parquet":
        rows = [row for path in folder.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    else:
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        rows = [row for line in lines for row in map(json.loads(line).get, ("before", "after")) if row]
    assert rows
    return {row[name] for row in rows for name in names & row.keys()} - {None}


# ---------------------------------------------------------------------- keys that two rows may share


@pytest.fixture(scope="module")
def keys(
    servers: Servers, postgres_version: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, Cut, Cut]]:
    pg = Database(servers.get(postgres_version), "shifted")
    pg.server.create_database(pg.name)
    scene = Scene(pg, tmp_path_factory.mktemp("shifted"))
    long = "(select string_agg(md5(x::text), '') from generate_series(n * 1000, n * 1000 + 300) x)"
    scene.run(
        "create table deferred(id int primary key deferrable initially deferred, note text)",
        "alter table deferred replica identity full",
        "insert into deferred select n, 'row ' || n from generate_series(1, 9) n",
        "create table long(id int primary key, note text, n int)",
        "alter table long alter note set storage external",
        f"insert into long select n, {long}, n from generate_series(1, 9) n",
    )
    try:
        scene.start()
        begun = scene.cut([])
        scene.run(
            "update deferred set id = id + 1",
            "begin; update deferred set id = 3 where note = 'row 1'; update deferred set id = 2 "
            "where note = 'row 2'; delete from deferred where id = 5; "
            "insert into deferred values (5, 'new'); update deferred set id = id - 1; commit",
            # Keys rotate in one transaction; the long values are not sent and must move with them.
            "begin; update long set id = -1 where id = 1; update long set id = 1 where id = 2; "
            "update long set id = 2, n = 20 where id = -1; commit",
            "begin; update long set id = -id; update long set id = 10 + id, n = n + 1; commit",
            "update long set n = n + 1 where id < 5",
        )
        yield scene, begun, scene.cut(["deferred", "long"])
    finally:
        scene.stop()
        pg.drop()


@pytest.mark.parametrize("step", [False, True], ids=["in one range", "after a first range"])
def test_rows_that_share_or_swap_keys_within_a_transaction_are_all_kept(
    step: bool, keys: tuple[Scene, Cut, Cut], spark: Any
) -> None:
    scene, begun, done = keys
    lake = scene.path / f"keys {step}"
    sink = make("mirror", lake, keyless="full_row")
    if step:
        write(sink, scene.path / "log", begun.offset)
    write(sink, scene.path / "log", done.offset, Nearby(spark), in_small_splits=step)
    for table in ("deferred", "long"):
        assert mirrored(lake, f"public.{table}") == (done.columns[table], done.rows[table])


def test_a_mirror_refuses_a_deferrable_key(keys: tuple[Scene, Cut, Cut]) -> None:
    scene, _, done = keys
    with pytest.raises(TailraceError) as raised:
        write(make("mirror", scene.path / "refused", ("public.deferred",)), scene.path / "log", done.offset)
    assert raised.value.kind is Kind.SINK_KEY_MISSING
    assert "deferrable" in raised.value.message
    assert "full_row" in raised.value.hint
