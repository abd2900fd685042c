"""A Spark data source for a benchmark: a log's keys and values, written by the converter `json`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from tailrace.changelog.directory import TASK
from tailrace.changelog.reader import LogReader
from tailrace.ranges import plan
from tailrace.ranges.plan import InputSplit

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class EventsSource(DataSource):
    """`format("tailrace_bench_events")` with the options `path`, of a log, and `name`, of the topics."""

    @classmethod
    def name(cls) -> str:
        return "tailrace_bench_events"

    def schema(self) -> str:
        return "key binary, value binary"

    def reader(self, schema: StructType) -> EventsReader:
        return EventsReader(Path(self.options["path"]), self.options["name"])


class _Part(InputPartition):
    value: InputSplit


class EventsReader(DataSourceReader):
    """Converts each input split of the log separately."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name

    def partitions(self) -> list[InputPartition]:
        """Return the input splits of the log, which are those of every reader."""
        with LogReader.open(self._path, TASK) as reader:
            start, end = reader.start, reader.end().offset
            return [_Part(split) for split in plan.input_splits(TASK, reader.blocks(start, end), start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the events of an input split."""
        import numpy as np
        import pyarrow as pa

        from tailrace import __version__
        from tailrace.converters.debezium import JsonConverter
        from tailrace.decode.json.debezium import SourceInfo
        from tailrace.ranges.changes import decoded_batches
        from tailrace.records.group import Group

        converter, origin = JsonConverter(schemas_enable=False), SourceInfo(self._name, "bench", __version__)
        batches = decoded_batches(self._path, partition.value)
        for changes in chain.from_iterable(decoded.changes for decoded in batches):
            group = Group.of_changes(self._name, np.arange(changes.count, dtype=np.int64), changes, origin)
            events = converter.convert(group)
            columns = [pa.array(column).cast(pa.binary()) for column in (events.keys, events.values)]
            yield pa.RecordBatch.from_arrays(columns, ["key", "value"])
