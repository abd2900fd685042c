"""Debezium's events as columns of Kafka Connect's values, from which Avro is written."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.avro.encoder import Members, Value, misfit
from tailrace.converters.cells.change_table import ChangeTable
from tailrace.converters.cells.connect_values import of_cells
from tailrace.converters.cells.json_values import Mask, Values, json_texts
from tailrace.converters.cells.plain import PlainValues
from tailrace.converters.cells.row_image import ColumnValues, Field, absent_text
from tailrace.converters.connect_schemas import RANK, Document, EventSchemas
from tailrace.converters.debezium_types import TypeMapping
from tailrace.converters.event_plan import Planned
from tailrace.decode import kernel
from tailrace.decode.gather import array_mask, replaced, text_cells
from tailrace.decode.json import json_kernel, shard_texts
from tailrace.decode.json.templates import Json, Part, Slot, Text, Unless
from tailrace.decode.shards import ShardPositions, own_names
from tailrace.decode.values import forms
from tailrace.protocol.frames import Numbers
from tailrace.records.group import Places

_RANK = TypeMapping(forms.style_of(forms.UNSCALED), RANK, '"AA=="')


def _rank_bytes(positions: ShardPositions) -> pa.Array:
    return of_cells(text_cells(shard_texts.ranks(positions)), _RANK).array


# For each list of coded texts, a function that returns it as a column, and the value for unknown shards.
_CODED: dict[int, tuple[Callable[[ShardPositions], pa.Array], Any]] = {
    shard_texts.SHARD_TEXT: (own_names, ""),
    shard_texts.VGTID_TEXT: (shard_texts.vgtids, shard_texts.NO_VGTID),
    shard_texts.EPOCH_TEXT: (lambda positions: pa.array(positions.epoch), 0),
    shard_texts.RANK_TEXT: (_rank_bytes, b"\0"),
}

# Cached: whenever pyarrow creates a scalar, it looks for a module that may not be installed.
_scalar = functools.lru_cache(maxsize=64)(pa.scalar)


@dataclass(frozen=True, slots=True, eq=False)
class EventColumns:
    """A group's events as columns; see `records.events.Converted`."""

    keys: Value | None
    values: Value
    headers: pa.StructArray | None
    rows: Places | None


def value_columns(table: ChangeTable, planned: Planned, event: dict[str, Part], numbers: Numbers) -> Members:
    """Return the values of events; tombstones have none.

    :param event: the template of each event.
    :param numbers: the table's numbers, with a time for each change.
    :raises TailraceError: `CONVERSION_FAILED` if a value is not of its type.
    """
    op = planned.plan.op
    columns = _Columns(table, planned, numbers)
    members = {name: columns.of(name, part) for name, part in event.items()}
    return Members(members, len(op), None if op.all() else op != 0)


