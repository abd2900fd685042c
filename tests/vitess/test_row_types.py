"""Every type of MySQL with values at its limits, through a real cluster, copied and streamed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tailrace.config.source.vitess import VitessSource
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace.sources.vitess.rows.column_defaults import Query, asked_by
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.transcoder import Transcoder
from tailrace_servers.vitess import EmbeddedVitess
from tests.support.vitess.cluster import add_table
from tests.support.vitess.reading import UNCHANGED, ChangeRead, read
from tests.support.vitess.streams import has_row, is_copied, position_now, responses

pytestmark = [pytest.mark.vitess, pytest.mark.ci]

# Column, its type in MySQL, SQL of its values, and PostgreSQL's text of each; None: NULL.
COLUMNS: list[tuple[str, str, list[str], list[str | None]]] = [
    ("i1", "tinyint", ["-128", "127"], ["-128", "127"]),
    ("u1", "tinyint unsigned", ["0", "255"], ["0", "255"]),
    ("b1", "tinyint(1)", ["0", "1"], ["0", "1"]),
    ("i2", "smallint", ["-32768", "32767"], ["-32768", "32767"]),
    ("u2", "smallint unsigned", ["0", "65535"], ["0", "65535"]),
    ("i3", "mediumint", ["-8388608", "8388607"], ["-8388608", "8388607"]),
    ("u3", "mediumint unsigned", ["0", "16777215"], ["0", "16777215"]),
    ("i4", "int", ["-2147483648", "2147483647"], ["-2147483648", "2147483647"]),
    ("u4", "int unsigned", ["0", "4294967295"], ["0", "4294967295"]),
    ("z4", "int(6) unsigned zerofill", ["42", "0"], ["42", "0"]),
    ("i8", "bigint", [str(-(2**63)), str(2**63 - 1)], [str(-(2**63)), str(2**63 - 1)]),
    ("u8", "bigint unsigned", ["0", "18446744073709551615"], ["0", "18446744073709551615"]),
    ("d1", "decimal(10,2)", ["-0.50", "99999999.99"], ["-0.50", "99999999.99"]),
    ("d2", "decimal(65,30)", ["0", f"-{'9' * 35}.{'9' * 30}"], [f"0.{'0' * 30}", f"-{'9' * 35}.{'9' * 30}"]),
    ("d3", "decimal(20,0)", ["0", "-123"], ["0", "-123"]),
    ("f4", "float", ["1.5", "-3.402823e38"], ["1.5", "-3.402823e+38"]),
    ("f8", "double", ["1e300", "-0.0001"], ["1e+300", "-0.0001"]),
    ("bit1", "bit", ["b'1'", "b'0'"], ["1", "0"]),
    ("bit12", "bit(12)", ["b'101'", "b'111111111111'"], ["000000000101", "111111111111"]),
    ("bit64", "bit(64)", ["1", "~0"], ["0" * 63 + "1", "1" * 64]),
    ("y", "year", ["1901", "0"], ["1901", "0"]),
    ("dt", "date", ["'9999-12-31'", "'0000-00-00'"], ["9999-12-31", "0000-00-00"]),
    ("dp", "date", ["'2024-00-10'", "'1000-01-01'"], ["2024-00-10", "1000-01-01"]),
    ("t0", "time", ["'838:59:59'", "'-838:59:59'"], ["838:59:59", "-838:59:59"]),
    ("t6", "time(6)", ["'-00:00:00.000001'", "'12:00:00.5'"], ["-00:00:00.000001", "12:00:00.500000"]),
    ("dt0", "datetime", ["'9999-12-31 23:59:59'", "'0000-00-00'"],
     ["9999-12-31 23:59:59", "0000-00-00 00:00:00"]),
    ("dt3", "datetime(3)", ["'2024-02-29 12:00:00.999'", "null"], ["2024-02-29 12:00:00.999", None]),
    ("ts0", "timestamp null", ["'2038-01-19 03:14:07'", "'0000-00-00'"],
     ["2038-01-19 03:14:07+00", "0000-00-00 00:00:00+00"]),
    ("ts6", "timestamp(6) null", ["'1970-01-01 00:00:01.000001'", "null"],
     ["1970-01-01 00:00:01.000001+00", None]),
    ("c", "char(5)", ["'ab '", "''"], ["ab", ""]),
    ("v", "varchar(20)", ["'ab '", "'Ñandú 🦩'"], ["ab ", "Ñandú 🦩"]),
    ("vb", "varchar(20) collate utf8mb4_bin", ["'a\\tb\\nc\\\\\\\\d\\re'", "'Ñ'"], ["a\tb\nc\\\\d\re", "Ñ"]),
    ("cb", "char(5) collate utf8mb4_bin", ["'ab'", "'Ñ'"], ["ab", "Ñ"]),
    ("vl", "varchar(20) character set latin1", ["'café €'", "'ÿ'"], ["café €", "ÿ"]),
    ("tl", "text character set latin1 collate latin1_bin", ["'ü'", "null"], ["ü", None]),
    ("va", "varchar(20) character set ascii", ["'a'", "''"], ["a", ""]),
    ("t", "text", ["repeat('x', 1000)", "''"], ["x" * 1000, ""]),
    ("tt", "tinytext", ["'t'", "null"], ["t", None]),
    ("mt", "mediumtext collate utf8mb4_bin", ["'m🦩'", "''"], ["m🦩", ""]),
    ("lt", "longtext", ["'l'", "''"], ["l", ""]),
    ("bi", "binary(4)", ["x'0100'", "x'01020304'"], ["\\x01000000", "\\x01020304"]),
    ("vbi", "varbinary(8)", ["x'00ff'", "''"], ["\\x00ff", "\\x"]),
    ("bl", "blob", ["x'deadbeef00'", "null"], ["\\xdeadbeef00", None]),
    ("tb", "tinyblob", ["''", "x'61'"], ["\\x", "\\x61"]),
    ("e", "enum('a','b','Ñ','1')", ["'Ñ'", "'1'"], ["Ñ", "1"]),
    ("eb", "enum('x','y') collate utf8mb4_bin", ["'y'", "''"], ["y", ""]),
    ("s", "set('a','b','c')", ["'a,c'", "''"], ["a,c", ""]),
    ("j", "json", ["'{\"a\": [1, null, \"Ñ\"]}'", "null"], ['{"a": [1, null, "Ñ"]}', None]),
    ("g", "geometry", ["st_geomfromtext('POINT(1 2)', 4326, 'axis-order=long-lat')", "null"],
     ["\\xe61000000101000000" + "000000000000f03f" + "0000000000000040", None]),
    ("p", "point", ["point(0, 0)", "null"], ["\\x000000000101000000" + "0" * 32, None]),
]  # fmt: skip
GENERATED = (
    "gs int generated always as (i1 + 1) stored, gv varchar(20) generated always as (concat('v', i1)) virtual"
)


def _insert(cluster: EmbeddedVitess, table: str, first: int) -> None:
    # Column by column through one shard: vtgate would check dates and labels more strictly than MySQL.
    names = ", ".join(f"`{name}`" for name, *_ in COLUMNS)
    with cluster.connection(f"{cluster.keyspace}:-80@primary") as connection, connection.cursor() as cursor:
        cursor.execute("set sql_mode = ''")
        cursor.execute("set names utf8mb4")
        for number in range(2):
            values = ", ".join(given[number] for _, _, given, _ in COLUMNS)
            cursor.execute(f"insert into {table} (id, {names}) values ({first + number}, {values})")


def _expected(number: int, key: int) -> dict[str, Any]:
    values = {name: texts[number] for name, _, _, texts in COLUMNS}
    i1 = int(values["i1"] or 0)
    return {"id": str(key), **values, "gs": str(i1 + 1), "gv": f"v{i1}"}


@pytest.fixture(scope="module")
def table(vitess: EmbeddedVitess) -> str:
    columns = ", ".join(f"`{name}` {declared}" for name, declared, *_ in COLUMNS)
    ddl = f"create table {{name}} (id bigint not null primary key, {columns}, {GENERATED})"
    add_table(vitess, "all_types", ddl)
    return "all_types"


def test_copied_and_streamed_values_equal_those_of_the_table(vitess: EmbeddedVitess, table: str) -> None:
    before = position_now(vitess, "-80")
    _insert(vitess, table, 1)
    streamed = responses(vitess, "-80", before, [table], has_row(b"2127"))
    copied = responses(vitess, "-80", "", [table], is_copied)
    for came, op in ((streamed, "c"), (copied, "r")):
        made = Transcoder(vitess.keyspace, "-80", LogTables({})).transcode(came, 1)
        found = [change for change in read(made.frames) if change.table == f"{vitess.keyspace}.{table}"]
        assert [change.op for change in found] == [op, op]
        for number, change in enumerate(found):
            expected = _expected(number, 1 + number)
            if op == "r" and number == 1:
                expected["f4"] = "-3.40282e+38"  # a copy reads FLOAT as SELECT shows it, with six digits
            different = {
                name: (value, expected.get(name))
                for name, value in change.row.items()
                if value != expected.get(name)
            }
            assert not different
            assert change.row.keys() == expected.keys()


_LAST = itertools.count(1000)


def _as_administrator(cluster: EmbeddedVitess, shard: str, *statements: str) -> None:
    tablets = cluster.ctl("GetTablets", "--keyspace", cluster.keyspace, "--shard", shard)
    cluster.ctl("ExecuteMultiFetchAsDBA", tablets.split()[0], "; ".join(statements))


def _streamed(cluster: EmbeddedVitess, name: str, *statements: str) -> list[ChangeRead]:
    """Return the changes that an administrator's statements on a shard make."""
    before = position_now(cluster, "-80")
    last = next(_LAST)
    _as_administrator(cluster, "-80", *statements, f"insert into {name} (id) values ({last})")
    came = responses(cluster, "-80", before, [name], has_row(str(last).encode()))
    made = Transcoder(cluster.keyspace, "-80", LogTables({})).transcode(came, 1)
    return read(made.frames)[:-1]


