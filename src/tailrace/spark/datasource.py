"""The data source `tailrace`, with which any Spark job reads a change log, in batch or as a stream.

The driver chooses a range of the log and divides it into input splits; executors read and decode
the input splits into Arrow batches. A range has the same rows at every read, so Spark may repeat
any task.

Without the option `table` a row is an envelope; with it, a row of that table.
"""

from __future__ import annotations

import contextlib
import socket
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
from tailrace.ranges.plan import InputSplit, input_splits
from tailrace.spark.options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from tailrace.changelog.format import BlockRef
    from tailrace.changelog.reader import LogReader
    from tailrace.decode.changes import TableChanges
    from tailrace.decode.column_policy import TablePolicy
    from tailrace.spark.position import LogPosition


#: Longest wait of a task for the catalogue facts of an altered table, in seconds. Then the task fails.
_PENDING_S_MAX = 120.0
#: Longest time in which a stream with limits passes what is not for it, in seconds. Then it plans an empty
#: micro-batch, after which it continues from there.
_PASSING_S_MAX = 2.0
#: A number of rows or bytes that no log has; a sum with a log offset still has 64 bits.
_UNLIMITED = 1 << 61


@contextlib.contextmanager
def _hints_of_queries() -> Iterator[None]:
    """Give `LOG_RANGE_GONE` the hint for a query; the log's own one is for sinks."""
    try:
        yield
    except TailraceError as error:
        if error.kind is not Kind.LOG_RANGE_GONE:
            raise
        raise error.changed(
            hint="begin at what the log has: with startingOffset earliest, a stream also with a new "
            "checkpoint and a new target; before that, if every row is needed, take a new snapshot "
            "(`tailrace snapshot FILE --table T`). With the option readerName, retention waits for a stream"
        ) from None


class TailraceDataSource(DataSource):
    """`format("tailrace")`. Spark creates an instance for each `load()`, calls `schema`, and then
    pickles it into the processes that plan and read.
    """

    _pinned: ReadOptions | None = None
    _table_in: str | None = None  # the schema of the option `table`

    @classmethod
    def name(cls) -> str:
        return "tailrace"

    def schema(self) -> StructType:
        """Return the schema of the requested rows, as of the log's current end.

        With `table`: every column that the table had from the log's start to the range's end.
        For a batch this also fixes the range, so that a DataFrame that Spark evaluates twice
        reads the same changes twice while capture continues.
        """
        from tailrace.decode.envelope import SCHEMA as ENVELOPE
        from tailrace.ranges.changes import settled_facts, with_renames
        from tailrace.spark import position, schema

        options = self._options()
        reader = position.opened(options.path, options.task)
        first = reader.start
        starting = options.starting
        # Only a batch needs the start: a stream that continues from its checkpoint does not use it.
        with contextlib.suppress(TailraceError):
            starting = str(position.resolve(reader, starting))
        # After the start: if the log grows in between, the end must not lie before the start.
        end = position.resolve(reader, options.ending)
        self._pinned = options.model_copy(update={"starting": starting, "ending": str(end)})
        if options.table is None:
            return schema.to_spark(ENVELOPE)
        table_policy = position.table_policy(options.path, options.task, raw=options.raw)
        table_policy = with_renames(table_policy, reader)
        blocks, frames = reader.blocks(first, end), reader.all_schema_frames(first, end)
        in_force = len(reader.schema_before(blocks[0])) if blocks else len(frames)
        settled = settled_facts(reader, first, frames)
        known = schema.relations(frames, in_force, options.value_modes, settled)
        found = schema.table_schema(known, options.table, table_policy)
        self._table_in = next(each.schema for each in known if each.qualified_name == options.table)
        return schema.to_spark(found)

    def reader(self, schema: StructType) -> BatchReader:
        self._options().refuse_limits()
        return BatchReader(self._planned(), schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 — Spark's name
        options = self._options()
        options.refuse_ending()
        self._planned()
        return StreamReader(options, schema, self._table_in)

    def _planned(self) -> ReadOptions:
        """Return the options with the range that `schema` has fixed.

        :raises TailraceError: `CONFIG_INVALID` if the query has a schema: Spark then does not call `schema`.
        """
        if self._pinned is None:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                "read a change log: the query sets a schema",
                "remove .schema(…): the schema comes from the log; choose columns with select",
            )
        return self._pinned

    def _options(self) -> ReadOptions:
        from tailrace.spark import position

        options = ReadOptions.parse(self.options)
        return options.model_copy(update={"task": position.task_named(options.path, options.task)})


