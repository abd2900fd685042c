"""Plans the events of a group's changes: one for each, a tombstone after a delete, and three for a changed
key: the delete of the old key, its tombstone, and the row with its new key.

Source: Debezium, RelationalChangeRecordEmitter (`emitUpdateAsPrimaryKeyChangeRecord`), EventDispatcher
(`StreamingChangeRecordReceiver`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace import __version__
from tailrace.converters.cells.change_table import TABLE_ORDER, TOTAL_ORDER, ChangeTable
from tailrace.converters.cells.json_values import Mask
from tailrace.converters.cells.row_image import RowImage, absent_text, columns_of
from tailrace.converters.headers import headers_of, with_other_keys
from tailrace.decode import kernel
from tailrace.decode.json import json_kernel
from tailrace.decode.json.debezium import LSN, MS, NS, US, XID, SourceInfo, source_members
from tailrace.decode.json.documents import Plan, write
from tailrace.decode.json.shard_texts import EPOCH_TEXT, RANK_TEXT, VGTID_TEXT, coded_texts
from tailrace.decode.json.templates import Json, Part, Slot, Text, Unless, template
from tailrace.decode.tuples import Spans
from tailrace.model import Op
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.records.events import NEW_KEY, OLD_KEY
from tailrace.records.group import Group

_NO_NUMBERS = np.empty((1, 0), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """The events of a group.

    :param plan: documents of the values; tombstones have none.
    :param keys: keys of the events, as JSON; None: there is no key.
    :param new_keys: for the delete of an old key and its tombstone, the new key; else null. None: no key
        changed. `old_keys`: likewise, for the row with the new key, the old key.
    :param takes_old: which events have the key before the change; None: no key changed.
    """

    plan: Plan
    keys: pa.Array | None
    new_keys: pa.Array | None = None
    old_keys: pa.Array | None = None
    takes_old: Mask | None = None

    @property
    def rows(self) -> Numbers | None:
        """The row of each event's change; None: each change is one event."""
        rows = self.plan.rows
        return None if len(rows) == 0 or (rows == np.arange(len(rows))).all() else rows


def plan_events(
    table: ChangeTable, key_schema: str | None, *, tombstones: bool, with_keys: bool = True
) -> Planned:
    """Return the events of a group's changes.

    :param key_schema: the key's schema as JSON, if keys are to include it.
    :param with_keys: whether all keys are needed, or only those of events of a changed key.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    count, key = len(table), table.key
    if key is None:
        return Planned(_without_keys(table, tombstones=tombstones), None)
    every = np.arange(count, dtype=np.int64)
    deleted = table.op == ord(Op.DELETE)
    keys = old_keys = None
    changed = _perhaps_changed(table, key)
    if with_keys or changed.any():
        keys = _keys(key, key.cells.current, every, table.has_key.astype(np.uint8), key_schema)
    if changed.any():
        old_keys = _keys(key, key.cells.old, every, changed.astype(np.uint8), key_schema)
        changed &= pc.not_equal(old_keys, keys).fill_null(False).to_numpy(zero_copy_only=False)
    if not changed.any() and not (tombstones and deleted.any()):
        return Planned(Plan(every, table.op, table.choice, table.wanted), keys)
    of_each = 1 + (deleted & tombstones) + changed * (2 if tombstones else 1)
    rows = np.repeat(every, of_each)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(of_each) - of_each, of_each)
    split = changed[rows]
    is_last = nth == of_each[rows] - 1
    tombstone = (nth == 1) & (deleted[rows] | (split & ~is_last))
    op = np.where(split, np.where(is_last, ord(Op.CREATE), ord(Op.DELETE)), table.op[rows])
    choice = np.ascontiguousarray(table.choice[:, rows])
    choice[json_kernel.BEFORE_CHOICE, split & is_last] = 0
    choice[json_kernel.AFTER_CHOICE, split & ~is_last] = 0
    plan = Plan(rows, np.where(tombstone, 0, op).astype(np.uint8), choice, table.wanted)
    of_events = None if keys is None else keys.take(pa.array(rows))
    if old_keys is None or not changed.any():
        return Planned(plan, of_events)
    of_old = old_keys.take(pa.array(rows))
    first = pa.array(split & ~is_last)
    nothing = pa.scalar(None, pa.large_string())
    return Planned(
        plan,
        pc.if_else(first, of_old, of_events),
        pc.if_else(first, of_events, nothing),
        pc.if_else(pa.array(split & is_last), of_old, nothing),
        split & ~is_last,
    )


def _without_keys(table: ChangeTable, *, tombstones: bool) -> Plan:
    # One event for each change, and a tombstone after a delete.
    of_each = 1 + (table.op == ord(Op.DELETE)) * np.int64(tombstones)
    rows = np.repeat(np.arange(len(table), dtype=np.int64), of_each)
    op = table.op[rows]
    op[1:][rows[1:] == rows[:-1]] = 0
    return Plan(rows, op, np.ascontiguousarray(table.choice[:, rows]), table.wanted)


def _keys(key: RowImage, spans: Spans, rows: Numbers, op: Bytes, schema: str | None) -> pa.Array:
    count = len(key.fields)
    whole = np.ones((1, count), np.bool_)
    choice = np.stack([np.zeros(len(rows), np.uint8), np.ones(len(rows), np.uint8)])
    payload = Slot(json_kernel.CELL if key.is_single else json_kernel.AFTER)
    if key.is_single:
        op = np.where(spans.kind[0][rows] == kernel.TEXT, op, 0).astype(np.uint8)
    columns = columns_of(key, ["null"] * count, ["null"] * count)
    return write(
        key.cells.buffer,
        Plan(rows, op, choice, whole),
        template(beside_schema(payload, schema)),
        _NO_NUMBERS,
        columns,
        Spans.empty(count, 0),
        spans,
    )


def _perhaps_changed(table: ChangeTable, key: RowImage) -> Mask:
    # Updates whose keys before and after the change are known.
    updated: Mask = (table.op == ord(Op.UPDATE)) & (table.choice[json_kernel.BEFORE_CHOICE] != 0)
    if updated.any():
        current, before = key.kinds()
        if not before.size:  # rows before the change without any column do not contain the key
            return np.zeros_like(updated)
        updated &= ((before == kernel.TEXT) | (before == kernel.NULL)).all(axis=0)
        updated &= (current != kernel.UNCHANGED).all(axis=0)
    return updated


def key_headers(planned: Planned, group: Group) -> pa.StructArray | None:
    """Return the events' headers: those of their record, and those of changed keys."""
    arrays: dict[str, pa.Array] = {}
    headers, rows = headers_of(group), planned.plan.rows
    if headers is not None and len(rows) != len(headers):
        headers = headers.take(pa.array(rows))
    if (headers := with_other_keys(headers, planned.keys, group, rows)) is not None:
        arrays = {field.name: values for field, values in zip(headers.type, headers.flatten(), strict=True)}
    if planned.new_keys is not None:
        for name, keys in ((NEW_KEY, planned.new_keys), (OLD_KEY, planned.old_keys)):
            # A group may contain both updates that are two records, and updates that are events of one.
            known = arrays.get(name) if group.is_second is not None else None
            arrays[name] = keys if known is None else pc.coalesce(keys, known)
    if not arrays:
        return None
    return pa.StructArray.from_arrays(list(arrays.values()), list(arrays))


