"""Descriptions of JSON documents as nested mappings, and the templates from which the kernel writes them.

Output formats other than JSON get their columns from the same description.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TypeAlias

from tailrace.decode.json.json_kernel import NOTHING, UNLESS

#: Constant texts, each with the slot after it: see `json_kernel.write_documents`.
Template = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Slot:
    """A part that differs from change to change: see `slots` of `json_kernel.write_documents`."""

    number: int


@dataclass(frozen=True, slots=True)
class Text:
    """A text of constants and slots; the content of the slots needs no escapes."""

    parts: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Unless:
    """Null for changes whose number in the row `row` is missing; a value for all others."""

    row: int
    value: Part


@dataclass(frozen=True, slots=True)
class Json:
    """A constant that already is JSON."""

    text: str


Part: TypeAlias = "str | int | Slot | Text | Unless | Json | dict[str, Part] | None"


def template(document: Part, *, ensure_ascii: bool = False, ending: str = "") -> Template:
    """Return the template of a document.

    :param ensure_ascii: whether characters outside ASCII are escaped.
    :param ending: text at the end of each document.
    """
    parts: Template = []
    constant = _added(document, "", parts, ensure_ascii) + ending
    return [*parts, (constant, NOTHING)] if constant else parts


def _added(part: Part, constant: str, parts: Template, ensure_ascii: bool) -> str:
    # Appends a part after `constant` to `parts`; returns the constant text after the last slot.
    if isinstance(part, dict):
        separator = "{"
        for name, member in part.items():
            before = f"{constant}{separator}{_written(name, ensure_ascii)}:"
            constant, separator = _added(member, before, parts, ensure_ascii), ","
        return constant + ("}" if part else "{}")
    if isinstance(part, Slot):
        parts.append((constant, part.number))
        return ""
    if isinstance(part, Text):
        constant += '"'
        for piece in part.parts:
            if isinstance(piece, int):
                parts.append((constant, piece))
                constant = ""
            else:
                constant += _written(piece, ensure_ascii)[1:-1]
        return constant + '"'
    if isinstance(part, Unless):
        value = template(part.value, ensure_ascii=ensure_ascii)
        parts += [(constant, UNLESS | len(value) << 8 | part.row), *value]
        return ""
    return constant + (part.text if isinstance(part, Json) else _written(part, ensure_ascii))


@functools.lru_cache(maxsize=1024)
def _written(value: str | int | None, ensure_ascii: bool) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii)
