"""Records the files that tests of decoding read: the wire bytes of a real PostgreSQL, and what its
SELECT and COPY return for the same rows. Run by hand: `python -m tests.support.decode.record_vectors DSN`.

DSN belongs to a superuser, for an empty UTF8 database of a server with wal_level = logical.
Each file is JSON: `frames` (hex, without keepalives), and for each table its oid, its
COPY text (hex) and its rows as SELECT's texts.
"""

# ruff: noqa: E501 (the table of values is read across)

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import psycopg
import psycopg.sql
from psycopg import pq

VECTORS = Path(__file__).parents[2] / "decode" / "vectors"
SETTINGS = (
    "-c DateStyle=ISO -c IntervalStyle=postgres -c TimeZone=UTC -c extra_float_digits=3 "
    "-c bytea_output=hex -c client_encoding=UTF8"
)

TYPES = {
    "bool": ("boolean", ["true", "false", None]),
    "int2": ("smallint", ["-32768", "32767", "0"]),
    "int4": ("integer", ["-2147483648", "2147483647", None]),
    "int8": ("bigint", ["-9223372036854775808", "9223372036854775807", "0"]),
    "oid": ("oid", ["0", "4294967295", None]),
    "xid": ("xid", ["3", "4294967295", None]),
    "float4": ("real", ["1.1", "NaN", "Infinity", "-Infinity", "-0", "3.4028235e38", "1e-45"]),
    "float8": ("double precision", ["0.1", "NaN", "Infinity", "-Infinity", "-0", "1.7976931348623157e308", "5e-324"]),
    "numeric_12_2": ("numeric(12,2)", ["0", "-0.01", "9999999999.99", "-9999999999.99", "NaN", None]),
    "numeric_38_38": ("numeric(38,38)", ["0." + "9" * 38, "-0." + "0" * 37 + "1", "0"]),
    "numeric_38_0": ("numeric(38,0)", ["9" * 38, "-" + "9" * 38]),
    "numeric_39_2": ("numeric(39,2)", ["9" * 37 + ".99", "NaN"]),
    "numeric_2_neg": ("numeric(2,-3)", ["12345", "NaN"]),
    "numeric_3_5": ("numeric(3,5)", ["0.00123"]),
    "numeric_free": ("numeric", ["NaN", "Infinity", "-Infinity", "1." + "0" * 50, "1e100", "0.00"]),
    "text": ("text", ["", "NULL", "\\N", "tab\there", "line\nbreak", "cr\rhere", "back\\slash", "\\\\", "\b\f\v", "ünï€😀", '"quoted"', "\u2028", None]),
    "varchar": ("varchar(20)", ["tag", "", "ö" * 20]),
    "char": ("char(5)", ["ab", ""]),
    "internal_char": ('"char"', ["x", ""]),
    "name": ("name", ["pg_class"]),
    "bytea": ("bytea", ["\\x", "\\x00", "\\xdeadbeef", "\\x0a095c27", "\\x" + "ff" * 300, None]),
    "date": ("date", ["1970-01-01", "infinity", "-infinity", "4713-01-01 BC", "0001-12-31 BC", "5874897-12-31", "10000-01-01", "2024-02-29", None]),
    "time": ("time", ["00:00:00", "24:00:00", "23:59:59.999999"]),
    "timetz": ("timetz", ["12:00:00+05:30", "24:00:00-15:59:59"]),
    "timestamp": ("timestamp", ["2024-01-01 00:00:00", "infinity", "-infinity", "4713-01-01 00:00:00 BC", "294276-12-31 23:59:59.999999", "10000-01-01 00:00:00.5", "1969-12-31 23:59:59.999999", None]),
    "timestamptz": ("timestamptz", ["2024-01-01 00:00:00+02", "infinity", "-infinity", "4713-01-01 00:00:00+00 BC", "294276-12-31 23:59:59.999999+00", "0001-06-01 00:00:00+00 BC", "10000-01-01 00:00:00.123456+00"]),
    "interval": ("interval", ["1 year 2 mons -3 days 04:05:06.789", "-00:00:00.000001"]),
    "uuid": ("uuid", ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    "json": ("json", ['{"a":"\\ud800"}', '{"a":1, "a":2}', "1e1000", '"\\u0000"']),
    "jsonb": ("jsonb", ['{"b": 123456789012345678901234567890, "a": [null, true]}', "null"]),
    "inet": ("inet", ["10.0.0.1/8", "::1"]),
    "money": ("money", ["1234.56", "-0.01"]),
    "bit": ("bit(4)", ["1010"]),
    "varbit": ("varbit", ["", "1"]),
    "point": ("point", ["(1.5,-2)"]),
    "int4range": ("int4range", ["[1,5)", "empty", "(,)"]),
    "xml": ("xml", ["<a>&amp;</a>"]),
    "tsvector": ("tsvector", ["'a':1 'b':2"]),
    "mood": ("mood", ["so so", 'very, "happy"']),
    "posint": ("posint", ["1"]),
    "pair": ("pair", ['(1,"a b")', "(,)"]),
    "int4_array": ("integer[]", ["{}", "{1,NULL,-3}", "{{1,2},{3,4}}", "[0:1]={7,8}", None]),
    "int8_array": ("bigint[]", ["{9223372036854775807}"]),
    "bool_array": ("boolean[]", ["{t,f,NULL}"]),
    "float8_array": ("double precision[]", ["{NaN,-0,1e+300,Infinity}"]),
    "numeric_array": ("numeric(12,2)[]", ["{1.5,NULL}", "{1.00,NaN}"]),
    "text_array": ("text[]", ['{a,"b c","","NULL",NULL,"x\\"y","back\\\\slash","{brace}","com,ma"}', "{ünï,😀}", '{"tab\there","line\nbreak"}', '{{a,NULL},{"}",","}}']),
    "varchar_array": ("varchar(3)[]", ["{abc}"]),
    "bytea_array": ("bytea[]", ['{"\\\\x00ff",NULL}']),
    "date_array": ("date[]", ["{2024-01-01,infinity}", "{2024-01-01}"]),
    "timestamp_array": ("timestamp[]", ['{"2024-01-01 00:00:00"}', '{"294276-01-01 00:00:00"}']),
    "timestamptz_array": ("timestamptz[]", ['{"2024-01-01 00:00:00+00",NULL}']),
    "uuid_array": ("uuid[]", ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"]),
    "jsonb_array": ("jsonb[]", ['{"{\\"a\\": \\"b\\"}"}']),
    "mood_array": ("mood[]", ['{"so so"}']),
    "box_array": ("box[]", ["{(2,2),(1,1);(4,4),(3,3)}"]),
}  # fmt: skip

TYPES_SETUP = """
create type mood as enum ('so so', 'very, "happy"');
create domain posint as integer check (value > 0);
create type pair as (a integer, b text);
"""

UPDATES = [
    "create table toasted (id int primary key, big text, small text)",
    "create table full_toasted (id int primary key, big text, small text)",
    "create table indexed (a int not null, b text not null, c text)",
    "create unique index indexed_b on indexed (b)",
    "create table keyless (a int, b text)",
    "create table no_columns ()",
    "alter table toasted alter big set storage external",
    "alter table full_toasted alter big set storage external, replica identity full",
    "alter table indexed replica identity using index indexed_b",
]
UPDATES_STREAM = [
    "insert into toasted values (1, repeat('x', 2500), 'a'), (2, 'short', null)",
    "update toasted set small = 'b' where id = 1",
    "update toasted set id = 3 where id = 1",
    "update toasted set id = id + 10",
    "delete from toasted where id = 12",
    "insert into full_toasted values (1, repeat('y', 2500), 'a'), (2, null, null)",
    "update full_toasted set small = 'b' where id = 1",
    "update full_toasted set id = 5 where id = 2",
    "delete from full_toasted",
    "insert into indexed values (1, 'one', 'c')",
    "update indexed set c = 'd'",
    "update indexed set b = 'two'",
    "delete from indexed",
    "insert into keyless values (1, 'x')",
    "insert into no_columns default values",
    "truncate toasted, full_toasted restart identity cascade",
    "select pg_logical_emit_message(true, 'outbox', 'in a transaction'::text)",
    "select pg_logical_emit_message(false, 'outbox', decode('00ff0a', 'hex'))",
]

DDL = [
    "create table shapes (id int primary key, name varchar(10))",
    "create table steady (id int primary key)",
]
DDL_STREAM = [
    "insert into shapes values (1, 'a'); insert into steady values (1)",
    "alter table shapes add price numeric(10,2) default 1.5; insert into shapes values (2, 'b', 2.25)",
    "insert into steady values (2); alter table shapes rename name to title; insert into shapes values (3, 'c', 3)",
    "alter table shapes alter price type numeric(12,4); insert into shapes values (4, 'd', 4.0001)",
    "insert into steady values (3); alter table shapes drop title; insert into shapes values (5, 5); insert into steady values (4)",
]  # fmt: skip


def stream(dsn: str, slot: str, end: int) -> bytes:
    """Return the slot's frames up to the commit that ends at or after `end`."""
    conn = pq.PGconn.connect(f"{dsn} replication=database options='{SETTINGS}'".encode())
    assert conn.status == pq.ConnStatus.OK, conn.error_message
    conn.exec_(
        f"START_REPLICATION SLOT {slot} LOGICAL 0/0 "
        f"(proto_version '1', publication_names '{slot}', messages 'true')".encode()
    )
    frames = b""
    while True:
        size, held = conn.get_copy_data(0)
        assert size > 0
        payload = bytes(held)
        if payload[:1] == b"w":
            frames += b"d" + struct.pack("!i", len(payload) + 4) + payload
        elif struct.unpack("!Q", payload[1:9])[0] >= end:
            conn.finish()
            return frames
        else:
            conn.put_copy_data(b"r" + struct.pack("!QQQqB", 0, 0, 0, 0, 1))
            conn.flush()


def record(dsn: str, name: str, setup: list[str], changes: list[str]) -> None:
    """Run each of `changes` in a transaction of its own, and store the stream's frames for them."""
    with psycopg.connect(f"{dsn} options='{SETTINGS}'", autocommit=True) as conn:
        for statement in setup:
            conn.execute(statement)
        conn.execute(f"create publication {name} for all tables")
        conn.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
        for statement in changes:
            with conn.transaction():
                conn.execute(statement)
        end = conn.execute("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()[0]
        frames = stream(dsn, name, int(end))
        tables = {}
        for oid, table in conn.execute(
            "select oid::int8, relname from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace"
        ).fetchall():
            columns = [r[0] for r in conn.execute(
                "select attname from pg_attribute where attrelid = %s::oid and attnum > 0 and not attisdropped order by attnum",
                (oid,),
            ).fetchall()]  # fmt: skip
            with conn.cursor() as cursor, cursor.copy(f'copy "{table}" to stdout') as copy:
                text = b"".join(bytes(part) for part in copy)
            rows = []
            if columns:
                # COPY's own output function: not a cast to text, which differs for "char" and char(n)
                with conn.cursor(binary=False) as cursor:
                    cursor.execute(f'select * from "{table}"')
                    result = cursor.pgresult
                    rows = [
                        [
                            None if (v := result.get_value(r, c)) is None else v.decode()
                            for c in range(len(columns))
                        ]
                        for r in range(result.ntuples)
                    ]
            tables[table] = {"oid": oid, "columns": columns, "copy": text.hex(), "rows": rows}
        version = conn.execute("show server_version").fetchone()[0]
        conn.execute(f"drop publication {name}")
        conn.execute("select pg_drop_replication_slot(%s)", (name,))
        for table in tables:
            conn.execute(f'drop table "{table}"')
    vector = {"server": version, "frames": frames.hex(), "tables": tables}
    (VECTORS / f"{name}.json").write_text(json.dumps(vector, indent=1) + "\n")


def quoted(value: str | None) -> str:
    return "null" if value is None else psycopg.sql.Literal(value).as_string(None)


def main(dsn: str) -> None:
    setup = [TYPES_SETUP]
    inserts = []
    kind: str
    values: Any
    for name, (kind, values) in TYPES.items():
        setup.append(f'create table "t_{name}" (id int primary key, v {kind})')
        rows = ", ".join(f"({n}, {quoted(value)})" for n, value in enumerate(values))
        inserts.append(f'insert into "t_{name}" values {rows}')
    record(dsn, "types", setup, inserts)
    record(dsn, "updates", UPDATES, UPDATES_STREAM)
    record(dsn, "ddl", DDL, DDL_STREAM)


if __name__ == "__main__":
    main(sys.argv[1])
