"""Compares the converter `json` with Debezium's own engine on the same database: keys and values byte for
byte.

Intended differences are listed in docs/converters.md; here they are removed from both sides or left out of
the tables, and for each of them a test shows that it still exists.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tailrace import Engine
from tailrace.converters.debezium import JsonConverter
from tailrace.records.batch import Batch
from tailrace.records.events import Events
from tailrace_bench.support import debezium
from tests.support.debezium import require_debezium
from tests.support.postgres import Database
from tests.support.wait import wait_until

PREFIX = "peer"
LAST = "last_of_all"

#: Texts of values for each type; the first row has the first of each, and so on.
VALUES: dict[str, tuple[str, ...]] = {
    "boolean": ("t", "f"),
    "smallint": ("-32768", "32767", "0"),
    "integer": ("-2147483648", "2147483647", "0"),
    "bigint": ("-9223372036854775808", "9223372036854775807", "0"),
    "oid": ("0", "4294967295"),
    # Of some others Java before 19 writes more digits than needed: 8.5899346E9, 9.999999999999999E22.
    "real": (
        "0", "1", "-1.5", "3.4028235e38", "1e-45", "1e10", "16777216", "33554432", "1.0e-3", "9.999e6", "1e7",
        "0.1", "NaN", "Infinity", "-Infinity", "-0",
    ),
    "double precision": (
        "0", "1", "-1.5", "1e22", "1.7976931348623157e308", "2.2250738585072014e-308", "5e-324",
        "1e-3", "9.999e6", "1e7", "0.1", "123456789012345678", "NaN", "Infinity", "-Infinity", "-0",
    ),
    "numeric(12,2)": ("0", "-0.01", "9999999999.99", "1.5"),
    "numeric(5,0)": ("0", "-99999", "127", "128", "-129"),
    "numeric": ("0", "0.00", "1.10", "100", "100.00", "-12345678901234567890.123456789", "1e20", "0.00001"),
    "numeric(40,10)": ("1.5", "-123456789012345678901234567890.0123456789"),
    "money": ("0", "-12.34", "1234567.89"),
    "char(5)": ("a", "abcde", ""),
    "varchar(20)": ("", "ü€😀", 'q"uo\\te'),
    "text": ("", "line\nbreak\ttab", "</script>", "\u2028 \x7f"),
    "bytea": ("\\x", "\\x00ff10"),
    "bit(1)": ("1", "0"),
    "bit(10)": ("1000000001", "0000000000", "0000000001"),
    "bit varying": ("101", "", "000000001"),
    "bit varying(12)": ("101", "", "111111111111"),
    "date": ("1970-01-01", "2026-02-28", "0001-01-01", "9999-12-31", "1969-12-31"),
    "time": ("00:00:00", "23:59:59.999999", "24:00:00", "12:34:56.7"),
    "time(0)": ("00:00:00", "23:59:59"),
    "time(3)": ("00:00:00", "23:59:59.999", "12:00:00.5"),
    "timestamp": ("1970-01-01", "2026-02-28 12:34:56.123456", "1969-12-31 23:59:59.999999", "0001-01-01"),
    "timestamp(0)": ("1970-01-01", "2026-02-28 12:34:56"),
    "timestamp(3)": ("1970-01-01", "2026-02-28 12:34:56.123", "1969-12-31 23:59:59.999"),
    "timestamp(5)": ("1970-01-01", "2026-02-28 12:34:56.12345"),
    "timestamptz": (
        "1970-01-01+00", "2026-02-28 12:34:56.123456+02", "2026-02-28 12:34:56.1+00",
        "2026-02-28 12:34:56.12+00", "2026-02-28 12:34:56.1234+00", "0001-01-01+00", "9999-12-31 23:59:59+00",
    ),
    "timestamptz(0)": ("1970-01-01+00", "2026-02-28 12:34:56+02"),
    "timestamptz(1)": ("1970-01-01+00", "2026-02-28 12:34:56.5+00"),
    "timestamptz(3)": ("1970-01-01+00", "2026-02-28 12:34:56.120+00", "2026-02-28 12:34:56.123+00"),
    "timestamptz(6)": ("1970-01-01+00", "2026-02-28 12:34:56.120+00", "2026-02-28 12:34:56.123456+00"),
    "timetz": ("00:00:00+00", "23:59:59.999999-03", "12:34:56.5+05:30"),
    "timetz(0)": ("00:00:00+00", "23:59:59-03"),
    "timetz(3)": ("00:00:00+00", "23:59:59.120-03"),
    "interval": ("0", "1 year 2 mons 3 days 04:05:06.789", "-1 day", "-1 year +1 day -00:00:00.000001"),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",),
    "json": ('{"a": [1, 2.50, null]}', "[]", '"x"'),
    "jsonb": ('{"a": [1, 2.50, null]}', "[]", '"x"'),
    "inet": ("192.168.0.1/24", "::1", "10.0.0.1"),
    "cidr": ("192.168.0.0/24", "::/0"),
    "macaddr": ("08:00:2b:01:02:03",),
    "macaddr8": ("08:00:2b:01:02:03:04:05",),
    "int4range": ("[1,5)", "empty", "(,)"),
    "int8range": ("[1,5)", "empty", "(,)"),
    "numrange": ("[1.5,5)", "empty", "(,)"),
    "tsrange": ("[2026-01-01,2026-01-02 03:04:05.5)", "empty"),
    "tstzrange": ("[2026-01-01 00:00:00+00,2026-01-02 00:00:00+00)", "empty"),
    "daterange": ("[2026-01-01,2026-02-01)", "empty"),
    "tsvector": ("'a':1 'b':2",),
    "price": ("0", "-0.01", "12.50"),
    "label": ("", "abc"),
    "integer[]": ("{1,2,NULL}", "{}"),
    "smallint[]": ("{1,2,NULL}", "{}"),
    "bigint[]": ("{1,2,NULL}", "{}"),
    "text[]": ('{a,"b c",NULL,"q\\"x"}', "{}"),
    "varchar(5)[]": ("{a,b}", "{}"),
    "boolean[]": ("{t,f,NULL}", "{}"),
    "real[]": ("{1.5,NaN,NULL,1e-45}", "{}"),
    "double precision[]": ("{1.5,1e22,NULL}", "{}"),
    "numeric(6,2)[]": ("{1.5,-0.01,NULL}", "{}"),
    "date[]": ("{2026-01-01,NULL}", "{}"),
    "uuid[]": ("{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}", "{}"),
    "timestamp[]": ("{2026-01-01 12:34:56.123456,NULL}", "{}"),
    "timestamptz[]": ('{"2026-01-01 12:34:56.12+00",NULL}', "{}"),
    "timestamptz(3)[]": ('{"2026-01-01 12:34:56.12+00",NULL}', "{}"),
    "json[]": ('{"{\\"a\\": 1}"}', "{}"),
}  # fmt: skip
ROWS = max(len(values) for values in VALUES.values())
COLUMNS = [f"c{number:02}" for number in range(len(VALUES))]

CREATE = """
create domain price as numeric(12,2);
create domain label as varchar(5);
"""


def make(pg: Database) -> None:
    types = [f"{name} {kind}" for name, kind in zip(COLUMNS, VALUES, strict=True)]
    pg.execute(CREATE)
    for name, key in (("keyed", "primary key"), ("whole", "primary key"), ("bare", "")):
        pg.execute(f"create table {name} ({', '.join([f'id integer {key}', *types])})")
    pg.execute(TABLES)
    for slot in (f"a_{pg.name}", f"b_{pg.name}"):
        pg.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])


TABLES = f"""
alter table whole replica identity full;
alter table bare replica identity full;
create table strict (
    id bigint primary key, t text not null, n int not null, b bytea not null, z timestamptz not null,
    f numeric(6,2) not null, u boolean not null, a int[] not null);
