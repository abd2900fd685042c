"""Databases in other encodings than UTF-8: how their texts are represented, and which can't be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from psycopg import pq

from tailrace.changelog.reader import LogReader
from tailrace.changelog.verify import verify
from tailrace.converters.debezium import JsonConverter
from tailrace.decode.changes import TableChanges
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import control_json
from tailrace.ranges.changes import decoded_batches
from tailrace.ranges.plan import input_splits
from tailrace.records.group import Group
from tailrace.records.record import Record
from tests.support.capture.captured import capturing
from tests.support.decode.wire import SOURCE
from tests.support.postgres import Database

pytestmark = pytest.mark.each_postgres("what the server converts")

#: `caf` and a byte that is not UTF-8; and the form that such a text gets.
BAD, GIVEN = "'caf' || chr(233)", "\\x636166e9"


@pytest.fixture
def in_encoding(pg: Database) -> Iterator[Any]:
    made: list[Database] = []

    def make(encoding: str) -> Database:
        name = f"{pg.name}_{encoding.lower()}"
        pg.execute(f"create database \"{name}\" encoding '{encoding}' locale 'C' template template0")
        made.append(Database(pg.server, name))
        return made[-1]

    yield make
    for database in made:
        database.drop()


def changes_in(path: Path) -> list[TableChanges]:
    with LogReader.open(path, "0") as reader:
        start, end = reader.start, reader.end().offset
        parts = input_splits("0", reader.blocks(start, end), start, end)
    return [changes for split in parts for some in decoded_batches(path, split) for changes in some.changes]


def rows_of(changes: list[TableChanges]) -> list[Any]:
    groups = [Group.of_changes("t", np.arange(len(each)), each) for each in changes]
    return [Record(group, row, {}).after for group in groups for row in range(len(group))]


def test_texts_of_sql_ascii_that_are_not_utf8_have_a_special_form(in_encoding: Any, tmp_path: Path) -> None:
    pg = in_encoding("SQL_ASCII")
    pg.execute("create table t(id int primary key, note text, tags text[])")
    pg.execute("alter table t replica identity full")
    pg.execute(f"insert into t values (1, 'plain', null), (2, {BAD}, array['a', {BAD}])")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute(f"insert into t values (3, {BAD}, array['a']), (4, 'caf\u00e9', null)")
        pg.execute(f"update t set note = 'b' where note = {BAD}")
        with pg.connect(autocommit=True, client_encoding="UTF8") as connection:
            running.catch_up(lambda query: connection.execute(query).fetchall())
    found = changes_in(tmp_path / "log")
    rows = rows_of(found)
    assert [row["note"] for row in rows] == ["plain", GIVEN, GIVEN, "caf\u00e9", "b", "b"]
    assert rows[1]["tags"] == "\\x7b612c636166e97d"
    assert rows[2]["tags"] == ["a"]
    assert in_every_form(found, after=[row["note"] for row in rows], before=[None] * 4 + [GIVEN] * 2)
    assert verify(tmp_path / "log").sound


def in_every_form(found: list[TableChanges], *, after: list[Any], before: list[Any]) -> bool:
    """Check `note` after and before each change in JSON Lines, documents, envelopes and typed columns."""
    lines = [json.loads(line) for each in found for line in each.json_lines("0", SOURCE).to_pylist()]
    events = [
        JsonConverter(schemas_enable=False).convert(Group.of_changes("t", np.arange(len(each)), each))
        for each in found
    ]
    documents = [json.loads(text) for each in events for text in each.values.to_pylist() if text]
    envelopes = [row for each in found for row in each.envelope("0").to_pylist()]
    for rows in (lines, documents, envelopes):
        assert [dict(row["after"])["note"] if row["after"] else None for row in rows] == after
        assert [dict(row["before"])["note"] if row["before"] else None for row in rows] == before
    typed = [note for each in found for note in each.rows().column("note").to_pylist()]
    assert typed == [new or old for new, old in zip(after, before, strict=True)]
    return True


def documented() -> list[str]:
    """Return the SQL in docs/postgresql.md for texts that are not UTF-8."""
    page = (Path(__file__).parents[2] / "docs" / "postgresql.md").read_text()
    return re.findall(r"```sql\n(.*?)```", page.partition("## Encodings")[2].partition("\n## ")[0], re.DOTALL)


def test_the_documented_repair_of_sql_ascii_works(in_encoding: Any, tmp_path: Path) -> None:
    find, repair = documented()
    pg = in_encoding("SQL_ASCII")
    pg.execute("create table orders(id int primary key, note text)")
    pg.execute(f"insert into orders values (1, 'caf\u00e9'), (2, {BAD})")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        with pg.connect(autocommit=True, client_encoding="UTF8") as connection:
            function, select = find.rsplit("\n", 2)[:2]
            connection.execute(function.encode())
            assert connection.execute(select.encode()).fetchall() == [(2,)]
            connection.execute(repair.encode())
            running.catch_up(lambda query: connection.execute(query).fetchall())
    found = [row["note"] for row in rows_of(changes_in(tmp_path / "log"))]
    assert found == ["caf\u00e9", GIVEN, "caf\u00e9"]


def test_the_documented_query_finds_texts_that_cannot_be_converted(in_encoding: Any) -> None:
    pg = in_encoding("WIN1252")
    pg.execute("create table orders(id int primary key, note text)")
    pg.execute("insert into orders values (1, 'caf' || chr(233)), (2, 'caf' || chr(129))")
    function, select = documented()[0].rsplit("\n", 2)[:2]
    with pg.connect(autocommit=True) as connection:
        connection.execute(function.encode())
        assert connection.execute(select.encode()).fetchall() == [(2,)]


def test_check_explains_the_form_of_texts_in_other_encodings(in_encoding: Any, tmp_path: Path) -> None:
    told = {}
    for encoding in ("SQL_ASCII", "WIN1252", "LATIN1"):
        pg = in_encoding(encoding)
        pg.execute("create table t(id int primary key)")
        file = tmp_path / f"{encoding}.yaml"
        file.write_text(f"name: e\nsource: {{dsn: '{pg.dsn}'}}\nlog: {{path: ./{encoding}.log}}\nsinks: []\n")
        told[encoding] = [found.message for found in preflight(file) if "encoding" in found.message]
    assert [len(told[encoding]) for encoding in told] == [1, 1, 0]
    assert "hexadecimal" in told["SQL_ASCII"][0]
    assert "WIN1252" in told["WIN1252"][0]


#: By encoding: SQL for a text of characters beyond ASCII, and the text; SQL for one with bytes without a
#: character, and the form of such a text. In LATIN1 every byte is a character. Row 9 of
#: EUC_JP's first set is empty.
TEXTS = {
    "LATIN1": ("'na' || chr(239) || 've'", "na\u00efve", "'caf' || chr(129)", "caf\u0081"),
    "WIN1252": (
        "'na' || chr(239) || 've ' || chr(128)",
        "na\u00efve \u20ac",
        "'caf' || chr(129) || E'\\n\\\\\\t'",
        "\\x636166810a5c09",
    ),
    "EUC_JP": (
        r"convert_from('\xa5bf78ada18fb0a1', 'EUC_JP')",
        "\u30bfx\u2460\u4e02",
        r"convert_from('\xb0a1a9a10a5c09', 'EUC_JP')",
        "\\xb0a1a9a10a5c09",
    ),
}


@pytest.mark.parametrize("encoding", TEXTS)
def test_texts_of_any_encoding_are_read_and_invalid_ones_have_a_special_form(
    in_encoding: Any, tmp_path: Path, encoding: str
) -> None:
    good, is_good, bad, is_bad = TEXTS[encoding]
    pg = in_encoding(encoding)
    pg.execute("create table t(id int primary key, note text, other text, tags text[])")
    pg.execute("alter table t replica identity full")
    pg.execute(f"insert into t values (1, {good}, 'plain', null), (2, {bad}, {good}, array['a', {good}])")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute(f"insert into t values (3, {bad}, {good}, null), (4, 'plain', 'plain', array[{good}])")
        pg.execute("update t set other = 'b' where id = 3")
        pg.execute("delete from t where id = 2")
        running.catch_up(pg.query)
        assert running.task.progress().reconnects == 0
    found = changes_in(tmp_path / "log")
    expected = [is_good, is_bad, is_bad, "plain", is_bad]
    rows = [row for row in rows_of(found) if row is not None]
    assert [row["note"] for row in rows] == expected
    assert [row["other"] for row in rows] == ["plain", is_good, is_good, "plain", "b"]
    assert [row["tags"] for row in rows] == [None, ["a", is_good], None, [is_good], None]
    assert in_every_form(found, after=[*expected, None], before=[None] * 4 + [is_bad] * 2)
    assert verify(tmp_path / "log").sound


def test_names_of_another_encoding_are_followed(in_encoding: Any, tmp_path: Path) -> None:
    pg = in_encoding("WIN1252")
    options = {"publication": "publi\u00e9", "tables": ("public.caf\u00e9",)}
    with pg.connect(client_encoding="UTF8") as connection:
        connection.execute('create table "caf\u00e9"("num\u00e9ro" int primary key)')
        connection.execute("create type \"humeur\u00e9\" as enum ('gai\u00e9')")
        connection.execute('insert into "caf\u00e9" values (1)')
        with capturing(pg.dsn, tmp_path / "log", **options) as running:
            running.wait_for("streaming")
            connection.execute(
                'alter table "caf\u00e9" add column "\u00e9tat" "humeur\u00e9" default \'gai\u00e9\''
            )
            connection.execute('insert into "caf\u00e9" values (2)')
            running.catch_up(pg.query)
    found = changes_in(tmp_path / "log")
    assert [each.relation.table for each in found if each.relation] == ["caf\u00e9", "caf\u00e9"]
    assert rows_of(found) == [{"num\u00e9ro": 1}, {"num\u00e9ro": 2, "\u00e9tat": "gai\u00e9"}]


#: SQL before capture begins, SQL while it streams, and the tables whose rows are then captured. %s: bytes
#: that are no character.
ODD: dict[str, tuple[str, str, list[str]]] = {
    "table": (
        'create table "caf%s"(id int primary key); insert into "caf%s" values (1)',
        'insert into "caf%s" values (2)',
        ["public.%s", "public.%s"],
    ),
    "schema and column": (
        (
            'create schema "caf%s"; create table "caf%s".t(id int primary key, "caf%s" int); '
            'insert into "caf%s".t values (1)'
        ),
        'insert into "caf%s".t values (2)',
        ["%s.t", "%s.t"],
    ),
    "table that is renamed": (
        "create table t(id int primary key); insert into t values (1)",
        'alter table t rename to "caf%s"; insert into "caf%s" values (2)',
        ["public.t", "public.%s"],
    ),
    "column that is renamed": (
        "create table t(id int primary key, n int); insert into t values (1)",
        'alter table t rename n to "caf%s"; insert into t values (2)',
        ["public.t", "public.t"],
    ),
    "type and label": (
        (
            "create type \"caf%s\" as enum ('caf%s', 'b'); create table t(id int primary key, n \"caf%s\"); "
            "insert into t values (1)"
        ),
        "alter type \"caf%s\" rename value 'b' to 'bcaf%s'; insert into t values (2)",
        ["public.t", "public.t"],
    ),
    "default": (
        "create table t(id int primary key); insert into t values (1)",
        "alter table t add n text default 'caf%s'; insert into t values (2)",
        ["public.t", "public.t"],
    ),
    "table that is not meant": (
        (
            'create schema "a%s"; create table "a%s"."b%s"("c%s" int); '
            "create table t(id int primary key); insert into t values (1)"
        ),
        "insert into t values (2)",
        ["public.t", "public.t"],
    ),
}


@pytest.mark.parametrize(("encoding", "byte"), [("SQL_ASCII", b"\xe9"), ("WIN1252", b"\x81")])
@pytest.mark.parametrize("odd", ODD)
def test_names_labels_and_defaults_without_characters_stop_nothing(
    in_encoding: Any, tmp_path: Path, encoding: str, byte: bytes, odd: str
) -> None:
    pg = in_encoding(encoding)
    before, after, tables = ODD[odd]
    form = f"\\x{(b'caf' + byte).hex()}"
    meant = ("public.*", f"{form}.*")

    def execute(statements: str) -> None:
        with pg.connect(autocommit=True) as connection:
            connection.pgconn.exec_(f"set client_encoding = '{encoding}'".encode())
            done = connection.pgconn.exec_(statements.encode().replace(b"%s", byte))
            assert done.status == pq.ExecStatus.COMMAND_OK, done.error_message

    execute(before)
    file = tmp_path / "p.yaml"
    named = json.dumps([*meant, f"public.{form}"][: 2 if odd != "table" else 3])
    file.write_text(f"name: e\nsource: {{dsn: '{pg.dsn}', tables: {named}}}\nlog: {{path: ./l}}\nsinks: []\n")
    assert [found for found in preflight(file) if found.severity == "error"] == []
    with capturing(pg.dsn, tmp_path / "log", tables=meant) as running:
        running.wait_for("streaming")
        execute(after)
        running.catch_up(pg.server.query)
        assert running.task.progress().reconnects == 0
    found = changes_in(tmp_path / "log")
    assert [row["id"] for row in rows_of(found)] == [1, 2]
    names = [each.relation.qualified_name for each in found if each.relation]
    assert names == [table.replace("%s", form) for table in tables]
    columns = {name for row in rows_of(found) for name in row} - {"id", "n"}
    assert columns == ({form} if "column" in odd else set())
    with LogReader.open(tmp_path / "log", "0") as reader:
        schemas = reader.all_schema_frames(reader.start, reader.end().offset)
    facts = [Facts.from_json(control_json(frame)) for frame in schemas if frame[5:6] == b"x"]
    missing = {column.missing for each in facts for column in each.columns}
    assert (form in missing) is (odd == "default")
    assert verify(tmp_path / "log").sound


@pytest.mark.parametrize("encoding", ["WIN1252", "SQL_ASCII"])
def test_chunks_of_a_table_with_invalid_texts_as_keys_do_not_overlap(
    in_encoding: Any, tmp_path: Path, encoding: str
) -> None:
    pg = in_encoding(encoding)
    pg.execute("create table t(id text primary key)")
    # After each letter a byte that is no character, then one that is: in byte order they alternate.
    pg.execute(
        "insert into t select chr(65 + i % 26) || chr(case when i % 2 = 0 then 129 else 233 end) || i "
        "from generate_series(1, 3000) i"
    )
    pg.execute("analyze t")
    with capturing(pg.dsn, tmp_path / "log", snapshot_chunk_rows=100) as running:
        running.wait_for("streaming")
    ids = [row["id"] for row in rows_of(changes_in(tmp_path / "log"))]
    assert len(ids) == len(set(ids)) == 3000


def test_a_key_with_a_nondeterministic_collation_is_read_in_chunks(in_encoding: Any, tmp_path: Path) -> None:
    pg = in_encoding("LATIN1")
    # Rows of pg_collation say nothing: the server may have been built without ICU all the same.
    if pg.query("select 1 from pg_config() where name = 'CONFIGURE' and setting like '%without-icu%'"):
        pytest.skip("this server has no ICU")
    pg.execute("create collation loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    pg.execute("create table t(id text collate loose primary key)")
    pg.execute("insert into t select chr(65 + i % 26) || i from generate_series(1, 3000) i")
    pg.execute("analyze t")
    with capturing(pg.dsn, tmp_path / "log", snapshot_chunk_rows=100) as running:
        running.wait_for("streaming")
        assert running.task.progress().snapshot["public.t"].chunks > 1
    ids = [row["id"] for row in rows_of(changes_in(tmp_path / "log"))]
    assert len(ids) == len(set(ids)) == 3000
