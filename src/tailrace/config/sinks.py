"""The settings that all sinks have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import Field

from tailrace.config.fields import MIB, ByteCount, LocalPath, Name
from tailrace.config.patterns import Patterns, matches_any
from tailrace.config.transformations.options import AnyTransformation
from tailrace.config.transformations.predicates import AnyPredicate, WithTransformations
from tailrace.model import Pacing


class SinkConfig(WithTransformations):
    """The settings that all sinks have."""

    name: Name = Field(
        default="",
        validate_default=False,
        description="Name of the sink. Default: its type and the end of its path or other target. "
        "Required for the types `python` and `kafka` if another sink would have the same default.",
    )
    tables: Patterns | None = Field(
        default=None, description="Tables that this sink gets. Default: all captured tables."
    )
    batch_rows_max: int = Field(
        default=1_000_000, ge=1, le=100_000_000, description="Most rows in one batch."
    )
    batch_bytes_max: ByteCount = Field(
        default=512 * MIB, ge=64 * 1024, le=64 * 1024 * MIB, description="Most bytes of the log in one batch."
    )
    interval_ms: int = Field(
        default=500,
        ge=0,
        le=3_600_000,
        description="Least milliseconds from batch to batch without a backlog. `parquet`, `jsonl`: 150.",
    )
    retry_attempts_max: int = Field(
        default=-1,
        ge=-1,
        le=1000,
        description="Most retries of a batch after transient errors before this sink stops. -1: no limit; "
        "8 in a row in a run that must end (`--until-caught-up`, `replay`).",
    )

    def wants(self, schema: str, table: str) -> bool:
        """Return whether this sink gets the changes of the table."""
        return self.tables is None or matches_any(self.tables, schema, table)

    @property
    def on_spark(self) -> bool:
        """Whether Spark writes the sink."""
        return True

    @property
    def small_ranges_in_process(self) -> bool:
        """Whether this process may write small ranges of a sink that otherwise Spark writes."""
        return False

    @property
    def target(self) -> str:
        """A word for the target, for the sink's default name; may be empty."""
        return ""

    @property
    def pacing(self) -> Pacing:
        """Limits for the size and frequency of the sink's batches."""
        return Pacing(self.batch_rows_max, self.batch_bytes_max, self.interval_ms / 1000)

    def of_source(self, name: str) -> Self:
        """Return this sink for one of several sources."""
        return self

    def after(
        self, transformations: Sequence[AnyTransformation], predicates: Mapping[str, AnyPredicate]
    ) -> Self:
        """Return this sink with the pipeline's transformations before its own, and predicates for both."""
        steps, chosen = (*transformations, *self.transformations), {**predicates, **self.predicates}
        return self.model_copy(update={"transformations": steps, "predicates": chosen}) if steps else self


class FolderSink(SinkConfig):
    """A sink whose target is a directory."""

    path: LocalPath = Field(description="Directory of the target; each table gets a folder in it.")

    @property
    def small_ranges_in_process(self) -> bool:
        return True

    @property
    def target(self) -> str:
        return self.path.name

    def of_source(self, name: str) -> Self:
        return self.model_copy(update={"path": self.path / name})
