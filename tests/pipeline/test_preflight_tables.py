"""Preflight of tables, columns, masks and keys: each problem with its own message and SQL."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.errors import Kind
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.sources.findings import Finding, Severity
from tests.support.capture.captured import run_to_end
from tests.support.pipeline.preflight import errors, found, pipeline_file
from tests.support.postgres import Database

pytestmark = pytest.mark.each_postgres("what the catalogue says of tables")


def checked(directory: Any, pg: Database, source: str, sinks: str = "") -> list[Finding]:
    return preflight(pipeline_file(directory, pg.server, pg.name, source=source, sinks=sinks))


def test_relations_that_are_no_tables_are_reported_by_their_kind(pg, tmp_path):
    pg.execute("create table t (id int primary key)")
    pg.execute("create unlogged table quick (id int primary key)")
    pg.execute("create view v as select * from t")
    pg.execute("create materialized view m as select * from t")
    pg.execute("create sequence s")
    names = ["quick", "v", "m", "s", "none", "t"]
    tables = ", ".join(f"public.{name}" for name in names)
    messages = [finding.message for finding in checked(tmp_path, pg, f"  tables: [{tables}]\n")]
    assert messages == [
        "source.tables: 'public.quick' is an unlogged table, which PostgreSQL does not replicate",
        "source.tables: 'public.v' is a view, which PostgreSQL does not replicate",
        "source.tables: 'public.m' is a materialized view, which PostgreSQL does not replicate",
        "source.tables: 's' is a sequence".replace("'s'", "'public.s'")
        + ", which PostgreSQL does not replicate",
        "source.tables: no table matches 'public.none'",
    ]
    # A pattern with a star skips them.
    assert checked(tmp_path, pg, "") == []


def test_partitions_that_the_snapshot_can_not_read_or_that_are_unlogged_are_named(own_pg, tmp_path):
    own_pg.create_database("shop")
    own_pg.execute(
        "create role cdc login replication; create schema parts; "
        "create table root (id int primary key) partition by range (id); "
        "create table parts.low partition of root for values from (0) to (9); "
        "create unlogged table parts.high partition of root for values from (9) to (99); "
        "grant select on root to cdc; "
        "create publication tailrace_shop for table root with (publish_via_partition_root)",
        dbname="shop",
    )
    file = pipeline_file(tmp_path, own_pg, "shop", user="cdc")
    missing = errors(file)
    assert {finding.table for finding in missing} == {"parts.low", "parts.high"}
    assert {finding.kind for finding in missing} == {Kind.SOURCE_PRIVILEGE_MISSING}
    for finding in missing:
        own_pg.execute(finding.repair, dbname="shop")
    (unlogged,) = preflight(file)
    assert unlogged.severity is Severity.WARNING
    assert 'the table "parts"."high" is unlogged' in unlogged.message
    own_pg.execute(unlogged.repair.partition(";")[0], dbname="shop")
    assert preflight(file) == []


def test_a_foreign_partition_is_named(pg, tmp_path):
    pg.execute(
        "create foreign data wrapper far; create server there foreign data wrapper far; "
        "create table root (id int) partition by range (id); "
        "create table low partition of root for values from (0) to (9); alter table low add primary key (id)"
    )
    pg.execute("create foreign table high partition of root for values from (9) to (99) server there")
    (foreign,) = checked(tmp_path, pg, "")
    assert foreign.severity is Severity.WARNING
    assert foreign.table == "public.root"
    assert 'the partition "public"."high" of "public"."root" is a foreign table' in foreign.message


def test_a_key_with_generated_columns_needs_a_later_server(pg, tmp_path):
    pg.execute(
        "create table t (a int, b int, id int generated always as (1000 * a + b) stored primary key);"
        "insert into t values (1, 2)"
    )
    findings = checked(tmp_path, pg, "")
    assert len(findings) == (pg.server.version < 18)
    for finding in findings:
        assert finding.severity is Severity.ERROR
        assert "the generated columns id, which PostgreSQL sends since version 18" in finding.message
        failure = run_to_end(pg.dsn, tmp_path / "read", snapshot="only")
        assert failure is not None
        assert "the generated columns of the key of public.t" in failure.message
        assert failure.hint == finding.repair.partition(";")[0]
        pg.execute(failure.hint)
        assert run_to_end(pg.dsn, tmp_path / "read", snapshot="only") is None
        assert checked(tmp_path, pg, "") == []


def test_settings_that_need_a_later_server_are_all_reported(pg, tmp_path):
    pg.execute("create table t (id int primary key)")
    settings = "  origin: none\n  slot_failover: true\n"
    found = [one for one in checked(tmp_path, pg, settings) if one.severity is Severity.ERROR]
    messages = [finding.message for finding in found]
    assert len(messages) == (pg.server.version < 17) + (pg.server.version < 16)
    assert all(f"the server is PostgreSQL {pg.server.version}" in message for message in messages)


def test_a_replica_identity_without_its_index_and_one_of_a_partition_are_reported(pg, tmp_path):
    pg.execute("create table i (a int not null, b int)")
    pg.execute("create unique index i_a on i (a)")
    pg.execute("alter table i replica identity using index i_a")
    pg.execute("drop index i_a")
    pg.execute("create table p (id int primary key, at date) partition by range (id)")
    pg.execute('create table "p 1" partition of p for values from (0) to (10)')
    pg.execute("create table p2 partition of p for values from (10) to (20)")
    pg.execute('alter table "p 1" replica identity nothing')
    file = pipeline_file(tmp_path, pg.server, pg.name)
    result = found(file)
    repair = result[Kind.SOURCE_MISCONFIGURED, "public.p"].repair
    assert repair.startswith('ALTER TABLE "public"."p 1" REPLICA IDENTITY FULL;')
    assert (Kind.SOURCE_MISCONFIGURED, "public.i") in result
    for finding in result.values():
        pg.execute(finding.repair.split(";")[0])
    assert preflight(file) == []


RULES = """  columns_exclude: ["public.users.ssn", "*.nothing.x"]
  masks:
    - {columns: ["public.users.mail"], method: hash, salt: "${env:SALT}"}
    - {columns: ["*.*.nowhere"], method: fixed}
  message_keys: {"public.log": [host], "public.gone": [a]}
