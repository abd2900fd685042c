"""Where things lie in a sink's directory, and how names of tables become names of folders.

    <path>/<schema>.<table>/                     one folder a table: data files, a Delta log
    <path>/_tailrace/identity.json               whose data this is
    <path>/_tailrace/lock                        held by the engine that writes
    <path>/_tailrace/staging/<task>-<start>/     files of the range that is being written
    <path>/_tailrace/manifests/<task>/           Parquet and JSON Lines: one file a commit
    <path>/_tailrace/position-<task>.json        Delta: a lower bound of what is in

Names come from the source, so they are treated as an attacker's: letters, digits, `_` and `-`
stand for themselves, every other byte of the name's UTF-8 becomes `~` and two hex digits. (Not
`%`: delta-rs decodes it in paths, in one place but not in another.) So a name can hold no `/`,
no dot that could be taken for the one between schema and table, no control character; a schema
whose name begins with `_` gets it encoded, too, since readers skip such folders. Two tables never
share a folder, save on file systems that ignore case.

Pure: functions of their arguments alone.
"""

from __future__ import annotations

import hashlib

STATE = "_tailrace"
#: File systems allow 255 bytes; staging adds a file's name to a folder's.
TABLE_DIRECTORY_BYTES_MAX = 150

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def table_directory(schema: str, table: str) -> str:
    """Return the name of a table's folder; different tables give different names.

    A name that would be too long is cut and ends in `~~` and a hash, which no other has.
    """
    name = f"{_encoded(schema)}.{_encoded(table)}"
    if name.startswith("_"):
        name = "~5f" + name[1:]
    if len(name) <= TABLE_DIRECTORY_BYTES_MAX:
        return name
    whole = f"{len(schema)}.{schema}.{table}".encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(whole).hexdigest()[:32]
    return f"{name[: TABLE_DIRECTORY_BYTES_MAX - 34].rstrip('~')}~~{digest}"


def file_name(task: str, start: int, end: int, piece: int, part: int, suffix: str) -> str:
    """Return a data file's name: a function of the range, its piece and the part in the piece.

    :param part: counts the files of one table, and of one name, in one piece, from 0: a new one begins where
        the table's schema or name changes.
    """
    return f"{_encoded(task)}-{start:016x}-{end:016x}-{piece:05d}-{part:03d}.{suffix}"


def staging_directory(task: str, start: int) -> str:
    """Return the folder, below `STATE`, in which executors leave the files of a range."""
    return f"staging/{_encoded(task)}-{start:016x}"


def staged_name(directory: str, name: str) -> str:
    """Return a file's name in the staging folder, where files of all tables lie side by side."""
    return f"{directory}@{name}"


def task_name(task: str) -> str:
    """Return `task` as a part of file names."""
    return _encoded(task)


def _encoded(name: str) -> str:
    encoded = name.encode("utf-8", "surrogatepass")
    return "".join(chr(byte) if byte in _PLAIN else f"~{byte:02x}" for byte in encoded) or "~"