@pytest.fixture(scope="module")
def documents(vitess: EmbeddedVitess) -> str:
    ddl = "create table {name} (id bigint not null primary key, n int, t text, j json, k json)"
    add_table(vitess, "documents", ddl)
    return "documents"


def test_large_values_that_a_binary_log_leaves_out_are_unchanged(
    vitess: EmbeddedVitess, documents: str
) -> None:
    found = _streamed(
        vitess,
        documents,
        "set session binlog_row_image = NOBLOB",
        f"insert into {documents} values (1, 1, 'long', '{{}}', '[]')",
        f"update {documents} set n = 2 where id = 1",
        f"update {documents} set t = null where id = 1",
        f"delete from {documents} where id = 1",
    )
    rows = [change.row for change in found]
    assert rows[0] == {"id": "1", "n": "1", "t": "long", "j": "{}", "k": "[]"}
    assert rows[1] == {"id": "1", "n": "2", "t": UNCHANGED, "j": "{}", "k": "[]"}
    assert rows[2] == {"id": "1", "n": "2", "t": None, "j": "{}", "k": "[]"}
    assert found[3].op == "d"


def test_a_partial_document_is_complete_in_the_log(vitess: EmbeddedVitess, documents: str) -> None:
    document = '{"a": 1, "b": [1, 2, 3], "long": "' + "x" * 200 + '"}'
    found = _streamed(
        vitess,
        documents,
        "set session binlog_row_value_options = PARTIAL_JSON",
        f"insert into {documents} values (2, 1, 'long', '{document}', '{{\"k\": 1.50}}')",
        f"update {documents} set j = json_set(j, '$.a', 'Ñ', '$.b[1]', json_object('x', null)) where id = 2",
        f"update {documents} set j = json_remove(j, '$.b[0]'), k = json_set(k, '$.k', 2) where id = 2",
        f"update {documents} set n = 5 where id = 2",
    )
    written = [(change.row["j"], change.row["k"]) for change in found]
    long = '"long": "' + "x" * 200 + '"}'
    assert written[1] == ('{"a": "Ñ", "b": [1, {"x": null}, 3], ' + long, '{"k": 1.5}')
    assert written[2] == ('{"a": "Ñ", "b": [{"x": null}, 3], ' + long, '{"k": 2}')
    assert written[3] == written[2]


