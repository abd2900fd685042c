"""Tables of one database that are altered in every way while they are captured.

Each case has its own table, and all cases share the server, the task and the log, so that
the suite pays for them once. The source's rows are recorded at two cuts of the log.
"""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.model import LogRange
from tailrace.ranges.plan import InputSplit
from tailrace.sinks.contract import Sink, SparkNeededError
from tailrace.sinks.delta.append import DeltaAppend
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.delta.sink import DeltaSink
from tailrace.sinks.files.jsonl import JSONL
from tailrace.sinks.files.parquet import parquet_format
from tailrace.sinks.files.sink import FileSink
from tailrace.sinks.write_job import SinkInput
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tailrace.sources.postgres.snapshot.state import kept_plans
from tailrace.sources.snapshot_requests import ask
from tests.support.capture.captured import Running, make_task
from tests.support.postgres import Database
from tests.support.sinks.rig import InProcess
from tests.support.wait import wait_until

TASK = "0"
COLUMNS = "id int primary key, a int, b text, c numeric(10,2), d varchar(10), e mood, f real"
ROWS = "select n, n, 'b' || n, n + 0.25, 'd', 'good', n / 8.0 from generate_series(1, 20) n"
#: Columns of the altered tables; `{t}` is the table, which has types of its own.
MORE_TYPES = ("create type {t}_pair as (a int, b text)", "create type {t}_label as enum ('first', 'last')")
MORE_COLUMNS = f"{COLUMNS}, g char(6), h numeric(40,5), k {{t}}_pair, l {{t}}_label"
MORE_ROWS = (
    "select n, n, 'b' || n, n + 0.25, 'd     ', 'good'::mood, n / 8.0, 'g' || n, n + 0.12345, "
    "row(n, 'p')::{t}_pair, 'first'::{t}_label from generate_series(1, 20) n"
)
TOUCH = ("update {t} set b = b || '!' where id % 3 = 0", "delete from {t} where id % 7 = 0")

