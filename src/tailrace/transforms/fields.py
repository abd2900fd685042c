"""Edits columns of rows and keys wherever they occur, together with the notes about them.

A row's column occurs in `before` and `after`, or in the `value` of a record that is no longer a
change. `special` and `unchanged` name columns: a column that is renamed is renamed in them too, and one
that is removed is removed from them.
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
from tailrace.records.group import Flags, Group
from tailrace.transforms.groups.rows import described
from tailrace.transforms.groups.values import edited, flags_of

Fields = dict[str, pa.Array]

#: Returns the new name of a column: the same, another one, or None if the column is removed.
Naming = Callable[[str], str | None]

#: Values of `apply_to`.
ROW, KEY, BOTH = "row", "key", "both"


def same_name(name: str) -> str:
    """Return the name unchanged: notes about a column stay as they are."""
    return name


def without(names: Collection[str]) -> Naming:
    """Return a naming that removes the columns of these names."""
    return lambda name: None if name in names else name


def field_names(group: Group, part: str) -> tuple[str, ...]:
    """Return the names of the columns in a part of the records, without decoding them."""
    wire, relation = group.wire, group.relation
    if wire is not None:
        row = ("prefix", "content") if relation is None else tuple(c.name for c in relation.columns)
        key = () if relation is None else tuple(name for name in row if name in relation.key)
        return row if part == ROW else key if part == KEY else row
    columns = [group.column(name).type for name in images_of(group, part)]
    found = (field.name for arrow in columns if pa.types.is_struct(arrow) for field in arrow)
    return tuple(dict.fromkeys(found))


def fitting(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that match one of the patterns; `*` matches any run of characters."""
    expressions = [re.compile(".*".join(map(re.escape, p.split("*"))), re.DOTALL) for p in patterns]
    return [name for name in names if any(found.fullmatch(name) for found in expressions)]


def with_edited(
    group: Group,
    part: str,
    edit: Callable[[Fields], Mapping[str, pa.Array]],
    naming: Naming = same_name,
    special: Naming | None = None,
) -> Group:
    """Return records in whose rows or keys, or both, `edit` has replaced the fields.

    :param naming: new names of the columns, for the notes about columns of the row.
    :param special: the same for the texts in `special`, if it differs.
    """
    found = _with_images(group, part, lambda _, fields: edit(fields))
    return with_notes(found, part, naming, special)


def with_converted(
    group: Group, part: str, names: Collection[str], convert: Callable[[str, str, pa.Array], pa.Array]
) -> Group:
    """Return records with other values in the columns of these names.

    :param convert: returns the new values; called with `key`, `before`, `after` or `value`, the column's name
        and its values.
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
    """Return records with renamed notes about a part's columns; parameters as for `with_edited`."""
    special, found = special or naming, group
    unchanged, texts = group.column("unchanged"), group.column("special")
    if part != KEY and naming is not same_name and pa.types.is_list(unchanged.type):
        found = found.with_column("unchanged", _renamed_items(unchanged, naming))
    if special is not same_name and pa.types.is_map(texts.type):
        found = found.with_column("special", _renamed_keys(texts, images_of(group, part), special))
    return found


def with_relation(group: Group, part: str, change: Callable[[Relation], Relation]) -> Group:
    """Return the records with their table changed, as it is for a part of them."""
    rows, keys = group.relation, group.relation_of("key")
    if rows is None or keys is None:
        return group
    return replace(
        group,
        relation=rows if part == KEY else change(rows),
        relation_of_keys=keys if part == ROW else change(keys),
    )


def images_of(group: Group, part: str) -> tuple[str, ...]:
    """Return the names of the group's columns that a part of the records consists of."""
    rows = ("before", "after") if group.is_change else ("value",)
    return rows if part == ROW else ("key",) if part == KEY else (*rows, "key")


def _renamed_items(lists: pa.ListArray, naming: Naming) -> pa.ListArray:
    names = _renamed(lists.flatten(), naming)
    parents = pc.list_parent_indices(lists).to_numpy()[flags_of(names.is_valid())]
    entries = np.bincount(parents, minlength=len(lists))
    return pa.ListArray.from_arrays(_offsets(entries, flags_of(lists.is_null())), names.drop_null())


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
    """Return records with other values in some rows (ascending) of one field of a row or key."""

    def edit(found: Fields) -> Fields:
        return {**found, name: replaced(found[name], rows, values)}

    return group.with_column(image, edited(group.column(image), edit))


