"""The initial snapshot of real servers is consistent with the stream and has the server's form."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

from tailrace.changelog.reader import LogReader
from tailrace.sources.postgres.snapshot.control import SnapshotControl
from tests.support.capture.captured import CREATE_ITEMS, NAME, SLOT, capturing, read_log
from tests.support.postgres import Database

pytestmark = pytest.mark.each_postgres("exported snapshots, and what COPY sends")

RUN = """
import sys
from pathlib import Path
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tailrace.config.source.postgres import PostgresSource
from tailrace.config.sections import LogConfig
path = Path(sys.argv[2])
CaptureTask(PostgresSource(dsn=sys.argv[1]), path, LogConfig(path=path), name=sys.argv[3]).run()
"""


def test_a_snapshot_among_writers_has_no_gap_and_no_repetition(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table items(id bigserial primary key, note text)")
    pg.execute("insert into items(note) select repeat('x', 200) from generate_series(1, 60000)")
    over = threading.Event()

    def write() -> None:
        with psycopg.connect(pg.dsn, autocommit=True) as connection:
            while not over.is_set():
                connection.execute("insert into items(note) select 'y' from generate_series(1, 3)")
                connection.execute("delete from items where id = (select min(id) from items)")

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        with capturing(pg.dsn, tmp_path / "log") as running:
            running.wait_for("streaming", 60)
            rows = running.task.progress().rows
            while running.task.progress().rows < rows + 200:
                over.wait(0.02)
            over.set()
            for writer in writers:
                writer.join()
            running.catch_up(pg.query)
    finally:
        over.set()
        for writer in writers:
            writer.join()
    found = read_log(tmp_path / "log")
    assert len(found.ids) == len(set(found.ids))
    assert len(found.deletes) == len(set(found.deletes))
    left = sorted(set(found.ids) - set(found.deletes))
    assert left == [row[0] for row in pg.query("select id from items order by id")]


def test_a_relation_message_made_for_the_snapshot_equals_the_servers(pg: Database, tmp_path: Path) -> None:
    pg.execute('create schema "od.d"')
    pg.execute("create type mood as enum('a', 'b')")
    pg.execute("create domain posint as int check (value > 0)")
    pg.execute("create domain deep as posint")
    tables = [
        "create table plain(id int primary key, n numeric(10, 2), v varchar(7), d posint, e deep, m mood[])",
        'create table "od.d"."q""x é"("A" int, a int, dropped int, primary key (a, "A"))',
        "create table full_(id int primary key, t text)",
        "create table keyless(id int, t text)",
        "create table chosen(id int primary key, k int not null, t text)",
        "create table generated(id int primary key, g int generated always as (id + 1) stored, t text)",
        "create table included(id int, t text, primary key (id) include (t))",
        "create table left_out(id int primary key, secret text, t text)",
    ]
    for statement in tables:
        pg.execute(statement)
    pg.execute('alter table "od.d"."q""x é" drop column dropped')
    pg.execute("alter table full_ replica identity full")
    pg.execute("alter table left_out replica identity full")
    pg.execute("create unique index chosen_k on chosen(k)")
    pg.execute("alter table chosen replica identity using index chosen_k")
    options = {
        "tables": ("public.*", "public.keyless", '"od.d".*'),
        "columns_exclude": ("public.left_out.secret",),
    }
    with capturing(pg.dsn, tmp_path / "log", **options) as running:
        running.wait_for("streaming")
        pg.execute("insert into plain values (1)")
        pg.execute('insert into "od.d"."q""x é" values (1, 2)')
        pg.execute("insert into full_ values (1)")
        pg.execute("insert into keyless values (1)")
        pg.execute("insert into chosen values (1, 2)")
        pg.execute("insert into generated(id) values (1)")
        pg.execute("insert into included values (1)")
        pg.execute("insert into left_out values (1)")
        running.catch_up(pg.query)
    relations = read_log(tmp_path / "log").relations
    made, sent = relations[: len(tables)], relations[len(tables) :]
    assert sorted(made) == sorted(sent)


@pytest.mark.parametrize("chunk_rows", [100, 100_000])
def test_the_rows_read_of_each_table_are_counted(pg: Database, tmp_path: Path, chunk_rows: int) -> None:
    for name, rows in (("few", 7), ("many", 5000), ("none", 0)):
        pg.execute(f"create table {name}(id int primary key)")
        pg.execute(f"insert into {name} select generate_series(1, {rows})")
    pg.execute("analyze")
    with capturing(pg.dsn, tmp_path / "log", snapshot_chunk_rows=chunk_rows) as running:
        running.wait_for("streaming")
    (listed,) = SnapshotControl(tmp_path / "log").known()
    assert {table["name"]: table["rows"] for table in listed["tables"]} == {
        "public.few": 7, "public.many": 5000, "public.none": 0
    }  # fmt: skip
    assert all(table["chunks_done"] == table["chunks"] > 0 for table in listed["tables"])
    assert (max(table["chunks"] for table in listed["tables"]) > 1) is (chunk_rows == 100)


def test_column_lists_row_filters_and_partitions_are_read_as_published(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table filtered(id int primary key, secret text, kept text)")
    pg.execute("insert into filtered select n, 'secret', 'kept' from generate_series(1, 20) n")
    pg.execute("create table parts(id int primary key) partition by range (id)")
    pg.execute("create table parts_low partition of parts for values from (0) to (100)")
    pg.execute("create table parts_high partition of parts for values from (100) to (200)")
    pg.execute("insert into parts values (50), (150)")
    pg.execute(
        "create publication tailrace_t for table filtered (id, kept) where (id > 10), parts "
        "with (publish_via_partition_root)"
    )
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        snapshot = running.task.progress().snapshot
        pg.execute("insert into parts values (51)")
        pg.execute("insert into filtered values (0), (99)")
        running.catch_up(pg.query)
    found = read_log(tmp_path / "log")
    assert sorted(found.snapshot) == [*range(11, 21), 50, 150]
    assert found.inserts == [51, 99]
    assert b"secret" not in found.text
    assert {name: (table.rows, table.done) for name, table in snapshot.items()} == {
        "public.filtered": (10, True),
        "public.parts": (2, True),
    }


#: A type that sorts in the opposite order of PostgreSQL's own operators, which compare it if its own are not
#: found: as citext would be compared as text, which sorts otherwise.
BACKWARDS = """
create type backwards as (n int);
create function b_lt(backwards, backwards) returns bool language sql immutable as 'select $1.n > $2.n';
create function b_le(backwards, backwards) returns bool language sql immutable as 'select $1.n >= $2.n';
create function b_eq(backwards, backwards) returns bool language sql immutable as 'select $1.n = $2.n';
create function b_ge(backwards, backwards) returns bool language sql immutable as 'select $1.n <= $2.n';
create function b_gt(backwards, backwards) returns bool language sql immutable as 'select $1.n < $2.n';
create function b_cmp(backwards, backwards) returns int language sql immutable as 'select $2.n - $1.n';
create operator public.< (leftarg = backwards, rightarg = backwards, function = b_lt);
create operator public.<= (leftarg = backwards, rightarg = backwards, function = b_le);
create operator public.= (leftarg = backwards, rightarg = backwards, function = b_eq);
create operator public.>= (leftarg = backwards, rightarg = backwards, function = b_ge);
create operator public.> (leftarg = backwards, rightarg = backwards, function = b_gt);
create operator class backwards_ops default for type backwards using btree as
  operator 1 public.<, operator 2 public.<=, operator 3 public.=, operator 4 public.>=, operator 5 public.>,
  function 1 b_cmp(backwards, backwards);
