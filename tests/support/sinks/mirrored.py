"""Reads a mirror as its users do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from tests.support.sinks.ddl_story import (
    ordered,
)

#: Columns, and rows in order.
Rows = tuple[list[str], list[tuple[Any, ...]]]


def mirrored(lake: Path, table: str) -> Rows:
    """Return the mirror's columns and rows, without the column `_position`."""
    rows = DeltaTable(str(lake / table)).to_pyarrow_table().drop_columns(["_position"])
    columns = [finite(rows[name]).to_pylist() for name in rows.column_names]
    return rows.column_names, ordered(list(zip(*columns, strict=True)))


def finite(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without the dates and times that Python can't hold."""
    if not pa.types.is_timestamp(column.type):
        return column
    last = pa.scalar(253_402_300_800_000_000, pa.int64()).cast(column.type)  # the year 10000
    return pc.if_else(pc.less(column, last), column, pa.scalar(None, column.type))
