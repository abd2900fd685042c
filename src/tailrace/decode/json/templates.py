"""What a JSON document is made of, said as nested mappings, and the template that the kernel writes it by.

The same description gives columns where values are written otherwise than in JSON.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TypeAlias

from tailrace.decode.json.json_kernel import NOTHING, UNLESS

#: Constant texts, each with what comes after it: see `json_kernel.write_documents`.
Template = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Slot:
    """What is different from change to change, as the kernel writes it: see `json_kernel.write_documents`."""

    number: int


@dataclass(frozen=True, slots=True)
class Text:
    """A text of constants and slots; what stands in these needs no escapes."""

    parts: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Unless:
    """Null for changes that have no number in a row of the numbers; a value for all others."""

    row: int
    value: Part


@dataclass(frozen=True, slots=True)
class Json:
    """A constant that is JSON already."""

    text: str


Part: TypeAlias = "str | int | Slot | Text | Unless | Json | dict[str, Part] | None"


def template(document: Part, *, ensure_ascii: bool = False, ending: str = "") -> Template:
    """Return the template of a document.

    :param ensure_ascii: whether letters beyond ASCII are escaped.
    :param ending: what each document ends with.
    """
    parts: Template = []
    constant = _added(document, "", parts, ensure_ascii) + ending
    return [*parts, (constant, NOTHING)] if constant else parts


def _added(part: Part, constant: str, parts: Template, ensure_ascii: bool) -> str:
    # Adds what a part is behind a constant; returns what stands behind its last slot.
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
