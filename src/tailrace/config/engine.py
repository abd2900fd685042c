"""The model of a whole file: one pipeline with one or several sources.

With several, each source has its own log and targets, in folders with its name. So one source's
part is a pipeline like any other (`EngineConfig.pipelines`), and code that works on a log or a
sink does not depend on the other sources.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from tailrace.config.engine_options import EngineOptions
from tailrace.config.fields import Name
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.sections import (
    LogConfig,
    PipelineConfig,
    RealtimeConfig,
    RealtimeSection,
    Sink,
    SparkConfig,
    SubscriptionsConfig,
    named_sinks,
)
from tailrace.config.sinks import FolderSink
from tailrace.config.source.postgres import SLOT_BYTES_MAX, slot_named_after
from tailrace.config.source.types import AnyNamedSource, AnySource
from tailrace.config.transformations.predicates import WithTransformations
from tailrace.errors import Kind, TailraceError

#: Most sources of a file. Each has three threads for its capture and one for each sink.
SOURCES_MAX = 100


class EngineConfig(WithTransformations):
    """The configuration of one engine."""

    name: Name = Field(description="Name of the pipeline; part of what sinks record, so keep it.")
    source: AnySource | None = Field(
        default=None, description="The database to capture. Either this or `sources` is required."
    )
    sources: Annotated[tuple[AnyNamedSource, ...], Field(max_length=SOURCES_MAX)] = Field(
        default=(),
        description="Several databases, on one server or on many, each with a `name`: see "
        "[Several databases](several-databases.md).",
    )
    tasks_max: int = Field(
        default=8,
        ge=1,
        le=SOURCES_MAX,
        description="Most capture tasks; `sources` are spread evenly over them. A task takes the initial "
        "snapshots of its sources one after another, and streams from all of them at once.",
    )
    log: LogConfig = Field(description="The change log.")
    sinks: tuple[Sink, ...] = Field(
        default=(), description="Targets of the changes; none: changes are only stored in the log."
    )
    spark: SparkConfig = Field(default=SparkConfig(), description="Settings of Spark.")
    subscriptions: SubscriptionsConfig | None = Field(
        default=None,
        description="Serve changes to other processes while `tailrace run` runs: see "
        "[Subscriptions](subscriptions.md). Default: no.",
    )
    realtime: RealtimeSection = Field(
        default=RealtimeConfig(),
        description="Feed handlers and sinks from memory while they keep up, `on` or a section: see "
        "[Real time](realtime.md).",
    )
    engine: EngineOptions = Field(
        default=EngineOptions(), description="How the engine works: see [engine](engine.md)."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        # `collisions` reports these problems of a file at their places; this is for callers in Python.
        if (self.source is None) == (not self.sources):
            raise ValueError("needs either source or sources")
        slots = {slot_named_after(f"{self.name}_{source.source_name}") for source in self.sources}
        if len(slots) < len(self.sources) or any(len(slot) > SLOT_BYTES_MAX for slot in slots):
            raise ValueError("needs a name for each source that gives it its own slot's name")
        object.__setattr__(self, "sinks", named_sinks(tuple(map(self._with_defaults, self.sinks))))
        return self

    def _with_defaults(self, sink: Sink) -> Sink:
        if not isinstance(sink, KafkaSinkConfig):
            return sink
        found = sink.beside(self._offsets_topics)
        if sink.atomic_source_offset_commit is not None:
            return found
        wanted = self.engine.atomic_source_offset_commit
        return found.model_copy(update={"atomic_source_offset_commit": wanted})

    @property
    def _offsets_topics(self) -> frozenset[str]:
        storage = self.engine.offsets_in_kafka
        of_sinks = {sink.offsets_topic for sink in self.sinks if isinstance(sink, KafkaSinkConfig)}
        return frozenset(of_sinks if storage is None else {*of_sinks, storage.topic})

    @property
    def _sinks(self) -> tuple[Sink, ...]:
        return tuple(sink.after(self.transformations, self.predicates) for sink in self.sinks)

    @property
    def has_several(self) -> bool:
        """Whether the file has `sources`, even if only one: logs and targets are in folders."""
        return self.source is None

    @property
    def is_atomic_for_nothing(self) -> bool:
        """Whether `engine.atomic_source_offset_commit` is set although no offsets are in Kafka."""
        has_sinks = any(isinstance(sink, KafkaSinkConfig) for sink in self.sinks)
        in_kafka = has_sinks or self.engine.offsets_in_kafka is not None
        return self.engine.atomic_source_offset_commit and not in_kafka

    def require_no_delivery(self) -> None:
        """Check that the file has no setting that only `tailrace.Engine` in a program supports.

        :raises TailraceError: `CONFIG_INVALID` if `engine.kafka` is set.
        """
        if self.engine.kafka is not None:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                "run the pipeline: engine.kafka is for records of tailrace.Engine in a program",
                "leave engine.kafka out, and write `type: kafka` among the sinks",
            )

    @property
    def folders(self) -> Iterator[FolderSink]:
        """The sinks whose target is a directory."""
        return (sink for sink in self.sinks if isinstance(sink, FolderSink))

    @property
    def needs_spark(self) -> bool:
        """Whether anything runs on Spark: a sink, tasks, or record processing."""
        runs_on = {self.engine.tasks_on, self.engine.record_processing.runs_on}
        return "spark" in runs_on or any(sink.on_spark for sink in self.sinks)

    @property
    def needs_spark_at_start(self) -> bool:
        """Whether Spark is started with the pipeline: it is needed, and not only for large ranges."""
        if self.spark.start == "eager":
            return self.needs_spark
        without = tuple(sink for sink in self.sinks if not sink.small_ranges_in_process)
        return self.model_copy(update={"sinks": without}).needs_spark

    @functools.cached_property
    def pipelines(self) -> tuple[PipelineConfig, ...]:
        """The pipeline of each source, in the order of the file, with its own log and targets."""
        if self.source is not None:
            return (
                PipelineConfig(
                    name=self.name,
                    source=self.source,
                    log=self.log,
                    sinks=self._sinks,
                    spark=self.spark,
                    realtime=self.realtime,
                ),
            )
        return tuple(self._part(source) for source in self.sources)

    def as_settings(self) -> dict[str, Any]:
        """Return the file's settings as those of its connector; references to secrets are not resolved."""
        found: dict[str, Any] = self.model_dump(mode="json", exclude_unset=True, exclude={"engine"})
        # Of the section `engine`, the settings that name topics of offsets: no sink writes records there.
        kept = self.engine.model_dump(mode="json", exclude_unset=True, include={"offset_storage", "kafka"})
        return {**found, "engine": kept} if kept else found

    def pipeline(self, source: str | None = None) -> PipelineConfig:
        """Return the pipeline of one source; None: of the only one.

        :raises TailraceError: `CONFIG_INVALID` if there is no such source, or more than one.
        """
        if source is None and len(self.pipelines) == 1:
            return self.pipelines[0]
        for pipeline in self.pipelines:
            if source is not None and pipeline.source_name == source:
                return pipeline
        known = ", ".join(pipeline.source_name for pipeline in self.pipelines)
        raise TailraceError(
            Kind.CONFIG_INVALID,
            "choose a source: the configuration has several"
            if source is None
            else f"choose source {source!r}: the configuration has {known or 'one source, without a name'}",
            f"name one of them with --source: {known}" if known else "leave --source out",
        )

    def _part(self, source: AnyNamedSource) -> PipelineConfig:
        return PipelineConfig(
            name=f"{self.name}_{source.source_name}",
            source=source,
            log=self.log.model_copy(update={"path": self.log.path / source.source_name}),
            sinks=tuple(sink.of_source(source.source_name) for sink in self._sinks),
            spark=self.spark,
            realtime=self.realtime,
        )
