"""Change tables of groups that transformations or other sources made, according to their Arrow types;
unmodified columns of a table are converted according to the table's types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from tailrace.converters.cells.change_table import TABLE_ORDER, ChangeTable, key_names, numbers_of, of_wire
from tailrace.converters.cells.connect_values import of_array, of_cells, of_parts
from tailrace.converters.cells.json_values import (
    Mask,
    Rows,
    Values,
    is_listed,
    json_texts,
    lengths_of,
)
from tailrace.converters.cells.row_image import ColumnValues, Field, RowImage
from tailrace.converters.connect_schemas import Schema, struct
from tailrace.converters.debezium_types import TypeMapping, arrow_mapping, debezium_modes, type_mapping
from tailrace.decode import images, kernel
from tailrace.decode.gather import array_mask, replaced, text_buffers, text_cells
from tailrace.decode.rows import HeldTexts, specials
from tailrace.decode.types import known_type, value_type
from tailrace.decode.values import forms
from tailrace.decode.values.forms import form_of
from tailrace.errors import Kind, TailraceError
from tailrace.model import OWN_FORMS, Column, Op, Relation, ValueModes
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.records.group import Group

#: Forms in JSON of the types whose Arrow texts are PostgreSQL's own.
_OWN_TEXTS = frozenset({forms.QUOTED, forms.UNSCALED, forms.VARIABLE_SCALE})

_ONE = np.ones((2, 1), np.bool_)


def of_columns(group: Group) -> ChangeTable:
    """Return the changes of a group, from its columns.

    :raises TailraceError: `DECODE_FAILED`.
    """
    relation, count = group.relation, len(group)
    modes = debezium_modes(relation.modes if relation else OWN_FORMS)
    before, after = group.column("before"), group.column("after")
    names = _names(after, before)
    fields = [field_of(relation, name, _child_type(name, after, before), modes) for name in names]
    noted = specials(group.column("special"))
    current = [field_values(relation, field, after, noted, "after.") for field in fields]
    old: list[ColumnValues] = []
    if not pa.types.is_null(before.type) and before.null_count < count:
        old = [field_values(relation, field, before, noted, "before.") for field in fields]
    choice, wanted = _choices(group, relation, names, before, after)
    _mark_unchanged(group.column("unchanged"), names, current)
    if relation is not None and not any(column.in_identity for column in relation.columns):
        for column in old:  # NULLs in partial row images are values that were not sent
            column.kind[(choice[0] == 2) & (column.kind == kernel.NULL)] = kernel.ABSENT
    rows = dict(zip(names, zip(current, old, strict=True), strict=True)) if old else {}
    key = _key(group, group.relation_of("key"), noted, modes, rows)
    source, source_column = group.column("source"), None
    if _is_postgres(source.type):
        numbers, schema, table = _postgres_source(source, relation)
    else:
        how = arrow_mapping(source.type, modes)
        numbers, schema, table = _other_source(source), *_named_table(group, relation)
        current.append(_column(of_array(source, how), array_mask(source)))
        old += [_nothing(count)] if old else []
        fields = [*fields, Field("source", how)]
        wanted = np.concatenate([wanted, np.zeros((2, 1), np.bool_)], axis=1)
        source_column = (len(fields) - 1, how.schema)
    row = RowImage(fields, count, None, current, old)
    op = _letters(group.column("op"))
    shards = images.shards_of(source)
    return ChangeTable(op, choice, wanted, row, key, numbers, schema, table, modes, shards, source_column)


def _column(values: Values, there: Mask) -> ColumnValues:
    # `there`: which rows exist.
    has_value = array_mask(values.array)
    if values.odd is not None:
        has_value = has_value.copy()
        has_value[values.odd_rows] = array_mask(values.odd)
    kind = np.where(there, np.where(has_value, kernel.TEXT, kernel.NULL), kernel.ABSENT)
    return ColumnValues(values, kind.astype(np.uint8))


def _nothing(count: int) -> ColumnValues:
    # A column without values.
    return ColumnValues(Values(pa.nulls(count)), np.full(count, kernel.ABSENT, np.uint8))


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


def _table_column(relation: Relation | None, name: str, arrow: pa.DataType) -> Column | None:
    # The table's column with this name, if the values still have the type to which decoding converts it.
    if relation is None:
        return None
    for column in relation.columns:
        if column.name == name and value_type(known_type(column), relation.modes).arrow == arrow:
            return column
    return None


def field_of(relation: Relation | None, name: str, arrow: pa.DataType, modes: ValueModes) -> Field:
    """Return a column's mapping: that of the table's column, if it is unmodified, else of its Arrow type.

    :param modes: all must be set.
    """
    column = _table_column(relation, name, arrow)
    if column is not None:
        return Field(name, type_mapping(known_type(column), modes), column.not_null)
    if relation is None or not pa.types.is_struct(arrow):
        return Field(name, arrow_mapping(arrow, modes))
    # `hoist_field` makes a field of a row or key: its members are columns of the table.
    parts = tuple(field_of(relation, each.name, each.type, modes).how for each in arrow)
    members = [
        part.schema.document(optional=each.nullable, field=each.name)
        for part, each in zip(parts, arrow, strict=True)
    ]
    return Field(name, TypeMapping(forms.RAW, struct(members), "{}", parts))


def _values_of(relation: Relation | None, field: Field, array: pa.Array) -> Values:
    # `field` as `field_of` returns it.
    if relation is not None and pa.types.is_struct(array.type) and field.how.in_parts:
        inside = map(Field, [each.name for each in array.type], field.how.in_parts)
        parts = [_values_of(relation, each, array.field(place)) for place, each in enumerate(inside)]
        return of_parts(array, parts)
    return of_array(array, field.how, is_rendered=_is_rendered(relation, field, array.type))


def single_values(relation: Relation | None, array: pa.Array, modes: ValueModes) -> tuple[Field, Values]:
    """Return values that are not in a row, whose column has an empty name, and their mapping."""
    field = field_of(relation, "", array.type, modes)
    return field, _values_of(relation, field, array)


def field_values(
    relation: Relation | None, field: Field, rows: pa.Array, noted: HeldTexts, prefix: str
) -> ColumnValues:
    """Return a field of rows; values that its type can't represent are in `noted`, by prefix + its name."""
    count = len(rows)
    if not pa.types.is_struct(rows.type) or rows.type.get_field_index(field.name) < 0:
        return _nothing(count)
    array = rows.field(rows.type.get_field_index(field.name))
    values = _values_of(relation, field, array)
    special = noted.get(prefix + field.name)
    if special is not None:
        values = _with_special(values, *special, field.how)
    return _column(values, array_mask(rows))


