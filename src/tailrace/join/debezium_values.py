"""Converts values of Debezium's documents to PostgreSQL's text, by their schemas. Pure.

Values for which Debezium's types have no form, Tailrace's own sink writes as PostgreSQL's text: `NaN` of a
decimal, `infinity` of a date, a timestamp beyond 64 bits (docs/converters.md, "Differences from Debezium").

Source: Debezium 3.6, io.debezium.time, io.debezium.data, UnchangedToastedPlaceholder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from tailrace.decode.values.stamps import stamp_texts

#: Returns PostgreSQL's text of a value; the second argument is the value's schema.
Writer = Callable[[Any, Mapping[str, Any]], str]

_DAY_0 = date(1970, 1, 1)
_TIME_0 = datetime(1970, 1, 1)  # noqa: DTZ001 - a timestamp without a zone
#: Length of `bit varying` without a limit: its bytes do not have the zeros at its start.
_LENGTH_UNKNOWN = 2**31 - 1
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
#: Kafka Connect's types of floating-point numbers of 32 bits, and those whose values are the same in JSON.
_REALS = ("float", "float32")
_SAME = frozenset({"boolean", "int8", "int16", "int32", "int64", "string", "bytes"})
_STAMP = re.compile(
    r"-?infinity|\d{4,}-\d\d-\d\d(?: \d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d(?::\d\d){0,2})?)?(?: BC)?"
)
_ISO_STAMP = re.compile(r"([+-]?)(\d{4,})(-\d\d-\d\d)T(\d\d:\d\d:\d\d(?:\.\d+)?)(Z|[+-][\d:]+)")

#: Infinite timestamps, by units per second: those of Debezium up to 3.6 and, in milliseconds, since 3.7.
_INFINITIES: dict[int, dict[int, str]] = {
    1_000: {
        9_223_372_036_825_200: "infinity",
        -9_223_372_036_832_400: "-infinity",
        9_223_372_036_825_200_000: "infinity",
        -9_223_372_036_832_400_000: "-infinity",
    },
    1_000_000: {9_223_372_036_825_200_000: "infinity", -9_223_372_036_832_400_000: "-infinity"},
    1_000_000_000: {2**63 - 1: "infinity", -(2**63): "-infinity"},
}


class Placeholder:
    """The placeholder that documents have for a value that was not sent.

    :param text: Debezium's `unavailable.value.placeholder`.
    """

    def __init__(self, text: str) -> None:
        raw = text.encode()
        encoded = _base64(raw)
        self._plain = {text, raw, encoded}
        # The forms for arrays of texts, bytes, numbers and booleans, for maps, and for decimals with a scale
        # in each value, alone and in arrays. For an array of UUIDs it is Java's name-based UUID of the text.
        bits = np.unpackbits(np.frombuffer(raw, np.uint8)).astype(bool).tolist()
        named = UUID(bytes=hashlib.md5(raw, usedforsecurity=False).digest(), version=3)
        self._nested: list[Any] = [[text], [encoded], [raw], list(raw), bits, {text: text}, [str(named)]]
        decimals = [{"scale": 0, "value": encoded}, {"scale": 0, "value": raw}]
        self._nested += [*decimals, *([decimal] for decimal in decimals)]

    def stands_for(self, value: Any) -> bool:
        """Return whether a value is the placeholder in the form of its type."""
        if isinstance(value, str | bytes):
            return value in self._plain
        return isinstance(value, list | dict) and value in self._nested


def column_type(schema: Mapping[str, Any]) -> tuple[str, Writer]:
    """Return PostgreSQL's type for values of a schema, and their writer; text if there is no schema."""
    if not schema:
        return "text", _text
    logical = _LOGICAL.get(schema.get("name") or "")
    return logical or _TYPES.get(schema.get("type", ""), ("jsonb", _json))


def _day(value: Any, _schema: Mapping[str, Any]) -> str:
    if isinstance(value, str):
        return _as_sent(value)
    try:
        return str(_DAY_0 + timedelta(days=value))
    except OverflowError:  # before year 1, or after 9999
        return str(stamp_texts(pa.array([value], pa.int32()).cast(pa.date32()))[0])


def _timestamp(per_s: int) -> Writer:
    def text(value: Any, _schema: Mapping[str, Any]) -> str:
        if isinstance(value, str):
            return _as_sent(value)
        if value in _INFINITIES[per_s]:
            return _INFINITIES[per_s][value]
        us = int(value) * 1_000_000 // per_s
        try:
            return _short(str(_TIME_0 + timedelta(microseconds=us)))
        except OverflowError:  # before year 1, or after 9999
            return str(stamp_texts(pa.array([us], pa.timestamp("us")))[0])

    return text


def _as_sent(text: str) -> str:
    if not _STAMP.fullmatch(text):
        raise ValueError("no date and no timestamp of PostgreSQL's")
    return text


def _short(text: str) -> str:
    """Return a time without zeros at the end of its fraction."""
    return text.rstrip("0").rstrip(".") if "." in text else text


