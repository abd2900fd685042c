"""The data source `tailrace`: anyone's Spark job reads a change log, in batch or as a stream.

On the driver a range of the log is chosen and cut into pieces; on executors each piece is read
and decoded into Arrow batches. Everything between two log offsets is the same at every read,
so Spark may repeat what it likes.

Without the option `table` a row is an envelope; with it, a row of that table.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tailrace.errors import Kind, TailraceError
from tailrace.ranges.plan import Piece, pieces
from tailrace.spark.options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from tailrace.changelog.reader import LogReader
    from tailrace.decode.changes import TableChanges
    from tailrace.spark.position import LogPosition


#: So long a task waits for what became of an altered table. Spark shows what it waits for when it is over.
_PENDING_S_MAX = 120.0
#: More than any log holds, and still a 64-bit number when a log offset is added.
_UNLIMITED = 1 << 61


class TailraceDataSource(DataSource):
    """`format("tailrace")`. Spark makes one for each `load()`, asks it for its schema, then
    pickles it into the processes that plan and read.
    """

    _pinned: ReadOptions | None = None

    @classmethod
    def name(cls) -> str:
        return "tailrace"

    def schema(self) -> StructType:
        """Return the schema of what was asked for, as the log stands now.

        With `table`: every column that the table had from the log's start to the range's end.
        For a batch it also settles which range that is, so that a DataFrame that Spark
        evaluates twice reads the same changes twice while capture goes on.
        """
        from tailrace.decode.envelope import SCHEMA as ENVELOPE
        from tailrace.ranges.changes import with_renames
        from tailrace.spark import position, schema

        options = self._options()
        reader = position.opened(options.path, options.task)
        first = reader.start
        starting = options.starting
        # Only a batch must find it: a stream that goes on from its checkpoint does not ask where to start.
        with contextlib.suppress(TailraceError):
            starting = str(position.resolve(reader, starting))
        # After the start: a log that grows in between must not end before it.
        end = position.resolve(reader, options.ending)
        self._pinned = options.model_copy(update={"starting": starting, "ending": str(end)})
        if options.table is None:
            return schema.to_spark(ENVELOPE)
        table_policy = position.table_policy(options.path, options.task, raw=options.raw)
        table_policy = with_renames(table_policy, reader)
        blocks, frames = reader.blocks(first, end), reader.all_schema_frames(first, end)
        in_force = len(reader.schema_before(blocks[0])) if blocks else len(frames)
        known = schema.relations(frames, in_force, options.value_modes, table_policy)
        return schema.to_spark(schema.table_schema(known, options.table))

    def reader(self, schema: StructType) -> BatchReader:
        options = self._pinned or self._options()
        options.refuse_limits()
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 — Spark's name
        options = self._options()
        options.refuse_ending()
        return StreamReader(options, schema)

    def _options(self) -> ReadOptions:
        from tailrace.spark import position

        options = ReadOptions.parse(self.options)
        return options.model_copy(update={"task": position.task_named(options.path, options.task)})


class PiecePartition(InputPartition):
    """What Spark carries to an executor: a piece of the log, or None for an empty range."""

    value: Piece | None


class _Rows:
    """The executors' side of both readers: a piece as Arrow batches in the query's schema.

    Selection and masks are resolved where the query is planned, and are sent with the
    tasks: executors need not have the secrets.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        from tailrace.spark import position

        self._options = options
        self._schema = schema
        self._table_policy = position.table_policy(options.path, options.task, raw=options.raw)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from tailrace.spark.schema import Conformer, to_arrow

        piece = partition.value
        if piece is None:
            return
        conformer = Conformer(to_arrow(self._schema))
        for stretch in self._stretches(piece):
            if self._options.table is not None:
                yield from map(conformer.rows, stretch)
            elif stretch:
                yield conformer.envelopes(stretch, piece.task)

    def _stretches(self, piece: Piece) -> Iterator[list[TableChanges]]:
        """Yield the changes of a piece; those of a table that was altered once the log knows as what."""
        from tailrace.ranges.changes import PENDING_S, stretches_of

        options = self._options
        wanted = None if options.table is None else {options.table}
        until_s = time.monotonic() + _PENDING_S_MAX
        while True:
            try:
                for stretch in stretches_of(
                    options.path, piece, wanted, options.value_modes, self._table_policy
                ):
                    yield stretch.changes
                    rest = tuple(block for block in piece.blocks if block.header.end > stretch.end)
                    piece = replace(piece, start=max(piece.start, stretch.end), blocks=rest)
            except TailraceError as error:
                if error.kind is not Kind.SCHEMA_PENDING or time.monotonic() >= until_s:
                    raise
                time.sleep(PENDING_S)
            else:
                return


class BatchReader(DataSourceReader):
    """Reads `[startingOffset, endingOffset)` once."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._rows = _Rows(options, schema)

    def partitions(self) -> list[InputPartition]:
        from tailrace.spark import position

        reader = position.opened(self._options.path, self._options.task)
        start = position.resolve(reader, self._options.starting)
        end = position.resolve(reader, self._options.ending)
        if start > end:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"read a change log: startingOffset is the log offset {start}, behind endingOffset, {end}",
                "give an endingOffset that comes later, or leave it out; load() fixes both",
                {"log": self._options.path},
            )
        # Without partitions Spark would ask for one of its own making.
        return _partitions(reader, self._options.task, start, end) or [PiecePartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows.read(partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a log as it grows. Every offset that it gives Spark is a boundary: no transaction
    is ever split between two micro-batches.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._rows = _Rows(options, schema)
        self._target: int | None = None
        self._registered = False

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        from tailrace.spark import position

        return self._kept.encode(position.resolve(self._reader, self._options.starting))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        from tailrace.spark import position

        begin = position.checked(self._reader, self._kept.decode(start))
        self._register(begin)
        end = self._reader.end().offset if self._target is None else self._target
        if begin >= end:
            return start
        if isinstance(limit, ReadAllAvailable):
            return self._kept.encode(end, begin)
        # Spark hands one limit over; where both options are set, both hold.
        rows_max = self._options.rows_max or _UNLIMITED
        bytes_max = self._options.bytes_max or _UNLIMITED
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        return self._kept.encode(self._reader.boundary_within(begin, rows_max, bytes_max, end), begin)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._kept.encode(self._reader.end().offset)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._reader.end().offset

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        first, last = self._kept.batch(start, end)
        return _partitions(self._reader, self._options.task, first, last)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Let retention have what lies before `end`, if the query is a registered reader."""
        from tailrace.changelog.retention.readers import Readers

        if self._options.reader_name is not None:
            Readers.open(self._options.path).commit(
                self._options.reader_name, self._options.task, self._kept.decode(end)
            )

    def _register(self, offset: int) -> None:
        from tailrace.changelog.retention.readers import Readers

        if self._registered or self._options.reader_name is None:
            return
        Readers.open(self._options.path).begin(self._options.reader_name, self._options.task, offset)
        self._registered = True

    @property
    def _reader(self) -> LogReader:
        from tailrace.spark import position

        return position.opened(self._options.path, self._options.task)

    @property
    def _kept(self) -> LogPosition:
        from tailrace.spark.position import LogPosition

        return LogPosition(self._options.path, self._options.task, self._options.table)


def _partitions(reader: LogReader, task: str, start: int, end: int) -> list[InputPartition]:
    if start >= end:
        return []
    return [PiecePartition(piece) for piece in pieces(task, reader.blocks(start, end), start, end)]