#: Changes that a mirror follows exactly. `{t}` is the table.
FOLLOWED: dict[str, list[str]] = {
    "added": ["alter table {t} add x int"],
    "added with defaults": ["alter table {t} add x int default 5, add y text not null default 'it''s'"],
    "added with the moment": ["alter table {t} add x timestamp default now()"],
    "added with a text that its type cannot hold": ["alter table {t} add x timestamp default 'infinity'"],
    "dropped": ["alter table {t} drop a"],
    "renamed": ["alter table {t} rename b to bee"],
    "names swapped": [
        "alter table {t} rename d to tmp",
        "alter table {t} rename b to d",
        "alter table {t} rename tmp to b",
        "update {t} set b = 'moved' where id = 2",
    ],
    "dropped and added": ["alter table {t} drop a", "alter table {t} add a int default 8"],
    "dropped and added with another type": ["alter table {t} drop a", "alter table {t} add a text"],
    "int to bigint": ["alter table {t} alter a type bigint", "update {t} set a = 1e12 where id = 4"],
    "int to smallint": ["alter table {t} alter a type smallint"],
    "int to numeric": ["alter table {t} alter a type numeric(14,3)", "update {t} set a = 1.5 where id = 4"],
    "int to numeric without digits": ["alter table {t} alter a type numeric"],
    "int to text": ["alter table {t} alter a type text", "update {t} set a = 'four' where id = 4"],
    "float to double": ["alter table {t} alter f type float8", "update {t} set f = 0.1 where id = 4"],
    "more digits": ["alter table {t} alter c type numeric(14,2)", "update {t} set c = 1e11 where id = 4"],
    "more scale": ["alter table {t} alter c type numeric(12,4)", "update {t} set c = 0.0001 where id = 4"],
    "less scale": [
        "update {t} set c = -0.05 where id = 1",
        "update {t} set c = 9999999.95 where id = 3",
        "alter table {t} alter c type numeric(10,1)",
    ],
    "numeric to int": ["alter table {t} alter c type int"],
    "numeric to numeric without digits": [
        "update {t} set c = 'NaN' where id = 2",
        "update {t} set c = 0.01 where id = 3",
        "alter table {t} alter c type numeric",
        "update {t} set c = 1e-9 where id = 4",
    ],
    "wider items": [
        "alter table {t} add m int[], add n numeric(6,2)[]",
        "update {t} set m = array[id, null], n = '{{1.50,NULL}}' where id < 5",
        "alter table {t} alter m type bigint[], alter n type numeric(9,2)[]",
        "update {t} set m = '{{10000000000}}', n = '{{1e6}}' where id = 4",
    ],
    "float to less": ["alter table {t} alter f type float8", "alter table {t} alter f type real"],
    "longer": ["alter table {t} alter d type varchar(30)", "update {t} set d = repeat('x', 30) where id = 4"],
    "varchar to text": ["alter table {t} alter d type text"],
    "enum value": [
        "alter type mood add value if not exists 'so-so'",
        "update {t} set e = 'so-so' where id = 5",
    ],
    "enum to text": ["alter table {t} alter e type text"],
    "char longer": ["alter table {t} alter g type char(9)", "update {t} set g = 'nine' where id = 4"],
    "char shorter, in the key": [
        "alter table {t} drop constraint {t}_pkey, alter g set not null, add primary key (id, g)",
        "update {t} set b = 'before' where id = 3",
        "alter table {t} alter g type char(4)",
        "update {t} set b = 'after' where id = 4",
        "delete from {t} where id = 5",
        "update {t} set id = 100 where id = 6",
    ],
    "shorter, with blanks at the end": ["alter table {t} alter d type varchar(4)"],
    "text to varchar": ["alter table {t} alter b type varchar(8)"],
    "many digits to more before the point": ["alter table {t} alter h type numeric(41,5)"],
    "a box by default": [
        "alter table {t} add x box default '((1,2),(3,4))'",
        "alter table {t} add z text default '{{\"a\"}}'",
    ],
    "nullable": ["alter table {t} alter b set not null", "alter table {t} alter b drop not null"],
    "identity full": ["alter table {t} replica identity full"],
    "identity full and back": [
        "alter table {t} replica identity full",
        "update {t} set b = 'full' where id = 1",
        "alter table {t} replica identity default",
    ],
    "identity by index": [
        "alter table {t} alter a set not null",
        "create unique index on {t}(a)",
        "alter table {t} replica identity using index {t}_a_idx",
        "update {t} set id = id + 100 where id < 5",
        "update {t} set a = a + 100 where id > 100",
    ],
    "another key": [
        "alter table {t} drop constraint {t}_pkey",
        "alter table {t} alter a set not null, add primary key (a)",
        "update {t} set id = id + 100 where a < 5",
    ],
    "wider key": [
        "alter table {t} drop constraint {t}_pkey, add primary key (id, b)",
        "insert into {t} values (1, 1, 'twice', 1, 'd', 'bad')",
    ],
    # The log can't tell whether the key changed before the transaction's rows or after them.
    "wider key in a savepoint": [
        "alter table {t} replica identity full",
        "begin; update {t} set b = 'two' where id = 2; savepoint s; "  # noqa: ISC004
        "alter table {t} drop constraint {t}_pkey, add primary key (id, b); release s; "
        "insert into {t} values (1, 1, 'twice', 1, 'd', 'bad'), (3, 1, 'thrice', 1, 'd', 'bad'); "
        "update {t} set b = 'moved' where id = 2; delete from {t} where id = 3 and b = 'thrice'; commit",
        "update {t} set a = 7 where b = 'twice'",
    ],
    "key renamed": ["alter table {t} rename id to number", "update {t} set number = 99 where number = 1"],
    "key widened": ["alter table {t} alter id type bigint", "insert into {t}(id) values (1e10)"],
    "truncated": ["truncate {t}", "alter table {t} add x int", "insert into {t} values (2, 2, 'after')"],
    "many at once": [
        # If capture is behind, a rewrite loses the default of an added column: so the rewrite comes first.
        "alter table {t} alter a type bigint",
        "alter table {t} drop c, add x int default 3",
        "alter table {t} rename d to dee",
        "insert into {t}(id, dee) values (50, 'x')",
        "alter table {t} rename x to y",
        "alter table {t} drop b",
        "update {t} set y = 4 where id < 5",
    ],
    "in one transaction": [
        "begin; insert into {t}(id) values (60); alter table {t} add x int default 1; "  # noqa: ISC004
        "insert into {t}(id) values (61); savepoint s; alter table {t} drop b; "
        "insert into {t}(id) values (62); rollback to s; alter table {t} rename a to aa; "
        "update {t} set x = 2 where id in (60, 3); commit",
        "update {t} set b = 'still there' where id = 5",
    ],
    "odd names": [
        'alter table {t} add "two words, {{and}}; (more)=~" int default 1',
        "alter table {t} add \"A\" text default 'upper'",
        'alter table {t} add "_position" int default 2',
        "update {t} set \"A\" = 'changed' where id < 4",
        'alter table {t} rename "_position" to "_op"',
    ],
}

