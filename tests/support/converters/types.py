"""PostgreSQL types with texts that a server sends, also unusual ones, and the modes for their values."""

from __future__ import annotations

import datetime as dt
from decimal import Context, Decimal

import numpy as np
from hypothesis import strategies as st

from tailrace.decode.changes import decode_block
from tailrace.model import ValueModes
from tailrace.records.group import Group
from tests.support.converters.customers import FACTS
from tests.support.decode.wire import block, xlog

HSTORE = 20_000
HSTORE_TYPE = xlog(b"Y" + HSTORE.to_bytes(4, "big") + b"public\0hstore\0")
MODES = {
    "none": ValueModes(),
    "debezium": ValueModes("precise", "adaptive", "numeric", "bytes", "json"),
    "double": ValueModes("double", "adaptive_time_microseconds", "string", "base64", "map"),
    "string": ValueModes("string", "connect", "string", "base64-url-safe", "map", money_fraction_digits=0),
    "iso": ValueModes("string", "isostring", "numeric", "hex", "json", money_fraction_digits=3),
    "micro": ValueModes("double", "microseconds", "numeric", "bytes", "map"),
    "nano": ValueModes("precise", "nanoseconds", "string", "hex", "json"),
}


_WIDE = Context(prec=100)


def numeric(precision: int, scale: int) -> int:
    return ((precision << 16) | (scale & 0x7FF)) + 4


def numbers(scale: int, digits: int) -> st.SearchStrategy[str]:
    whole = st.integers(-(10**digits) + 1, 10**digits - 1)
    return whole.map(lambda n: format(Decimal(n).scaleb(-scale, _WIDE), "f"))


def postgres_stamp(us: int) -> str:
    days, rest = divmod(us, 86_400_000_000)
    text = dt.date.fromordinal(dt.date(1970, 1, 1).toordinal() + days).isoformat()
    seconds, fraction = divmod(rest, 1_000_000)
    text += f" {seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return text + (f".{fraction:06}".rstrip("0") if fraction else "")


STAMPS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999).map(postgres_stamp) | st.sampled_from(
    [
        "infinity",
        "-infinity",
        "4713-01-01 00:00:00 BC",
        "294276-12-31 23:59:59.999999",
        "10000-01-01 00:00:00.5",
    ]
)
DATES = st.dates().map(str) | st.sampled_from(["infinity", "-infinity", "0044-03-15 BC", "5874897-12-31"])
TIMES = st.times().map(str) | st.just("24:00:00")
SPECIAL = st.sampled_from(["NaN", "Infinity", "-Infinity"])
#: PostgreSQL's notation; Java writes the first number shorter.
LARGE = st.sampled_from(["9.999999999999999e+22", "1e+23", "1.2345678901234568e+17"])
#: Types with modifiers, and texts that a server sends.
TYPES: dict[str, tuple[int, int, st.SearchStrategy[str]]] = {
    "bool": (16, -1, st.sampled_from("tf")),
    "int8": (20, -1, st.integers(-(2**63), 2**63 - 1).map(str)),
    "int2": (21, -1, st.integers(-(2**15), 2**15 - 1).map(str)),
    "xid8": (5069, -1, st.integers(0, 2**64 - 1).map(str)),
    "float8": (701, -1, st.floats(allow_nan=False, allow_infinity=False).map(repr) | SPECIAL | LARGE),
    "numeric_12_2": (1700, numeric(12, 2), numbers(2, 12) | st.just("NaN")),
    "numeric_38_38": (1700, numeric(38, 38), numbers(38, 38)),
    "numeric_39_2": (1700, numeric(39, 2), numbers(2, 39) | st.just("NaN")),
    "numeric_negative": (1700, numeric(5, -3), st.integers(-99_999, 99_999).map(lambda n: str(n * 1000))),
    "numeric": (1700, -1, numbers(3, 30) | SPECIAL),
    "money": (790, -1, st.sampled_from(["$1,234.56", "-$0.01", "($5)", "$92,233,720,368,547,758.07", "x"])),
    "text": (25, -1, st.text(st.characters(codec="utf-8", exclude_characters="\0"))),
    "bytea": (17, -1, st.binary(max_size=40).map(lambda raw: "\\x" + raw.hex())),
    "date": (1082, -1, DATES),
    "time": (1083, -1, TIMES),
    "time_3": (1083, 3, TIMES),
    "timetz": (1266, -1, TIMES.map(lambda text: text + "+05:30")),
    "timestamp": (1114, -1, STAMPS),
    "timestamp_3": (1114, 3, STAMPS),
    "timestamptz": (1184, -1, STAMPS.map(lambda text: text if text[-1] in "yC" else text + "+00")),
    "interval": (1186, -1, st.sampled_from(["1 year 2 mons", "-00:00:00.5", "178000000 years", "?"])),
    "json": (114, -1, st.sampled_from(['{"a":"\\u0000"}', "null", " [ ] "])),
    "uuid": (2950, -1, st.uuids().map(str)),
    "bit": (1560, 1, st.sampled_from("01")),
    "bits": (1560, 12, st.text("01", min_size=12, max_size=12)),
    "varbit": (1562, -1, st.text("01", max_size=40)),
    "point": (600, -1, st.just("(1,2)")),
    "hstore": (HSTORE, -1, st.sampled_from(['"a"=>"1", "b"=>NULL', "", '"k"=>"\\"\\\\"', "odd"])),
    "int4[]": (1007, -1, st.sampled_from(["{}", "{1,NULL,-3}", "{{1},{2}}", "[0:1]={1,2}"])),
    "float8[]": (1022, -1, st.sampled_from(["{1,NULL,9.999999999999999e+22}", "{NaN,-0}"])),
    "numeric[]": (1231, numeric(12, 2), st.sampled_from(["{1.50,NULL}", "{1.50,NaN}", "{}"])),
    "text[]": (1009, -1, st.sampled_from(['{a,"b\\"c",NULL,"NULL",""}', "{}", "{{a},{b}}"])),
    "date[]": (1182, -1, st.sampled_from(["{2024-01-01,NULL}", "{infinity}"])),
    "timestamp[]": (1115, -1, st.sampled_from(['{"2024-01-01 00:00:00.5",NULL}'])),
    "time[]": (1183, 3, st.sampled_from(["{00:00:01,24:00:00}"])),
    "bytea[]": (1001, -1, st.sampled_from(['{"\\\\x00ff",NULL}'])),
    "interval[]": (1187, -1, st.sampled_from(['{"1 day",NULL}'])),
    "bit[]": (1561, 1, st.sampled_from(["{1,0,NULL}"])),
}  # fmt: skip


def groups_in(data: bytes, modes: ValueModes) -> list[Group]:
    return [
        Group.of_changes("t", np.arange(changes.count), changes, FACTS)
        for changes in decode_block(block(data), 0, None, (), modes=modes)
    ]
