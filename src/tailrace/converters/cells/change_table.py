"""The changes of a group in the form that converters use, whether they come from the wire or from columns.

JSON is written from cells, Avro from values. A group that became columns but was not modified yields the same
bytes as its wire form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tailrace.converters.cells.json_values import Mask
from tailrace.converters.cells.row_image import Field, RowCells, RowImage
from tailrace.converters.connect_schemas import STRING, Schema, struct
from tailrace.converters.debezium_types import TypeMapping, arrow_mapping, debezium_modes, type_mapping
from tailrace.decode import kernel
from tailrace.decode.envelope import image_choices
from tailrace.decode.json.debezium import times_of
from tailrace.decode.shards import RowShards, rows_of
from tailrace.decode.tuples import Tuples
from tailrace.decode.types import known_type
from tailrace.decode.values import forms
from tailrace.model import OWN_FORMS, Op, Relation, ValueModes
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.records.group import Group
from tailrace.records.orders import order_in_table

# Rows of `ChangeTable.numbers`, in addition to those of `decode.json.debezium`.
TOTAL_ORDER, TABLE_ORDER = 7, 8


@dataclass(frozen=True, slots=True, eq=False)
class ChangeTable:
    """Changes cell by cell.

    :param choice: of the row before and after: 0 none, 1 all columns, 2 those of `wanted`'s second row.
    :param key: the key's columns in their order; None: there is no key.
    :param source: if the source is not PostgreSQL, the place in `row` of the column `source` (JSON), and its
        schema; the columns before that place are the table's.
    :param shards: of the changes' transactions, for sources with shards.
    :param is_plain: whether these are not changes: `row` has one column, the records' values.
    """

    op: Bytes
    choice: Bytes
    wanted: Mask
    row: RowImage
    key: RowImage | None
    numbers: Numbers
    schema: str
    table: str
    modes: ValueModes
    shards: RowShards
    source: tuple[int, Schema] | None = None
    is_plain: bool = False

    def __len__(self) -> int:
        return len(self.op)

    @property
    def is_message(self) -> bool:
        """Whether these are logical messages."""
        return len(self.op) > 0 and bool(self.op[0] == ord(Op.MESSAGE))

    @property
    def is_snapshot(self) -> bool:
        """Whether these are rows of a snapshot: all of a group are, or none."""
        return len(self.op) > 0 and bool(self.op[0] == ord(Op.READ))

    @property
    def has_key(self) -> Mask:
        """Which changes have a key: no TRUNCATE has, and none whose key is null."""
        found: Mask = self.op != ord(Op.TRUNCATE)
        if self.key is not None and self.key.fields:
            current, _ = self.key.kinds()
            found &= (current != kernel.ABSENT).any(axis=0)
        return found

    @property
    def fields(self) -> Sequence[Field]:
        """The table's columns."""
        return self.row.fields if self.source is None else self.row.fields[: self.source[0]]


def of_wire(tuples: Tuples) -> ChangeTable:
    """Return the change table of changes from the wire.

    :raises TailraceError: `DECODE_FAILED`.
    """
    relation = tuples.relation
    modes = debezium_modes(relation.modes if relation else OWN_FORMS)
    if relation is None:
        content = replace(arrow_mapping(pa.binary(), modes), style=forms.BASE64)
        fields = [Field("prefix", TypeMapping(forms.QUOTED, STRING, "null")), Field("content", content)]
        places = [0]
    else:
        fields = fields_of(relation)
        names = [field.name for field in fields]
        places = [names.index(name) for name in key_names(relation)]
    styles = [field.how.style for field in fields]
    row = RowImage(fields, len(tuples), RowCells(styles, tuples.buffer, tuples.current, tuples.old))
    wanted = np.stack([np.ones(len(fields), np.bool_), tuples.in_key])
    key = row.taken(places) if places else None
    numbers = numbers_of(
        tuples.fields[kernel.AT_COMMIT_TIME], tuples.fields[kernel.AT_COMMIT_LSN], tuples.fields[kernel.LSN],
        tuples.fields[kernel.AT_XID], tuples.fields[kernel.AT_ORDINAL],
    )  # fmt: skip
    schema, table = (relation.schema, relation.table) if relation else ("", "")
    shards = rows_of(tuples.shards, tuples.fields[kernel.AT_COMMIT_LSN])
    choice = image_choices(tuples)
    return ChangeTable(tuples.op, choice, wanted, row, key, numbers, schema, table, modes, shards)


def fields_of(relation: Relation) -> list[Field]:
    """Return a table's columns with the mappings of their types."""
    modes = debezium_modes(relation.modes)
    return [
        Field(column.name, type_mapping(known_type(column), modes), column.not_null)
        for column in relation.columns
    ]


def key_names(relation: Relation) -> tuple[str, ...]:
    """Return the columns of a table's key in the primary key's order, if that is known."""
    key = relation.key
    return relation.primary_key if set(relation.primary_key) == set(key) else key


def numbers_of(us: Numbers, commit_lsn: Numbers, lsn: Numbers, xid: Numbers, ordinal: Numbers) -> Numbers:
    """Return `ChangeTable.numbers`; `kernel.NONE` for a missing number."""
    order = order_in_table(commit_lsn, xid)
    return np.stack([*times_of(us), commit_lsn, lsn, xid, ordinal, ordinal + 1, order])


def required_columns(table: ChangeTable, group: Group) -> tuple[frozenset[str], frozenset[str]]:
    """Return the columns that are never null: those of keys, and those of rows that are the key's."""
    fields = () if table.key is None else table.key.fields
    rows, keys = group.relation, group.relation_of("key")
    if rows is None or keys is None:
        names = frozenset(field.name for field in fields)
        return names, names
    # A transformation may have made the key of other columns, or changed them in rows alone.
    # The key that the settings chose may have columns that can be null.
    always = set(keys.key) - set(keys.chosen_key)
    names = frozenset(field.name for field in fields if field.not_null or field.name in always)
    alike = rows.columns if keys is rows else set(rows.columns) & set(keys.columns)
    return names, names & {column.name for column in alike}


def row_schema(name: str, fields: Sequence[Field], *, all_there: bool, required: frozenset[str]) -> Schema:
    """Return the schema of a table's rows.

    :param all_there: whether each row has all columns; otherwise only those of `required` are.
    """
    return struct(
        [
            field.how.schema.document(
                optional=not ((field.not_null and all_there) or field.name in required), field=field.name
            )
            for field in fields
        ],
        name,
    )
