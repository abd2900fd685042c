"""Refuses changes of settings that would leave a mirror with rows of different settings.

A mirror keeps rows that no later change concerns. If a mask were added, removed or given another salt,
some rows would show values that others hide. If a handling mode changed without changing a column's type,
such as bytes in hexadecimal instead of base64, rows would have values in two forms. The server does not
check that a key of `source.message_keys` identifies all rows: rows with different keys may be one row
according to another key. A row is not found by a key that is masked or written in another form. And rows
without later changes would keep the values of earlier transformations.

So the target stores the settings of each table's rows, by the table's oid and the numbers of its columns,
which stay when they are renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.gather import text_cells
from tailrace.decode.postgres_types import OIDS, item_of
from tailrace.decode.types import column_types, known_type
from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, Relation, ValueType
from tailrace.sinks.delta.evolution import held_columns
from tailrace.sinks.names import as_mirror
from tailrace.sinks.target import Target
from tailrace.transforms.tables import TableChain

if TYPE_CHECKING:
    from tailrace.sinks.delta.sink import TableWork

_FILE = "settings.json"

#: The files of earlier versions instead of it, one for each part.
_FORMER = {"masks": "masks.json", "key": "keys.json", "forms": "forms.json"}

# Types whose values in typed columns depend on a mode that may not change the column's type.
_SAMPLES = {
    OIDS["money"]: "$1,234.56",
    OIDS["bytea"]: "\\xfbff00",
    OIDS["time"]: "01:02:03.004005",
    OIDS["timetz"]: "01:02:03.004005+01:30",
    OIDS["interval"]: "1 year 2 mons 3 days 04:05:06.007008",
}
_SAMPLES_BY_NAME = {"hstore": '"a"=>"1"'}


def require_same_settings(
    target: Target, table_policy: TablePolicy, chain: TableChain, work: Iterable[TableWork], have: int
) -> dict[int, int]:
    """Check that the tables' masks, keys, forms of values and transformations are unchanged, and store those
    of new tables and columns.

    Called before anything of `work` is committed.

    :param have: the log offset up to which the mirror has everything.
    :return: for each relation, by oid, the value of `have` when it was new, as far as it is known.
    :raises TailraceError: `SINK_SCHEMA_REFUSED`, `SINK_WRITE_FAILED`.
    """
    known = _known(target)
    found = dict(known)
    for each in work:
        oid = str(each.files[-1].source.oid)
        before = known.get(oid, {})
        try:
            now = {
                "masks": _same_masks(each, table_policy, before.get("masks", {})),
                "key": _same_key(each, before.get("key")),
                "forms": _same_forms(each, before.get("forms", {})),
                "steps": _same_steps(each, chain, before.get("steps", {})),
            }
        except _DiffersError as error:
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                f"mirror a table: {error.found}",
                f"restore {error.setting}; or give the sink a new, empty path, so that it reads the log from "
                "its start",
                {"sink": target.sink, "table": each.table},
            ) from None
        found[oid] = {part: value for part, value in now.items() if value}
        if oid not in known or "since" in before:
            found[oid]["since"] = before.get("since", have)
    if found != known:
        target.write(_FILE, found)
    return {int(oid): parts["since"] for oid, parts in found.items() if "since" in parts}


class _DiffersError(Exception):
    def __init__(self, found: str, setting: str) -> None:
        super().__init__(found)
        self.found = found
        self.setting = setting


def _known(target: Target) -> dict[str, dict[str, Any]]:
    content = target.read(_FILE)
    if content is not None:
        return content
    found: dict[str, dict[str, Any]] = {}
    for part, file in _FORMER.items():
        for oid, value in (target.read(file) or {}).items():
            found.setdefault(oid, {})[part] = value
    return found


# ---------------------------------------------------------------------- masks


def _same_masks(work: TableWork, table_policy: TablePolicy, before: Mapping[str, str]) -> Mapping[str, str]:
    source = work.files[-1].source
    marks = table_policy.mask_marks(source)
    now = {_place(column): marks[column.name] for column in source.columns if column.name in marks}
    changed = {
        column.name for column in source.columns if before.get(_place(column)) != now.get(_place(column))
    }
    if changed and (mixed := changed & _in_rows(work, source)):
        raise _DiffersError(
            f"the mask of {', '.join(map(repr, sorted(mixed)))} is not the one that the mirror's rows were "
            "written with",
            "the mask and its salt",
        )
    return now if changed else before


def _place(column: Column) -> str:
    """Return the name under which a column's mark is stored: its number, since names change."""
    return str(column.number) if column.number else column.name


