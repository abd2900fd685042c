"""Preflight of broken set-ups on real servers: every problem, each with its repair."""

from __future__ import annotations

import os

import pytest

from tailrace.config import load
from tailrace.errors import Kind
from tailrace.pipeline.preflight import preflight as preflight_module
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.sources.findings import Severity
from tailrace.sources.postgres.connection.session import Session
from tests.support.pipeline.preflight import errors, found, pipeline_file

pytestmark = pytest.mark.each_postgres("what the server says of itself")


def test_a_working_set_up_has_no_problem(pg, tmp_path):
    pg.execute("create table orders (id int primary key)")
    file = pipeline_file(tmp_path, pg.server, pg.name, sinks="{type: delta, mode: mirror, path: ./lake}")
    assert preflight(file) == []
    # Nothing was changed: there is neither slot nor publication nor directory.
    assert pg.query("select count(*) from pg_publication") == [(0,)]
    assert pg.query("select count(*) from pg_replication_slots where database = current_database()") == [(0,)]
    assert not (tmp_path / "log").exists()


def test_captures_on_spark_need_a_core_more_than_there_are_sources(pg, tmp_path):
    pg.execute("create table orders (id int primary key)")
    file = pipeline_file(tmp_path, pg.server, pg.name)
    content = file.read_text() + "engine: {tasks_on: spark}\n"
    for master, problems in (("local[1]", 1), ("local[2]", 0), ("spark://nowhere:7077", 0)):
        file.write_text(content + f"spark: {{master: '{master}'}}\n")
        told = [str(finding.message) for finding in errors(file)]
        assert len(told) == problems, told
        assert not told or "1 tasks would take all 1 cores" in told[0]


def test_tables_that_lack_something_are_reported(pg, tmp_path):
    pg.execute("create table keyless (a int)")
    pg.execute("create table full_rows (a int)")
    pg.execute("alter table full_rows replica identity full")
    pg.execute("create table good (a int primary key)")
    file = pipeline_file(
        tmp_path,
        pg.server,
        pg.name,
        source='  tables: ["public.*", "public.keyless", "public.none", "sales.*"]\n',
        sinks="{type: delta, mode: mirror, path: ./lake, "
        "tables: [public.keyless, public.full_rows, other.x]}",
    )
    result = found(file)
    keyless = result[Kind.SOURCE_MISCONFIGURED, "public.keyless"]
    assert keyless.severity is Severity.WARNING
    assert 'ALTER TABLE "public"."keyless" REPLICA IDENTITY FULL;' in keyless.repair
    for table in ("public.keyless", "public.full_rows"):
        assert "ADD PRIMARY KEY" in result[Kind.SINK_KEY_MISSING, table].repair
    assert (Kind.SINK_KEY_MISSING, "public.good") not in result
    missing = [finding for finding in preflight(file) if finding.kind is Kind.TABLE_MISSING]
    assert [(finding.severity, finding.message) for finding in missing] == [
        (Severity.ERROR, "source.tables: no table matches 'public.none'"),
        (Severity.WARNING, "source.tables: no table matches 'sales.*'"),
        (Severity.WARNING, "sinks[0].tables: no captured table matches 'other.x'"),
    ]


def test_every_repair_that_is_sql_repairs(own_pg, tmp_path):
    """For a role without rights: the SQL of the findings, run by a superuser, gives it all that it needs."""
    own_pg.create_database("shop")
    own_pg.execute("create role cdc login", dbname="shop")
    own_pg.execute('create schema "Sa""les"', dbname="shop")
    own_pg.execute('create table "Sa""les"."Or ders" (id int primary key)', dbname="shop")
    own_pg.execute('alter table "Sa""les"."Or ders" enable row level security', dbname="shop")
    file = pipeline_file(tmp_path, own_pg, "shop", user="cdc", source="  tables: ['*.Or ders']\n")
    first = errors(file)
    assert {finding.kind for finding in first} == {Kind.SOURCE_PRIVILEGE_MISSING}
    assert len(first) >= 5
    for finding in first:
        own_pg.execute(finding.repair.split(";")[0], dbname="shop")
    assert errors(file) == []
    # A login that gets the privileges of another role: it is the login that replicates.
    own_pg.execute("create role login login replication; grant cdc to login; alter role login set role = cdc")
    own_pg.execute("alter role cdc noreplication")
    file.write_text(file.read_text().replace("user: cdc", "user: login"))
    assert errors(file) == []
    own_pg.execute("alter role login noreplication")
    [finding] = errors(file)
    assert finding.repair == 'ALTER ROLE "login" REPLICATION;'


def test_the_settings_for_logical_decoding_are_reported(make_server, tmp_path):
    server = make_server(wal_level="replica", max_replication_slots="0", max_wal_senders="0")
    server.create_database("shop")
    server.execute("create table t (id int primary key)", dbname="shop")
    repairs = " ".join(finding.repair for finding in errors(pipeline_file(tmp_path, server, "shop")))
    assert "ALTER SYSTEM SET wal_level = logical" in repairs
    assert "ALTER SYSTEM SET max_replication_slots" in repairs
    assert "ALTER SYSTEM SET max_wal_senders" in repairs


def test_a_slot_that_we_did_not_create_is_reported(pg, tmp_path):
    pg.execute("create table t (id int primary key)")
    pg.query(f"select pg_create_logical_replication_slot('tailrace_{pg.name}', 'pgoutput')")
    finding = found(pipeline_file(tmp_path, pg.server, pg.name))[Kind.SLOT_FOREIGN, ""]
    assert f"pg_drop_replication_slot('tailrace_{pg.name}')" in finding.repair


