"""A mirror's rows are all masked alike, or the mirror stops.

A mirror keeps rows that no later change touches. Were a mask added, taken away or given another
salt, some rows would show what others hide, and a masked key would no longer find its row. So the
target remembers a mark of each column's mask from the table's first row on: by relation and
number of the column, which stay when the table or the column is renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tailrace.decode.disclosed import Disclosed
from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, Relation
from tailrace.sinks.evolution import held_columns
from tailrace.sinks.target import Target

if TYPE_CHECKING:
    from tailrace.sinks.delta_sink import TableWork

_FILE = "masks.json"


def require_same_masks(target: Target, disclosed: Disclosed, work: Iterable[TableWork]) -> None:
    """Check that tables are masked as they were, and remember how new ones and new columns are.

    Before anything of `work` is committed.

    :raises TailraceError: `SINK_SCHEMA_REFUSED`, `SINK_WRITE_FAILED`.
    """
    known = target.read(_FILE) or {}
    found = dict(known)
    for each in work:
        source, oid = each.files[-1].source, each.files[-1].source.oid
        marks = disclosed.mask_marks(source)
        before: dict[str, str] = known.get(str(oid), {})
        now = {_place(column): marks[column.name] for column in source.columns if column.name in marks}
        changed = {column.name for column in source.columns if _differs(column, before, now)}
        if changed and (mixed := changed & _in_rows(each, source)):
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                f"mirror a table: the mask of {', '.join(map(repr, sorted(mixed)))} is not the one that the "
                "mirror's rows were made under",
                "restore the mask and its salt; or give the sink a new, empty path, so that it reads the log "
                "from its start",
                {"sink": target.sink, "table": source.qualified_name},
            )
        if changed:
            found[str(oid)] = now
    if found != known:
        target.write(_FILE, found)


def _place(column: Column) -> str:
    """Return what a column's mark is kept under: its number, since names change."""
    return str(column.number) if column.number else column.name


def _differs(column: Column, before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return before.get(_place(column)) != now.get(_place(column))


def _in_rows(work: TableWork, source: Relation) -> set[str]:
    """Return the columns of `source` that rows of the mirror have."""
    if not work.folder.exists() or work.folder.relation() not in (0, source.oid):
        return set()
    there = held_columns(work.folder.schema())
    numbers, names = {each.number for each in there if each.number}, {each.name for each in there}
    held = work.files[-1].relation
    return {
        column.name
        for column, other in zip(source.columns, held.columns, strict=True)
        if column.number in numbers or (not (column.number and numbers) and other.name in names)
    }