create table pairs (b text, a int, v text, primary key (a, b));
create table big (id int primary key, v text, w bytea, l text[]);
alter table big alter v set storage external, alter w set storage external;
create table keyless (v int);
create type mood as enum ('calm');
create table on_purpose (
    id int primary key, n name, e mood, p point, d int default 5,
    k int not null default 7, s text not null default 'x', i timestamp, j date);
create table {LAST} (id int primary key);
create publication p for all tables;
"""

CHANGES = f"""
insert into strict values (1, 't', 2, 'b', '2026-01-01', 1.5, true, '{{1}}');
update strict set n = 3;
update strict set id = 2;
delete from strict;
insert into pairs values ('x', 1, 'v'), ('y', 2, 'w');
update pairs set b = 'z' where a = 1;
delete from pairs;
insert into big values (1, repeat('x', 9000), repeat('y', 9000)::bytea, array[repeat('z', 9000)]);
update big set id = 2;
update big set id = id;
delete from big;
insert into keyless values (1);
truncate keyless, pairs;
select pg_logical_emit_message(true, 'pre', 'content');
insert into on_purpose values (1, 'a_name', 'calm', '(1,2)', null, 1, 'y', 'infinity', 'infinity');
delete from on_purpose;
insert into {LAST} values (1);
"""


def change(pg: Database) -> None:
    kinds = dict(zip(COLUMNS, VALUES, strict=True))
    cells = [[values[row % len(values)] for values in VALUES.values()] for row in range(ROWS)]
    casts = ", ".join(f"%s::{kind}" for kind in VALUES)
    assignments = ", ".join(f"{name} = %s::{kind}" for name, kind in kinds.items())
    for table in ("keyed", "whole", "bare"):
        for row, values in enumerate(cells):
            pg.execute(f"insert into {table} values ({row}, {casts})", values)
        pg.execute(f"insert into {table} (id) values (-1)")
        pg.execute(f"update {table} set {assignments} where id = 0", cells[1])
        pg.execute(f"update {table} set id = 100 where id = 1")
        pg.execute(f"delete from {table} where id in (2, -1)")
        pg.execute(f"truncate {table}")
    for statement in CHANGES.split(";")[:-1]:
        pg.execute(statement)


def take_out(text: str | None) -> str | None:
    """Return a key or a value without the intended differences of every event: which program wrote it, and
    when.
    """
    if text is None:
        return None
    text = re.sub(r'"version":"[^"]*","connector"', '"version":"","connector"', text)
    text = re.sub(r'"sequence":"\[[^]]*\]"', '"sequence":""', text)
    text = re.sub(r'("op":"m","ts_ms":)[0-9]+', r"\1", text)
    text = re.sub(r"\\u[0-9A-F]{4}(\\u[0-9A-F]{4})?", lambda found: json.loads(f'"{found[0]}"'), text)
    return re.sub(r',"ts_ms":[0-9]+,"ts_us":[0-9]+,"ts_ns":[0-9]+(\}+)$', r"\1", text)


class Both:
    """Our events, converted with and without schemas."""

    def __init__(self) -> None:
        self.found: dict[bool, list[debezium.PeerEvent]] = {False: [], True: []}

    def take(self, batch: Batch) -> None:
        for with_schemas, events in self.found.items():
            converter = JsonConverter(schemas_enable=with_schemas, topic_prefix=PREFIX, rows_in_part="filled")
            converted = tuple(converter.convert(group) for group in batch.groups)
            for event in Events(batch, converted):
                events.append(debezium.PeerEvent(f"{PREFIX}.{event.topic}", event.key, event.value))

    @property
    def is_whole(self) -> bool:
        events = self.found[True]
        return bool(events) and events[-1].topic == f"{PREFIX}.public.{LAST}"


def ours(pg: Database, directory: Path) -> dict[bool, list[debezium.PeerEvent]]:
    """Change the database while our engine captures it; return the events."""
    both = Both()
    settings = {
        "name": PREFIX,
        "source": {
            "type": "postgresql", "dsn": pg.dsn, "tables": ["public.*"], "slot": f"c_{pg.name}",
            "publication": "p", "snapshot": "never",
        },
        "log": {"path": str(directory / "log")},
    }  # fmt: skip
    slots = "select active from pg_replication_slots where slot_name = %s"
    with Engine(settings, on_batch=both.take):
        wait_until(lambda: pg.query(slots, [f"c_{pg.name}"]) == [(True,)], 120, "the stream")
        change(pg)
        wait_until(lambda: both.is_whole, 120, "the last event")
    return both.found


def theirs(pg: Database, slot: str, with_schemas: bool, directory: Path) -> list[debezium.PeerEvent]:
    settings = {
        "database.dbname": pg.name,
        "publication.name": "p",
        "table.include.list": "public.*",
        "skipped.operations": "none",
        "key.converter.schemas.enable": str(with_schemas).lower(),
        "value.converter.schemas.enable": str(with_schemas).lower(),
        "converter.schemas.enable": str(with_schemas).lower(),
    }
    return debezium.events(pg.server, slot, f"{PREFIX}.public.{LAST}", settings, directory)


def members(event: debezium.PeerEvent, with_schemas: bool) -> Any:
    assert event.value is not None
    found = json.loads(event.value)
    return found["payload"] if with_schemas else found


@pytest.mark.timeout(900)
@pytest.mark.ci
def test_keys_and_values_equal_debeziums_byte_for_byte(pg: Database, tmp_path: Path) -> None:
    require_debezium()
    make(pg)
    found = ours(pg, tmp_path)
    for with_schemas, slot in ((False, f"a_{pg.name}"), (True, f"b_{pg.name}")):
        mine, others = found[with_schemas], theirs(pg, slot, with_schemas, tmp_path)
        assert [event.topic for event in mine] == [event.topic for event in others]
        for number, (event, other) in enumerate(zip(mine, others, strict=True)):
            assert event.key == other.key, number
            if event.topic.endswith(".on_purpose") and event.value is not None:
                require_differences(members(event, with_schemas), members(other, with_schemas))
            else:
                assert take_out(event.value) == take_out(other.value), (number, event.topic)


#: Transformations as both have them: tables share a topic, rows are flat, and keys are a single field.
STEPS = [
    {"type": "route", "regex": "(.*)[.].*moved", "replacement": "$1.all", "key_field": "was"},
    {"type": "flatten", "add_fields": ["op"]},
    {"type": "hoist_field", "field": "of", "apply_to": "key"},
]
THEIR_STEPS = {
    "transforms": "route,flatten,hoist",
    "transforms.route.type": "io.debezium.transforms.ByLogicalTableRouter",
    "transforms.route.topic.regex": "(.*)[.](?:moved|whole_moved)",
    "transforms.route.topic.replacement": "$1.all",
    "transforms.route.key.field.name": "was",
    "transforms.flatten.type": "io.debezium.transforms.ExtractNewRecordState",
    "transforms.flatten.add.fields": "op",
    "transforms.hoist.type": "org.apache.kafka.connect.transforms.HoistField$Key",
    "transforms.hoist.field": "of",
}
MOVES = """
create table moved (id int primary key, v text);
create table whole_moved (a int, b text, v text, primary key (a, b));
alter table whole_moved replica identity full;
create table last_of_all (id int primary key);
create publication p for all tables;
"""
MOVED = """
insert into moved values (1, 'one'), (2, 'two');
update moved set id = id + 10, v = 'moved';
update moved set v = 'again' where id = 11;
insert into whole_moved values (1, 'x', 'v');
update whole_moved set b = 'y';
update whole_moved set v = 'w';
delete from moved where id = 12;
delete from whole_moved;
insert into last_of_all values (1);
"""


@pytest.mark.timeout(300)
@pytest.mark.ci
def test_an_update_that_changes_the_key_is_transformed_as_by_kafka_connect(
    pg: Database, tmp_path: Path
) -> None:
    require_debezium()
    pg.execute(MOVES)
    pg.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [f"a_{pg.name}"])
    found: list[tuple[str, Any, Any]] = []

    def take(events: Events) -> None:
        found.extend((event.topic, event.key, event.value) for event in events)

    settings = {
        "name": PREFIX,
        "source": {
            "type": "postgresql", "dsn": pg.dsn, "tables": ["public.*"], "slot": f"c_{pg.name}",
            "publication": "p", "snapshot": "never",
        },
        "log": {"path": str(tmp_path / "log")},
        "engine": {
            "converter": {"type": "json", "topic_prefix": PREFIX, "rows_in_part": "filled"},
            "transformations": STEPS,
        },
    }  # fmt: skip
    slots = "select active from pg_replication_slots where slot_name = %s"
    with Engine(settings, on_batch=take):
        wait_until(lambda: pg.query(slots, [f"c_{pg.name}"]) == [(True,)], 120, "the stream")
        for statement in MOVED.split(";")[:-1]:
            pg.execute(statement)
        wait_until(lambda: bool(found) and found[-1][0] == f"public.{LAST}", 120, "the last event")
    given = {
        "database.dbname": pg.name,
        "publication.name": "p",
        "table.include.list": "public.*",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "converter.schemas.enable": "false",
        **THEIR_STEPS,
    }
    others = debezium.events(pg.server, f"a_{pg.name}", f"{PREFIX}.public.{LAST}", given, tmp_path)
    # Our topics have the prefix only in Kafka. Their tombstone without its schema is the text null.
    schema = f"{PREFIX}.public"
    mine = [(f"{PREFIX}.{topic}", key.replace("public", schema), value) for topic, key, value in found]
    wanted = [(event.topic, event.key, None if event.value == "null" else event.value) for event in others]
    assert mine == wanted
    assert [json.loads(key)["of"] for _, key, value in mine if value is None] == [
        {"id": 1, "was": f"{schema}.moved"},
        {"id": 2, "was": f"{schema}.moved"},
        {"a": 1, "b": "x", "was": f"{schema}.whole_moved"},
        {"id": 12, "was": f"{schema}.moved"},
        {"a": 1, "b": "y", "was": f"{schema}.whole_moved"},
    ]


def require_differences(event: Any, other: Any) -> None:
    """Check the differences that docs/converters.md lists: of types and defaults, and of each event."""
    if event["op"] == "d":
        assert [event["before"][name] for name in ("id", "d", "k", "s")] == [1, None, 0, ""]
        assert [other["before"][name] for name in ("id", "d", "k", "s")] == [1, 5, 7, "x"], "defaults"
    else:
        row = {"id": 1, "n": "a_name", "e": "calm", "p": "(1,2)", "d": None, "k": 1, "s": "y"}
        assert event["after"] == {**row, "i": 9_223_372_036_825_200_000, "j": "infinity"}
        assert other["after"]["n"] is None
        assert other["after"]["e"] == "calm"
        assert isinstance(other["after"]["p"], dict)
        assert other["after"]["d"] == 5, "the column's default in the place of NULL"
        assert other["after"]["i"] == 2**63 - 1
        assert isinstance(other["after"]["j"], int)
    assert event["ts_ms"] == event["source"]["ts_ms"] <= other["ts_ms"]
    for source in (event["source"], other["source"]):
        first, second = map(int, json.loads(source["sequence"]))
        assert second == source["lsn"]
        assert (first <= second) is (source is other["source"])
    assert other["source"]["version"] == debezium.VERSION
