"""Debezium's events as columns of Kafka Connect's values: what Avro is written from."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.avro.encoder import Members, Value, misfit
from tailrace.converters.cells.change_table import TABLE_ORDER, TOTAL_ORDER, ChangeTable
from tailrace.converters.cells.connect_values import of_cells
from tailrace.converters.cells.json_values import Mask, Values, array_mask, json_texts, text_cells
from tailrace.converters.cells.plain import PlainValues
from tailrace.converters.cells.row_image import ColumnValues, Field, absent_text
from tailrace.converters.connect_schemas import RANK, Document, EventSchemas
from tailrace.converters.debezium_types import TypeMapping
from tailrace.converters.event_plan import Planned
from tailrace.decode import kernel
from tailrace.decode.gather import replaced
from tailrace.decode.json.debezium import COMMIT_LSN, LSN, MS, NS, US, XID, SourceInfo
from tailrace.decode.json.json_kernel import AFTER_CHOICE, BEFORE_CHOICE
from tailrace.decode.json.shard_texts import NO_VGTID, ranks, vgtids
from tailrace.decode.shards import own_names
from tailrace.decode.values import forms
from tailrace.model import Op
from tailrace.protocol.frames import Numbers
from tailrace.records.group import Places

_RANK = TypeMapping(forms.style_of(forms.UNSCALED), RANK, '"AA=="')

# Made once: pyarrow looks for a module that may not be installed whenever it makes a scalar.
_OPENING, _BETWEEN, _CLOSING, _COLON, _EMPTY = (pa.scalar(text) for text in ('["', '","', '"]', ":", ""))


@dataclass(frozen=True, slots=True, eq=False)
class EventColumns:
    """A group's events; as `records.events.Converted` has them."""

    keys: Value | None
    values: Value
    headers: pa.StructArray | None
    rows: Places | None


def value_columns(
    table: ChangeTable,
    planned: Planned,
    facts: SourceInfo,
    numbers: Numbers,
    times: Mapping[str, int | None],
    *,
    transaction: bool,
) -> Members:
    """Return the values of events; none for tombstones.

    :param numbers: the table's, all of which have a time.
    :param times: the event's own times; None: those of the change.
    :raises TailraceError: `CONVERSION_FAILED` if a value is not of its type.
    """
    plan = planned.plan
    count, rows = len(plan.rows), planned.rows

    def number(row: int) -> pa.Array | Numbers:
        values = numbers[row] if rows is None else numbers[row][rows]
        missing = values == kernel.NONE
        return pa.array(values, pa.int64(), mask=missing) if missing.any() else values

    def own_time(name: str, row: int) -> Value:
        time = times[name]
        return number(row) if time is None else time

    members: dict[str, Value] = {
        "source": _source(table, facts, number, rows, count),
        "transaction": _transaction(table, facts, number, rows, count) if transaction else None,
        "op": _letters(plan.op),
        "ts_ms": own_time("ts_ms", MS),
        "ts_us": own_time("ts_us", US),
        "ts_ns": own_time("ts_ns", NS),
    }
    there = None if plan.op.all() else plan.op != 0
    after = _image(
        table, table.row.current, "message" if table.is_message else "after", rows, plan.choice[AFTER_CHOICE]
    )
    if table.is_message:
        content = Members(after.values, count)
        return Members({**members, "message": content}, count, there)
    before: Value = None
    if plan.choice[BEFORE_CHOICE].any():
        before = _image(table, table.row.old, "before", rows, plan.choice[BEFORE_CHOICE])
    return Members({**members, "before": before, "after": after}, count, there)


def key_columns(table: ChangeTable, planned: Planned) -> Value:
    """Return the keys of events; None: there is no key.

    :raises TailraceError: `CONVERSION_FAILED` if a value is not of its type.
    """
    if table.key is None:
        return None
    rows = planned.plan.rows
    there = table.op[rows] != ord(Op.TRUNCATE)
    values: dict[str, Value] = {}
    taken = rows if planned.takes_old is None else rows + len(table) * planned.takes_old
    old = table.key.old if planned.takes_old is not None else ()
    for place, (field, column) in enumerate(zip(table.key.fields, table.key.current, strict=True)):
        odd = _odd(column)
        array = column.values.array
        if old:
            array = pa.concat_arrays([array, old[place].values.array])
            odd = np.concatenate((odd, _odd(old[place])))
        if planned.rows is not None or old:
            array, odd = array.take(pa.array(taken)), odd[taken]
        if (odd & there).any():
            raise misfit(field.name, int(rows[np.argmax(odd & there)]))
        values[field.name] = array
    if table.key.is_single:
        return values[""]
    return Members(values, len(rows), None if there.all() else there)


def _odd(column: ColumnValues) -> Mask:
    found: Mask = column.kind == kernel.TEXT
    if column.values.odd is None:
        return np.zeros(len(found), np.bool_)
    is_odd = np.zeros(len(found), np.bool_)
    is_odd[column.values.odd_rows] = array_mask(column.values.odd)
    return found & is_odd


def _image(
    table: ChangeTable, columns: Sequence[ColumnValues], name: str, rows: Places | None, choice: Any
) -> Members:
    # The rows before or after, with all columns. `choice` is each event's.
    there = choice != 0
    wanted = table.wanted
    values: dict[str, Value] = {}
    for place, (field, column) in enumerate(zip(table.fields, columns, strict=False)):
        kind, array = column.kind, column.values.array
        odd = None if column.values.odd is None else _odd(column)
        if rows is not None:
            kind, array = kind[rows], array.take(pa.array(rows))
            odd = None if odd is None else odd[rows]
        left_out = kind == kernel.ABSENT
        if not wanted[1, place]:
            left_out = left_out | (choice == 2)
        if odd is not None and (odd := odd & there & ~left_out).any():
            event = int(np.argmax(odd))
            raise misfit(f"{name}.{field.name}", event if rows is None else int(rows[event]))
        unchanged = (kind == kernel.UNCHANGED) & ~left_out & there
        if unchanged.any():
            placeholder = field.how.unavailable(table.modes.unavailable_placeholder)
            array = _with_constant(array, unchanged, placeholder, field, f"{name}.{field.name}")
        left_out &= there
        if left_out.any():
            array = _with_constant(array, left_out, absent_text(field), field, f"{name}.{field.name}")
        values[field.name] = array
    return Members(values, len(choice), None if there.all() else there)