# The events' documents.

#: The source info of a group without one.
UNKNOWN = SourceInfo("tailrace", "", __version__)


def facts_of(group: Group, topic_prefix: str) -> SourceInfo:
    """Return the group's source info, with `topic_prefix` as its name unless that is empty."""
    known = group.origin or UNKNOWN
    return replace(known, name=topic_prefix or known.name)


def is_filled(rows_in_part: str | None, *, with_schema: bool) -> bool:
    """Return whether partial row images are filled, so that they have all columns."""
    return with_schema if rows_in_part is None else rows_in_part == "filled"


def beside_schema(payload: Part, schema: str | None) -> Part:
    """Return a document with its schema (JSON), as `schema` and `payload`; None: without a schema."""
    return payload if schema is None else {"schema": Json(schema), "payload": payload}


def source_of(table: ChangeTable, facts: SourceInfo) -> Part:
    """Return the member `source` of an event."""
    if table.source is not None:
        return Slot(json_kernel.CELL - table.source[0])
    return source_members(facts, table.schema, table.table, is_snapshot=table.is_snapshot)


def transaction_of(facts: SourceInfo) -> Part:
    """Return the member `transaction` of an event; rows of a snapshot have none."""
    orders = {"total_order": Slot(TOTAL_ORDER), "data_collection_order": Slot(TABLE_ORDER)}
    if facts.has_shards:
        return {
            "id": Text((json_kernel.CODED - VGTID_TEXT,)),
            **orders,
            "transaction_epoch": Slot(json_kernel.CODED - EPOCH_TEXT),
            "transaction_rank": Slot(json_kernel.CODED - RANK_TEXT),
        }
    return Unless(XID, {"id": Text((XID, ":", LSN)), **orders})


def write_values(
    table: ChangeTable, planned: Planned, event: Part, *, filled: bool, now_ns: Callable[[], int]
) -> pa.Array:
    """Return a document for each event; null for tombstones.

    :param filled: whether partial row images get all columns.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    fields, cells = table.row.fields, table.row.cells
    unavailable = [field.how.unavailable(table.modes.unavailable_placeholder) for field in fields]
    absent = [""] * len(fields)
    if filled:
        absent = [absent_text(field) for field in table.fields] + [""] * (len(fields) - len(table.fields))
    documents = template(event)
    return write(
        cells.buffer, planned.plan, documents, with_times(table, now_ns),
        columns_of(table.row, unavailable, absent), cells.old, cells.current,
        coded_texts(table.shards, documents),
    )  # fmt: skip


def with_times(table: ChangeTable, now_ns: Callable[[], int]) -> Numbers:
    """Return the table's numbers, with the clock's time for changes without one, as Debezium does it."""
    missing = table.numbers[US] == kernel.NONE
    if not missing.any():
        return table.numbers
    numbers, now = table.numbers.copy(), now_ns()
    for row, unit in ((MS, 1_000_000), (US, 1000), (NS, 1)):
        numbers[row] = np.where(missing, now // unit, numbers[row])
    return numbers
