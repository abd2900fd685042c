"""Transformations of whole keys and values: a key from columns, a single field, or a wrapping field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tailrace.config.transformations import options
from tailrace.decode.rows import specials
from tailrace.records.group import Group
from tailrace.transforms.fields import KEY, failure, specials_of_keys, with_relation
from tailrace.transforms.groups.columns import renamed
from tailrace.transforms.groups.rows import not_sent
from tailrace.transforms.groups.values import either, flags_of, members, struct_of
from tailrace.transforms.selection import Operations

_DELETES, _MESSAGES = Operations("d"), Operations("m")
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ValueToKey:
    """Makes the key from columns of the row: of the row after, or of the row before for a delete."""

    given: options.ValueToKeyConfig

    def apply(self, group: Group) -> list[Group]:
        """Return the records with their keys; a record without a row has no key.

        :raises TailraceError: `TRANSFORM_FAILED` if there is no such column, if the source does not send it
            with each delete, or did not send its value; for a delete whose value is null.
        """
        self._require_no_unchanged(group)
        if not group.is_change:
            rows, deleted = group.column("value"), _DELETES.matches(group)
            has_row = flags_of(rows.is_valid())
            if (deleted & ~has_row).any():
                # Without a key, consumers would not learn which row was deleted.
                raise failure(
                    group,
                    "make keys of columns: the value of a delete is null, and has no columns",
                    "put this transformation before `flatten`, or have that keep the row: deletes: rewrite",
                )
            self._require_sent(group, deleted)
            return [self._with_key(group, self._key(group, rows), None)]
        if _MESSAGES.matches(group).any():
            return [group]
        deleted = _DELETES.matches(group)
        key = self._key(group, group.column("after"))
        if deleted.any():
            self._require_sent(group, deleted)
            key = either(deleted, self._key(group, group.column("before")), key)
        return [self._with_key(group, key, deleted)]

    def _with_key(self, group: Group, key: pa.Array, deleted: np.ndarray | None) -> Group:
        # The notes about the row's columns apply to the key's columns, too.
        every = np.ones(len(group), np.bool_)
        old = ~every if deleted is None else deleted
        found = replace(group.with_column("key", key), relation_of_keys=None)
        if "special" not in found.columns.schema.names:
            return found
        special = specials_of_keys(found.column("special"), self.given.fields, every, old)
        return found.with_column("special", special)

    def _key(self, group: Group, rows: pa.Array) -> pa.Array:
        found = members(rows) if pa.types.is_struct(rows.type) else {}
        if missing := [name for name in self.given.fields if name not in found]:
            raise failure(
                group,
                f"make keys of columns: there is no column {', '.join(map(repr, missing))}",
                "name other columns, or restrict the transformation to tables that have them by a predicate",
            )
        return struct_of({name: found[name] for name in self.given.fields}, rows.is_null(), len(group))

    def _require_no_unchanged(self, group: Group) -> None:
        # NULL or a placeholder replaces such a value: keys of different rows would be equal.
        if silent := [name for name in self.given.fields if not_sent(group, [name]).any()]:
            raise failure(
                group,
                f"make keys of columns: an update did not send {', '.join(map(repr, silent))}, because large "
                "values that stay the same are not sent",
                "set REPLICA IDENTITY FULL on the table, or make keys of other columns",
            )

    def _require_sent(self, group: Group, deleted: np.ndarray) -> None:
        # A delete has only the key, or the whole row: a column that is absent from it need not be NULL.
        partial = group.column("partial")
        columns = () if group.relation is None else group.relation.columns
        sent = {column.name for column in columns if column.in_identity}
        if not group.is_change:  # such as the fields that `flatten` added
            sent |= set(self.given.fields) - {column.name for column in columns}
        silent = [name for name in self.given.fields if name not in sent]
        if (
            silent
            and pa.types.is_boolean(partial.type)
            and (flags_of(partial.fill_null(False)) & deleted).any()
        ):
            raise failure(
                group,
                f"make keys of columns: deletes don't send {', '.join(map(repr, silent))}",
                "set REPLICA IDENTITY FULL on the table, or exclude deletes by a predicate of operations",
            )


@dataclass(frozen=True, slots=True)
class ExtractField:
    """Replaces a key or value by one of its fields."""

    given: options.ExtractFieldConfig

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the field as their key or value.

        :raises TailraceError: `TRANSFORM_FAILED` if there is no such field, if it would be the value of a
            change, or if its type can't hold one of its values: null would be another key, or a tombstone.
        """
        column, values = _whole(group, self.given.apply_to)
        name = self.given.field
        if pa.types.is_null(values.type):
            return [group]
        found = members(values) if pa.types.is_struct(values.type) else {}
        if name not in found:
            raise failure(
                group,
                f"extract a field: the {column} has no field {name!r}",
                "name another field, or restrict the transformation to tables that have it by a predicate",
            )
        require_held(group, column, [name])
        # The single value keeps the form of its column, which has no name any more.
        extracted = group.with_column(column, found[name])
        return [with_relation(extracted, self.given.apply_to, lambda each: renamed(each, {name: ""}))]


def require_held(group: Group, column: str, names: Iterable[str]) -> None:
    """Refuse fields with values that their types can't hold, before their entries in `special` are lost.

    :raises TailraceError: `TRANSFORM_FAILED`: the null in the field's column would be read as its value.
    """
    noted = specials(group.column("special"))
    for name in names:
        rows, _ = noted.get(f"{column}.{name}", (_NO_ROWS, None))
        if not len(rows):
            continue
        held = members(group.column(column))[name].take(pa.array(rows))
        # In an array, the item that its type can't hold is null.
        if held.null_count or (pa.types.is_list(held.type) and held.flatten().null_count):
            raise failure(
                group,
                f"move a field: {name!r} has a value that its type can't hold, such as NaN or infinity, and "
                "would become null",
                f"cast it to text first: {{type: cast, fields: {{{name}: text}}}}",
            )


@dataclass(frozen=True, slots=True)
class HoistField:
    """Wraps a key or value in a struct with one field."""

    given: options.HoistFieldConfig

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the wrapped key or value; null stays null.

        :raises TailraceError: `TRANSFORM_FAILED` for the value of a change, or as `ExtractField.apply`.
        """
        column, values = _whole(group, self.given.apply_to)
        if pa.types.is_struct(values.type):
            require_held(group, column, values.type.names)
        field = self.given.field
        hoisted = group.with_column(column, struct_of({field: values}, values.is_null(), len(group)))
        return [with_relation(hoisted, self.given.apply_to, lambda each: renamed(each, {"": field}))]


def _whole(group: Group, part: str) -> tuple[str, pa.Array]:
    column = "key" if part == KEY else "value"
    if column == "value" and group.is_change:
        raise failure(
            group,
            "change a value's shape: the record is a change, and has a row before and a row after",
            "flatten it first: {type: flatten}",
        )
    return column, group.column(column)
