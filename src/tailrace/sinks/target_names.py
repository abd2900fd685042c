"""Under which names a target holds a table's columns.

Most names stand for themselves. What a target can't hold is written otherwise, so that no name
stops a sink, in a way that is a function of the table's own names and never gives one name twice:

- A character that Delta refuses, and `~`, becomes `~` and two hex digits, as in names of folders.
- A name that the target needs for itself gets `~own` at its end.
- Delta ignores case. Of columns whose names differ by case alone one keeps its name, the one in
  lower case if there is one, else the first; the others get `~~` and a hash of their name.

Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Sequence

from tailrace.model import Relation
from tailrace.sources.postgres.decode.types import METADATA, OLD_KEY

_REFUSED = frozenset(" ,;{}()\n\t=~")
_OWN = "~own"

#: What every row of a history carries.
HISTORY = frozenset(field.name for field in (*METADATA, OLD_KEY))
#: What a mirror and the net changes on the way to it carry.
MIRROR = HISTORY | {"_position", "_upsert", "_origin", "_sent", "_offset"}


@functools.lru_cache(maxsize=1024)
def as_files(relation: Relation) -> Relation:
    """Return the table as Parquet files hold it: all names but those of their own columns."""
    return _renamed(relation, [_not_own(column.name, HISTORY) for column in relation.columns])


@functools.lru_cache(maxsize=1024)
def as_history(relation: Relation) -> Relation:
    """Return the table as a Delta table with every change as a row holds it."""
    return _renamed(relation, delta_names([column.name for column in relation.columns], HISTORY))


@functools.lru_cache(maxsize=1024)
def as_mirror(relation: Relation) -> Relation:
    """Return the table as a Delta table with its current rows holds it."""
    return _renamed(relation, delta_names([column.name for column in relation.columns], MIRROR))


def as_it_is(relation: Relation) -> Relation:
    """Return the table itself: JSON holds any name."""
    return relation


def delta_names(names: Sequence[str], own: Collection[str]) -> list[str]:
    """Return what a Delta table calls columns of these names; `own`: names of its own columns."""
    held = [_not_own(_encoded(name), own) for name in names]
    keeps: dict[str, str] = {}
    for name in held:
        lower = name.lower()
        if name == lower or lower not in keeps:
            keeps[lower] = name
    return [name if keeps[name.lower()] == name else beside(name) for name in held]


def beside(name: str) -> str:
    """Return the name for a column whose own name another has but for case."""
    return f"{name}~~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _encoded(name: str) -> str:
    return "".join(f"~{ord(letter):02x}" if letter in _REFUSED else letter for letter in name)


def _not_own(name: str, own: Collection[str]) -> str:
    return name + _OWN if name.lower() in own else name


def _renamed(relation: Relation, names: Sequence[str]) -> Relation:
    held = {column.name: name for column, name in zip(relation.columns, names, strict=True)}
    if all(name == other for name, other in held.items()):
        return relation
    columns = tuple(dataclasses.replace(column, name=held[column.name]) for column in relation.columns)
    return dataclasses.replace(
        relation,
        columns=columns,
        primary_key=tuple(held[name] for name in relation.primary_key),
        chosen_key=tuple(held[name] for name in relation.chosen_key),
    )
