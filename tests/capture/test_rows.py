"""Rows of every kind of change, from real servers, as the log returns them.

The log is decoded as by sinks, without Spark.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.disclosure import kept_disclosure
from tailrace.config import ColumnPolicy
from tailrace.decode.column_policy import TablePolicy
from tailrace.errors import Kind
from tailrace.pipeline.log.inspection import Selection, json_lines
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tests.support.capture.captured import capturing, run_to_end
from tests.support.capture.requested import await_end, request
from tests.support.postgres import Database

pytestmark = pytest.mark.each_postgres("what pgoutput sends")

UNSENT = "__debezium_unavailable_value"
LONG = "x" * 3000
Row = dict[str, Any] | None


def told(log: Path, table: str | None = None, *, raw: bool = False) -> list[dict[str, Any]]:
    directory = LogDirectory.open(log)
    rules = ColumnPolicy() if raw else kept_disclosure(directory, "0")
    return [json.loads(line) for line in json_lines(directory, "0", Selection(table), TablePolicy.of(rules))]


def changes(log: Path, table: str | None = None, *, raw: bool = False) -> list[tuple[str, Row, Row]]:
    """Return the changes of a table, in order: letter, row before, row after."""
    return [(line["op"], line.get("before"), line.get("after")) for line in told(log, table, raw=raw)]


def captured(pg: Database, log: Path, statements: str, **options: Any) -> None:
    """Capture from now on, run `statements` one by one, and stop once the log has all of them.

    The lines from `begin;` to `commit;` are one transaction.
    """
    with capturing(pg.dsn, log, **options) as running:
        running.wait_for("streaming")
        with pg.connect(autocommit=True) as connection:
            for statement in filter(None, (part.strip() for part in statements.split(";\n"))):
                connection.execute(statement)
        running.catch_up(pg.query)


def prepared(pg: Database, statements: str) -> None:
    with pg.connect(autocommit=True) as connection:
        for statement in filter(None, (part.strip() for part in statements.split(";\n"))):
            connection.execute(statement)


def test_what_each_replica_identity_sends(pg: Database, tmp_path: Path) -> None:
    prepared(
        pg,
        """
        create table d (id int primary key, big text, n int);
        alter table d alter big set storage external;
        create table f (like d including all);
        alter table f replica identity full;
        create table i (id int, big text, n int not null unique);
        alter table i alter big set storage external;
        alter table i replica identity using index i_n_key;
        create table n (id int primary key);
        alter table n replica identity nothing
        """,
    )
    captured(
        pg,
        tmp_path / "log",
        f"""
        insert into d values (1, '{LONG}', 1);
        update d set n = 2;
        update d set id = 2;
        update d set n = n;
        delete from d;
        insert into f values (1, '{LONG}', 1);
        update f set n = 2;
        update f set id = 2;
        delete from f;
        insert into i values (1, '{LONG}', 1);
        update i set id = 2;
        update i set n = 3;
        delete from i;
        insert into n values (1)
        """,
        tables=("public.*", "public.n"),
        snapshot="never",
    )
    log = tmp_path / "log"
    assert changes(log, "public.d") == [
        ("c", None, {"id": 1, "big": LONG, "n": 1}),
        ("u", None, {"id": 1, "big": UNSENT, "n": 2}),
        ("u", {"id": 1}, {"id": 2, "big": UNSENT, "n": 2}),
        ("u", None, {"id": 2, "big": UNSENT, "n": 2}),
        ("d", {"id": 2}, None),
    ]
    one, two, three = ({"id": 1, "big": LONG, "n": 1}, {"id": 1, "big": LONG, "n": 2}, None)
    three = {"id": 2, "big": LONG, "n": 2}
    assert changes(log, "public.f") == [
        ("c", None, one),
        ("u", one, two),  # the old row has the value that the new one lacks
        ("u", two, three),
        ("d", three, None),
    ]
    assert changes(log, "public.i") == [
        ("c", None, one),
        ("u", None, {"id": 2, "big": UNSENT, "n": 1}),
        ("u", {"n": 1}, {"id": 2, "big": UNSENT, "n": 3}),
        ("d", {"n": 3}, None),
    ]
    with pytest.raises(Exception, match="does not have a replica identity"):
        pg.execute("update n set id = 2")


def test_keys_swapped_in_one_transaction(pg: Database, tmp_path: Path) -> None:
    prepared(
        pg,
        """
        create table s (id int primary key, v text);
        create table deferred (id int primary key deferrable initially deferred, v text);
        alter table deferred replica identity full;
        create table shifted (k int primary key, v text);
        alter table shifted drop constraint shifted_pkey;
        alter table shifted add primary key (k) deferrable initially immediate;
        alter table shifted replica identity full
        """,
    )
    captured(
        pg,
        tmp_path / "log",
        """
        insert into s values (1, 'a'), (2, 'b');
        begin;
        update s set id = 0 where id = 1;
        update s set id = 1 where id = 2;
        update s set id = 2 where id = 0;
        commit;
        insert into deferred values (1, 'a'), (2, 'b');
        update deferred set id = 3 - id;
        insert into shifted select i, 'v' || i from generate_series(1, 3) i;
        update shifted set k = k + 1
        """,
        snapshot="never",
    )
    log = tmp_path / "log"
    assert changes(log, "public.s")[2:] == [
        ("u", {"id": 1}, {"id": 0, "v": "a"}),
        ("u", {"id": 2}, {"id": 1, "v": "b"}),
        ("u", {"id": 0}, {"id": 2, "v": "a"}),
    ]
    lines = told(log, "public.s")[2:]
    assert len({line["source"]["txId"] for line in lines}) == 1
    assert [line["position"]["ordinal"] for line in lines] == [0, 1, 2]
    assert changes(log, "public.deferred")[2:] == [
        ("u", {"id": 1, "v": "a"}, {"id": 2, "v": "a"}),
        ("u", {"id": 2, "v": "b"}, {"id": 1, "v": "b"}),
    ]
    assert [(before, after) for _, before, after in changes(log, "public.shifted")[3:]] == [
        ({"k": k, "v": f"v{k}"}, {"k": k + 1, "v": f"v{k}"}) for k in (1, 2, 3)
    ]


def test_truncates_are_in_order_with_other_changes(pg: Database, tmp_path: Path) -> None:
    prepared(
        pg,
        """
        create table a (id serial primary key);
        create table b (id int primary key, a int references a);
        create table c (id int primary key)
        """,
    )
    captured(
        pg,
        tmp_path / "log",
        """
        begin;
        insert into a default values;
        insert into b values (1, 1);
        truncate a restart identity cascade;
        insert into a default values;
        commit;
        insert into c values (1);
        truncate b, c
        """,
        snapshot="never",
    )
    lines = told(tmp_path / "log")
    assert [(line["op"], line["source"]["table"]) for line in lines[:2]] == [("c", "a"), ("c", "b")]
    assert {(line["op"], line["source"]["table"]) for line in lines[2:4]} == {("t", "a"), ("t", "b")}
    assert (lines[4]["op"], lines[4]["after"]) == ("c", {"id": 1})
    assert [line["position"]["ordinal"] for line in lines[:5]] == [0, 1, 2, 3, 4]
    assert {(line["op"], line["source"]["table"]) for line in lines[6:]} == {("t", "b"), ("t", "c")}
    assert all(line["before"] is None and line["after"] is None for line in lines if line["op"] == "t")
    offsets = [line["position"]["log_offset"] for line in lines]
    assert offsets == sorted(set(offsets))


def test_statements_of_all_kinds_are_captured_as_rows(pg: Database, tmp_path: Path) -> None:
    prepared(pg, "create table t (id int primary key, v text);\ncreate table empty (id int primary key)")
    log = tmp_path / "log"
    with capturing(pg.dsn, log, snapshot="never") as running:
        running.wait_for("streaming")
        with pg.connect(autocommit=True) as connection:
            connection.execute("insert into t values (1, 'a'), (2, 'b')")
            connection.execute("insert into t values (1, 'z') on conflict (id) do update set v = excluded.v")
            connection.execute("insert into t values (1, 'y') on conflict do nothing")
            with connection.cursor().copy("copy t from stdin") as copy:
                copy.write("3\tcopied\n4\t\\N\n")
            connection.execute(
                "merge into t using (values (1, 'm'), (9, 'n')) s(id, v) on t.id = s.id "
                "when matched then update set v = s.v when not matched then insert values (s.id, s.v)"
            )
            connection.execute("update t set v = v where id = 9")
            connection.execute("begin")
            connection.execute("insert into t values (5, 'kept')")
            connection.execute("savepoint one")
            connection.execute("insert into t values (6, 'gone')")
            connection.execute("rollback to one")
            connection.execute("savepoint two")
            connection.execute("insert into t values (7, 'kept')")
            connection.execute("release two")
            connection.execute("commit")
            connection.execute("begin")
            connection.execute("insert into t values (8, 'gone')")
            connection.execute("rollback")
            connection.execute("create temporary table own (id int primary key)")
            connection.execute("insert into own values (1)")
            connection.execute("select txid_current()")  # a transaction without changes
        running.catch_up(pg.query)
    after = [(op, row and (row["id"], row["v"])) for op, _, row in changes(log)]
    assert after == [
        ("c", (1, "a")),
        ("c", (2, "b")),
        ("u", (1, "z")),
        ("c", (3, "copied")),
        ("c", (4, None)),
        ("u", (1, "m")),
        ("c", (9, "n")),
        ("u", (9, "n")),
        ("c", (5, "kept")),
        ("c", (7, "kept")),
    ]


@pytest.mark.slow
def test_partitioned_tables_by_root_and_by_partition(pg: Database, tmp_path: Path) -> None:
    prepared(
        pg,
        """
        create table m (id int, at int, v text, primary key (id, at)) partition by range (at);
        create table m1 partition of m for values from (0) to (10);
        create table m2 partition of m for values from (10) to (20);
        insert into m values (1, 1, 'a'), (2, 11, 'b');
        alter table m1 replica identity full;
        create publication by_part for table m
        """,
    )
    work = """
        update m set at = 12 where id = 1;
        update m set v = 'c' where id = 2;
        create table m3 (v text, at int not null, id int not null, primary key (id, at));
        insert into m3 values ('unseen', 25, 5);
        alter table m attach partition m3 for values from (20) to (30);
        insert into m values (3, 21, 'new');
        create table m4 partition of m for values from (30) to (40);
        insert into m values (4, 31, 'newer');
        delete from m where id = 4;
        truncate m
        """
    with capturing(pg.dsn, tmp_path / "root") as root:
        root.wait_for("streaming")
        captured(
            pg, tmp_path / "part", work,
            publication="by_part", slot="by_part", publish_via_partition_root=False,
        )  # fmt: skip
        root.catch_up(pg.query)
    a, b, c = ({"id": 1, "at": 1, "v": "a"}, {"id": 2, "at": 11, "v": "b"}, {"id": 2, "at": 11, "v": "c"})
    moved, new = {"id": 1, "at": 12, "v": "a"}, {"id": 3, "at": 21, "v": "new"}
    newer = {"id": 4, "at": 31, "v": "newer"}
    found = [
        (line["source"]["table"], line["op"], line["before"], line["after"])
        for line in told(tmp_path / "root")
    ]
    # Chunks of a snapshot are read in parallel: there is no order between them.
    assert sorted(found[:2], key=str) == [("m", "r", None, a), ("m", "r", None, b)]
    # Existing rows of an attached partition are missing: PostgreSQL does not send them.
    assert found[2:] == [
        ("m", "d", {"id": 1, "at": 1}, None),  # the root's replica identity counts, not the partition's
        ("m", "c", None, moved),
        ("m", "u", None, c),
        ("m", "c", None, new),
        ("m", "c", None, newer),
        ("m", "d", {"id": 4, "at": 31}, None),
        ("m", "t", None, None),
    ]
    found = [
        (line["source"]["table"], line["op"], line["before"], line["after"])
        for line in told(tmp_path / "part")
    ]
    assert sorted(found[:2], key=str) == [("m1", "r", None, a), ("m2", "r", None, b)]
    assert found[2:8] == [
        ("m1", "d", a, None),
        ("m2", "c", None, moved),
        ("m2", "u", None, c),
        ("m3", "c", None, new),
        ("m4", "c", None, newer),
        ("m4", "d", {"id": 4, "at": 31}, None),
    ]
    assert sorted(found[8:]) == [(f"m{number}", "t", None, None) for number in (1, 2, 3, 4)]


def test_names_of_all_kinds(pg: Database, tmp_path: Path) -> None:
    schemas = ["s", 'S "q"', "a.b", "ünï"]
    names = ["t", 'T "quoted"', "dot.ted", "sp ace", "ünïcode", "x" * 63, "select", "*", "/slash/"]
    with pg.connect(autocommit=True) as connection:
        for schema in schemas:
            quoted = schema.replace('"', '""')
            connection.execute(f'create schema "{quoted}"')
            for name in names:
                table = f'"{quoted}"."' + name.replace('"', '""') + '"'
                connection.execute(f'create table {table} (id int primary key, "c ""o.l" text)')
                connection.execute(f"insert into {table} values (1, 'snapshot')")
    log = tmp_path / "log"
    quoted_names = tuple('"' + schema.replace('"', '""') + '".*' for schema in schemas)
    with capturing(pg.dsn, log, tables=quoted_names) as running:
        running.wait_for("streaming")
        with pg.connect(autocommit=True) as connection:
            for schema in schemas:
                for name in names:
                    table = ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
                    connection.execute(f"insert into {table} values (2, 'stream')")
        running.catch_up(pg.query)
        asked = [f"{schemas[1]}.{name}" for name in names]
        assert await_end(running, log, request(log, *asked)).outcome is SnapshotOutcome.DONE
    found = Counter(
        (line["source"]["schema"], line["source"]["table"], line["op"], line["after"]["id"])
        for line in told(log)
    )
    once = [("r", 1), ("c", 2)]
    assert found == Counter(
        (schema, name, op, number)
        for schema in schemas
        for name in names
        for op, number in (once if schema != schemas[1] else [*once, ("r", 1), ("r", 2)])
    )
    assert told(log)[0]["after"]['c "o.l'] == "snapshot"


@pytest.mark.one_postgres
def test_the_clients_environment_does_not_change_values(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGTZ", "America/New_York")
    monkeypatch.setenv("PGDATESTYLE", "German")
    pg.execute("create table days (id int primary key, day date, at timestamptz)")
    pg.execute("insert into days values (1, '2024-02-03', '2024-02-03 04:05:06+00')")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("insert into days values (2, '2024-02-03', '2024-02-03 04:05:06+00')")
        running.catch_up(pg.query)
    row = {"day": 19756, "at": "2024-02-03T04:05:06Z"}
    assert changes(tmp_path / "log") == [("r", None, {"id": 1, **row}), ("c", None, {"id": 2, **row})]


def test_rows_cross_row_filters_in_both_directions(pg: Database, tmp_path: Path) -> None:
    prepared(
        pg,
        """
        create table t (id int primary key, open bool not null, v text);
        alter table t replica identity full;
        insert into t values (1, true, 'a'), (2, false, 'hidden');
        create publication filtered for table t where (open)
        """,
    )
    captured(
        pg,
        tmp_path / "log",
        """
        update t set open = false where id = 1;
        update t set open = true where id = 2;
        update t set v = 'seen' where id = 2;
        update t set v = 'unseen' where id = 1;
        insert into t values (3, false, 'hidden')
        """,
        publication="filtered",
    )
    a, b = {"id": 1, "open": True, "v": "a"}, {"id": 2, "open": True, "v": "hidden"}
    assert changes(tmp_path / "log") == [
        ("r", None, a),
        ("d", a, None),
        ("c", None, b),
        ("u", b, {**b, "v": "seen"}),
    ]


def test_generated_columns_are_the_same_in_snapshot_and_stream(pg: Database, tmp_path: Path) -> None:
    modern = pg.server.version >= 18
    virtual = ", w int generated always as (n * 3) virtual" if modern else ""
    prepared(
        pg,
        f"""
        create table g (id int primary key, n int, s int generated always as (n * 2) stored{virtual});
        insert into g (id, n) values (1, 10)
        """,
    )
    captured(pg, tmp_path / "log", "insert into g (id, n) values (2, 20);\nupdate g set n = 21 where id = 2")
    stored = [{"s": s} if modern else {} for s in (20, 40, 42)]
    assert [after for _, _, after in changes(tmp_path / "log")] == [
        {"id": 1, "n": 10} | stored[0],
        {"id": 2, "n": 20} | stored[1],
        {"id": 2, "n": 21} | stored[2],
    ]


def test_logical_messages_do_not_affect_tables_and_can_be_excluded(pg: Database, tmp_path: Path) -> None:
    prepared(pg, "create table t (id int primary key)")
    work = """
        begin;
        insert into t values (1);
        select pg_logical_emit_message(true, 'app', 'within');
        insert into t values (2);
        commit;
        select pg_logical_emit_message(false, 'app', '\\x0001ff'::bytea);
        begin;
        select pg_logical_emit_message(true, 'app', 'never');
        rollback;
        insert into t values (3)
        """
    captured(pg, tmp_path / "log", work, snapshot="never")
    found = [
        (line["op"], line.get("message") or line["after"], line["position"]["ordinal"])
        for line in told(tmp_path / "log")
    ]
    assert found == [
        ("c", {"id": 1}, 0),
        ("m", {"prefix": "app", "content": "d2l0aGlu"}, 1),
        ("c", {"id": 2}, 2),
        ("m", {"prefix": "app", "content": "AAH/"}, 0),
        ("c", {"id": 3}, 0),
    ]
    pg.execute("truncate t")
    captured(pg, tmp_path / "none", work, snapshot="never", message_prefixes=(), slot="none")
    assert [line["op"] for line in told(tmp_path / "none")] == ["c", "c", "c"]


def test_changes_of_another_origin_are_captured_or_not(pg: Database, tmp_path: Path) -> None:
    prepared(pg, "create table t (id int primary key)")
    work = """
        insert into t values (1);
        select pg_replication_origin_session_setup('elsewhere');
        begin;
        select pg_replication_origin_xact_setup('0/1', now());
        insert into t values (2);
        commit;
        select pg_replication_origin_session_reset();
        insert into t values (3)
        """
    pg.execute("select pg_replication_origin_create('elsewhere')")
    try:
        captured(pg, tmp_path / "any", work, snapshot="never")
        assert [after["id"] for _, _, after in changes(tmp_path / "any") if after] == [1, 2, 3]
        pg.execute("truncate t")
        if pg.server.version < 16:
            error = run_to_end(pg.dsn, tmp_path / "none", origin="none", slot="none")
            assert error is not None
            assert error.kind is Kind.SOURCE_MISCONFIGURED
            assert not pg.query("select 1 from pg_replication_slots where slot_name = 'none'")
            return
        captured(pg, tmp_path / "none", work, snapshot="never", origin="none", slot="none")
        assert [after["id"] for _, _, after in changes(tmp_path / "none") if after] == [1, 3]
    finally:
        pg.execute("select pg_replication_origin_drop('elsewhere')")


def test_children_by_inheritance_are_tables_of_their_own(pg: Database, tmp_path: Path) -> None:
    prepared(
        pg,
        """
        create table parent (id int primary key);
        create table child (extra text, primary key (id)) inherits (parent);
        create table other (primary key (id)) inherits (parent);
        insert into parent values (1);
        insert into child values (2, 'x');
        insert into other values (3)
        """,
    )
    work = "insert into parent values (4);\ninsert into child values (5, 'y');\ninsert into other values (6)"
    captured(pg, tmp_path / "log", work, tables_exclude=("public.other",))
    found = [(line["source"]["table"], line["after"]["id"]) for line in told(tmp_path / "log")]
    assert sorted(found[:2]) == [("child", 2), ("parent", 1)]
    assert found[2:] == [("parent", 4), ("child", 5)]


def test_excluded_columns_do_not_leave_the_server_if_it_can_keep_them(pg: Database, tmp_path: Path) -> None:
    prepared(
        pg,
        """
        create table t (id int primary key, secret text, v text);
        create table f (id int primary key, secret text, v text);
        alter table f replica identity full;
        insert into t values (1, 'CANARY', 'a');
        insert into f values (1, 'CANARY', 'a');
        create table theirs (id int primary key, secret text, v text);
        insert into theirs values (1, 'CANARY', 'a');
        create publication theirs for table theirs
        """,
    )
    rules = {"columns_exclude": ("public.*.secret",)}
    captured(
        pg,
        tmp_path / "log",
        "insert into t values (2, 'CANARY', 'b');\nupdate t set v = 'c', id = 3 where id = 2;\n"
        "delete from t where id = 3;\nupdate f set v = 'c'",
        **rules,
    )
    log = tmp_path / "log"
    assert changes(log, "public.t") == [
        ("r", None, {"id": 1, "v": "a"}),
        ("c", None, {"id": 2, "v": "b"}),
        ("u", {"id": 2}, {"id": 3, "v": "c"}),
        ("d", {"id": 3}, None),
    ]
    assert changes(log, "public.t", raw=True) == changes(log, "public.t")
    # PostgreSQL must send full rows completely; excluded columns are dropped when the log is read.
    assert changes(log, "public.f")[1] == ("u", {"id": 1, "v": "a"}, {"id": 1, "v": "c"})
    assert changes(log, "public.f", raw=True)[0] == ("r", None, {"id": 1, "secret": None, "v": "a"})
    assert "secret" in (changes(log, "public.f", raw=True)[1][2] or {})
    captured(
        pg, tmp_path / "theirs", "insert into theirs values (2, 'CANARY', 'b')",
        publication="theirs", slot="theirs", tables=("public.theirs",), **rules,
    )  # fmt: skip
    assert [after for _, _, after in changes(tmp_path / "theirs")] == [
        {"id": 1, "v": "a"},
        {"id": 2, "v": "b"},
    ]
    raw = [after or {} for _, _, after in changes(tmp_path / "theirs", raw=True)]
    assert [row["secret"] for row in raw] == [None, "CANARY"]


@pytest.mark.parametrize("identity", ["default", "full"])
def test_a_snapshot_beside_the_stream_excludes_columns_too(
    pg: Database, tmp_path: Path, identity: str
) -> None:
    prepared(
        pg,
        f"""
        create table t (id int primary key, secret text, v text);
        alter table t replica identity {identity};
        create publication tailrace_t for table t
        """,
    )
    log = tmp_path / "log"
    with capturing(pg.dsn, log, columns_exclude=("public.t.secret",)) as running:
        running.wait_for("streaming")
        pg.execute("insert into t values (1, 'CANARY', 'a')")
        running.catch_up(pg.query)
        assert await_end(running, log, request(log, "public.t")).outcome is SnapshotOutcome.DONE
        pg.execute("insert into t values (2, 'CANARY', 'b')")
        running.catch_up(pg.query)
    assert changes(log) == [
        ("c", None, {"id": 1, "v": "a"}),
        ("r", None, {"id": 1, "v": "a"}),
        ("c", None, {"id": 2, "v": "b"}),
    ]
    assert changes(log, raw=True)[1] == ("r", None, {"id": 1, "secret": None, "v": "a"})


def test_an_excluded_key_column_is_refused_at_the_start(pg: Database, tmp_path: Path) -> None:
    prepared(pg, "create table t (id int primary key, v text)")
    error = run_to_end(pg.dsn, tmp_path / "log", columns_exclude=("public.t.id",))
    assert error is not None
    assert (error.kind, error.context["table"]) == (Kind.CONFIG_INVALID, "public.t")
    assert not pg.query("select 1 from pg_publication")


def test_a_prepared_transaction_is_captured_when_it_is_committed(own_pg: Any, tmp_path: Path) -> None:
    own_pg.execute("alter system set max_prepared_transactions = 4")
    own_pg.execute("alter system set logical_decoding_work_mem = '64kB'")
    own_pg.restart()
    own_pg.create_database("shop")
    pg = Database(own_pg, "shop")
    pg.execute("create table t (id int primary key, v text)")
    captured(
        pg,
        tmp_path / "log",
        """
        begin;
        insert into t values (1, 'prepared');
        prepare transaction 'one';
        insert into t values (2, 'between');
        begin;
        insert into t values (3, 'never');
        prepare transaction 'two';
        rollback prepared 'two';
        commit prepared 'one';
        insert into t select i, repeat('spilled', 20) from generate_series(10, 20009) i
        """,
        snapshot="never",
    )
    found = [(after or {})["id"] for _, _, after in changes(tmp_path / "log")]
    assert found[:2] == [2, 1]
    assert found[2:] == list(range(10, 20010))


def test_names_have_no_quotes_that_only_a_setting_adds(pg: Database, tmp_path: Path) -> None:
    prepared(
        pg,
        """
        create type mood as enum ('fine');
        create table q (id int primary key, of regclass, m mood);
        insert into q values (1, 'public.q', 'fine')
        """,
    )
    pg.execute(f'alter database "{pg.name}" set quote_all_identifiers = on')
    captured(pg, tmp_path / "log", "insert into q values (2, 'public.q', 'fine')", tables=("public.q",))
    assert [after for _, _, after in changes(tmp_path / "log", "public.q")] == [
        {"id": 1, "of": "public.q", "m": "fine"},
        {"id": 2, "of": "public.q", "m": "fine"},
    ]