"""


def test_column_settings_that_match_nothing_or_leak_are_reported(pg, tmp_path, monkeypatch):
    pg.execute("create table users (id int primary key, mail text, ssn text)")
    pg.execute("create table log (host text, what text)")
    pg.execute("alter table log replica identity full")
    monkeypatch.setenv("SALT", "short")
    mirror = "{type: delta, mode: mirror, path: ./lake}"
    result = checked(tmp_path, pg, RULES, mirror)
    told = {(finding.severity, finding.message.split(";")[0]) for finding in result}
    salt = "source.masks[0]: the salt ${env:SALT} is shorter than 16 characters, so it can be guessed "
    salt += "by brute force, and with it the values"
    assert told == {
        (Severity.WARNING, "source.columns_exclude: no column of a captured table matches '*.nothing.x'"),
        (Severity.WARNING, "source.masks[1].columns: no column of a captured table matches '*.*.nowhere'"),
        (Severity.WARNING, "source.message_keys: no captured table matches 'public.gone'"),
        (Severity.WARNING, salt),
    }
    monkeypatch.delenv("SALT")
    assert [
        finding.kind for finding in checked(tmp_path, pg, RULES) if finding.severity is Severity.ERROR
    ] == [Kind.SECRET_MISSING]


def test_settings_that_would_lose_keys_are_refused_with_a_repair(pg, tmp_path):
    pg.execute("create table t (id int primary key, a int not null, b text)")
    pg.execute("create table u (id int primary key, a int not null, b text)")
    source = (
        '  columns_exclude: ["public.t.id"]\n  message_keys: {"public.u": [a], "public.t": [a, id]}\n'
        '  masks: [{columns: ["public.u.a"], method: truncate, length: 1}]\n'
    )
    file = pipeline_file(tmp_path, pg.server, pg.name, source=source)
    messages = [(finding.table, finding.message) for finding in errors(file)]
    assert messages == [
        ("public.t", "source.message_keys names what updates and deletes don't send of the old row: 'a'"),
        ("public.t", "source.columns_exclude leaves out what the table's key needs: 'id'"),
        ("public.u", "source.message_keys names what updates and deletes don't send of the old row: 'a'"),
        ("public.u", "source.masks has the method truncate, which makes different keys equal, for 'a'"),
    ]
    pg.execute(errors(file)[2].repair.split(";")[0])
    assert [finding.table for finding in errors(file)] == ["public.t", "public.t", "public.u"]


def test_a_mirrors_key_that_a_handling_mode_rounds_is_reported(pg, tmp_path):
    pg.execute(
        "create domain amount as numeric(20,2); create domain price as amount check (value > 0); "
        "create table rounded (p price, t timetz, primary key (p, t)); "
        "create table exact (p numeric(12,2) primary key)"
    )
    modes = "  decimal_handling_mode: double\n  time_precision_mode: connect\n"
    sink = f"{{type: delta, path: '{tmp_path}/lake', mode: mirror%s}}"
    found = checked(tmp_path, pg, modes, sink % "")
    assert [(finding.kind, finding.table) for finding in found] == [
        (Kind.SINK_SCHEMA_REFUSED, "public.rounded")
    ] * 2
    assert "decimal_handling_mode rounds the key column 'p'" in found[0].message
    assert "time_precision_mode rounds the key column 't'" in found[1].message
    steps = ", transformations: [{type: cast, fields: {p: text, t: text}}]"
    assert checked(tmp_path, pg, modes, sink % steps) == []


def test_publications_that_break_the_sources_own_updates_are_reported(pg, tmp_path):
    pg.execute("create table t (id int primary key, a int, secret text)")
    pg.execute("create table whole (id int primary key, a int)")
    pg.execute("alter table whole replica identity full")
    pg.execute("insert into whole values (1, 1)")
    pg.execute(f"create publication tailrace_{pg.name} for table t (id, secret), whole (id)")
    file = pipeline_file(tmp_path, pg.server, pg.name, source='  columns_exclude: ["public.t.secret"]\n')
    result = preflight(file)
    told = {(finding.severity, finding.table): finding for finding in result}
    assert set(told) == {(Severity.ERROR, "public.whole"), (Severity.WARNING, "public.t")}
    messages = [finding.message for finding in result]
    assert (
        "PostgreSQL refuses updates and deletes of the table" in told[Severity.ERROR, "public.whole"].message
    )
    assert any("does not send the columns 'a'" in message for message in messages)
    assert any("'secret' are left out, but leave the server" in message for message in messages)
    for finding in (told[Severity.ERROR, "public.whole"], told[Severity.WARNING, "public.t"]):
        with pg.connect(autocommit=True) as connection:
            connection.execute(finding.repair)
    assert preflight(file) == []
    pg.execute("update whole set a = 2")
    assert pg.query("select tablename, attnames::text from pg_publication_tables where tablename = 't'") == [
        ("t", "{id,a}")
    ]


def test_excluded_columns_that_replica_identity_full_sends_nevertheless_are_reported(pg, tmp_path):
    pg.execute("create table t (id int primary key, secret text)")
    pg.execute("alter table t replica identity full")
    exclude = '  columns_exclude: ["public.t.secret"]\n'
    (finding,) = checked(tmp_path, pg, exclude)
    assert "under which PostgreSQL must send all columns" in finding.message
    (kept,) = checked(tmp_path, pg, exclude + '  replica_identity: {"public.*": full}\n')
    assert kept.repair.startswith("name public.t with default in source.replica_identity")
    pg.execute(finding.repair.split(";")[0])
    assert checked(tmp_path, pg, exclude) == []


def test_partitions_that_are_excluded_or_published_in_another_way_are_reported(pg, tmp_path):
    pg.execute("create table p (id int primary key) partition by range (id)")
    pg.execute("create table p1 partition of p for values from (0) to (10)")
    (finding,) = checked(tmp_path, pg, "  tables_exclude: [public.p1]\n")
    assert "whose rows are still captured with its root" in finding.message
    pg.execute(f"create publication tailrace_{pg.name} for table p")
    (finding,) = checked(tmp_path, pg, "")
    assert "publish_via_partition_root = false, the configuration says true" in finding.message
    assert checked(tmp_path, pg, "  publish_via_partition_root: false\n") == []
    pg.execute(finding.repair.removeprefix("before the first run: ").split(";")[0])
    assert checked(tmp_path, pg, "") == []


def test_a_root_with_replica_identity_full_whose_partitions_lack_it_is_an_error(pg, tmp_path):
    pg.execute("create table p (id int primary key, v text) partition by range (id)")
    pg.execute("create table p1 partition of p for values from (0) to (10)")
    pg.execute("alter table p replica identity full")
    (finding,) = checked(tmp_path, pg, "")
    assert (finding.severity, finding.table) == (Severity.ERROR, "public.p")
    pg.execute(finding.repair)
    assert checked(tmp_path, pg, "") == []


NAMED = """  columns: ["public.items.id", "public.items.nmae"]
  columns_exclude: ["public.users.Mail", "public.*.nothing"]
  masks:
    - {columns: ["public.usr.mail", "public.parts_low.name", "public.other.a"], method: fixed}
