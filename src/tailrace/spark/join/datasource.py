"""The data source `tailrace-join`: changes of a data topic with their transactions, in batch or as a stream.

The driver plans with offsets alone; Spark stores the plan as its offset. Each Spark task reads a range of one
data partition, and the part of the transaction topic that the range's rows need.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tailrace.errors import Kind, TailraceError
from tailrace.join.planning import BatchLimits, BatchPlan, decoded, encoded
from tailrace.spark.join.options import JoinReadOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from tailrace.join.range_join import JoinRange
    from tailrace.spark.join.planner import JoinPlanner

#: A number of rows that no micro-batch has.
_UNLIMITED = 1 << 61


class JoinDataSource(DataSource):
    """`format("tailrace-join")`."""

    _pinned: dict[str, Any] | None = None

    @classmethod
    def name(cls) -> str:
        return "tailrace-join"

    def schema(self) -> StructType:
        """Return the schema.

        For a batch this also fixes the range, so that a DataFrame that Spark evaluates twice reads the same
        changes twice.
        """
        from tailrace.spark.join.columns import SCHEMA
        from tailrace.spark.schema import to_spark

        options = JoinReadOptions.parse(self.options)
        options.made_extraction()
        try:
            with _planning(options) as planner:
                self._pinned = encoded(planner.whole_range())
        except TailraceError as error:
            # Only a batch needs the start: a stream that continues from its checkpoint does not use it.
            if error.kind is not Kind.LOG_RANGE_GONE:
                raise
        return to_spark(SCHEMA)

    def reader(self, schema: StructType) -> JoinBatchReader:
        options = JoinReadOptions.parse(self.options)
        options.refuse_limits()
        with _planning(options) as planner:
            plan = planner.whole_range() if self._pinned is None else decoded(self._pinned)
            planner.await_committed(plan)
        return JoinBatchReader(options, encoded(plan))

    def streamReader(self, schema: StructType) -> JoinStreamReader:  # noqa: N802 — Spark's name
        options = JoinReadOptions.parse(self.options)
        options.refuse_ending()
        return JoinStreamReader(options)


class JoinInputPartition(InputPartition):
    """A Spark partition: a range of a data partition and its consumer group; None: no rows."""

    value: tuple[JoinRange, str] | None


class JoinBatchReader(DataSourceReader):
    """Reads from `startingOffsets` to `endingOffsets` once."""

    def __init__(self, options: JoinReadOptions, plan: dict[str, Any]) -> None:
        self._options = options
        self._plan = plan

    def partitions(self) -> list[InputPartition]:
        # Without partitions Spark would read one that it creates itself.
        return _partitions(decoded(self._plan)) or [JoinInputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark plans a frame once, and may read it much later, or again.
        with _planning(self._options) as planner:
            planner.require_topics(decoded(self._plan))
        return _rows(partition, self._options, keep_progress=False)


class JoinStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads growing topics."""

    def __init__(self, options: JoinReadOptions) -> None:
        self._options = options
        self._kept_planner: JoinPlanner | None = None

    @property
    def _planner(self) -> JoinPlanner:
        from tailrace.spark.join.planner import JoinPlanner

        if self._kept_planner is None:
            self._kept_planner = JoinPlanner(self._options)
        return self._kept_planner

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return encoded(self._planner.first(f"{self._options.group_id_prefix}-{uuid.uuid4()}"))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.limits == BatchLimits():
            return ReadAllAvailable()
        return ReadMaxRows(self._options.offsets_max or _UNLIMITED)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        limits = BatchLimits() if isinstance(limit, ReadAllAvailable) else self._options.limits
        before = decoded(start)
        plan = self._planner.next(before, limits)
        return start if plan.ends_as(before) else encoded(plan)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._planner.end_now()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        # The plan has its start, too: after a restart `initialOffset` of the first batch is called again.
        return [] if start == end else _partitions(decoded(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _rows(partition, self._options, keep_progress=True)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: a join holds no resources per batch."""

    def stop(self) -> None:
        if self._kept_planner is not None:
            self._kept_planner.close()


def _planning(options: JoinReadOptions) -> contextlib.closing[JoinPlanner]:
    from tailrace.spark.join.planner import JoinPlanner

    return contextlib.closing(JoinPlanner(options))


def _partitions(plan: BatchPlan) -> list[InputPartition]:
    from tailrace.join.range_join import ranges_of

    return [JoinInputPartition((wanted, plan.group)) for wanted in ranges_of(plan)]


def _rows(
    partition: InputPartition, options: JoinReadOptions, *, keep_progress: bool
) -> Iterator[pa.RecordBatch]:
    from tailrace.spark.join.columns import with_columns
    from tailrace.spark.join.reading import joined_rows

    if partition.value is None:
        return
    wanted, group = partition.value
    for batch in joined_rows(wanted, options, group, keep_progress=keep_progress):
        yield with_columns(batch, wanted)
