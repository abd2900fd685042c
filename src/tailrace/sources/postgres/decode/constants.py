"""One value of a column, from its text: what rows have that were never written with it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tailrace.model import Column, Relation
from tailrace.sources.postgres.decode import kernel
from tailrace.sources.postgres.decode.gather import Cells
from tailrace.sources.postgres.decode.types import column_types


def value_of(relation: Relation, column: Column, text: str) -> pa.Array | None:
    """Return `text` as an array of one value of the column's type; None if that can't hold it."""
    raw = np.frombuffer(text.encode() + bytes(8), np.uint8)
    cells = Cells(
        raw,
        np.zeros(1, np.int32),
        np.array([len(raw) - 8], np.int32),
        np.array([kernel.TEXT], np.uint8),
    )
    typed = column_types(relation)[relation.columns.index(column)].read(cells)
    return None if len(typed.special_rows) else typed.values
