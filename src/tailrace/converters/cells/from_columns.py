"""Pictures of groups that were transformed, or that other sources made: columns become cells again."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.cells.change_table import (
    TEXTS_BYTES_MAX,
    ChangeTable,
    Field,
    Mask,
    RowImage,
    key_names,
    numbers_of,
    replaced,
    together,
)
from tailrace.converters.cells.specials import Specials
from tailrace.converters.cells.texts import array_mask, is_listed, json_texts, text_buffers, text_cells
from tailrace.converters.debezium_types import debezium_modes, given, given_arrow
from tailrace.errors import Kind, TailraceError
from tailrace.model import OWN_FORMS, Column, Op, Relation, ValueModes
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.records.group import Group
from tailrace.sources.postgres.decode import images, kernel
from tailrace.sources.postgres.decode.json.documents import render
from tailrace.sources.postgres.decode.tuples import Spans
from tailrace.sources.postgres.decode.types import known_type, value_type
from tailrace.sources.postgres.decode.values import forms
from tailrace.sources.postgres.decode.values.forms import form_of

#: What an Arrow text is that is PostgreSQL's own, by the form that JSON gives it.
_OWN_TEXTS = frozenset({forms.QUOTED, forms.UNSCALED, forms.VARIABLE_SCALE})

_ONE = np.ones((2, 1), np.bool_)


def of_columns(group: Group) -> ChangeTable:
    """Return the picture of a group of changes, from its columns.

    :raises TailraceError: `DECODE_FAILED`.
    """
    relation, count = group.relation, len(group)
    modes = debezium_modes(relation.modes if relation else OWN_FORMS)
    before, after = group.column("before"), group.column("after")
    names = _names(after, before)
    fields = [field_of(relation, name, _child_type(name, after, before), modes) for name in names]
    specials = Specials(group.column("special"))
    canvas = _Canvas(count)
    current = [canvas.column(*field_texts(relation, f, after, specials, "after.")) for f in fields]
    has_old = not pa.types.is_null(before.type) and before.null_count < count
    old = (
        [canvas.column(*field_texts(relation, f, before, specials, "before.")) for f in fields]
        if has_old
        else []
    )
    choice, wanted = _choices(group, relation, names, before, after)
    _mark_unchanged(group.column("unchanged"), names, canvas, current)
    if relation is not None and not any(c.in_identity for c in relation.columns):
        canvas.mark_absent_where_null(old, choice[0] == 2)
    key = _key(group, relation, canvas, specials, modes)
    of_key = [] if key is None else [field for field, _ in key]
    by_name = {field.name: number for field, number in zip(fields, old, strict=False)}
    old_key = [by_name.get(field.name, -1) for field in of_key] if old else []
    old_key = [canvas.nothing() if number < 0 else number for number in old_key]
    source = group.column("source")
    if _is_postgres(source.type):
        numbers, schema, table = _postgres_source(source, relation)
        source_column = None
    else:
        how = given_arrow(source.type, modes)
        numbers, schema, table = _other_source(source), *_named_table(group, relation)
        current.append(canvas.column(json_texts(source, how), array_mask(source)))
        old += [canvas.nothing()] if old else []
        fields = [*fields, Field("source", how)]
        wanted = np.concatenate([wanted, np.zeros((2, 1), np.bool_)], axis=1)
        source_column = (len(fields) - 1, how.schema)
    row = canvas.side(fields, current, old)
    key_side = None if key is None else canvas.side(of_key, [number for _, number in key], old_key)
    op = _letters(group.column("op"))
    return ChangeTable(op, choice, wanted, row, key_side, numbers, schema, table, modes, source_column)


class _Canvas:
    """Cells of columns as they are put together; all point into one buffer in the end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[Bytes] = []
        self._size = 0
        self._spans = Spans.empty(0, count)
        self._columns: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], Bytes]] = []

    def column(self, texts: pa.Array, there: Mask) -> int:
        """Add a column of JSON texts; returns its number."""
        cells = text_cells(texts)
        if self._size + len(cells.buffer) > TEXTS_BYTES_MAX:
            together([], TEXTS_BYTES_MAX + 1)
        kind = np.where(there, cells.kind, kernel.ABSENT).astype(np.uint8)
        self._columns.append((cells.start + np.int32(self._size), cells.length, kind))
        self._parts.append(cells.buffer)
        self._size += len(cells.buffer)
        return len(self._columns) - 1

    def nothing(self) -> int:
        """Add a column without values."""
        return self.column(pa.nulls(self._count, pa.large_string()), np.zeros(self._count, np.bool_))

    def kind(self, number: int) -> Bytes:
        """Return the kinds of a column's cells, to be changed."""
        return self._columns[number][2]

    def mark_absent_where_null(self, numbers: Sequence[int], rows: Mask) -> None:
        """Let NULLs in `rows` be values that were not sent."""
        for number in numbers:
            kind = self.kind(number)
            kind[rows & (kind == kernel.NULL)] = kernel.ABSENT

    def spans(self, numbers: Sequence[int], count: int) -> Spans:
        """Return the cells of some columns."""
        if not numbers:
            return Spans.empty(0, count)
        starts, lengths, kinds = zip(*(self._columns[number] for number in numbers), strict=True)
        return Spans(np.stack(starts), np.stack(lengths), np.stack(kinds))

    @functools.cached_property
    def _buffer(self) -> Bytes:
        return together(self._parts, self._size)

    def side(self, fields: Sequence[Field], current: Sequence[int], old: Sequence[int]) -> RowImage:
        """Return columns with their cells after and before; no column is added any more."""
        before = self.spans(old, 0) if old else Spans.empty(len(fields), 0)
        styles = [forms.RAW] * len(fields)
        return RowImage(fields, styles, self._buffer, self.spans(current, self._count), before)