#: Changes that a mirror can't follow, and the column that it names.
REFUSED: dict[str, tuple[list[str], str]] = {
    "text to int": (["alter table {t} alter b type int using length(b)"], "b"),
    "added with values of its own": (["alter table {t} add x float8 default random()"], "x"),
    "added with the default of its domain": (
        [
            "create domain {t}_token as uuid default gen_random_uuid()",
            "alter table {t} add x {t}_token",
        ],
        "x",
    ),
    "added with values of its own by a default that was dropped": (
        ["alter table {t} add x float8 not null default random()", "alter table {t} alter x drop default"],
        "x",
    ),
    "added by a statement that wrote all rows": (
        ["alter table {t} add x int default 3, alter a type bigint"],
        "x",
    ),
    "generated": (["alter table {t} add x int generated always as (a * 2) stored"], "x"),
    "int to boolean": (["alter table {t} alter a type boolean using a > 5"], "a"),
    "many digits to fewer after the point": (["alter table {t} alter h type numeric(41,2)"], "h"),
    "an attribute added to a composite": (
        ["alter type {t}_pair add attribute c int", "alter table {t} add x int"],
        "k",
    ),
    "a label renamed": (
        ["alter type {t}_label rename value 'first' to 'primary'", "alter table {t} add x int"],
        "l",
    ),
}

#: Changes after which a history has no common type, and the column.
NO_COMMON_TYPE = {
    "dropped and added with another type": "a",
    "int to text": "a",
    "int to numeric without digits": "a",
    "numeric to numeric without digits": "c",
    "text to int": "b",
    "int to boolean": "a",
}