def _time(per_s: int) -> Writer:
    def text(value: Any, _schema: Mapping[str, Any]) -> str:
        seconds, us = divmod(int(value) * 1_000_000 // per_s, 1_000_000)
        return _short(f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{us:06}")

    return text


def _zoned_stamp(value: Any, _schema: Mapping[str, Any]) -> str:
    parts = _ISO_STAMP.fullmatch(value)
    if parts is None:
        return _as_sent(value)
    sign, digits, day, time, zone = parts.groups()
    year = int(sign + digits)
    era, year = (" BC", 1 - year) if year < 1 else ("", year)
    return f"{year:04}{day} {_short(time)}{_zone(zone)}{era}"


def _zoned_time(value: Any, _schema: Mapping[str, Any]) -> str:
    at = re.search(r"Z|[+-]", value)
    return value if at is None else _short(value[: at.start()]) + _zone(value[at.start() :])


def _zone(text: str) -> str:
    return "+00" if text == "Z" else text


def _decimal(value: Any, schema: Mapping[str, Any]) -> str:
    if isinstance(value, dict):  # VariableScaleDecimal
        scale, raw = int(value["scale"]), _raw(value["value"])
    # `Infinity` is also valid base64: only a decimal without a precision can be infinite.
    elif value == "NaN" or (schema.get("type") == "struct" and value in _NO_NUMBERS):
        return str(value)
    else:
        scale, raw = int(schema.get("parameters", {}).get("scale", 0)), _raw(value)
    unscaled = int.from_bytes(raw, "big", signed=True)
    sign, digits = "-" if unscaled < 0 else "", str(abs(unscaled)).zfill(max(scale, 0) + 1)
    whole = len(digits) - max(scale, 0)
    return f"{sign}{digits[:whole]}.{digits[whole:]}" if scale > 0 else f"{sign}{digits}{'0' * -scale}"


def _raw(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else base64.b64decode(value, validate=True)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(value: Any, _schema: Mapping[str, Any]) -> str:
    return "\\x" + _raw(value).hex()


def _bits(value: Any, schema: Mapping[str, Any]) -> str:
    number = int.from_bytes(_raw(value), "little")
    length = int(schema.get("parameters", {}).get("length", 1))
    return f"{number:b}".zfill(0 if length == _LENGTH_UNKNOWN else length)


def _plain(value: Any, _schema: Mapping[str, Any]) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return value if isinstance(value, str) else repr(value)


def _double(value: Any, _schema: Mapping[str, Any]) -> str:
    if isinstance(value, str) and value not in _NO_NUMBERS:
        raise ValueError("no number")
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return repr(number).removesuffix(".0")


def _real(value: Any, schema: Mapping[str, Any]) -> str:
    # The shortest text of this number in 32 bits: Avro's are read as 64 bits.
    return _double(float(str(np.float32(value))), schema)


def _json(value: Any, schema: Mapping[str, Any]) -> str:
    as_json = _as_json(value, schema)
    return json.dumps(as_json, ensure_ascii=False, separators=(",", ":"), default=_base64)


def _as_json(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value of Avro's as Kafka Connect's JSON has it: `NaN` and infinities are texts."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return _double(value, schema)
        return float(_real(value, schema)) if schema.get("type") in _REALS else value
    if isinstance(value, list):
        items = schema.get("items", {})
        return value if items.get("type") in _SAME else [_as_json(item, items) for item in value]
    if isinstance(value, dict):
        members = {field["field"]: field for field in schema.get("fields", ())}
        other = schema.get("values", {})
        return {name: _as_json(one, members.get(name, other)) for name, one in value.items()}
    return value


def _text(value: Any, _schema: Mapping[str, Any]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else _json(value, _schema)


#: PostgreSQL's type and the writer of values, by the name of a logical type.
_LOGICAL: dict[str, tuple[str, Writer]] = {
    "io.debezium.time.Date": ("date", _day),
    "org.apache.kafka.connect.data.Date": ("date", _day),
    "io.debezium.time.Timestamp": ("timestamp", _timestamp(1_000)),
    "org.apache.kafka.connect.data.Timestamp": ("timestamp", _timestamp(1_000)),
    "io.debezium.time.MicroTimestamp": ("timestamp", _timestamp(1_000_000)),
    "io.debezium.time.NanoTimestamp": ("timestamp", _timestamp(1_000_000_000)),
    "io.debezium.time.ZonedTimestamp": ("timestamptz", _zoned_stamp),
    "io.debezium.time.Time": ("time", _time(1_000)),
    "org.apache.kafka.connect.data.Time": ("time", _time(1_000)),
    "io.debezium.time.MicroTime": ("time", _time(1_000_000)),
    "io.debezium.time.NanoTime": ("time", _time(1_000_000_000)),
    "io.debezium.time.ZonedTime": ("timetz", _zoned_time),
    "org.apache.kafka.connect.data.Decimal": ("numeric", _decimal),
    "io.debezium.data.VariableScaleDecimal": ("numeric", _decimal),
    "io.debezium.data.Json": ("json", _plain),
    "io.debezium.data.Uuid": ("uuid", _plain),
    "io.debezium.data.Xml": ("xml", _plain),
    "io.debezium.data.Bits": ("varbit", _bits),
}
#: PostgreSQL's type and the writer of values, by Kafka Connect's type.
_TYPES: dict[str, tuple[str, Writer]] = {
    "boolean": ("bool", _plain),
    "int8": ("int2", _plain),
    "int16": ("int2", _plain),
    "int32": ("int4", _plain),
    "int64": ("int8", _plain),
    "float": ("float4", _real),
    "float32": ("float4", _real),
    "double": ("float8", _double),
    "float64": ("float8", _double),
    "string": ("text", _plain),
    "bytes": ("bytea", _bytes),
}