def _names(*structs: pa.Array) -> list[str]:
    found: dict[str, None] = {}
    for array in structs:
        if pa.types.is_struct(array.type):
            found.update((field.name, None) for field in array.type)
    return list(found)


def _child_type(name: str, *structs: pa.Array) -> pa.DataType:
    for array in structs:
        if pa.types.is_struct(array.type) and array.type.get_field_index(name) >= 0:
            return array.type.field(name).type
    return pa.null()


def _column(relation: Relation | None, name: str, arrow: pa.DataType) -> Column | None:
    # The table's column that the values are still of: same name, same type as decoding gives it.
    if relation is None:
        return None
    for column in relation.columns:
        if column.name == name and value_type(known_type(column), relation.modes).arrow == arrow:
            return column
    return None


def field_of(relation: Relation | None, name: str, arrow: pa.DataType, modes: ValueModes) -> Field:
    """Return how a column goes out: as the table's, if it is still that, else by its Arrow type.

    :param modes: all chosen.
    """
    column = _column(relation, name, arrow)
    if column is None:
        return Field(name, given_arrow(arrow, modes))
    return Field(name, given(known_type(column), modes), column.not_null)


def field_texts(
    relation: Relation | None, field: Field, rows: pa.Array, specials: Specials, prefix: str
) -> tuple[pa.Array, Mask]:
    """Return a field of rows as JSON, and which rows there are; `specials` has it under `prefix` + name."""
    count = len(rows)
    if not pa.types.is_struct(rows.type) or rows.type.get_field_index(field.name) < 0:
        return pa.nulls(count, pa.large_string()), np.zeros(count, np.bool_)
    values = rows.field(rows.type.get_field_index(field.name))
    texts = json_texts(values, field.how, is_rendered=is_rendered(relation, field, values.type))
    special = specials.of(prefix + field.name)
    if special is not None:
        odd = render(text_cells(special[1]), _special_style(field))
        texts = replaced(texts, special[0], odd)
    return texts, array_mask(rows)


def _special_style(field: Field) -> int:
    # A style made of parts is for Arrow's values; PostgreSQL's text of such a column stays text.
    return forms.QUOTED if field.how.style == forms.RAW else field.how.style


def is_rendered(relation: Relation | None, field: Field, arrow: pa.DataType) -> bool:
    """Tell whether texts of a table's column have the form that its modes ask for, and are not
    PostgreSQL's own.
    """
    column = _column(relation, field.name, arrow)
    if relation is None or column is None:
        return False
    item = arrow.value_type if is_listed(arrow) else arrow
    own = form_of(value_type(known_type(column), relation.modes).json) in _OWN_TEXTS
    return bool(pa.types.is_string(item) and not own and relation.modes != OWN_FORMS)


def _choices(
    group: Group, relation: Relation | None, names: Sequence[str], before: pa.Array, after: pa.Array
) -> tuple[Bytes, Mask]:
    there = array_mask(before) if not pa.types.is_null(before.type) else np.zeros(len(group), np.bool_)
    partial = group.column("partial")
    parts = np.zeros(len(group), np.bool_)
    if pa.types.is_boolean(partial.type):
        parts = partial.fill_null(False).to_numpy(zero_copy_only=False)
    follows = array_mask(after) if not pa.types.is_null(after.type) else np.zeros(len(group), np.bool_)
    choice = np.stack([np.where(there, np.where(parts, 2, 1), 0), follows]).astype(np.uint8)
    wanted = np.ones((2, len(names)), np.bool_)
    if relation is not None and any(column.in_identity for column in relation.columns):
        others = {column.name for column in relation.columns if not column.in_identity}
        wanted[1] = [name not in others for name in names]
    return choice, wanted


def _mark_unchanged(column: pa.Array, names: Sequence[str], canvas: _Canvas, numbers: Sequence[int]) -> None:
    if pa.types.is_null(column.type) or column.null_count == len(column):
        return
    found = column.flatten().to_numpy(zero_copy_only=False)
    if len(found) == 0:
        return
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(column)), lengths)
    for name, number in zip(names, numbers, strict=True):
        canvas.kind(number)[rows[found == name]] = kernel.UNCHANGED


