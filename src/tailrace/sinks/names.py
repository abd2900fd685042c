"""The layout of a sink's directory, and the names of tables and columns in a target.

    <path>/<schema>.<table>/                     one folder per table: data files, a Delta log
    <path>/_tailrace/identity.json               the log and pipeline that the data is from
    <path>/_tailrace/lock                        held by the engine that writes
    <path>/_tailrace/staging/<task>-<start>/     files of the range that is being written
    <path>/_tailrace/manifests/<task>/           Parquet and JSON Lines: one file per commit
    <path>/_tailrace/position-<task>.json        Delta: a lower bound of the sink's position
    <path>/_tailrace/columns-<task>.json         Delta mirror: up to where columns may be ahead of rows

Names come from the source, so they are treated as an attacker's: letters, digits, `_` and `-`
are kept, every other byte of the name's UTF-8 becomes `~` and two hex digits. (Not `%`: delta-rs
decodes it in paths, in one place but not in another.) So a name contains no `/`, no control
character, and no dot that could be taken for the one between schema and table; a schema whose
name begins with `_` gets it encoded, too, since readers skip such folders. Two tables never share
a folder, except on file systems that ignore case.

Most columns keep their names. Names that a target does not allow are changed, so that no name stops a
sink. The new name is a function of the table's own names, and unique:

- A character that Delta refuses, and `~`, becomes `~` and two hex digits, as in names of folders.
- A name of one of the target's own columns gets `~own` at its end; so does a name that already has it.
- Delta ignores case. Of columns whose names differ only by case one keeps its name, the one in
  lower case if there is one, otherwise the first; the others get `~~` and a hash of their name.

No name in a Delta table begins with `~` and a letter after `f`; temporary columns of a merge do.

Pure: functions of their arguments alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Sequence

from tailrace.decode.types import METADATA, OLD_KEY
from tailrace.model import Relation, ReplicaIdentity

STATE = "_tailrace"
#: Longest name of a table's folder. File systems allow 255 bytes, and staging adds a file's name to it.
TABLE_DIRECTORY_BYTES_MAX = 150

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")

_REFUSED = frozenset(" ,;{}()\n\t=~")
_OWN = "~own"

#: Columns that every row of a history has in addition to the table's.
HISTORY = frozenset(field.name for field in (*METADATA, OLD_KEY))
#: Columns that a mirror and its net changes have in addition to the table's.
MIRROR = HISTORY | {"_position", "_upsert", "_origin", "_sent", "_offset"}


def table_directory(schema: str, table: str) -> str:
    """Return the name of a table's folder; different tables give different names.

    A name that would be too long is shortened and ends in `~~` and a hash of the whole.
    """
    name = f"{_encoded(schema)}.{_encoded(table)}"
    if name.startswith("_"):
        name = "~5f" + name[1:]
    if len(name) <= TABLE_DIRECTORY_BYTES_MAX:
        return name
    whole = f"{len(schema)}.{schema}.{table}".encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(whole).hexdigest()[:32]
    return f"{name[: TABLE_DIRECTORY_BYTES_MAX - 34].rstrip('~')}~~{digest}"


def file_name(task: str, start: int, end: int, split: int, part: int, suffix: str) -> str:
    """Return a data file's name: a function of the range, its split and the part in the split.

    :param part: number of the file among those of one table and one name in the split, from 0: a new file
        begins when the table's schema or name changes.
    """
    return f"{_encoded(task)}-{start:016x}-{end:016x}-{split:05d}-{part:03d}.{suffix}"


def staging_directory(task: str, start: int) -> str:
    """Return the folder, below `STATE`, into which executors write the files of a range."""
    return f"staging/{_encoded(task)}-{start:016x}"


def staged_name(directory: str, name: str) -> str:
    """Return a file's name in the staging folder, which has the files of all tables."""
    return f"{directory}@{name}"


def task_name(task: str) -> str:
    """Return `task` as a part of file names."""
    return _encoded(task)


def _encoded(name: str) -> str:
    encoded = name.encode("utf-8", "surrogatepass")
    return "".join(chr(byte) if byte in _PLAIN else f"~{byte:02x}" for byte in encoded) or "~"


@functools.lru_cache(maxsize=1024)
def as_files(relation: Relation) -> Relation:
    """Return the table with the column names of Parquet files: only names of their own columns change."""
    return _renamed(relation, [_not_own(column.name, HISTORY) for column in relation.columns])


@functools.lru_cache(maxsize=1024)
def as_history(relation: Relation) -> Relation:
    """Return the table with the column names of a Delta table of changes."""
    return _renamed(relation, delta_names([column.name for column in relation.columns], HISTORY))


@functools.lru_cache(maxsize=1024)
def as_mirror(relation: Relation) -> Relation:
    """Return the table with the column names of a Delta mirror.

    If it is unknown which of two keys is in force, the columns of both are the key: whole old rows are sent.
    """
    held = _renamed(relation, delta_names([column.name for column in relation.columns], MIRROR))
    if held.identity is ReplicaIdentity.FULL and held.primary_key and not held.chosen_key:
        may_be = (column.name for column in held.columns if column.may_be_key)
        held = dataclasses.replace(held, primary_key=(*held.primary_key, *may_be))
    return held


def as_it_is(relation: Relation) -> Relation:
    """Return the table itself: JSON allows all names."""
    return relation


def delta_names(names: Sequence[str], own: Collection[str]) -> list[str]:
    """Return the names of these columns in a Delta table; `own`: names of its own columns."""
    held = [_not_own(_encoded_column(name), own) for name in names]
    keeps: dict[str, str] = {}
    for name in held:
        lower = name.lower()
        if name == lower or lower not in keeps:
            keeps[lower] = name
    return [name if keeps[name.lower()] == name else beside(name) for name in held]


def beside(name: str) -> str:
    """Return the name for a column whose name differs from another one only by case."""
    return f"{name}~~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _encoded_column(name: str) -> str:
    return "".join(f"~{ord(letter):02x}" if letter in _REFUSED else letter for letter in name)


def _not_own(name: str, own: Collection[str]) -> str:
    bare = name
    while bare.endswith(_OWN):  # a source's column may have such a name, now or later
        bare = bare.removesuffix(_OWN)
    return name + _OWN if bare.lower() in own else name


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