def specials_of_values(maps: pa.Array, old: Flags) -> pa.Array:
    """Return the texts of keys, and of the rows that become values: before where `old`, else after."""
    own = own_specials(maps, old, np.ones(len(maps), np.bool_))
    if own.null_count == len(own):
        return own
    keys, items, parents = special_entries(own)
    names = pc.replace_substring_regex(keys, r"^(before|after)\.", "value.")
    return _maps(parents, len(own), names, items)


def own_specials(maps: pa.Array, old: Flags, single: Flags) -> pa.Array:
    """Return `special`; `single` changes keep texts of the key and one row: before if `old`, else after."""
    if maps.null_count == len(maps):
        return maps
    keys, items, parents = special_entries(maps)
    kept = _is_own(keys, parents, old) | _is_of_key(keys) | ~single[parents]
    return _maps(parents, len(maps), pc.if_else(pa.array(kept), keys, None), items)


def specials_of_keys(maps: pa.Array, names: Iterable[str], rows: Flags, old: Flags) -> pa.Array:
    """Return `special` with the texts of keys, in some rows, replaced by those of the row's columns.

    :param names: the key's columns.
    :param old: where the key is of the row before, instead of the row after or the value.
    """
    if maps.null_count == len(maps):
        return maps
    keys, items, parents = special_entries(maps)
    named = pc.replace_substring_regex(keys, r"^(before|after|value)\.", "key.")
    is_named = pc.is_in(named, value_set=pa.array([f"key.{name}" for name in names], pa.string()))
    of_key, is_made = _is_of_key(keys), rows[parents]
    made = is_made & ~of_key & _is_own(keys, parents, old) & flags_of(is_named)
    at = np.concatenate((np.flatnonzero(~(of_key & is_made)), np.flatnonzero(made)))
    found = pa.concat_arrays([keys.filter(pa.array(~(of_key & is_made))), named.filter(pa.array(made))])
    order = np.argsort(parents[at], kind="stable")
    places = pa.array(at[order])
    return _maps(parents[at][order], len(maps), found.take(pa.array(order)), items.take(places))


def _is_of_key(keys: pa.Array) -> Flags:
    return flags_of(pc.starts_with(keys, "key."))


def _is_own(keys: pa.Array, parents: npt.NDArray[np.int64], old: Flags) -> Flags:
    # Returns which texts belong to the row before where `old`, and to the row after or the value elsewhere.
    found: Flags = old[parents] == flags_of(pc.starts_with(keys, "before."))
    return found


def _renamed(names: pa.StringArray, naming: Naming) -> pa.StringArray:
    """Return the new names; null for columns that are removed."""
    coded = names.dictionary_encode()
    known = pa.array([naming(name) for name in coded.dictionary.to_pylist()], pa.string())
    return known.take(coded.indices)


def _maps(parents: npt.NDArray[np.int64], count: int, keys: pa.Array, items: pa.Array) -> pa.MapArray:
    """Return `count` maps; `parents` (ascending) has the place of each entry's map.

    An entry whose key is null is left out. A map without entries is null, as after decoding.
    """
    kept = keys.is_valid()
    entries = np.bincount(parents[flags_of(kept)], minlength=count)
    return pa.MapArray.from_arrays(_offsets(entries, entries == 0), keys.drop_null(), items.filter(kept))


def _offsets(entries: npt.NDArray[np.int64], is_null: Flags) -> pa.Array:
    # Returns the offsets of lists or maps with these numbers of entries.
    offsets = np.concatenate(([0], np.cumsum(entries))).astype(np.int32)
    return pa.array(offsets, mask=np.append(is_null, [False]))


def failure(group: Group, message: str, hint: str) -> TailraceError:
    """Return the error of records that a transformation does not support with its options."""
    return TailraceError(Kind.TRANSFORM_FAILED, message, hint, {"table": described(group)})