def test_directories_that_a_run_would_refuse_are_reported(pg, tmp_path):
    pg.execute("create table orders (id int primary key)")
    sinks = "{type: delta, path: ./lake}, {type: parquet, path: ./files}, {type: jsonl, path: ./lines}"
    sinks += ", {type: delta, path: ./la%ke}"
    file = pipeline_file(tmp_path, pg.server, pg.name, sinks=sinks)
    for name in ("lake/_tailrace/identity.json", "files/public.orders/a.parquet", "log/letter.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    problems = {finding.kind: finding.message for finding in errors(file)}
    told = sorted(finding.message for finding in errors(file) if finding.kind is Kind.SINK_FOREIGN)
    assert [message.partition(":")[0] for message in told] == ["sink 'delta-lake'", "sink 'parquet-files'"]
    assert "'letter.txt'" in problems[Kind.LOG_FOREIGN]
    assert "percent sign" in problems[Kind.CONFIG_INVALID]
    assert set(problems) == {Kind.SINK_FOREIGN, Kind.LOG_FOREIGN, Kind.CONFIG_INVALID}


def test_a_mismatched_publication_is_reported_with_its_sql(pg, tmp_path):
    pg.execute("create table a (id int primary key)")
    pg.execute("create table b (id int primary key)")
    pg.execute("create schema other")
    pg.execute("create table other.c (id int primary key)")
    pg.execute(f"create publication tailrace_{pg.name} for table a, other.c with (publish = 'insert')")
    result = found(pipeline_file(tmp_path, pg.server, pg.name))
    assert result[Kind.PUBLICATION_MISMATCH, "public.b"].severity is Severity.ERROR
    assert result[Kind.PUBLICATION_MISMATCH, "other.c"].severity is Severity.WARNING
    assert "update, delete, truncate" in result[Kind.PUBLICATION_MISMATCH, ""].message
    pg.execute(result[Kind.PUBLICATION_MISMATCH, "public.b"].repair)
    pg.execute(result[Kind.PUBLICATION_MISMATCH, ""].repair)
    assert errors(tmp_path / "pipeline.yaml") == []


def test_an_unreachable_server_is_one_problem_among_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    file = tmp_path / "pipeline.yaml"
    avro = "{converter: {type: avro, registry_url: 'http://127.0.0.1:1'}}"
    file.write_text(
        "name: shop\nsource: {host: 127.0.0.1, port: 1, user: x}\nlog: {path: ./log}\n"
        f"engine: {avro}\n"
        "sinks:\n  - {type: jsonl, path: ./pipeline.yaml/out}\n"
        "  - {type: python, handler: 'json:dumps', " + avro[1:] + "\n"
    )
    kinds = sorted(finding.kind for finding in errors(file))
    assert kinds == sorted(
        [Kind.SOURCE_UNREACHABLE, Kind.ENVIRONMENT_UNFIT, Kind.SINK_WRITE_FAILED]
        + [Kind.REGISTRY_UNREACHABLE] * 2
    )


def test_a_missing_secret_is_a_problem_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    file = tmp_path / "pipeline.yaml"
    file.write_text("name: shop\nsource: {host: localhost, password: '${env:NOT_SET}'}\nlog: {path: ./log}\n")
    (finding,) = errors(file)
    assert (finding.kind, finding.is_configuration) == (Kind.SECRET_MISSING, True)


def test_little_disk_space_is_a_warning_and_none_an_error(pg, tmp_path, monkeypatch):
    pg.execute("create table t (id int primary key)")
    file = pipeline_file(tmp_path, pg.server, pg.name)

    def room(free):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr(f"{preflight_module.__name__}.shutil.disk_usage", lambda _: usage)
        return [finding.severity for finding in preflight(file) if finding.kind is Kind.LOG_FULL]

    assert room(100 << 30) == []
    assert room(100 << 20) == [Severity.WARNING]
    assert room(1 << 20) == [Severity.ERROR]


def test_a_read_only_file_system_is_not_reported_as_a_matter_of_rights(tmp_path, monkeypatch):
    file = tmp_path / "pipeline.yaml"
    file.write_text("name: shop\nsource: {host: 127.0.0.1, port: 1}\nlog: {path: ./log}\n")
    mounted = type("Mounted", (), {"f_flag": os.ST_RDONLY})
    monkeypatch.setattr(f"{preflight_module.__name__}.os.statvfs", lambda _: mounted)
    [finding] = [finding for finding in preflight(file) if finding.kind is Kind.LOG_WRITE_FAILED]
    assert "mounted read-only" in finding.message


def test_a_broken_check_does_not_hide_the_others(pg, tmp_path, monkeypatch):
    pg.execute("create table t (a int)")
    file = pipeline_file(tmp_path, pg.server, pg.name, sinks="{type: jsonl, path: ./out}")
    monkeypatch.setattr(preflight_module, "_rooms", lambda _: 1 / 0)
    kinds = {finding.kind for finding in preflight(file)}
    assert kinds == {Kind.INTERNAL, Kind.SOURCE_MISCONFIGURED}


def test_the_session_of_the_preflight_is_closed(pg, tmp_path, monkeypatch):
    pg.execute("create table t (id int primary key)")
    file = pipeline_file(tmp_path, pg.server, pg.name)
    made = []
    connect = vars(Session)["connect"].__func__

    def watched(cls, *arguments, **options):
        made.append(connect(cls, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(Session, "connect", classmethod(watched))
    preflight(file)
    assert load(file).name == pg.name
    assert made
    assert all(session._connection.closed for session in made)
