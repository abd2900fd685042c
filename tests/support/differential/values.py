"""Compares a typed value of a file or table with PostgreSQL's text.

Whatever type a column got, an integer, a decimal or the text itself, it must mean the same.
"""

from __future__ import annotations

import base64
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa

#: Oids of PostgreSQL types whose JSON form is a number that counts something.
DATE, TIMESTAMP, TIMESTAMPTZ, BYTEA, FLOAT4 = 1082, 1114, 1184, 17, 700

_MOMENT = re.compile(
    r"(?P<year>-?\d+)-(?P<month>\d\d)-(?P<day>\d\d)"
    r"(?:[ T](?P<time>\d\d:\d\d:\d\d(?:\.\d+)?)(?:Z|\+00)?)?(?P<bc> BC)?"
)


def plain(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values; dates and times as counts, as Python may not hold them."""
    return column.cast(_counted(column.type)).to_pylist()


def is_same(text: str | None, value: Any, kind: pa.DataType) -> bool:
    """Tell whether `value`, of a column of type `kind` read by `plain`, means the same as `text`."""
    if text is None or value is None:
        return text is value
    if pa.types.is_list(kind):
        return _is_same_list(array_items(text), value, kind.value_type)
    if pa.types.is_date(kind):
        return days(text) == value
    if pa.types.is_timestamp(kind):
        return microseconds(text) == value
    if pa.types.is_float32(kind):
        return _is_same_float(float(np.float32(text)), value)
    return is_same_scalar(text, value)


def is_same_json(text: str | None, value: Any, oid: int) -> bool:
    """Tell whether a JSON value of a column of PostgreSQL's type `oid` means the same as `text`."""
    if text is None or value is None:
        return text is value
    if isinstance(value, list):
        return _is_same_json_list(array_items(text), value)
    if oid == BYTEA and isinstance(value, str) and value != text:
        return base64.b64decode(value).hex() == text.removeprefix("\\x")
    if oid == DATE and isinstance(value, int):
        return days(text) == value
    if oid in {TIMESTAMP, TIMESTAMPTZ} and value != text:
        return microseconds(text) == (value if isinstance(value, int) else microseconds(value))
    if oid == FLOAT4 and isinstance(value, float):
        return _is_same_float(float(np.float32(text)), float(np.float32(value)))
    return is_same_scalar(text, value)


def is_same_scalar(text: str, value: Any) -> bool:
    """Tell the same of a value, judged by its Python type."""
    match value:
        case str():
            return text == value
        case bool():
            return text == ("t" if value else "f")
        case int():
            return _is_number(text) and int(text) == value
        case float():
            return _is_number(text) and _is_same_float(float(text), value)
        case Decimal():
            return _is_number(text) and Decimal(text) == value
        case bytes():
            return text == "\\x" + value.hex()
    return False


def is_same_text(text: str, other: str) -> bool:
    """Tell whether two texts mean the same number, time, boolean or list of those."""
    if text == other or {text, other} in ({"t", "true"}, {"f", "false"}):
        return True
    if _is_number(text) and _is_number(other):
        return _is_same_float(float(text), float(other))
    items = array_items(text), array_items(other)
    if None not in items:
        return repr(items[0]) == repr(items[1]) or all(
            one is two or (isinstance(one, str) and isinstance(two, str) and is_same_text(one, two))
            for one, two in zip(*items, strict=True)  # type: ignore[arg-type]
        )
    return microseconds(text) is not None and microseconds(text) == microseconds(other)


def days(text: str) -> int | None:
    """Return days since 1970; None if the text is no date."""
    found = _moment(text)
    return None if found is None else int(np.datetime64(found[0], "D").astype(np.int64))


def microseconds(text: str) -> int | None:
    """Return microseconds since 1970, in UTC; None if the text is no time."""
    found = _moment(text)
    if found is None:
        return None
    midnight = int(np.datetime64(found[0], "D").astype(np.int64)) * 86_400_000_000
    hours, minutes, seconds = found[1].split(":")
    return midnight + (int(hours) * 60 + int(minutes)) * 60_000_000 + int(Decimal(seconds) * 1_000_000)


def array_items(text: str) -> list[Any] | None:
    """Return an array's items: texts, lists of items, or None; None if `text` is no array."""
    body = text[text.index("=") + 1 :] if text.startswith("[") else text
    if not body.startswith("{"):
        return None
    items, _ = _items(body, 1)
    return items


def _items(text: str, at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while text[at] != "}":
        if text[at] == "{":
            inner, at = _items(text, at + 1)
            found.append(inner)
        elif text[at] == '"':
            end = at + 1
            while text[end] != '"':
                end += 2 if text[end] == "\\" else 1
            found.append(re.sub(r"\\(.)", r"\1", text[at + 1 : end], flags=re.DOTALL))
            at = end + 1
        else:
            end = min(place for mark in ",}" if (place := text.find(mark, at)) >= 0)
            found.append(None if text[at:end] == "NULL" else text[at:end])
            at = end
        if text[at] == ",":
            at += 1
    return found, at + 1


def _is_same_list(items: list[Any] | None, value: Any, kind: pa.DataType) -> bool:
    if items is None or len(items) != len(value):
        return False
    pairs = zip(items, value, strict=True)
    return all(not isinstance(item, list) and is_same(item, each, kind) for item, each in pairs)


def _is_same_json_list(items: list[Any] | None, value: list[Any]) -> bool:
    if items is None or len(items) != len(value):
        return False
    for item, each in zip(items, value, strict=True):
        if isinstance(item, list) or isinstance(each, list):
            if not (isinstance(item, list) and isinstance(each, list) and _is_same_json_list(item, each)):
                return False
        elif item is None or each is None:
            if item is not each:
                return False
        elif not is_same_scalar(item, each) and microseconds(item) != each:
            return False
    return True


def _moment(text: str) -> tuple[str, str] | None:
    match = _MOMENT.fullmatch(text)
    if match is None:
        return None
    year = 1 - int(match["year"]) if match["bc"] else int(match["year"])
    return f"{year:05d}-{match['month']}-{match['day']}", match["time"] or "00:00:00"


def _counted(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_counted(kind.value_type))
    if pa.types.is_date32(kind):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


def _is_number(text: str) -> bool:
    try:
        Decimal(text)
    except InvalidOperation:
        return False
    return True


def _is_same_float(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