#: Changes of whole tables, `{t}_1` and `{t}_2` at first, and the tables that exist at the end.
TABLE_CHANGES: dict[str, tuple[list[str], list[str]]] = {
    "renamed": (
        ["alter table {t}_1 rename to {t}_new", "update {t}_new set b = 'new' where id < 5"],
        ["{t}_new", "{t}_2"],
    ),
    "names swapped": (
        [
            "begin; alter table {t}_1 rename to tmp; alter table {t}_2 rename to {t}_1; "  # noqa: ISC004
            "alter table tmp rename to {t}_2; commit",
            "update {t}_1 set b = 'was 2' where id < 5",
            "update {t}_2 set b = 'was 1' where id < 5",
        ],
        ["{t}_1", "{t}_2"],
    ),
    "dropped and created again": (
        [
            "drop table {t}_1",
            "create table {t}_1(" + COLUMNS + ")",
            "alter publication tailrace_t add table {t}_1",
            "insert into {t}_1(id, b) values (1, 'anew'), (100, 'anew')",
        ],
        ["{t}_1", "{t}_2"],
    ),
    "dropped and created with other columns and another key": (
        [
            "drop table {t}_1",
            "create table {t}_1(b int, id text, k text primary key)",
            "alter publication tailrace_t add table {t}_1",
            "insert into {t}_1 values (1, 'x', 'key'), (2, 'y', 'other')",
            "update {t}_1 set b = 3 where k = 'key'",
        ],
        ["{t}_1", "{t}_2"],
    ),
    "renamed away and created again": (
        [
            "alter table {t}_1 rename to {t}_old",
            "create table {t}_1(" + COLUMNS + ")",
            "alter publication tailrace_t add table {t}_1",
            "insert into {t}_1(id, b) values (1, 'anew')",
            "update {t}_old set b = 'old' where id = 3",
        ],
        ["{t}_1", "{t}_2", "{t}_old"],
    ),
    "dropped, and another got its name": (
        [
            "update {t}_1 set b = 'lost'",
            "drop table {t}_1",
            "alter table {t}_2 rename to {t}_1",
            "insert into {t}_1(id) values (50)",
        ],
        ["{t}_1"],
    ),
    "moved to another schema": (
        [
            "alter table {t}_1 set schema other",
            "insert into other.{t}_1(id) values (50)",
        ],
        ["other.{t}_1", "{t}_2"],
    ),
}

#: By change: tables whose name is no longer their first one, or is now another table's.
DISPLACED: dict[str, list[str]] = {
    "renamed": ["{t}_new"],
    "names swapped": ["{t}_1", "{t}_2"],
    "dropped and created again": [],
    "dropped and created with other columns and another key": [],
    "renamed away and created again": ["{t}_old"],
    "dropped, and another got its name": ["{t}_1"],
    "moved to another schema": ["other.{t}_1"],
}

#: Types whose values are the same in Python with every reader.
NATIVE = frozenset(
    {
        "integer", "bigint", "smallint", "text", "real", "double precision", "boolean", "date",
        "integer[]", "bigint[]", "character", "character varying", "timestamp without time zone", "numeric",
    }
)  # fmt: skip


@dataclass
class Cut:
    """The source's tables at a place in the log: columns, and rows in order."""

    offset: int
    columns: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)


class Nearby(InProcess):
    """Runs jobs in this process, and MERGEs in the Spark of the suite."""

    def __init__(self, spark: Any) -> None:
        super().__init__()
        self.newSession = spark.newSession


class Scene:
    """A database whose tables are captured, and sinks that the test feeds."""

    def __init__(self, pg: Database, path: Path) -> None:
        self.pg = pg
        self.path = path
        self._running: Running | None = None

    def start(self) -> None:
        # Two scenes may use one server at a time.
        options: dict[str, Any] = {"slot": f"tailrace_{self.pg.name}"}
        if self.pg.query("select to_regnamespace('other')")[0][0]:
            options["tables"] = ("public.*", "other.*")
        self._running = Running(make_task(self.pg.dsn, self.path / "log", **options))
        self._running.wait_for("streaming")

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
        self._running = None

    def run(self, *statements: str) -> None:
        with self.pg.connect() as connection:
            for statement in statements:
                connection.execute(statement)

    def end(self) -> int:
        """Return the log's end once everything committed so far is in it."""
        assert self._running is not None
        self._running.catch_up(self.pg.query)
        with LogReader.open(self.path / "log", TASK) as reader:
            return reader.end().offset

    def read_again(self, tables: tuple[str, ...]) -> None:
        """Take a snapshot of tables beside the stream, to its end."""
        assert self._running is not None
        log = LogDirectory.open(self.path / "log")
        named = tuple(table if "." in table else f"public.{table}" for table in tables)
        id_ = ask(log, tables=named, where="", cancels=False).id

        def is_over() -> bool:
            found = kept_plans(log).find(id_)
            return found is not None and found.outcome is not SnapshotOutcome.OPEN

        wait_until(is_over, 120, "the snapshot")

    def cut(self, tables: list[str]) -> Cut:
        cut = Cut(self.end())
        for table in tables:
            cut.columns[table], cut.rows[table] = selected(self.pg, table)
        return cut