class SplitPartition(InputPartition):
    """A Spark partition: an input split of the log with the columns that are delivered, and how they are
    masked, as of the planning of its batch; or None for an empty range.
    """

    value: tuple[InputSplit, TablePolicy] | None


class _Rows:
    """Reads input splits on executors, for both readers, as Arrow batches in the query's schema.

    The driver resolves column selection and masks and sends them with the tasks, so executors
    do not need the secrets.
    """

    def __init__(self, options: ReadOptions, schema: StructType, table_in: str | None = None) -> None:
        self._options = options
        self._schema = schema
        self._table_in = table_in

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from tailrace.spark.schema import Conformer, to_arrow

        if partition.value is None:
            return
        split, table_policy = partition.value
        conformer = Conformer(to_arrow(self._schema))
        with _hints_of_queries():
            for decoded in self._decoded(split, table_policy):
                if self._options.table is not None:
                    yield from map(conformer.rows, map(self._own, decoded))
                elif decoded:
                    yield conformer.envelopes(decoded, split.task)

    def _own(self, changes: TableChanges) -> TableChanges:
        """Return the changes of the table; refuse those of one in another schema that got the same name."""
        from tailrace.spark.schema import in_several_schemas

        found = changes.relation.schema if changes.relation is not None else self._table_in
        if self._options.table is None or self._table_in in (None, found):
            return changes
        raise in_several_schemas(self._options.table, {str(self._table_in), str(found)})

    def _decoded(self, split: InputSplit, table_policy: TablePolicy) -> Iterator[list[TableChanges]]:
        """Yield the changes of an input split; waits before those of an altered table for its new schema."""
        from tailrace.ranges.changes import PENDING_S, decoded_batches
        from tailrace.spark.folders import not_shared

        options = self._options
        wanted = None if options.table is None else {options.table}
        until_s = time.monotonic() + _PENDING_S_MAX
        while True:
            try:
                for decoded in decoded_batches(
                    options.path, split, wanted, options.value_modes, table_policy
                ):
                    yield decoded.changes
                    rest = tuple(block for block in split.blocks if block.header.end > decoded.end)
                    split = replace(split, start=max(split.start, decoded.end), blocks=rest)
            except TailraceError as error:
                if error.kind is Kind.LOG_MISSING:  # the driver has it
                    host = socket.gethostname()
                    raise not_shared(host, "the log", options.path, "there is no log") from None
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

    @_hints_of_queries()
    def partitions(self) -> list[InputPartition]:
        from tailrace.spark import position

        reader = position.opened(self._options.path, self._options.task)
        start = position.resolve(reader, self._options.starting)
        end = position.resolve(reader, self._options.ending)
        if start > end:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"read a change log: startingOffset is the log offset {start}, after endingOffset, {end}",
                "set a larger endingOffset, or leave it out; load() fixes both",
                {"log": self._options.path},
            )
        # Without partitions Spark would read one that it creates itself.
        return _partitions(reader, self._options, start, end) or [SplitPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows.read(partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a growing log. Every offset that it returns to Spark is a boundary, so no transaction
    is split between two micro-batches.
    """

    def __init__(self, options: ReadOptions, schema: StructType, table_in: str | None = None) -> None:
        self._options = options
        self._rows = _Rows(options, schema, table_in)
        self._target: int | None = None
        self._registered = False
        # The last idle range that was found, and its segment: Spark asks up to a hundred times a second.
        self._idle = -1, -1, ""

    @_hints_of_queries()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        from tailrace.spark import position

        return self._positions.encode(position.resolve(self._reader, self._options.starting))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

    @_hints_of_queries()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        from tailrace.spark import position

        begin = position.checked(self._reader, self._positions.decode(start))
        self._register(begin)
        end = self._reader.end().offset if self._target is None else self._target
        if begin >= end:
            return start
        if self._is_idle(begin, end):
            self.commit(start)  # Spark itself does so when it plans the next micro-batch
            return start
        if isinstance(limit, ReadAllAvailable):
            return self._positions.encode(end, begin)
        # Spark passes only one limit; if both options are set, both apply.
        rows_max = self._options.rows_max or _UNLIMITED
        bytes_max = self._options.bytes_max or _UNLIMITED
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        upto, passes_until_s = begin, time.monotonic() + _PASSING_S_MAX
        while True:  # what is not for the query is passed, whatever the limits
            begun, upto = upto, self._reader.boundary_within(upto, rows_max, bytes_max, end)
            is_last = upto == end or time.monotonic() > passes_until_s
            if is_last or self._concern(self._reader.blocks(begun, upto)):
                return self._positions.encode(upto, begin)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._positions.encode(self._reader.end().offset)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._reader.end().offset

    @_hints_of_queries()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        first, last = self._positions.batch(start, end)
        return _partitions(self._reader, self._options, first, last)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Allow retention to remove everything before `end`, if the query is a registered reader."""
        from tailrace.changelog.retention.readers import Readers

        if self._options.reader_name is not None:
            Readers.open(self._options.path).commit(
                self._options.reader_name, self._options.task, self._positions.decode(end)
            )

    def _is_idle(self, begin: int, end: int) -> bool:
        """Return whether a range has nothing for the query, and lies in one segment of the log.

        At such an end a micro-batch would be empty and would not allow retention to remove anything.
        """
        start, seen, segment = self._idle
        blocks = self._reader.blocks(seen if start == begin else begin, end)
        if not blocks:
            return True
        if start != begin:
            segment = blocks[0].segment
        if segment != blocks[-1].segment:
            return False
        if self._concern(blocks):
            return False
        self._idle = begin, end, segment
        return True

    def _concern(self, blocks: list[BlockRef]) -> bool:
        """Return whether these runs may have changes for the query, or describe its table."""
        from tailrace.decode.schemas import Catalog
        from tailrace.protocol.metadata_frames import schema_frames

        headers, table = [block.header for block in blocks], self._options.table
        if table is None:
            return any(header.rows for header in headers)
        wanted = Catalog(self._reader.schema_before(blocks[0])).named({table})
        if any(header.tables is None or not wanted.isdisjoint(header.tables) for header in headers):
            return True
        shaped = [self._reader.read(block) for block in blocks if block.header.has_schema]
        return any(Catalog([frame]).named({table}) for raw in shaped for _, frame in schema_frames(raw))

    def _register(self, offset: int) -> None:
        from tailrace.changelog.retention.readers import Readers

        name, task = self._options.reader_name, self._options.task
        if self._registered or name is None:
            return
        readers = Readers.open(self._options.path)
        known = readers.get(name)
        if known is not None and (known.kept.get(task) or name.startswith("engine:")):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"register the query as reader {name!r} of the log: that is a sink or an engine, and "
                "retention would remove what it has not read yet",
                "set the option readerName to another name; if that sink does not exist any more, "
                "`tailrace log forget PATH --reader NAME` removes it from the log's list",
                {"log": self._options.path},
            )
        readers.begin(name, task, offset)
        self._registered = True

    @property
    def _reader(self) -> LogReader:
        from tailrace.spark import position

        return position.opened(self._options.path, self._options.task)

    @property
    def _positions(self) -> LogPosition:
        from tailrace.spark.position import LogPosition

        return LogPosition(self._options.path, self._options.task, self._options.table)


def _partitions(reader: LogReader, options: ReadOptions, start: int, end: int) -> list[InputPartition]:
    from tailrace.spark import position

    if start >= end:
        return []
    table_policy = position.table_policy(options.path, options.task, raw=options.raw)
    splits = input_splits(options.task, reader.blocks(start, end), start, end)
    return [SplitPartition((split, table_policy)) for split in splits]