def _with_constant(array: pa.Array, mask: Mask, text: str, field: Field, path: str) -> pa.Array:
    # The values, those of `mask` replaced by one that is given as JSON.
    rows = np.flatnonzero(mask)
    arrow = None if pa.types.is_null(array.type) else array.type
    try:
        one = pa.array([_python(json.loads(text), field.how.schema.document())], arrow)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        raise misfit(path, int(rows[0])) from None
    return replaced(array.cast(one.type), rows, one.take(pa.array(np.zeros(len(rows), np.int64))))


def _python(value: Any, schema: Document) -> Any:
    # A value of JSON as Arrow takes it.
    kind = schema["type"]
    if value is None:
        return None
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "array":
        return [_python(item, schema["items"]) for item in value]
    if kind == "map":
        return list(value.items())
    if kind == "struct":
        return {field["field"]: _python(value[field["field"]], field) for field in schema["fields"]}
    return value


def _source(
    table: ChangeTable,
    facts: SourceInfo,
    number: Callable[[int], pa.Array | Numbers],
    rows: Places | None,
    count: int,
) -> Value:
    if table.source is not None:
        values = table.row.current[table.source[0]].values
        if values.odd is not None:
            raise misfit("source", int(values.odd_rows[0]))
        return values.array if rows is None else values.array.take(pa.array(rows))
    of_any: dict[str, Value] = {
        "version": facts.version,
        "connector": facts.connector,
        "name": facts.name,
        "snapshot": "true" if table.is_snapshot else "false",
        "table": table.table,
        "ts_ms": number(MS),
        "ts_us": number(US),
        "ts_ns": number(NS),
    }
    if facts.has_shards:
        shards = table.shards
        shard = shards.of(own_names(shards.positions)).fill_null("")
        vgtid = shards.of(vgtids(shards.positions)).fill_null(NO_VGTID)
        members = {"shard": _of_events(shard, rows), "vgtid": _of_events(vgtid, rows)}
        return Members({**of_any, "db": "", "sequence": None, "keyspace": table.schema, **members}, count)
    lsns = [_texts(number(row)) for row in (COMMIT_LSN, LSN)]
    return Members(
        {
            **of_any,
            "db": facts.database,
            "schema": table.schema,
            "sequence": pc.binary_join_element_wise(_OPENING, lsns[0], _BETWEEN, lsns[1], _CLOSING, _EMPTY),
            "txId": number(XID),
            "lsn": number(LSN),
            "xmin": None,
            "origin": None,
            "origin_lsn": None,
        },
        count,
    )


def _of_events(values: pa.Array, rows: Places | None) -> pa.Array:
    return values if rows is None else values.take(pa.array(rows))


def _transaction(
    table: ChangeTable,
    facts: SourceInfo,
    number: Callable[[int], pa.Array | Numbers],
    rows: Places | None,
    count: int,
) -> Value:
    if table.is_snapshot or table.source is not None:
        return None
    orders: dict[str, Value] = {
        "total_order": number(TOTAL_ORDER),
        "data_collection_order": number(TABLE_ORDER),
    }
    if facts.has_shards:
        shards, positions = table.shards, table.shards.positions
        vgtid = shards.of(vgtids(positions)).fill_null(NO_VGTID)
        epoch = shards.of(pa.array(positions.epoch)).fill_null(0)
        rank = of_cells(text_cells(shards.of(ranks(positions)).fill_null("0")), _RANK).array
        members = {"id": vgtid, "transaction_epoch": epoch, "transaction_rank": rank}
        return Members(
            {**orders, **{name: _of_events(values, rows) for name, values in members.items()}}, count
        )
    xid = number(XID)
    values: dict[str, Value] = {
        "id": pc.binary_join_element_wise(_texts(xid), _texts(number(LSN)), _COLON),
        **orders,
    }
    return Members(values, count, array_mask(xid) if isinstance(xid, pa.Array) else None)


def _texts(numbers: pa.Array | Numbers) -> pa.StringArray:
    array = numbers if isinstance(numbers, pa.Array) else pa.array(numbers)
    return array.cast(pa.string()).fill_null("null")


def _letters(op: Any) -> pa.StringArray:
    offsets = np.arange(len(op) + 1, dtype=np.int32)
    return pa.StringArray.from_buffers(len(op), pa.py_buffer(offsets), pa.py_buffer(op))


def plain_columns(found: PlainValues, *, with_keys: bool) -> tuple[EventColumns, EventSchemas]:
    """Return records that are no changes as columns, and their schemas.

    :param with_keys: whether keys are columns, too; else they are JSON.
    :raises TailraceError: `CONVERSION_FAILED` if a value is not of its type.
    """
    keys = None
    if found.keys is not None:
        keys = _held(found.keys) if with_keys else json_texts(found.keys)
    return EventColumns(keys, _held(found.values), found.headers, None), found.schemas


def _held(values: Values) -> pa.Array:
    if values.odd is not None and (found := array_mask(values.odd)).any():
        raise misfit("", int(values.odd_rows[np.argmax(found)]))
    return values.array