def test_the_facts_of_an_added_column_have_the_value_of_older_rows(vitess: EmbeddedVitess) -> None:
    add_table(vitess, "grown", "create table {name} (id bigint not null primary key)")
    tables = LogTables({}, asked_by(_query_of(vitess), vitess.keyspace, "PRIMARY"))
    transcoder = Transcoder(vitess.keyspace, "-80", tables)
    before = position_now(vitess, "-80")
    _as_administrator(
        vitess,
        "-80",
        "insert into grown values (1)",
        "alter table grown add a int default 5, add b varchar(9) not null, add c datetime default now(), "
        "add d bit(3) not null default b'11', add e int not null default -7, add f varchar(9) default 'hé', "
        "add g decimal(5,2) not null default 1.5",
        "alter table grown alter e drop default, alter f set default 'other', alter g drop default",
        "insert into grown (id, b, e, g) values (2000, 'x', 1, 1)",
    )
    came = responses(vitess, "-80", before, ["grown"], has_row(b"2000"))
    found = read(transcoder.transcode(came, 1).frames)
    assert [list(change.row.values())[:3] for change in found] == [["1"], ["2000", "5", "x"]]
    columns = tables.shape(vitess.keyspace, "grown").columns
    assert [(column.missing, column.unknown) for column in columns] == [
        (None, False), ("5", False), ("", False), (None, True), ("011", False), ("-7", False),
        ("hé", False), (None, True),
    ]  # fmt: skip


def test_a_column_that_is_renamed_in_case_only_is_a_new_column(vitess: EmbeddedVitess) -> None:
    """MySQL finds it by its former name as well."""
    add_table(vitess, "cased", "create table {name} (id bigint not null primary key, a int, b int)")
    tables = LogTables({}, asked_by(_query_of(vitess), vitess.keyspace, "PRIMARY"))
    transcoder = Transcoder(vitess.keyspace, "-80", tables)
    found = []
    for key, change in ((1, "comment 'none'"), (2, "rename column a to A")):
        before = position_now(vitess, "-80")
        statements = [f"alter table cased {change}", f"insert into cased values ({key}, 10, 20)"]
        _as_administrator(vitess, "-80", *statements)
        came = responses(vitess, "-80", before, ["cased"], has_row(str(key).encode()))
        found += [each.row for each in read(transcoder.transcode(came, 1).frames)]
    assert found[0] == {"id": "1", "a": "10", "b": "20"}
    assert found[1].items() >= {"id": "2", "A": "10", "b": "20"}.items()


def _query_of(cluster: EmbeddedVitess) -> Query:
    given = {"hosts": [cluster.address], "keyspace": cluster.keyspace}

    def query(sql: str, attempted: str, target: str) -> list[tuple[str | None, ...]]:
        vtgate = Vtgate.connect(VitessSource.model_validate(given))
        try:
            return vtgate.query(sql, attempted, target)
        finally:
            vtgate.close()

    return query