def selected(pg: Database, table: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    columns = pg.query(
        "select attname::text, format_type(atttypid, atttypmod) from pg_attribute "
        "where attrelid = %s::regclass and attnum > 0 and not attisdropped and attgenerated <> 'v' "
        "order by attnum",
        [table],
    )

    def expression(name: str, kind: str) -> str:
        quoted = '"' + name.replace('"', '""') + '"'
        if kind == "timestamp without time zone":  # Python has no infinity
            return f"case when isfinite({quoted}) then {quoted} end"
        return quoted if kind.partition("(")[0] in NATIVE and kind != "numeric" else f"{quoted}::text"

    wanted = ", ".join(expression(*column) for column in columns)
    rows = pg.query(f"select {wanted} from {table}")
    return [name for name, _ in columns], ordered(rows)


def ordered(rows: list[Any]) -> list[tuple[Any, ...]]:
    return sorted((tuple(map(plain, row)) for row in rows), key=repr)


def plain(value: Any) -> Any:
    """Return a value in a form that both sides have: times and decimals as text."""
    if isinstance(value, dt.datetime):
        return value.isoformat(" ")
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral() else f"{value.normalize():f}"
    return value


def make(
    kind: str,
    path: Path,
    tables: tuple[str, ...] | None = None,
    on_type_change: str = "stop",
    keyless: str = "refuse",
    rules: ColumnPolicy | None = None,
) -> Sink:
    given = SinkInput(tables, rules or ColumnPolicy())
    if kind in ("parquet", "jsonl"):
        return FileSink("lake", path, JSONL if kind == "jsonl" else parquet_format(), given)
    mode = DeltaAppend(on_type_change) if kind == "append" else DeltaMirror(keyless, on_type_change)
    return DeltaSink("lake", path, mode, given)


def write(sink: Sink, log: Path, upto: int, spark: Any = None, *, in_small_splits: bool = False) -> None:
    """Bring a sink to `upto` in one range, with one split or one for every few transactions."""
    sink.open(LogDirectory.open(log).identity, "shop")
    try:
        start = at = sink.position(TASK) or 0
        splits: list[InputSplit] = []
        with LogReader.open(log, TASK) as reader:
            while at < upto:
                end = reader.boundary_within(at, 12, 1 << 20, upto) if in_small_splits else upto
                splits.append(InputSplit(TASK, len(splits), at, end, tuple(reader.blocks(at, end))))
                at = end
        span = LogRange(TASK, start, upto)
        try:
            sink.write(None if isinstance(spark, InProcess) else spark, log, span, splits)
        except SparkNeededError:
            sink.write(spark or InProcess(), log, span, splits)  # type: ignore[arg-type]
    finally:
        sink.close()


KILLED = """
import sys
from pathlib import Path
from tests.support.sinks.ddl_story import make, write

kind, lake, log, upto, *tables = sys.argv[1:]
write(make(kind, Path(lake), tuple(tables) or None), Path(log), int(upto))
"""


def write_and_die(kind: str, lake: Path, log: Path, upto: int, tables: list[str], failpoints: str) -> None:
    """Write in another process, which is killed at a failpoint."""
    command = [
        *(sys.executable, "-m", "tests.support.script", KILLED),
        *(kind, str(lake), str(log), str(upto), *tables),
    ]
    environment = {
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]) + ":" + os.environ.get("PYTHONPATH", ""),
        "TAILRACE_FAILPOINTS": failpoints,
        "PATH": "",
    }
    died = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert died.returncode == -9, (failpoints, died.returncode, died.stderr[-2000:])
