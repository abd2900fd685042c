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
    writing = _Writing(ensure_ascii)
    writing.add(document)
    return writing.ended(ending)


class _Writing:
    """A template as far as it is written."""

    def __init__(self, ensure_ascii: bool) -> None:
        self._ensure_ascii = ensure_ascii
        self._parts: Template = []
        self._constant = ""  # what was added since the last slot

    def add(self, part: Part) -> None:
        if isinstance(part, dict):
            self._constant += "{"
            for place, (name, member) in enumerate(part.items()):
                self._constant += f"{',' if place else ''}{self._json(name)}:"
                self.add(member)
            self._constant += "}"
        elif isinstance(part, Slot):
            self._end(part.number)
        elif isinstance(part, Text):
            self._constant += '"'
            for piece in part.parts:
                if isinstance(piece, int):
                    self._end(piece)
                else:
                    self._constant += self._json(piece)[1:-1]
            self._constant += '"'
        elif isinstance(part, Unless):
            value = template(part.value, ensure_ascii=self._ensure_ascii)
            self._end(UNLESS | len(value) << 8 | part.row)
            self._parts += value
        else:
            self._constant += part.text if isinstance(part, Json) else self._json(part)

    def ended(self, ending: str) -> Template:
        if self._constant or ending:
            self._constant += ending
            self._end(NOTHING)
        return self._parts

    def _end(self, slot: int) -> None:
        self._parts.append((self._constant, slot))
        self._constant = ""

    def _json(self, value: str | int | None) -> str:
        return _written(value, self._ensure_ascii)


@functools.lru_cache(maxsize=1024)
def _written(value: str | int | None, ensure_ascii: bool) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii)
