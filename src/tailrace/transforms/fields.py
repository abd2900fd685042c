"""Columns of rows and keys, edited wherever they occur, and with them what is noted of them.

A row's column occurs in `before` and `after`, or in the `value` of a record that is no change any
more. `special` and `unchanged` name columns: they follow a column to its new name, and go with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.gather import replaced
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


def without(names: Collection[str]) -> Naming:
    """Return what becomes of columns when those of these names go."""
    return lambda name: None if name in names else name


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
    found = _with_images(group, part, lambda _, fields: edit(fields))
    return with_notes(found, part, naming, special)


def with_converted(
    group: Group, part: str, names: Collection[str], convert: Callable[[str, str, pa.Array], pa.Array]
) -> Group:
    """Return records with other values in the columns of these names.

    :param convert: returns them; called with `key`, `before`, `after` or `value`, the column's name and its
        values.
    """
    meant = set(names)

    def edit(image: str, found: Fields) -> Fields:
        return {n: convert(image, n, v) if n in meant else v for n, v in found.items()}

    return _with_images(group, part, edit)


def _with_images(group: Group, part: str, edit: Callable[[str, Fields], Mapping[str, pa.Array]]) -> Group:
    columns = group.columns
    for image in images_of(group, part):
        at = columns.schema.get_field_index(image)
        if at >= 0:
            columns = columns.set_column(at, image, edited(columns.column(at), partial(edit, image)))
    return group.with_columns(columns)


def with_notes(group: Group, part: str, naming: Naming = same_name, special: Naming | None = None) -> Group:
    """Return records with what is noted of a part's columns; `naming` and `special` as for `with_edited`."""
    special, found = special or naming, group
    unchanged, texts = group.column("unchanged"), group.column("special")
    if part != KEY and naming is not same_name and pa.types.is_list(unchanged.type):
        found = found.with_column("unchanged", _renamed_items(unchanged, naming))
    if special is not same_name and pa.types.is_map(texts.type):
        found = found.with_column("special", _renamed_keys(texts, images_of(group, part), special))
    return found


def with_relation(group: Group, relation: Relation | None) -> Group:
    """Return the records as those of `relation`."""
    return replace(group, relation=relation)


def images_of(group: Group, part: str) -> tuple[str, ...]:
    """Return the names of the columns that a part of the records is."""
    rows = ("before", "after") if group.is_change else ("value",)
    return rows if part == ROW else ("key",) if part == KEY else (*rows, "key")


def _renamed_items(lists: pa.ListArray, naming: Naming) -> pa.ListArray:
    names = _renamed(lists.flatten(), naming)
    parents = pc.list_parent_indices(lists).to_numpy()[_flags(names.is_valid())]
    entries = np.bincount(parents, minlength=len(lists))
    return pa.ListArray.from_arrays(_offsets(entries, _flags(lists.is_null())), names.drop_null())


def _renamed_keys(maps: pa.MapArray, images: Collection[str], naming: Naming) -> pa.MapArray:
    def renamed(key: str) -> str | None:
        place, dot, column = key.partition(".")
        name = naming(column) if place in images else column
        return None if name is None else place + dot + name

    if maps.null_count == len(maps):
        return maps
    keys, items, parents = special_entries(maps)
    return _maps(parents, len(maps), _renamed(keys, renamed), items)


def with_values(group: Group, image: str, name: str, rows: npt.NDArray[np.int64], values: pa.Array) -> Group:
    """Return records with other values in some rows (rising) of one field of a row or key."""

    def edit(found: Fields) -> Fields:
        return {**found, name: replaced(found[name], rows, values)}

    return group.with_column(image, edited(group.column(image), edit))


def specials_of_values(maps: pa.Array, old: _Flags) -> pa.Array:
    """Return the texts of keys, and of rows that become values: before where `old`, else after."""
    own = own_specials(maps, old, np.ones(len(maps), np.bool_))
    if own.null_count == len(own):
        return own
    keys, items, parents = special_entries(own)
    names = pc.replace_substring_regex(keys, r"^(before|after)\.", "value.")
    return _maps(parents, len(own), names, items)


def own_specials(maps: pa.Array, old: _Flags, single: _Flags) -> pa.Array:
    """Return the texts; of `single` changes those of keys, and of the row before where `old`, else after."""
    if maps.null_count == len(maps):
        return maps
    keys, items, parents = special_entries(maps)
    kept = _is_own(keys, parents, old) | _is_of_key(keys) | ~single[parents]
    return _maps(parents, len(maps), pc.if_else(pa.array(kept), keys, None), items)


def specials_of_keys(maps: pa.Array, names: Iterable[str], rows: _Flags, old: _Flags) -> pa.Array:
    """Return the texts, those of keys made again in some rows.

    :param names: the key's columns.
    :param old: where they are of the row before, and not of that after, or of the value.
    """
    if maps.null_count == len(maps):
        return maps
    keys, items, parents = special_entries(maps)
    named = pc.replace_substring_regex(keys, r"^(before|after|value)\.", "key.")
    is_named = pc.is_in(named, value_set=pa.array([f"key.{name}" for name in names], pa.string()))
    of_key, is_made = _is_of_key(keys), rows[parents]
    made = is_made & ~of_key & _is_own(keys, parents, old) & is_named.to_numpy(zero_copy_only=False)
    at = np.concatenate((np.flatnonzero(~(of_key & is_made)), np.flatnonzero(made)))
    found = pa.concat_arrays([keys.filter(pa.array(~(of_key & is_made))), named.filter(pa.array(made))])
    order = np.argsort(parents[at], kind="stable")
    places = pa.array(at[order])
    return _maps(parents[at][order], len(maps), found.take(pa.array(order)), items.take(places))


def _is_of_key(keys: pa.Array) -> _Flags:
    return _flags(pc.starts_with(keys, "key."))


def _is_own(keys: pa.Array, parents: npt.NDArray[np.int64], old: _Flags) -> _Flags:
    # Which texts are of the row before where `old`, and of the row after elsewhere.
    found: _Flags = old[parents] == _flags(pc.starts_with(keys, "before."))
    return found


def _flags(values: pa.BooleanArray) -> _Flags:
    found: _Flags = values.to_numpy(zero_copy_only=False)
    return found


def _renamed(names: pa.StringArray, naming: Naming) -> pa.StringArray:
    """Return the names as they are called then; null where they go."""
    coded = names.dictionary_encode()
    known = pa.array([naming(name) for name in coded.dictionary.to_pylist()], pa.string())
    return known.take(coded.indices)


def _maps(parents: npt.NDArray[np.int64], count: int, keys: pa.Array, items: pa.Array) -> pa.MapArray:
    """Return `count` maps of entries, each of the map at its place in `parents` (rising).

    An entry whose key is null goes. A map without entries is null, as decoding has it.
    """
    kept = keys.is_valid()
    entries = np.bincount(parents[_flags(kept)], minlength=count)
    return pa.MapArray.from_arrays(_offsets(entries, entries == 0), keys.drop_null(), items.filter(kept))


def _offsets(entries: npt.NDArray[np.int64], is_null: _Flags) -> pa.Array:
    # Of lists or maps with so many entries.
    offsets = np.concatenate(([0], np.cumsum(entries))).astype(np.int32)
    return pa.array(offsets, mask=np.append(is_null, [False]))


def failure(group: Group, message: str, hint: str) -> TailraceError:
    """Return the error of records that a transformation can't take under its options."""
    return TailraceError(Kind.TRANSFORM_FAILED, message, hint, {"table": described(group)})
