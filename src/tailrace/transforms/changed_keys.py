"""Splits an update that changes the key into two records: a delete of the old and a create of the new key.

A converter splits the update itself as long as the key consists of columns of the row before. A step whose
result no longer allows that, such as `flatten`, gets the two records, as in Kafka Connect.

Source: Debezium, RelationalChangeRecordEmitter (`emitUpdateAsPrimaryKeyChangeRecord`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import Op
from tailrace.records.group import Flags, Group, Places
from tailrace.transforms.contract import Transformation
from tailrace.transforms.fields import BOTH, KEY, ROW, field_names, own_specials, specials_of_keys
from tailrace.transforms.flatten import Flatten
from tailrace.transforms.groups.columns import AddFields, Cast, DropFields, Mask, Rename
from tailrace.transforms.groups.rows import not_sent
from tailrace.transforms.groups.values import column_texts, either, flags_of, members
from tailrace.transforms.headers import FieldsFromHeaders, SetHeaders
from tailrace.transforms.keys import ExtractField, HoistField
from tailrace.transforms.routes import Routing
from tailrace.transforms.selection import Operations
from tailrace.transforms.timestamps import Timestamps

_UPDATES = Operations("u")

_DELETE, _CREATE = (pa.scalar(op.value, pa.string()) for op in (Op.DELETE, Op.CREATE))


@dataclass(frozen=True, slots=True)
class WithSplitUpdates:
    """A step that gets two records for each update whose former key would be lost by it."""

    step: Transformation

    def apply(self, group: Group) -> Iterable[Group]:
        """Apply the step; the two records share a place (`Group.is_second`)."""
        return self.step.apply(split(group) if _loses_former_key(self.step, group) else group)


def _loses_former_key(step: Any, group: Group) -> bool:
    """Return whether the key no longer consists of columns of the row before after the step."""
    if not group.is_change or isinstance(step, Flatten):
        return group.is_change
    if isinstance(step, ExtractField | HoistField):
        return step.given.apply_to == KEY
    if isinstance(step, Routing):
        return step.given.key_field is not None and step.may_route(group)
    if isinstance(step, AddFields) and step.expressions and step.given.apply_to != ROW:
        return True  # the values are computed from the row after
    if isinstance(step, AddFields | FieldsFromHeaders) and step.given.apply_to == KEY:
        return True  # the row before lacks columns that are added to keys only
    edits_one = isinstance(step, SetHeaders) or (isinstance(step, _EDITING) and step.given.apply_to != BOTH)
    return edits_one and bool(step.meant(field_names(group, KEY)))


#: Steps that edit columns of keys, of rows, or of both alike.
_EDITING = Rename | DropFields | Mask | AddFields | Cast | Timestamps | FieldsFromHeaders


def split(group: Group) -> Group:
    """Return changes in which each update that changed the key is replaced by two.

    :raises TailraceError: `DECODE_FAILED`.
    """
    rows = _with_changed_key(group)
    if not len(rows):
        return group
    records = np.ones(len(group), np.int64)
    records[rows] = 2
    source = np.repeat(np.arange(len(group)), records)
    is_new = np.append(False, source[1:] == source[:-1])
    is_old = np.append(is_new[1:], False)
    found = group.columns.take(pa.array(source))
    columns = dict(zip(found.schema.names, found.columns, strict=True))
    names = [field.name for field in columns["key"].type]
    special = specials_of_keys(group.column("special").take(pa.array(source)), names, is_old, is_old)
    op = pc.if_else(pa.array(is_new), _CREATE, columns["op"].cast(pa.string()))
    changed = {
        "op": pc.if_else(pa.array(is_old), _DELETE, op),
        "key": _keys(columns["key"], columns["before"], is_old),
        "before": _without(columns["before"], is_new),
        "after": _without(columns["after"], is_old),
        "partial": pc.and_not(columns["partial"], pa.array(is_new)) if "partial" in columns else None,
        "special": own_specials(special, is_old, is_old | is_new),
        "unchanged": _without(columns.get("unchanged"), is_old),
    }
    columns |= {name: column for name, column in changed.items() if column is not None}
    return group.repeated(source, is_new, pa.RecordBatch.from_pydict(columns))


def _with_changed_key(group: Group) -> Places:
    """Return the rows of updates whose old and new keys are known and differ."""
    none = np.empty(0, np.int64)
    images = [group.column(name) for name in ("key", "before", "after")]
    if not all(pa.types.is_struct(image.type) for image in images) or images[1].null_count == len(group):
        return none
    key, before, after = map(members, images)
    if any({_type(before, name), _type(after, name)} != {values.type} for name, values in key.items()):
        return none
    key = {name: values for name, values in key.items() if not pa.types.is_null(values.type)}
    rows = np.flatnonzero(_UPDATES.matches(group) & ~_is_unknown(group, list(key)))
    if len(rows):
        # Most updates with a complete row before have equal keys: no need to compare their texts.
        rows = rows[~np.logical_and.reduce([_is_same(key[n], before[n], after[n], rows) for n in key])]
    if not len(rows):
        return none
    taken = group.with_columns(group.columns).take(rows)
    changed = np.zeros(len(rows), np.bool_)
    try:
        for name in key:
            texts = {image: _texts(taken, image, name) for image in ("key", "before", "after")}
            if _differs(texts["key"], texts["after"]).any():
                return none  # a transformation changed the keys: the row before does not have the old ones
            changed |= _differs(texts["before"], texts["after"])
    except pa.ArrowNotImplementedError:
        return none
    return rows[changed]


def _is_same(key: pa.Array, before: pa.Array, after: pa.Array, rows: Places) -> Flags:
    """Return in which rows a key column certainly is the same; false for types that are not compared."""
    if pa.types.is_nested(key.type) or pa.types.is_floating(key.type):
        return np.zeros(len(rows), np.bool_)
    at = pa.array(rows)
    now = after.take(at)
    return flags_of(pc.and_(pc.equal(before.take(at), now), pc.equal(key.take(at), now)).fill_null(False))


def _type(found: dict[str, pa.Array], name: str) -> pa.DataType | None:
    return found[name].type if name in found else None


def _texts(group: Group, image: str, name: str) -> pa.Array:
    return column_texts(group, image, name, members(group.column(image))[name])


def _differs(one: pa.Array, other: pa.Array) -> Flags:
    differs = pc.not_equal(one, other).fill_null(False)
    return flags_of(pc.or_(differs, pc.not_equal(one.is_null(), other.is_null())))


def _is_unknown(group: Group, names: Sequence[str]) -> Flags:
    """Return for which records a key column was not sent, before or after."""
    found = np.asarray(group.column("before").is_null())
    sent = set() if group.relation is None else {c.name for c in group.relation.columns if c.in_identity}
    partial = group.column("partial")
    if not set(names) <= sent and pa.types.is_boolean(partial.type):
        found = found | flags_of(partial.fill_null(False))
    return found | not_sent(group, names)


def _keys(key: pa.Array, before: pa.Array, is_old: Flags) -> pa.Array:
    fields = members(before)
    old = pa.StructArray.from_arrays([fields[field.name] for field in key.type], fields=list(key.type))
    return either(is_old, old, key)


def _without(column: pa.Array | None, rows: Flags) -> pa.Array | None:
    # Returns the column with nulls in `rows`.
    return None if column is None else column.take(pa.array(np.arange(len(column)), mask=rows))
