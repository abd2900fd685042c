r"""JSON documents that are sent as a change of the previous document.

MySQL writes such changes with `binlog_row_value_options = PARTIAL_JSON`, and Vitess converts them to a nested
SQL expression: `JSON_INSERT(JSON_REMOVE(%s, _utf8mb4'$.a'), _utf8mb4'$.b', 7)`, where `%s` stands for the
previous document. Parsing is strict: an expression that isn't completely understood is not applied.

Source: `ParseBinaryJSONDiff` and `MarshalSQLTo` of Vitess; MySQL manual, "Partial Updates of JSON Values".
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any

_CALL = re.compile(r"JSON_(REPLACE|INSERT|REMOVE)\(")
_PATH = re.compile(r"_utf8mb4'\$((?:\.[A-Za-z_][A-Za-z_0-9]*|\.\"[^\"\\']*\"|\[[0-9]+\])*)'")
_LEG = re.compile(r"\.([A-Za-z_][A-Za-z_0-9]*)|\.\"([^\"\\']*)\"|\[([0-9]+)\]")
_STRING = re.compile(r"_utf8mb4'((?:[^'\\]|\\.)*)'", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD = re.compile(r"(true|false|null)\b")
_TIME = re.compile(r"(?:date|timestamp|time) '([-0-9:. ]+)'")
_BYTES = re.compile(r"x'([0-9a-fA-F]*)'")
_BITS = re.compile(r"b'([01]*)'")

_ESCAPES = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a"}
_WORDS = {"true": True, "false": False, "null": None}

#: MySQL's own limit is 100 levels.
_DEPTH_MAX = 200


class _NotUnderstood(Exception):  # noqa: N818 - it never leaves this module
    pass


class _Digits(str):
    """A number, kept as its text."""

    __slots__ = ()


def changed_document(text: bytes, before: bytes | None) -> bytes | None:
    """Return the document that an expression yields; None if it can't be evaluated.

    :param text: the value in the row image: an expression, or `null`.
    :param before: the previous document; None if it was not sent.
    """
    try:
        reader = _Expression(text.decode(), before)
        made = reader.document()
        reader.end()
        return _written(made).encode()
    except (_NotUnderstood, ValueError, RecursionError):
        return None


class _Expression:
    """A parser that evaluates an expression from left to right."""

    def __init__(self, text: str, before: bytes | None) -> None:
        self._text = text
        self._at = 0
        self._before = before

    def document(self, depth: int = 0) -> Any:
        """Return the document that the expression at the current offset yields."""
        if depth > _DEPTH_MAX:
            raise _NotUnderstood
        call = self._match(_CALL)
        if call is None:
            if depth == 0:
                return self._value()
            self._expect("%s")
            if self._before is None:
                raise _NotUnderstood
            return json.loads(self._before, parse_float=_Digits, parse_int=_Digits)
        made = self.document(depth + 1)
        self._expect(", ")
        path = self._match(_PATH)
        if path is None:
            raise _NotUnderstood
        value = None
        if call.group(1) != "REMOVE":
            self._expect(", ")
            value = self._value()
        self._expect(")")
        return _applied(call.group(1), made, _legs(path.group(1)), value)

    def end(self) -> None:
        """Check that the whole text was read."""
        if self._at != len(self._text):
            raise _NotUnderstood

    def _value(self, depth: int = 0) -> Any:
        if depth > _DEPTH_MAX:
            raise _NotUnderstood
        if self._take("JSON_OBJECT("):
            items = self._list(depth)
            return dict(zip(items[::2], items[1::2], strict=True))
        if self._take("JSON_ARRAY("):
            return self._list(depth)
        if self._take("CAST(JSON_QUOTE("):
            return self._closed(") as JSON)", depth)
        if self._take("CAST("):
            word = self._match(_STRING)
            if word is None:
                return self._closed(" as JSON)", depth)
            self._expect(" as JSON)")
            return _WORDS[word.group(1)] if word.group(1) in _WORDS else self._refuse()
        return self._scalar()

    def _scalar(self) -> Any:
        if found := self._match(_STRING):
            return re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[1]), found[1], flags=re.DOTALL)
        if found := self._match(_WORD):
            return _WORDS[found[1]]
        if found := self._match(_NUMBER):
            return _Digits(found[0])
        if found := self._match(_TIME):
            return found[1]
        if found := self._match(_BYTES):
            return _encoded(bytes.fromhex(found[1]))
        if found := self._match(_BITS):
            number = int(found[1] or "0", 2)
            return _encoded(number.to_bytes((number.bit_length() + 7) // 8, "big"))
        return self._refuse()

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        if self._take(")"):
            return found
        while True:
            found.append(self._value(depth + 1))
            if self._take(")"):
                return found
            self._expect(", ")

    def _closed(self, closing: str, depth: int) -> Any:
        made = self._value(depth + 1)
        self._expect(closing)
        return made

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) if is_there else 0
        return is_there

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise _NotUnderstood

    def _refuse(self) -> Any:
        raise _NotUnderstood


def _encoded(value: bytes) -> str:
    return f"base64:type15:{base64.b64encode(value).decode()}"


def _legs(path: str) -> list[str | int]:
    return [
        int(found[3]) if found[3] is not None else found[1] if found[1] is not None else found[2]
        for found in _LEG.finditer(path)
    ]


def _applied(operation: str, document: Any, legs: list[str | int], value: Any) -> Any:
    if not legs:
        return value if operation == "REPLACE" else _refused()
    holder = document
    for leg in legs[:-1]:
        holder = _child(holder, leg)
    last = legs[-1]
    if operation == "INSERT":
        if isinstance(last, int) and isinstance(holder, list):
            holder.insert(last, value)
        elif isinstance(last, str) and isinstance(holder, dict) and last not in holder:
            holder[last] = value
        else:
            _refused()
        return document
    _child(holder, last)
    if operation == "REMOVE":
        del holder[last]
    else:
        holder[last] = value
    return document


def _child(holder: Any, leg: str | int) -> Any:
    fits = isinstance(holder, list) if isinstance(leg, int) else isinstance(holder, dict)
    try:
        return holder[leg] if fits else _refused()
    except (KeyError, IndexError):
        return _refused()


def _refused() -> Any:
    raise _NotUnderstood


def _written(value: Any) -> str:
    # As MySQL writes it: members by the length of their names, then by their bytes.
    if isinstance(value, _Digits):
        return str(value)
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: (len(name.encode()), name.encode()))
        return "{" + ", ".join(f"{_written(name)}: {_written(value[name])}" for name in names) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
