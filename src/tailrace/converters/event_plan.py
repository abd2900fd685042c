"""Which events a group's changes become: one each, a tombstone after a delete, and three for a changed
key: the delete of the old one, its tombstone, and the row under its new key.

Source: Debezium, RelationalChangeRecordEmitter (`emitUpdateAsPrimaryKeyChangeRecord`), EventDispatcher
(`StreamingChangeRecordReceiver`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.cells.change_table import ChangeTable, Mask, RowImage, columns_of
from tailrace.model import Op
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.sources.postgres.decode import kernel
from tailrace.sources.postgres.decode.json import json_kernel
from tailrace.sources.postgres.decode.json.documents import Plan, Template, write
from tailrace.sources.postgres.decode.tuples import Spans

#: Headers of the delete (with its tombstone) and of the create that a changed key becomes.
NEW_KEY, OLD_KEY = "__debezium.newkey", "__debezium.oldkey"

_NOTHING: Mapping[str, pa.Array] = {}
_NO_NUMBERS = np.empty((1, 0), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """The events of a group.

    :param plan: documents of the values; those of tombstones are none.
    :param keys: of the events, JSON; None: there is no key.
    :param new_keys: for events of a changed key, the other key; else null. None: no key changed.
    """

    plan: Plan
    keys: pa.Array | None
    new_keys: pa.Array | None = None
    old_keys: pa.Array | None = None

    @property
    def is_one_each(self) -> bool:
        """Whether each change is one event."""
        rows = self.plan.rows
        return len(rows) == 0 or bool((rows == np.arange(len(rows))).all())


def plan_events(picture: ChangeTable, key_schema: str | None, *, tombstones: bool) -> Planned:
    """Return the events of a group's changes.

    :param key_schema: the JSON of the key's schema, if keys are to carry it.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    count, key = len(picture), picture.key
    if key is None:
        return Planned(_without_keys(picture, tombstones=tombstones), None)
    has_key = (picture.op != ord(Op.TRUNCATE)).astype(np.uint8)
    every = np.arange(count, dtype=np.int64)
    keys = _keys(key, key.current, every, has_key, key_schema)
    deleted = picture.op == ord(Op.DELETE)
    changed, old_keys = _changed(picture, key, keys, key_schema)
    if not changed.any() and not (tombstones and deleted.any()):
        return Planned(Plan(every, picture.op, picture.choice, picture.wanted), keys)
    of_each = 1 + (deleted & tombstones) + changed * (2 if tombstones else 1)
    rows = np.repeat(every, of_each)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(of_each) - of_each, of_each)
    split = changed[rows]
    is_last = nth == of_each[rows] - 1
    tombstone = (nth == 1) & (deleted[rows] | (split & ~is_last))
    op = np.where(split, np.where(is_last, ord(Op.CREATE), ord(Op.DELETE)), picture.op[rows])
    choice = np.ascontiguousarray(picture.choice[:, rows])
    choice[json_kernel.BEFORE_CHOICE, split & is_last] = 0
    choice[json_kernel.AFTER_CHOICE, split & ~is_last] = 0
    plan = Plan(rows, np.where(tombstone, 0, op).astype(np.uint8), choice, picture.wanted)
    of_events = keys.take(pa.array(rows))
    if old_keys is None:
        return Planned(plan, of_events)
    of_old = old_keys.take(pa.array(rows))
    first = pa.array(split & ~is_last)
    nothing = pa.scalar(None, pa.large_string())
    return Planned(
        plan,
        pc.if_else(first, of_old, of_events),
        pc.if_else(first, of_events, nothing),
        pc.if_else(pa.array(split & is_last), of_old, nothing),
    )


def _without_keys(picture: ChangeTable, *, tombstones: bool) -> Plan:
    # Each change, and after a delete its tombstone.
    of_each = 1 + (picture.op == ord(Op.DELETE)) * np.int64(tombstones)
    rows = np.repeat(np.arange(len(picture), dtype=np.int64), of_each)
    op = picture.op[rows]
    op[1:][rows[1:] == rows[:-1]] = 0
    return Plan(rows, op, np.ascontiguousarray(picture.choice[:, rows]), picture.wanted)


def _keys(key: RowImage, spans: Spans, rows: Numbers, op: Bytes, schema: str | None) -> pa.Array:
    count = len(key.fields)
    whole = np.ones((1, count), np.bool_)
    choice = np.stack([np.zeros(len(rows), np.uint8), np.ones(len(rows), np.uint8)])
    opening, closing = ("", "") if schema is None else (f'{{"schema":{schema},"payload":', "}")
    template: Template = [(opening, json_kernel.AFTER)]
    template += [(closing, json_kernel.NOTHING)] if closing else []
    columns = columns_of(key, ["null"] * count, ["null"] * count)
    return write(
        key.buffer,
        Plan(rows, op, choice, whole),
        template,
        _NO_NUMBERS,
        columns,
        Spans.empty(count, 0),
        spans,
    )


def _changed(
    picture: ChangeTable, key: RowImage, keys: pa.Array, schema: str | None
) -> tuple[Mask, pa.Array | None]:
    # Which updates changed the key, as it goes out, and all keys before.
    updated = (picture.op == ord(Op.UPDATE)) & (picture.choice[json_kernel.BEFORE_CHOICE] != 0)
    if not updated.any():
        return updated, None
    before = key.old.kind
    known = ((before == kernel.TEXT) | (before == kernel.NULL)).all(axis=0)
    known &= (key.current.kind != kernel.UNCHANGED).all(axis=0)
    updated &= known
    if not updated.any():
        return updated, None
    old = _keys(key, key.old, np.arange(len(picture), dtype=np.int64), updated.astype(np.uint8), schema)
    differs = pc.not_equal(old, keys).fill_null(False)
    changed = updated & differs.to_numpy(zero_copy_only=False)
    return changed, old if changed.any() else None


def key_headers(
    planned: Planned, headers: pa.Array, rows: Numbers, own: Mapping[str, pa.Array] = _NOTHING
) -> pa.StructArray | None:
    """Return the events' headers: their record's, the converter's, and those of changed keys.

    :param headers: the group's column of them.
    :param own: the converter's, one value an event.
    """
    arrays: dict[str, pa.Array] = {}
    if pa.types.is_struct(headers.type):
        kept = headers if len(rows) == len(headers) else headers.take(pa.array(rows))
        arrays = {field.name: values for field, values in zip(kept.type, kept.flatten(), strict=True)}
    arrays |= own
    if planned.new_keys is not None:
        arrays |= {NEW_KEY: planned.new_keys, OLD_KEY: planned.old_keys}
    if not arrays:
        return None
    return pa.StructArray.from_arrays(list(arrays.values()), list(arrays))