"""


def test_a_pattern_that_names_one_column_must_match_it(pg, tmp_path):
    pg.execute("create table users (id int primary key, mail text, ssn text)")
    pg.execute("create table items (id int primary key, name text)")
    pg.execute("create table parts (id int primary key, name text) partition by range (id)")
    pg.execute("create table parts_low partition of parts for values from (0) to (10)")
    pg.execute("create table other (id int primary key, a text)")
    tables = '  tables: ["public.*"]\n  tables_exclude: ["public.other"]\n'
    result = checked(tmp_path, pg, tables + NAMED)
    masks = "source.masks[0].columns"
    under = "whose rows come under the name of public.parts"
    star = "; a pattern with * or a /regular expression/ may name what is not there yet"
    assert [(finding.severity, finding.message, finding.repair) for finding in result] == [
        (
            Severity.ERROR,
            "source.columns: 'public.items.nmae' names no column of the table",
            f"the columns of public.items are: id, name; correct source.columns{star}",
        ),
        (
            Severity.ERROR,
            "source.columns_exclude: 'public.users.Mail' names no column of the table",
            f"the columns of public.users are: id, mail, ssn; correct source.columns_exclude{star}",
        ),
        (
            Severity.WARNING,
            "source.columns_exclude: no column of a captured table matches 'public.*.nothing'",
            "correct source.columns_exclude",
        ),
        (
            Severity.ERROR,
            f"{masks}: 'public.usr.mail' names a column of a table that does not exist",
            f"correct {masks}, or create the table first{star}",
        ),
        (
            Severity.ERROR,
            f"{masks}: 'public.parts_low.name' names a partition, {under}",
            "name public.parts.name",
        ),
        (
            Severity.WARNING,
            f"{masks}: 'public.other.a' names a column of a table that source.tables does not mean",
            f"correct {masks}, or leave it so",
        ),
    ]
    # The other way round: each partition is a table, and no rows come under the root's name.
    alone = '  publish_via_partition_root: false\n  columns_exclude: ["public.parts.name"]\n'
    (finding,) = checked(tmp_path, pg, alone)
    assert (finding.severity, "its partitions" in finding.message) == (Severity.ERROR, True)
    pattern = finding.repair.rpartition(" ")[2]
    assert checked(tmp_path, pg, alone.replace("public.parts.name", pattern)) == []
