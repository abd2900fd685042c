"""A captured database and mirrors of its log, for tests of repairs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.model import LogRange
from tailrace.ranges.plan import InputSplit
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.delta.sink import DeltaSink
from tailrace.sinks.write_job import SinkInput
from tests.support.capture.requested import KEYED
from tests.support.postgres import Database
from tests.support.sinks.ddl_story import Nearby


class Mirror:
    """A mirror of the log that a test captures."""

    def __init__(self, spark: Any, log: Path, lake: Path, given: SinkInput) -> None:
        self._spark, self._log, self._lake = spark, log, lake
        self.sink = DeltaSink("lake", lake, DeltaMirror(), given)
        self.sink.open(LogDirectory.open(log).identity, "shop")

    def follow(self) -> None:
        """Write everything that the log has into the mirror."""
        with LogReader.open(self._log, "0") as reader:
            at, end = self.sink.position("0"), reader.end().offset
            start = reader.start if at is None else at
        if start < end:
            with LogReader.open(self._log, "0") as reader:
                split = InputSplit("0", 0, start, end, tuple(reader.blocks(start, end)))
            self.sink.write(self._spark, self._log, LogRange("0", start, end), [split])

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        found = DeltaTable(str(self._lake / f"public.{table}")).to_pyarrow_table(columns=list(columns))
        return sorted(tuple(row.values()) for row in found.to_pylist())

    def require_equal(self, pg: Database, *tables: str) -> None:
        for table in tables:
            columns = [
                row[0]
                for row in pg.query(
                    "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not "
                    "attisdropped order by attnum",
                    [table],
                )
            ]
            source = sorted(pg.query(f"select {', '.join(columns)} from {table}"))
            assert self.rows(table, *columns) == source, table

    def close(self) -> None:
        self.sink.close()


@pytest.fixture
def place(pg: Database, spark: Any, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A database that is captured, and mirrors of its log that are closed at the end."""
    made: list[Mirror] = []

    def mirror(name: str = "lake", tables: tuple[str, ...] | None = KEYED, **rules: Any) -> Mirror:
        given = SinkInput(tables, ColumnPolicy(**rules))
        made.append(Mirror(Nearby(spark), tmp_path / "log", tmp_path / name, given))
        return made[-1]

    yield SimpleNamespace(pg=pg, log=tmp_path / "log", mirror=mirror)
    for each in made:
        each.close()
