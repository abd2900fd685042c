"""Every type that a column can have, with the values at its limits.

Each animal is a table `id int primary key, v <type>`; each type has an array, too, made of the
same values in one dimension and two, with NULLs, empty and with unusual bounds. What a server
lacks (an extension, a later version's value) is left out there, or replaced by a type of the
same name: hstore, citext and geometry are base types over text where they can't be installed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Animal:
    """A type and the texts of its values. `array` is its array type, "" for none."""

    name: str
    type: str
    values: tuple[str, ...]
    since: int = 0
    array: str = "yes"


SETUP = """
create type mood as enum ('so so', 'very, "happy"', 'ünï\\😀', '', 'NULL', '{braces}');
create type "Odd ""Name" as enum ('a');
create type pair as (a integer, b text);
create type nest as (p pair, list integer[], "n,m" numeric(6,2));
create type span as range (subtype = text);
create domain posint as integer check (value > 0);
create domain tiny as posint check (value < 100);
create domain price as numeric(12,2);
create domain dear as price;
create domain label as varchar(5);
create domain opt as text;
create domain moody as mood;
create domain pairs as pair;
create domain ints as integer[];
create domain prices as numeric(8,3)[];
create domain stamp3 as timestamp(3);
create domain raw as bytea;
create domain day as date;
create domain spans as int4range;
"""

#: A base type over text, named and delimited as an extension's type.
STAND_IN = """
create type {name};
create function {name}_in(cstring) returns {name} language internal immutable strict as 'textin';
create function {name}_out({name}) returns cstring language internal immutable strict as 'textout';
create type {name} (input = {name}_in, output = {name}_out, like = text, delimiter = '{delimiter}');
"""
STAND_INS = {"hstore": ",", "citext": ",", "geometry": ":"}

#: Created where the server has them.
EXTENSIONS = {
    "ltree": ("Top.Science.Astronomy", ""),
    "cube": ("(1, 2),(3, 4)", "(0.5)"),
    "seg": ("1.5 .. 2.5", "~5"),
    "isbn": ("978-0-393-04002-9",),
    "vector": ("[1,2,3.5]", "[0]"),
}
EXTENSION_OF = {"isbn": "isn"}

_DIGITS = "123456789" * 150  # 1350 digits

ANIMALS = (
    Animal("bool", "boolean", ("t", "f")),
    Animal("int2", "smallint", ("-32768", "32767", "0")),
    Animal("int4", "integer", ("-2147483648", "2147483647", "0")),
    Animal("int8", "bigint", ("-9223372036854775808", "9223372036854775807", "0")),
    Animal("oid", "oid", ("0", "4294967295")),
    Animal("xid", "xid", ("3", "4294967295")),
    Animal("xid8", "xid8", ("3", "9223372036854775807", "18446744073709551615")),
    Animal("cid", "cid", ("0", "4294967295")),
    Animal("tid", "tid", ("(0,1)", "(4294967295,65535)")),
    Animal("regclass", "regclass", ("pg_class", "4294967295", "-", "public.z_bool")),
    Animal("regtype", "regtype", ("integer", "character varying")),
    Animal("regproc", "regproc", ("now", "array_in")),
    Animal("regprocedure", "regprocedure", ("abs(integer)",)),
    Animal("regoper", "regoper", ("||/",)),
    Animal("regoperator", "regoperator", ("+(integer,integer)",)),
    Animal("regrole", "regrole", ("postgres",)),
    Animal("regnamespace", "regnamespace", ("public",)),
    Animal("regconfig", "regconfig", ("english",)),
    Animal("regcollation", "regcollation", ('"C"',)),
    Animal("float4", "real", ("1.1", "NaN", "Infinity", "-Infinity", "-0", "3.4028235e38", "1e-45")),
    Animal(
        "float8",
        "double precision",
        (
            "0.1",
            "0.30000000000000004",
            "NaN",
            "Infinity",
            "-Infinity",
            "-0",
            "1.7976931348623157e308",
            "5e-324",
            "2.2250738585072011e-308",
            "123456789012345680",
            "1e23",
        ),
    ),
    Animal("numeric_12_2", "numeric(12,2)", ("0", "-0.01", "9999999999.99", "-9999999999.99", "NaN")),
    Animal("numeric_38_38", "numeric(38,38)", ("0." + "9" * 38, "-0." + "0" * 37 + "1", "0")),
    Animal("numeric_38_0", "numeric(38,0)", ("9" * 38, "-" + "9" * 38, "0")),
    Animal("numeric_39_2", "numeric(39,2)", ("9" * 37 + ".99", "NaN")),
    Animal("numeric_1000", "numeric(1000,500)", (_DIGITS[:500] + "." + _DIGITS[:500], "0")),
    Animal("numeric_negative", "numeric(2,-3)", ("12345", "-99000", "0", "NaN")),
    Animal("numeric_small", "numeric(3,5)", ("0.00123", "-0.00999")),
    Animal(
        "numeric",
        "numeric",
        (
            "NaN",
            "Infinity",
            "-Infinity",
            "1." + "0" * 50,
            "1e100",
            "0.00",
            "-0.1",
            "1e-100",
            _DIGITS,
            "-128",
            "127",
            "128",
            "-129",
            "4294967296",
            "-4294967296",
            "-2147483648",
            "0." + _DIGITS,
        ),
    ),
    Animal("money", "money", ("1234.56", "-0.01", "0", "92233720368547758.07", "-92233720368547758.08")),
    Animal(
        "text",
        "text",
        (
            "",
            "NULL",
            "null",
            "\\N",
            "\\.",
            "tab\there",
            "line\nbreak",
            "cr\rhere",
            "back\\slash",
            "\\\\",
            "\\",
            "\b\f\v\x01\x7f",
            "ünï€😀",
            '"quoted"',
            "\u2028",
            " padded ",
            "{a,b}",
            "a" * 3000,
            "é" * 3000,
        ),
    ),
    Animal("varchar", "varchar(20)", ("tag", "", "ö" * 20, "  ")),
    Animal("char", "char(5)", ("ab", "", "     ", "😀")),
    Animal("internal_char", '"char"', ("x", "", "\\377", "\\", ",")),
    Animal("name", "name", ("pg_class", "", "x" * 63)),
    Animal(
        "bytea", "bytea", ("\\x", "\\x00", "\\xdeadbeef", "\\x" + bytes(range(256)).hex(), "\\x0a095c2722")
    ),
    Animal(
        "date",
        "date",
        (
            "1970-01-01",
            "infinity",
            "-infinity",
            "4713-01-01 BC",
            "0001-12-31 BC",
            "0001-01-01",
            "5874897-12-31",
            "10000-01-01",
            "2024-02-29",
            "1900-03-01",
        ),
    ),
    Animal("time", "time", ("00:00:00", "24:00:00", "23:59:59.999999", "01:02:03.4")),
    Animal("time_3", "time(3)", ("00:00:00.123", "24:00:00")),
    Animal("time_0", "time(0)", ("12:34:56",)),
    Animal("timetz", "timetz", ("12:00:00+05:30", "24:00:00-15:59:59", "24:00:00+00", "00:00:00.5+15:59:59")),
    Animal("timetz_3", "timetz(3)", ("12:00:00.1234+02",)),
    Animal(
        "timestamp",
        "timestamp",
        (
            "2024-01-01 00:00:00",
            "infinity",
            "-infinity",
            "4713-01-01 00:00:00 BC",
            "0001-01-01 00:00:00",
            "294276-12-31 23:59:59.999999",
            "10000-01-01 00:00:00.5",
            "1969-12-31 23:59:59.999999",
            "2261-12-31 23:59:59.999999",
            "1677-09-22 00:00:00",
            "2024-02-29 12:34:56.789",
        ),
    ),
    Animal("timestamp_3", "timestamp(3)", ("2024-01-01 00:00:00.123", "infinity", "1969-12-31 23:59:59.999")),
    Animal("timestamp_0", "timestamp(0)", ("2024-01-01 00:00:01", "-infinity")),
    Animal(
        "timestamptz",
        "timestamptz",
        (
            "2024-01-01 00:00:00+02",
            "infinity",
            "-infinity",
            "4713-01-01 00:00:00+00 BC",
            "294276-12-31 23:59:59.999999+00",
            "0001-06-01 00:00:00+00 BC",
            "10000-01-01 00:00:00.123456+00",
        ),
    ),
    Animal("timestamptz_3", "timestamptz(3)", ("2024-01-01 00:00:00.123+02",)),
    Animal(
        "interval",
        "interval",
        (
            "1 year 2 mons -3 days 04:05:06.789",
            "-00:00:00.000001",
            "0",
            "-1 year",
            "1 mon",
            "-2 days",
            "100:00:00",
            "178000000 years",
            "-178000000 years",
            "2147483647 days",
            "1 year -1 mon +1 day -00:00:01",
            "-14 mons",
        ),
    ),
    Animal("interval_infinity", "interval", ("infinity", "-infinity"), since=17),
    Animal("interval_day", "interval day to second(3)", ("3 days 04:05:06.789",)),
    Animal("uuid", "uuid", ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "ffffffff-ffff-ffff-ffff-ffffffffffff")),
    Animal(
        "json",
        "json",
        ('{"a":"\\ud800"}', '{"a":1, "a":2}', "1e1000", '"\\u0000"', "null", " [ ] ", '"\\\\"'),
    ),
    Animal(
        "jsonb", "jsonb", ('{"b": 123456789012345678901234567890, "a": [null, true]}', "null", '"é\\n\\""')
    ),
    Animal("jsonpath", "jsonpath", ('$."a"[*]?(@ > 1)', "strict $")),
    Animal("xml", "xml", ("<a>&amp;</a>", "text", '<a b="c"/>')),
    Animal("inet", "inet", ("10.0.0.1/8", "::1", "fe80::1/64", "255.255.255.255")),
    Animal("cidr", "cidr", ("10.0.0.0/8", "::/0")),
    Animal("macaddr", "macaddr", ("08:00:2b:01:02:03",)),
    Animal("macaddr8", "macaddr8", ("08:00:2b:01:02:03:04:05",)),
    Animal("bit", "bit(4)", ("1010", "0000")),
    Animal("bit_1", "bit", ("1", "0")),
    Animal("varbit", "varbit", ("", "1", "10" * 40)),
    Animal("point", "point", ("(1.5,-2)", "(NaN,Infinity)", "(1e300,5e-324)")),
    Animal("line", "line", ("{1,-1,0}",)),
    Animal("lseg", "lseg", ("[(0,0),(1,1)]",)),
    Animal("box", "box", ("(2,2),(1,1)", "(0,0),(-1.5,-1)")),
    Animal("path", "path", ("[(0,0),(1,1)]", "((0,0),(1,1),(2,0))")),
    Animal("polygon", "polygon", ("((0,0),(1,1),(2,0))",)),
    Animal("circle", "circle", ("<(0,0),2.5>",)),
    Animal("tsvector", "tsvector", ("'a':1A 'b c':2,3 'it''s':4", "")),
    Animal("tsquery", "tsquery", ("'a' & !'b'", "")),
    Animal("pg_lsn", "pg_lsn", ("0/0", "FFFFFFFF/FFFFFFFF")),
    Animal("txid_snapshot", "txid_snapshot", ("10:20:10,14,15",)),
    Animal("pg_snapshot", "pg_snapshot", ("10:20:10,14,15", "1:1:")),
    Animal("int4range", "int4range", ("[1,5)", "empty", "(,)", "(,5)", "[1,)", "(1,5]")),
    Animal("int8range", "int8range", ("[-9223372036854775808,9223372036854775807)",)),
    Animal("numrange", "numrange", ("[1.50,NaN]", "(0,1]", "[1,1]", "(-Infinity,Infinity)")),
    Animal("daterange", "daterange", ("[2024-01-01,infinity]", "[4713-01-01 BC,2024-01-01)")),
    Animal("tsrange", "tsrange", ('["2024-01-01 00:00:00","2024-01-02 00:00:00.5")', "empty")),
    Animal("tstzrange", "tstzrange", ('("2024-01-01 00:00:00+00",)',)),
    Animal("int4multirange", "int4multirange", ("{}", "{[1,5),[7,)}")),
    Animal("int8multirange", "int8multirange", ("{(,)}",)),
    Animal("nummultirange", "nummultirange", ("{[1.5,2.5),(3,4]}",)),
    Animal("datemultirange", "datemultirange", ("{[2024-01-01,2024-01-03)}",)),
    Animal("tsmultirange", "tsmultirange", ('{["2024-01-01 00:00:00","2024-01-02 00:00:00")}',)),
    Animal("tstzmultirange", "tstzmultirange", ('{["2024-01-01 00:00:00+00",)}',)),
    Animal("enum", "mood", ("so so", 'very, "happy"', "ünï\\😀", "", "NULL", "{braces}")),
    Animal("odd_enum", '"Odd ""Name"', ("a",)),
    Animal("composite", "pair", ('(1,"a b")', "(,)", '(,"")', '(-1,"q""\\\\ ,()")')),
    Animal("nested_composite", "nest", ('("(1,""x,y"")","{1,2}",1.50)', "(,,)", '("(,)",{},NaN)')),
    Animal("own_range", "span", ('["a b",c)', '["""",",")', "empty", "(,)")),
    Animal("posint", "posint", ("1", "2147483647")),
    Animal("tiny", "tiny", ("1", "99")),
    Animal("price", "price", ("1.50", "-9999999999.99", "NaN")),
    Animal("dear", "dear", ("1.50", "0")),
    Animal("label", "label", ("abcde", "")),
    Animal("opt", "opt", ("x", "", "NULL")),
    Animal("moody", "moody", ("so so", 'very, "happy"')),
    Animal("pairs", "pairs", ('(1,"a b")',)),
    Animal("ints", "ints", ("{}", "{1,NULL}", "{{1},{2}}", "[5:6]={1,2}")),
    Animal("prices", "prices", ("{1.500,NULL}", "{NaN}")),
    Animal("stamp3", "stamp3", ("2024-01-01 00:00:00.123", "infinity")),
    Animal("raw", "raw", ("\\x00ff", "\\x")),
    Animal("day", "day", ("2024-01-01", "infinity")),
    Animal("spans", "spans", ("[1,5)", "empty")),
    Animal("int2vector", "int2vector", ("1 2 3", "")),
    Animal("oidvector", "oidvector", ("1 2 3", "")),
    Animal("aclitem", "aclitem", ("postgres=arwdDxt/postgres",)),
    Animal("hstore", "public.hstore", ('"a"=>"1", "b"=>NULL', "", '"k\\"\\\\"=>"v,=> \\"\\\\", "ü😀"=>""')),
    Animal("citext", "public.citext", ("MiXed", "", "ünï")),
    Animal("geometry", "public.geometry", ("0101000000000000000000F03F0000000000000040", "POINT EMPTY")),
)
