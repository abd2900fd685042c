"""Every type through Spark into Parquet and Delta tables, read back by Spark, compared with SELECT."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.model import OWN_FORMS, LogRange, ValueModes
from tailrace.ranges import plan
from tailrace.sinks.contract import Sink
from tailrace.sinks.delta.append import DeltaAppend
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.delta.sink import DeltaSink
from tailrace.sinks.files.parquet import parquet_format
from tailrace.sinks.files.sink import FileSink
from tailrace.sinks.write_job import SinkInput
from tests.support.postgres import Servers, fresh_database
from tests.support.zoo.expected import MODES, UNHELD, Expectation, plain
from tests.support.zoo.keeping import STREAMED, as_captured
from tests.support.zoo.wide import ROWS, Wide, capture


@pytest.fixture(scope="module")
def wide(servers: Servers, postgres_version: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wide]:
    databases = fresh_database(servers.get(postgres_version))
    yield capture(next(databases), tmp_path_factory.mktemp("wide") / "log")
    next(databases, None)


@pytest.mark.parametrize("modes", [OWN_FORMS, MODES], ids=["own forms", "modes"])
def test_tables_equal_selects_result(wide: Wide, modes: ValueModes, spark: Any, tmp_path: Path) -> None:
    given = SinkInput(("public.wide",), modes=modes)
    sinks: dict[str, Any] = {
        "parquet": FileSink("parquet", tmp_path / "parquet", parquet_format(), given),
        "append": DeltaSink("append", tmp_path / "append", DeltaAppend(), given),
        "mirror": DeltaSink("mirror", tmp_path / "mirror", DeltaMirror("refuse"), given),
    }
    with as_captured(wide.database) as connection:
        expected = Expectation(wide.selected, connection, modes)
        for kind, sink in sinks.items():
            write(sink, wide, spark)
            form = "parquet" if kind == "parquet" else "delta"
            read = spark.read.format(form).load(str(tmp_path / kind / "public.wide"))
            compare(kind, wide, expected, read.toArrow())


def write(sink: Sink, wide: Wide, spark: Any) -> None:
    """Write the snapshot, then the stream: first a mirror appends, then it merges."""
    sink.open(LogDirectory.open(wide.log).identity, "zoo")
    with LogReader.open(wide.log, "0") as reader:
        edges = [reader.start, wide.snapshot_end, reader.end().offset]
        ranges = [(start, end, reader.blocks(start, end)) for start, end in pairwise(edges)]
    for start, end, blocks in ranges:
        sink.write(spark, wide.log, LogRange("0", start, end), plan.input_splits("0", blocks, start, end))


def compare(kind: str, wide: Wide, expected: Expectation, table: pa.Table) -> None:
    ids = table["id"].to_pylist()
    if kind == "mirror":
        ops = ["m"] * len(ids)
        unchanged: list[Any] = [None] * len(ids)
        specials = [row["special"] for row in table["_position"].to_pylist()]
        assert sorted(ids) == sorted(wide.selected.rows)
    else:
        ops, unchanged = table["_op"].to_pylist(), table["_unchanged"].to_pylist()
        specials = table["_special"].to_pylist()
        assert sorted(ops) == ["c"] * ROWS + ["r"] * ROWS + ["u"] * ROWS
    # A snapshot row has the values of the row that was inserted again with another id.
    rows = [row + STREAMED if op == "r" else row for row, op in zip(ids, ops, strict=True)]
    for column in wide.selected.columns:
        arrow = table.schema.field(column).type
        for row, value, special, unsent in zip(rows, plain(table[column]), specials, unchanged, strict=True):
            if column in (unsent or ()):
                continue
            where, text = (kind, column, row), wide.selected.rows[row][column]
            wanted = expected.value(column, row, arrow)
            assert dict(special or {}).get(column) == (text if wanted is UNHELD else None), where
            if wanted is not UNHELD:
                assert value == wanted, where
