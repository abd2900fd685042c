"""A picture of a group: its changes cell by cell, whether they come from the wire or were transformed.

Both ways lead to the same writer, and a group that was made columns and not changed gives the same
bytes as its wire form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.connect_schemas import Schema, struct, written
from tailrace.converters.debezium_types import TypeMapping, debezium_modes, given
from tailrace.errors import Kind, TailraceError
from tailrace.model import Op, Relation, ValueModes
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.sources.postgres.decode import kernel
from tailrace.sources.postgres.decode.json.documents import ColumnTexts
from tailrace.sources.postgres.decode.tuples import Spans
from tailrace.sources.postgres.decode.types import known_type

# Rows of a picture's numbers, each of a change: PostgreSQL's positions and times.
MS, US, NS, COMMIT_LSN, LSN, XID, ORDINAL, TOTAL_ORDER, TABLE_ORDER = range(9)

TEXTS_BYTES_MAX = 2**31 - 1

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Field:
    """A column as it goes out."""

    name: str
    how: TypeMapping
    not_null: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RowImage:
    """Columns with their cells before and after each change; both of as many changes, or none before."""

    fields: Sequence[Field]
    styles: Sequence[int]
    buffer: Bytes
    current: Spans
    old: Spans


@dataclass(frozen=True, slots=True, eq=False)
class ChangeTable:
    """Changes cell by cell.

    :param choice: of the row before and after: 0 none, 1 all columns, 2 those of `wanted`'s second row.
    :param key: the key's columns in their order; None: there is no key.
    :param source: a column of JSON that stands for `source`, where the source is not PostgreSQL: its
        place in `row`, whose columns before that are the table's.
    :param is_plain: whether these are no changes: `row` has one column, their values.
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
    def fields(self) -> Sequence[Field]:
        """The table's columns."""
        return self.row.fields if self.source is None else self.row.fields[: self.source[0]]


def columns_of(side: RowImage, unavailable: Sequence[str], absent: Sequence[str]) -> ColumnTexts:
    """Return how a side's columns are written."""
    return ColumnTexts([written(field.name) + ":" for field in side.fields], side.styles, unavailable, absent)


def fields_of(relation: Relation) -> list[Field]:
    """Return a table's columns as they go out."""
    modes = debezium_modes(relation.modes)
    return [
        Field(column.name, given(known_type(column), modes), column.not_null) for column in relation.columns
    ]


def key_names(relation: Relation) -> tuple[str, ...]:
    """Return the columns of a table's key in the key's own order, as far as it is known."""
    key = relation.key
    return relation.primary_key if set(relation.primary_key) == set(key) else key


def numbers_of(us: Numbers, commit_lsn: Numbers, lsn: Numbers, xid: Numbers, ordinal: Numbers) -> Numbers:
    """Return the rows of a picture's numbers; `kernel.NONE` where there is none."""
    missing = us == kernel.NONE
    ms, ns = us // 1000, us * 1000
    ms[missing] = ns[missing] = kernel.NONE
    return np.stack(
        [ms, us, ns, commit_lsn, lsn, xid, ordinal, ordinal + 1, _order_in_table(commit_lsn, xid)]
    )


def _order_in_table(commit_lsn: Numbers, xid: Numbers) -> Numbers:
    # Counted from 1 anew at each transaction; as far as the group holds it.
    count = len(xid)
    if count == 0:
        return np.empty(0, np.int64)
    begins = np.ones(count, np.bool_)
    begins[1:] = (commit_lsn[1:] != commit_lsn[:-1]) | (xid[1:] != xid[:-1])
    first = np.maximum.accumulate(np.where(begins, np.arange(count), 0))
    return np.arange(count, dtype=np.int64) - first + 1


def together(parts: Sequence[Bytes], size: int) -> Bytes:
    """Return buffers of `size` bytes in all as one.

    :raises TailraceError: `DECODE_FAILED` if they are longer than 2 GiB.
    """
    if size > TEXTS_BYTES_MAX:
        raise TailraceError(
            Kind.DECODE_FAILED,
            "converted records: the texts of a group are longer than 2 GiB",
            "take smaller batches",
        )
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def replaced(texts: pa.Array, rows: npt.NDArray[np.int64], others: pa.Array) -> pa.Array:
    """Return texts, those in `rows` (rising) replaced."""
    mask = np.zeros(len(texts), np.bool_)
    mask[rows] = True
    return pc.replace_with_mask(texts, pa.array(mask), others)


def row_schema(name: str, fields: Sequence[Field], *, all_there: bool, key: frozenset[str]) -> Schema:
    """Return the schema of a table's rows.

    :param all_there: whether each row has all columns; else only those of the key are required.
    """
    return struct(
        [
            field.how.schema.document(
                optional=not ((field.not_null and all_there) or field.name in key), field=field.name
            )
            for field in fields
        ],
        name,
    )