def _with_special(values: Values, rows: Rows, texts: pa.Array, how: TypeMapping) -> Values:
    # The values, with those of `rows` replaced by values read from PostgreSQL's texts.
    found = of_cells(text_cells(texts), how)
    array = replaced(values.array, rows, found.array)
    kept = np.isin(values.odd_rows, rows, invert=True)
    odd_rows = np.concatenate((values.odd_rows[kept], rows[found.odd_rows]))
    if not len(odd_rows):
        return Values(array)
    both = [part for part in (values.odd, found.odd) if part is not None]
    odd = pa.concat_arrays(both).filter(
        pa.array(np.concatenate((kept, np.ones(len(found.odd_rows), np.bool_))))
    )
    order = np.argsort(odd_rows, kind="stable")
    return Values(array, odd_rows[order], odd.take(pa.array(order)))


def _is_rendered(relation: Relation | None, field: Field, arrow: pa.DataType) -> bool:
    """Return whether texts of a table's column have the form that its modes prescribe, other than
    PostgreSQL's own.
    """
    column = _table_column(relation, field.name, arrow)
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


def _mark_unchanged(column: pa.Array, names: Sequence[str], columns: Sequence[ColumnValues]) -> None:
    if pa.types.is_null(column.type) or column.null_count == len(column):
        return
    found = column.flatten().to_numpy(zero_copy_only=False)
    if len(found) == 0:
        return
    rows = np.repeat(np.arange(len(column)), lengths_of(column))
    for name, of_name in zip(names, columns, strict=True):
        of_name.kind[rows[found == name]] = kernel.UNCHANGED