def _key(
    group: Group, relation: Relation | None, canvas: _Canvas, specials: Specials, modes: ValueModes
) -> list[tuple[Field, int]] | None:
    # The key's columns with their numbers on the canvas.
    key = group.column("key")
    if relation is None and _is_message(group):
        after = group.column("after")
        key = pa.StructArray.from_arrays([after.field(0)], ["prefix"])
    if not pa.types.is_struct(key.type):
        return None
    names = [field.name for field in key.type]
    ordered = key_names(relation) if relation is not None else ()
    names = list(ordered) if set(ordered) == set(names) else names
    of_key = [field_of(relation, name, key.type.field(name).type, modes) for name in names]
    return [(field, canvas.column(*_key_texts(relation, field, key, specials, group))) for field in of_key]


def _key_texts(
    relation: Relation | None, field: Field, key: pa.Array, specials: Specials, group: Group
) -> tuple[pa.Array, Mask]:
    # What a key's column does not hold is told where the row's does not: after, or before a delete.
    texts, there = field_texts(relation, field, key, specials, "")
    for prefix, rows in (("after.", group.column("after")), ("before.", group.column("before"))):
        special = specials.of(prefix + field.name)
        if special is None:
            continue
        use = (
            array_mask(rows)[special[0]]
            if prefix == "after."
            else ~array_mask(group.column("after"))[special[0]]
        )
        odd = render(text_cells(special[1].filter(pa.array(use))), _special_style(field))
        texts = replaced(texts, special[0][use], odd)
    return texts, there


def _is_message(group: Group) -> bool:
    op = group.column("op")
    return len(op) > 0 and op[0].as_py() == Op.MESSAGE.value


def _letters(op: pa.Array) -> Bytes:
    buffer, offsets = text_buffers(op.cast(pa.large_string()))
    if op.null_count or not (np.diff(offsets) == 1).all():
        raise TailraceError(
            Kind.DECODE_FAILED,
            "converted changes: `op` must be one letter each",
            "keep the column `op` in transformations, or make records that are no changes (column `value`)",
        )
    return buffer[offsets[:-1]]


def plain_picture_of(group: Group) -> tuple[ChangeTable, Mask]:
    """Return the picture of records that are no changes, without their keys, and which have a value.

    :raises TailraceError: `DECODE_FAILED`.
    """
    relation, count = group.relation, len(group)
    modes = debezium_modes(relation.modes if relation else OWN_FORMS)
    value, source, op = group.column("value"), group.column("source"), group.column("op")
    how = given_arrow(value.type, modes)
    canvas = _Canvas(count)
    number = canvas.column(json_texts(value, how), np.ones(count, np.bool_))
    row = canvas.side([Field("value", how)], [number], [])
    letters = np.full(count, ord(Op.CREATE), np.uint8)
    if op.null_count == 0:
        letters = _letters(op)
    nothing, column = np.zeros((2, count), np.uint8), (0, how.schema)
    if not _is_postgres(source.type):
        empty = np.empty((0, count), np.int64)
        found = ChangeTable(letters, nothing, _ONE, row, None, empty, "", "", modes, column, is_plain=True)
    else:
        numbers, schema, table = _postgres_source(source, relation)
        found = ChangeTable(letters, nothing, _ONE, row, None, numbers, schema, table, modes, is_plain=True)
    return found, array_mask(value)


# Sources.


def _is_postgres(arrow: pa.DataType) -> bool:
    return pa.types.is_struct(arrow) and {field.name for field in images.SOURCE} <= {
        field.name for field in arrow
    }


def _postgres_source(source: pa.Array, relation: Relation | None) -> tuple[Numbers, str, str]:
    def of(name: str) -> Numbers:
        values = source.field(name)
        if pa.types.is_timestamp(values.type):
            values = values.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        numbers: Numbers = values.fill_null(kernel.NONE).to_numpy(zero_copy_only=False).astype(np.int64)
        return numbers

    found = numbers_of(of("commit_ts"), of("commit_lsn"), of("lsn"), of("xid"), of("ordinal"))
    if len(source) == 0:
        return found, *((relation.schema, relation.table) if relation else ("", ""))
    return found, source.field("schema")[0].as_py() or "", source.field("table")[0].as_py() or ""


def _other_source(source: pa.Array) -> Numbers:
    count = len(source)
    missing = np.full(count, kernel.NONE, np.int64)
    ms = missing
    if pa.types.is_struct(source.type) and source.type.get_field_index("ts_ms") >= 0:
        values = source.field("ts_ms")
        if pa.types.is_integer(values.type):
            ms = values.cast(pa.int64()).fill_null(kernel.NONE).to_numpy(zero_copy_only=False)
    us = np.where(ms == kernel.NONE, kernel.NONE, ms * 1000)
    return numbers_of(us, missing, missing, missing, np.arange(count, dtype=np.int64))


def _named_table(group: Group, relation: Relation | None) -> tuple[str, str]:
    if relation is not None:
        return relation.schema, relation.table
    schema, _, table = group.topic.rpartition(".")
    return schema, table