def _in_rows(work: TableWork, source: Relation) -> set[str]:
    """Return the columns of `source` that rows of the mirror have."""
    if not work.folder.exists() or work.folder.relation() not in (0, source.oid):
        return set()
    there = held_columns(work.folder.schema())
    numbers, names = {each.number for each in there if each.number}, {each.name for each in there}
    held = as_mirror(source)
    return {
        column.name
        for column, other in zip(source.columns, held.columns, strict=True)
        if column.number in numbers or (not (column.number and numbers) and other.name in names)
    }


# ---------------------------------------------------------------------- keys


def _same_key(work: TableWork, before: Mapping[str, Any] | None) -> Mapping[str, Any]:
    relation = work.files[-1].relation
    # Columns are identified by their numbers, since names change; the names are for the message.
    numbers = {column.name: column.number for column in relation.columns}
    now = {
        "key": [numbers[name] or name for name in relation.key],
        "names": list(relation.key),
        "chosen": bool(relation.chosen_key),
    }
    chosen = now["chosen"] or (before is not None and before["chosen"])
    if before is not None and before["key"] != now["key"] and chosen and work.folder.exists():
        raise _DiffersError(
            f"its key is ({', '.join(relation.key)}), and the mirror's rows were identified by "
            f"({', '.join(before['names'])}); source.message_keys was changed",
            "the table's key in source.message_keys",
        )
    return now


# ---------------------------------------------------------------------- forms of values


def _same_forms(work: TableWork, before: Mapping[str, str]) -> Mapping[str, str]:
    now = _forms(work.files[-1].source)
    changed = [name for place, (name, form) in now.items() if before.get(place, form) != form]
    if changed and work.folder.exists():
        raise _DiffersError(
            f"a handling mode gives {', '.join(map(repr, changed))} in another form than the mirror's rows "
            "have",
            "the source's handling modes",
        )
    return {**before, **{place: form for place, (_, form) in now.items()}}


def _forms(relation: Relation) -> dict[str, tuple[str, str]]:
    """Return, by column and type, the column's name and the form of the type's sample value."""
    forms = {}
    for column, kind in zip(relation.columns, column_types(relation), strict=True):
        value = known_type(column)
        sample = _sample(value)
        if sample:
            place = f"{column.number or column.name} {column.type_oid} {column.type_modifier}"
            cells = text_cells(pa.array([sample]))
            forms[place] = column.name, str(kind.read(cells).values[0].as_py())
    return forms


def _sample(value: ValueType) -> str:
    found = item_of(value)
    if found is not None:
        inner = _sample(found[0]).replace("\\", "\\\\").replace('"', '\\"')
        return f'{{"{inner}"}}' if inner else ""
    return _SAMPLES.get(value.oid) or _SAMPLES_BY_NAME.get(value.name, "")


# ---------------------------------------------------------------------- transformations


def _same_steps(work: TableWork, chain: TableChain, before: Mapping[str, Any]) -> Mapping[str, Any]:
    source = work.files[-1].source
    mark = chain.mark(source)
    inputs = chain.of_table(source)[1] if mark else {}
    if _in_rows(work, source):
        if before.get("mark", "") != mark:
            raise _DiffersError(
                "the transformations of the table are not those that were applied to the mirror's rows",
                "the sink's transformations",
            )
        known = before.get("inputs", {})
        if changed := [name for name, read in inputs.items() if known.get(name, read) != read]:
            raise _DiffersError(
                f"{', '.join(map(repr, changed))} is computed from columns that were altered; existing rows "
                "would keep their old values",
                "the columns",
            )
    return {"mark": mark, "inputs": inputs} if mark else {}
