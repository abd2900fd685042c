"""Columns of rows and keys, edited wherever they occur, and with them what is noted of them.

A row's column occurs in `before` and `after`, or in the `value` of a record that is no change any
more. `special` and `unchanged` name columns: they follow a column to its new name, and go with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.rows import special_entries
from tailrace.errors import Kind, TailraceError
from tailrace.model import Relation
from tailrace.records.group import Group
from tailrace.transforms.groups.rows import described
from tailrace.transforms.groups.values import edited

Fields = dict[str, pa.Array]

_Flags = npt.NDArray[np.bool_]

#: What becomes of a column: its name, another one, or None where it goes.
Naming = Callable[[str], str | None]

#: What `apply_to` says.
ROW, KEY, BOTH = "row", "key", "both"


def same_name(name: str) -> str:
    """Return the name: what is noted of a column stays with it."""
    return name


def field_names(group: Group, part: str) -> tuple[str, ...]:
    """Return the names of columns in a part of the records; of the wire's without decoding."""
    wire, relation = group.wire, group.relation
    if wire is not None:
        row = ("prefix", "content") if relation is None else tuple(c.name for c in relation.columns)
        key = () if relation is None else tuple(name for name in row if name in relation.key)
        return row if part == ROW else key if part == KEY else row
    columns = [group.column(name).type for name in images_of(group, part)]
    found = (field.name for arrow in columns if pa.types.is_struct(arrow) for field in arrow)
    return tuple(dict.fromkeys(found))