create domain key as backwards;
create domain word as text collate "C";
"""


@pytest.mark.parametrize("type_", ["backwards", "key", "int", 'word collate "POSIX"'])
def test_rows_come_once_whatever_the_sort_order_of_their_key(
    pg: Database, tmp_path: Path, type_: str
) -> None:
    pg.execute(BACKWARDS)
    cut = type_ not in ("backwards", "key")
    value = "n" if cut else f"row(n)::{type_}"
    pg.execute(f"create table t(id int, k {type_}, n int default 0, primary key (n, k))")
    pg.execute(f"insert into t select n, {value} from generate_series(1, 500) n")
    pg.execute("analyze t")
    with capturing(pg.dsn, tmp_path / "log", snapshot_chunk_rows=100) as running:
        running.wait_for("streaming")
        chunks = running.task.progress().snapshot["public.t"].chunks
    assert chunks == (5 if cut else 1)
    assert sorted(read_log(tmp_path / "log").snapshot) == list(range(1, 501))


def test_a_key_of_the_type_char_is_read_although_the_server_cannot_plan_its_comparison(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute('create table t(id int, k "char", primary key (k, id))')
    pg.execute('insert into t select n, chr(65 + n % 26)::"char" from generate_series(1, 500) n')
    pg.execute("analyze t")
    with capturing(pg.dsn, tmp_path / "log", snapshot_chunk_rows=100) as running:
        running.wait_for("streaming")
    assert sorted(read_log(tmp_path / "log").snapshot) == list(range(1, 501))


def test_values_with_newlines_and_no_columns_are_counted_right(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute(r"insert into items select n, e'a\nb\\c\td\n' from generate_series(1, 1000) n")
    pg.execute("insert into items values (1001, repeat('w', 3000000))")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    found = read_log(tmp_path / "log")
    assert found.snapshot == list(range(1, 1002))
    assert len(found.text) > 3_000_000


@pytest.mark.parametrize(
    "point",
    ["snapshot.after_slot", "snapshot.in_copy", "snapshot.before_handover", "snapshot.after_handover"],
)
@pytest.mark.one_postgres
@pytest.mark.ci
def test_a_killed_first_start_begins_again(pg: Database, tmp_path: Path, point: str) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute("insert into items select n, repeat('z', 500) from generate_series(1, 8000) n")
    name, _, count = point.partition("@")
    killed = subprocess.run(
        [sys.executable, "-m", "tests.support.script", RUN, pg.dsn, str(tmp_path / "log"), NAME],
        env={"TAILRACE_FAILPOINTS": f"{name}=kill@{count or 1}", "PATH": ""},
        timeout=240,
        check=False,
    )
    assert killed.returncode == -9
    pg.execute("insert into items values (8001, 'between')")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (8002, 'after')")
        running.catch_up(pg.query)
    found = read_log(tmp_path / "log")
    assert sorted(found.ids) == list(range(1, 8003))
    assert len(pg.query("select 1 from pg_replication_slots where slot_name = %s", [SLOT])) == 1


def test_readers_see_nothing_of_a_snapshot_before_its_end(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute("insert into items select n, repeat('z', 500) from generate_series(1, 8000) n")
    killed = subprocess.run(
        [sys.executable, "-m", "tests.support.script", RUN, pg.dsn, str(tmp_path / "log"), NAME],
        env={"TAILRACE_FAILPOINTS": "snapshot.in_copy=kill@1", "PATH": ""},
        timeout=240,
        check=False,
    )
    assert killed.returncode == -9
    with LogReader.open(tmp_path / "log", "0") as reader:
        assert reader.end().offset == 0
