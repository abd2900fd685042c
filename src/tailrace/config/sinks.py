"""What sinks have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field

from tailrace.config.fields import MIB, ByteCount, LocalPath, Name, Section
from tailrace.config.patterns import Patterns, matches_any
from tailrace.config.predicates import AnyPredicate
from tailrace.config.transformations import AnyTransformation


@dataclass(frozen=True, slots=True)
class Pacing:
    """How much a batch holds, and how often there is one.

    :param rows_max: rows at most; a single transaction of the source may have more.
    :param bytes_max: bytes of the log at most, likewise.
    :param interval_s: least seconds from batch to batch while less than a batch waits.
    :param within_s: with a backlog, a batch is what can be written in about so many seconds; None: as
        much as the limits allow.
    :param begins_full: whether the first one has as much as the limits allow.
    """

    rows_max: int
    bytes_max: int
    interval_s: float
    within_s: float | None = None
    begins_full: bool = False


class SinkConfig(Section):
    """What all sinks have in common."""

    name: Name = Field(
        default="",
        validate_default=False,
        description="Name of the sink. Default: its type and the end of its path, or what else it goes to.",
    )
    tables: Patterns | None = Field(
        default=None, description="Tables that this sink gets. Default: all that are captured."
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
        description="Least milliseconds from batch to batch when there is no backlog. 150 for `parquet` and "
        "`jsonl`.",
    )
    retry_attempts_max: int = Field(
        default=-1,
        ge=-1,
        le=1000,
        description="Times that a failed batch is tried again before this sink stops, where what failed may "
        "pass. -1: as often as it takes; 8 times in a row in a run that is to end (`--until-caught-up`, "
        "`replay`).",
    )
    transformations: Annotated[tuple[AnyTransformation, ...], Field(max_length=100)] = Field(
        default=(),
        description="What changes go through before they are written, in this order, after those of the "
        "pipeline: see [Transformations](transformations.md).",
    )
    predicates: dict[str, AnyPredicate] = Field(
        default={}, description="By name, what chooses changes for transformations, beside the pipeline's."
    )

    def wants(self, schema: str, table: str) -> bool:
        """Tell whether this sink gets the changes of the table."""
        return self.tables is None or matches_any(self.tables, schema, table)

    @property
    def on_spark(self) -> bool:
        """Whether Spark writes it."""
        return True

    @property
    def small_ranges_in_process(self) -> bool:
        """Whether a small range may be written without Spark, though Spark writes it."""
        return False

    @property
    def target(self) -> str:
        """A word for where it goes, for its default name; empty where nothing tells."""
        return ""

    @property
    def pacing(self) -> Pacing:
        """How its batches are cut and paced."""
        return Pacing(self.batch_rows_max, self.batch_bytes_max, self.interval_ms / 1000)

    def of_source(self, name: str) -> Self:
        """Return what this sink is for one of several sources."""
        return self

    def after(
        self, transformations: Sequence[AnyTransformation], predicates: Mapping[str, AnyPredicate]
    ) -> Self:
        """Return this sink in a pipeline with these: they come first."""
        if not transformations:
            return self
        steps, chosen = (*transformations, *self.transformations), {**predicates, **self.predicates}
        return self.model_copy(update={"transformations": steps, "predicates": chosen})


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