def _key(
    group: Group,
    relation: Relation | None,
    noted: HeldTexts,
    modes: ValueModes,
    rows: Mapping[str, tuple[ColumnValues, ColumnValues]],
) -> RowImage | None:
    # `rows`: the row's columns after and before the change, by name; empty if there is no row before.
    key, count = group.column("key"), len(group)
    if relation is None and _is_message(group):
        after = group.column("after")
        at = after.type.get_field_index("prefix")
        key = pa.nulls(count) if at < 0 else pa.StructArray.from_arrays([after.field(at)], ["prefix"])
    if pa.types.is_null(key.type):
        return None
    if not pa.types.is_struct(key.type):
        field, values = single_values(relation, key, modes)
        return RowImage([field], count, None, [_column(values, np.ones(count, np.bool_))], is_single=True)
    names = [field.name for field in key.type]
    ordered = key_names(relation) if relation is not None else ()
    names = list(ordered) if set(ordered) == set(names) else names
    fields = [field_of(relation, name, key.type.field(name).type, modes) for name in names]
    columns = [field_values(relation, field, key, noted, "key.") for field in fields]
    has_after = array_mask(group.column("after"))
    before = [
        _before(rows.get(name), column, has_after) or _nothing(count)
        for name, column in zip(names if rows else (), columns, strict=False)
    ]
    return RowImage(fields, count, None, columns, before)


def _before(
    row: tuple[ColumnValues, ColumnValues] | None, key: ColumnValues, has_after: Mask
) -> ColumnValues | None:
    # A key's column before the change. If the key's column differs from the row's after the change, because
    # only one of them was transformed, the row before does not contain the former key.
    if row is None:
        return None
    rows = pa.array(has_after)
    texts = (json_texts(column.values).filter(rows) for column in (row[0], key))
    return row[1] if next(texts).equals(next(texts)) else None


def _is_message(group: Group) -> bool:
    op = group.column("op")
    return len(op) > 0 and op[0].as_py() == Op.MESSAGE.value


def _letters(op: pa.Array) -> Bytes:
    buffer, offsets = text_buffers(op.cast(pa.large_string()))
    if op.null_count or not (np.diff(offsets) == 1).all():
        raise TailraceError(
            Kind.DECODE_FAILED,
            "converted changes: `op` must be one letter each",
            "keep the column `op` in transformations, or make records that are not changes (column `value`)",
        )
    return buffer[offsets[:-1]]


def plain_change_table_of(group: Group, how: TypeMapping, values: Values) -> tuple[ChangeTable, Mask]:
    """Return records that are not changes, without their keys, and which of them have a value.

    :param values: of the records, with their mapping `how`.
    :raises TailraceError: `DECODE_FAILED`.
    """
    relation, count = group.relation, len(group)
    modes = debezium_modes(relation.modes if relation else OWN_FORMS)
    source, op = group.column("source"), group.column("op")
    row = RowImage([Field("value", how)], count, None, [_column(values, np.ones(count, np.bool_))])
    letters = np.full(count, ord(Op.CREATE), np.uint8)
    if op.null_count == 0:
        letters = _letters(op)
    numbers, schema, table = np.empty((0, count), np.int64), "", ""
    source_column: tuple[int, Schema] | None = (0, how.schema)
    if _is_postgres(source.type):
        numbers, schema, table = _postgres_source(source, relation)
        source_column = None
    choice = np.zeros((2, count), np.uint8)
    found = ChangeTable(
        letters,
        choice,
        _ONE,
        row,
        None,
        numbers,
        schema,
        table,
        modes,
        images.shards_of(source),
        source_column,
        is_plain=True,
    )
    return found, array_mask(group.column("value"))


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


def change_table_of(group: Group) -> ChangeTable:
    """Return the change table of a group of changes.

    :raises TailraceError: `DECODE_FAILED`.
    """
    found = of_columns(group) if group.wire is None else of_wire(group.wire.tuples_in_utf8())
    if group.orders is not None:
        found.numbers[TABLE_ORDER] = group.orders
    return found