def fitting(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that one of the patterns means; `*` is any run of characters."""
    expressions = [re.compile(".*".join(map(re.escape, p.split("*"))), re.DOTALL) for p in patterns]
    return [name for name in names if any(found.fullmatch(name) for found in expressions)]


def with_edited(
    group: Group,
    part: str,
    edit: Callable[[Fields], Mapping[str, pa.Array]],
    naming: Naming = same_name,
    special: Naming | None = None,
) -> Group:
    """Return records whose rows or keys, or both, are what `edit` makes of their fields.

    :param naming: what becomes of a column's name, for what is noted of columns of the row.
    :param special: the same for the texts of values that a column does not hold, if it differs.
    """
    columns = group.columns
    for name in images_of(group, part):
        at = columns.schema.get_field_index(name)
        if at >= 0:
            columns = columns.set_column(at, name, edited(columns.column(at), edit))
    found = group.with_columns(columns)
    return found if part == KEY else with_notes(found, naming, special)


def with_notes(group: Group, naming: Naming = same_name, special: Naming | None = None) -> Group:
    """Return records with what is noted of their columns; `naming` and `special` as for `with_edited`."""
    return group.with_columns(_with_notes(group.columns, naming, special or naming))


def with_relation(group: Group, relation: Relation | None) -> Group:
    """Return the records as those of `relation`."""
    return replace(group, relation=relation)


def images_of(group: Group, part: str) -> tuple[str, ...]:
    """Return the names of the columns that a part of the records is."""
    rows = ("before", "after") if group.is_change else ("value",)
    return rows if part == ROW else ("key",) if part == KEY else (*rows, "key")


def _with_notes(columns: pa.RecordBatch, naming: Naming, special: Naming) -> pa.RecordBatch:
    at = columns.schema.get_field_index("unchanged")
    if naming is not same_name and at >= 0 and pa.types.is_list(columns.schema.field(at).type):
        columns = columns.set_column(at, "unchanged", _renamed_items(columns.column(at), naming))
    at = columns.schema.get_field_index("special")
    if special is not same_name and at >= 0 and pa.types.is_map(columns.schema.field(at).type):
        columns = columns.set_column(at, "special", _renamed_keys(columns.column(at), special))
    return columns


def _renamed_items(lists: pa.ListArray, naming: Naming) -> pa.ListArray:
    names, kept = _renamed(lists.flatten(), naming)
    parents = pc.list_parent_indices(lists).to_numpy()[kept]
    offsets = _offsets(parents, lists)
    return pa.ListArray.from_arrays(offsets, names)


def _renamed_keys(maps: pa.MapArray, naming: Naming) -> pa.MapArray:
    def renamed(key: str) -> str | None:
        place, dot, column = key.partition(".")
        name = naming(column)
        return None if name is None else place + dot + name

    if maps.null_count == len(maps):
        return maps
    keys, items, parents = special_entries(maps)
    names, kept = _renamed(keys, renamed)
    return _maps(parents[kept], len(maps), names, items.filter(pa.array(kept)))


def with_values(group: Group, image: str, name: str, rows: npt.NDArray[np.int64], values: pa.Array) -> Group:
    """Return records with other values in some rows (rising) of one field of `before`, `after` or `value`."""
    chosen = np.zeros(len(group), np.bool_)
    chosen[rows] = True

    def edit(found: Fields) -> Fields:
        changed = pc.replace_with_mask(found[name], pa.array(chosen), values)
        return {**found, name: changed}

    return group.with_column(image, edited(group.column(image), edit))


def specials_of_values(maps: pa.Array, old: pa.Array) -> pa.Array:
    """Return the texts of rows that become values: those of the row before where `old`, else after."""
    if maps.null_count == len(maps):
        return maps
    keys, items, parents = special_entries(maps)
    kept = _is_own(keys, parents, old.to_numpy(zero_copy_only=False))
    names = pc.replace_substring_regex(keys.filter(pa.array(kept)), r"^(before|after)\.", "value.")
    return _maps(parents[kept], len(maps), names, items.filter(pa.array(kept)))


def own_specials(maps: pa.Array, old: _Flags, single: _Flags) -> pa.Array:
    """Return the texts of which those of `single` changes are of the row before where `old`, else after."""
    if maps.null_count == len(maps):
        return maps
    keys, items, parents = special_entries(maps)
    kept = pa.array(_is_own(keys, parents, old) | ~single[parents])
    left = parents[kept.to_numpy(zero_copy_only=False)]
    return _maps(left, len(maps), keys.filter(kept), items.filter(kept))


def _is_own(keys: pa.Array, parents: npt.NDArray[np.int64], old: _Flags) -> _Flags:
    # Which texts are of the row before where `old`, and of the row after elsewhere.
    found: _Flags = old[parents] == pc.starts_with(keys, "before.").to_numpy(zero_copy_only=False)
    return found


def _renamed(names: pa.StringArray, naming: Naming) -> tuple[pa.StringArray, np.ndarray]:
    """Return the names that stay, as they are called then, and which those are."""
    coded = names.dictionary_encode()
    known = pa.array([naming(name) for name in coded.dictionary.to_pylist()], pa.string())
    found = known.take(coded.indices)
    kept = found.is_valid().to_numpy(zero_copy_only=False)
    return found.drop_null(), kept


def _maps(parents: npt.NDArray[np.int64], count: int, keys: pa.Array, items: pa.Array) -> pa.MapArray:
    # Null where there is nothing, as decoding has it.
    entries = np.bincount(parents, minlength=count)
    offsets = np.concatenate(([0], np.cumsum(entries))).astype(np.int32)
    return pa.MapArray.from_arrays(pa.array(offsets, mask=np.append(entries == 0, [False])), keys, items)


def _offsets(parents: np.ndarray, lists: pa.Array) -> pa.Array:
    # The offsets of lists whose items have these parents; a null list stays one.
    counts = np.bincount(parents, minlength=len(lists))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    if not lists.null_count:
        return pa.array(offsets)
    return pa.array(offsets, mask=np.append(lists.is_null().to_numpy(zero_copy_only=False), [False]))


def failure(group: Group, message: str, hint: str) -> TailraceError:
    """Return the error of records that a transformation can't take under its options."""
    return TailraceError(Kind.TRANSFORM_FAILED, message, hint, {"table": described(group)})
