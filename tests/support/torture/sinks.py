"""Reads the sinks' data with readers of other projects: pyarrow, json and delta-rs.

Everything becomes a `Change`, whatever the sink's form; nothing of the product is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from tests.support.torture.ledger import KEYS, TABLES

_NOT_SENT = "__debezium_unavailable_value"


@dataclass(frozen=True, slots=True)
class Change:
    """One change as a sink has it. `values` lacks the columns that were not sent."""

    table: str
    op: str
    values: dict[str, Any]
    commit_lsn: int
    ordinal: int
    log_offset: int
    file: str  # file and row, to check the order inside one file

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.values[column] for column in TABLES[self.table][: KEYS[self.table]])


def read_history(kind: str, path: Path) -> list[Change]:
    """Return all changes under `path`, file by file, rows in the order of their file.

    :param kind: `parquet`, `jsonl` or `delta` (append).
    """
    changes: list[Change] = []
    for table in TABLES:
        folder = path / f"public.{table}"
        for file in _data_files(kind, folder):
            rows = _json_rows(file, table) if kind == "jsonl" else _arrow_rows(file, table)
            changes.extend(rows)
    return changes


def read_mirror(path: Path, version: int | None = None) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return a Delta mirror's rows by primary key.

    :raises AssertionError: if a key occurs twice.
    """
    table = path.name.removeprefix("public.")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    content = DeltaTable(str(path), version=version).to_pyarrow_table(columns=list(TABLES[table]))
    for row in content.to_pylist():
        key = tuple(row[column] for column in TABLES[table][: KEYS[table]])
        assert key not in rows, f"{path}: key {key} stands there twice"
        rows[key] = row
    return rows


def mirror_versions(path: Path) -> range:
    """Return the versions of a Delta table that can still be read."""
    return range(DeltaTable(str(path)).version() + 1)


def _data_files(kind: str, folder: Path) -> list[Path]:
    if kind == "delta":
        if not (folder / "_delta_log").is_dir():
            return []
        return sorted(Path(uri.removeprefix("file://")) for uri in DeltaTable(str(folder)).file_uris())
    if not folder.is_dir():
        return []
    return sorted(
        file
        for file in folder.rglob(f"*.{kind}")
        if not any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)
    )


def _arrow_rows(file: Path, table: str) -> Iterator[Change]:
    columns = TABLES[table]
    content: pa.Table = pq.ParquetFile(file).read()
    for row in content.to_pylist():
        missing = row["_unchanged"] or ()
        yield Change(
            table=table,
            op=row["_op"],
            values={name: row[name] for name in columns if name not in missing},
            commit_lsn=row["_commit_lsn"],
            ordinal=row["_ordinal"],
            log_offset=row["_log_offset"],
            file=str(file),
        )


def _json_rows(file: Path, table: str) -> Iterator[Change]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            change = parse_json(line, str(file))
            assert change.table == table, f"{file} holds a row of {change.table}"
            yield change


def parse_json(line: str, file: str) -> Change:
    """Return the change in a line of JSON Lines; `log show --json` prints the same form."""
    record = json.loads(line)
    values = record["before" if record["op"] == "d" else "after"] or {}
    values = {name: value for name, value in values.items() if value != _NOT_SENT}
    if isinstance(values.get("price"), str):
        values["price"] = Decimal(values["price"])
    return Change(
        table=record["source"]["table"],
        op=record["op"],
        values=values,
        commit_lsn=record["position"]["commit_lsn"],
        ordinal=record["position"]["ordinal"],
        log_offset=record["position"]["log_offset"],
        file=file,
    )
