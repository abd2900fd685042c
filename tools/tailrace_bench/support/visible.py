"""Counts the visible rows of a table in a sink's folder, as any reader sees them."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq

TABLE_FOLDER = "public.orders"


class ParquetFolder:
    """Counts the rows of Parquet files as they become visible. Each file is opened once."""

    def __init__(self, sink: Path) -> None:
        self._folder = sink / TABLE_FOLDER
        self._rows: dict[str, int] = {}

    def new_files(self) -> list[Path]:
        """Return the files that are new since the last call."""
        try:
            names = [entry.name for entry in os.scandir(self._folder)]
        except FileNotFoundError:
            return []
        found = [name for name in names if name[0] not in "._" and name not in self._rows]
        for name in found:
            self._rows[name] = pq.read_metadata(self._folder / name).num_rows
        return [self._folder / name for name in found]

    def rows(self) -> int:
        """Return the number of visible rows."""
        self.new_files()
        return sum(self._rows.values())


class VisibleDeltaTable:
    """Counts the rows of a Delta table's latest version."""

    def __init__(self, sink: Path) -> None:
        self._folder = sink / TABLE_FOLDER

    def rows(self) -> int:
        """Return the number of rows in the newest version; 0 before the first commit."""
        from deltalake import DeltaTable

        if not DeltaTable.is_deltatable(str(self._folder)):
            return 0
        actions = DeltaTable(str(self._folder)).get_add_actions(flatten=True)
        return int(sum(actions.column("num_records").to_pylist()))