class _Columns:
    """Converts parts of the events' template to columns.

    :param numbers: as in `value_columns`.
    """

    def __init__(self, table: ChangeTable, planned: Planned, numbers: Numbers) -> None:
        self._table = table
        self._plan = planned.plan
        self._rows = planned.rows
        self._numbers = numbers

    def of(self, name: str, part: Part) -> Value:
        """Return a member's values.

        :raises TailraceError: `CONVERSION_FAILED` if one is not of its type.
        """
        if isinstance(part, dict):
            return Members({each: self.of(each, inner) for each, inner in part.items()}, len(self._plan.op))
        if isinstance(part, Unless):
            value, number = self.of(name, part.value), self._number(part.row)
            assert isinstance(value, Members), "a part that depends on a number is an object"
            return replace(value, there=array_mask(number)) if isinstance(number, pa.Array) else value
        if isinstance(part, Text):
            return self._text(part.parts)
        if isinstance(part, Slot):
            return self._slot(name, part.number)
        assert not isinstance(part, Json), "events have no constants in JSON"
        return part

    def _slot(self, name: str, slot: int) -> Value:
        table, choice = self._table, self._plan.choice
        if slot == json_kernel.AFTER:
            after = _image(table, table.row.current, name, self._rows, choice[json_kernel.AFTER_CHOICE])
            return replace(after, there=None) if table.is_message else after  # a message is never null
        if slot == json_kernel.BEFORE:
            there = choice[json_kernel.BEFORE_CHOICE]
            return _image(table, table.row.old, name, self._rows, there) if there.any() else None
        if slot <= json_kernel.CELL:
            values = table.row.current[json_kernel.CELL - slot].values
            if values.odd is not None:
                raise misfit(name, int(values.odd_rows[0]))
            return self._of_events(values.array)
        return self._number(slot) if slot >= 0 else self._coded(json_kernel.CODED - slot)

    def _text(self, parts: Sequence[str | int]) -> pa.Array:
        if parts == (json_kernel.OP_LETTER,):
            return _letters(self._plan.op)
        texts = [_scalar(part) if isinstance(part, str) else self._piece(part) for part in parts]
        return texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, _scalar(""))

    def _piece(self, slot: int) -> pa.Array:
        return self._coded(json_kernel.CODED - slot) if slot < 0 else _texts(self._number(slot))

    def _number(self, row: int) -> pa.Array | Numbers:
        numbers = self._numbers[row]
        values = numbers if self._rows is None else numbers[self._rows]
        missing = values == kernel.NONE
        return pa.array(values, pa.int64(), mask=missing) if missing.any() else values

    def _coded(self, number: int) -> pa.Array:
        of_positions, other = _CODED[number]
        shards = self._table.shards
        return self._of_events(shards.of(of_positions(shards.positions)).fill_null(other))

    def _of_events(self, values: pa.Array) -> pa.Array:
        return values if self._rows is None else values.take(pa.array(self._rows))


def key_columns(table: ChangeTable, planned: Planned) -> Value:
    """Return the keys of events; None: there is no key.

    :raises TailraceError: `CONVERSION_FAILED` if a value is not of its type.
    """
    if table.key is None:
        return None
    rows = planned.plan.rows
    there = table.has_key[rows]
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
    # The row images before or after the change, with all columns; `choice` is that of each event.
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
    # The values, with those of `mask` replaced by the value of the JSON `text`.
    rows = np.flatnonzero(mask)
    arrow = None if pa.types.is_null(array.type) else array.type
    try:
        one = pa.array([_python(json.loads(text), field.how.schema.document())], arrow)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        raise misfit(path, int(rows[0])) from None
    return replaced(array.cast(one.type), rows, one.take(pa.array(np.zeros(len(rows), np.int64))))


def _python(value: Any, schema: Document) -> Any:
    # A JSON value as a Python object for Arrow.
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


def _texts(numbers: pa.Array | Numbers) -> pa.StringArray:
    array = numbers if isinstance(numbers, pa.Array) else pa.array(numbers)
    return array.cast(pa.string()).fill_null("null")


def _letters(op: Any) -> pa.StringArray:
    offsets = np.arange(len(op) + 1, dtype=np.int32)
    return pa.StringArray.from_buffers(len(op), pa.py_buffer(offsets), pa.py_buffer(op))


def plain_columns(found: PlainValues, *, with_keys: bool) -> tuple[EventColumns, EventSchemas]:
    """Return records that are not changes as columns, and their schemas.

    :param with_keys: whether keys are columns, too; otherwise they are JSON.
    :raises TailraceError: `CONVERSION_FAILED` if a value is not of its type.
    """
    keys = None
    if found.keys is not None:
        keys = _held(found.keys) if with_keys else json_texts(found.keys)
    return EventColumns(keys, _held(found.values), found.headers, None), found.schemas


def _held(values: Values) -> pa.Array:
    if values.odd is not None and (found := array_mask(values.odd)).any():
        raise misfit(values.member, int(values.odd_rows[np.argmax(found)]))
    return values.array
