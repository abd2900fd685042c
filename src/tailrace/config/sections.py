"""The sections `log`, `sinks`, `spark`, `realtime` and `subscriptions`, and the pipeline of one source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from tailrace.config.converters import ConverterSection
from tailrace.config.fields import MIB, ByteCount, LocalPath, Name, Section, Setting
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.sinks import FolderSink, SinkConfig
from tailrace.config.source.types import PipelineSource
from tailrace.secrets import Secret, resolved


class RetentionConfig(Section):
    """Limits for the removal of old segments of the log. Without a limit, none is removed."""

    size_bytes: Annotated[ByteCount, Field(ge=MIB)] | None = Field(
        default=None, description="Remove the oldest segments while the log is larger than this."
    )
    age_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Remove segments whose last commit is older than this many seconds."
    )
    on_slow_reader: Literal["hold", "drop"] = Field(
        default="hold",
        description="If a limit requires the removal of segments that a sink has not read yet: `hold` keeps "
        "them until it has, `drop` removes them, and the sink stops with an error.",
    )


class LogConfig(Section):
    """The change log."""

    path: LocalPath = Field(description="Directory of the log.")
    segment_bytes: ByteCount = Field(
        default=256 * MIB,
        ge=64 * 1024,
        le=16 * 1024 * MIB,
        description="Size at which a segment is sealed, without the description of all tables at its start.",
    )
    compression: Literal["none", "lz4", "zstd"] = Field(
        default="lz4",
        description="Compression of the log's blocks, except those with rows of a snapshot, which it would "
        "slow down.",
    )
    retention: RetentionConfig = Field(
        default=RetentionConfig(), description="When old segments are removed."
    )


class DeltaSinkConfig(FolderSink):
    """Delta tables."""

    type: Literal["delta"] = Field(description="Kind of the sink.")
    mode: Literal["append", "mirror"] = Field(
        default="append",
        description="`append`: one row per change; `mirror`: the table's current state.",
    )
    keyless: Literal["refuse", "full_row"] = Field(
        default="refuse",
        description="Tables without a key under `mirror`: `refuse` stops the sink; `full_row` uses the "
        "whole row as the key (needs `REPLICA IDENTITY FULL`; equal rows are counted).",
    )
    on_type_change: Literal["stop", "follow"] = Field(
        default="stop",
        description="If a column's type changes and the target's rows can't be converted exactly: `stop` "
        "stops the sink; `follow` continues: under `append` the column becomes text, under `mirror` rows "
        "get their old values cast to the new type, or NULL.",
    )


class FileSinkConfig(FolderSink):
    """A sink of plain files."""

    mode: Literal["append"] = Field(default="append", description="`append`: one row or line per change.")
    interval_ms: int = Field(
        default=150,
        ge=0,
        le=3_600_000,
        description="As for all sinks; each batch writes one file for each table that changed.",
    )


class ParquetSink(FileSinkConfig):
    """Parquet files."""

    type: Literal["parquet"] = Field(description="Kind of the sink.")
    compression: Literal["none", "snappy", "zstd"] = Field(
        default="zstd", description="Compression of the files."
    )


class JsonlSink(FileSinkConfig):
    """JSON Lines files, one line per change."""

    type: Literal["jsonl"] = Field(description="Kind of the sink.")


def _handler(value: str) -> str:
    module, colon, name = value.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError("must be package.module:function")
    return value


class PythonSinkConfig(SinkConfig):
    """The user's function, called in this process; each change at least once, in order."""

    type: Literal["python"] = Field(description="Kind of the sink.")
    handler: Annotated[str, AfterValidator(_handler)] = Field(
        description="The function, as `package.module:function`."
    )
    batch: bool = Field(
        default=True,
        description="Whether it is called with batches of records; `false`: with one record at a time.",
    )
    converter: ConverterSection | None = Field(
        default=None,
        description="Format in which it gets records, as `engine.converter`. Default: not converted.",
    )
    python_path: LocalPath = Field(
        default=Path(),
        validate_default=True,
        description="Directory of the module, searched after Python's own. Default: that of the file.",
    )
    batch_rows_max: int = Field(default=10_000, ge=1, le=1_000_000, description="Most records in one batch.")
    batch_bytes_max: ByteCount = Field(
        default=64 * MIB, ge=64 * 1024, le=1024 * MIB, description="Most bytes of the log in one batch."
    )
    interval_ms: int = Field(
        default=50,
        ge=0,
        le=3_600_000,
        description="Least milliseconds from batch to batch when there is no backlog.",
    )

    retry_attempts_max: int = Field(
        default=8,
        ge=-1,
        le=1000,
        description="Most retries of the function with the same records before this sink stops. "
        "-1: no limit.",
    )

    @model_validator(mode="after")
    def _keep_python_path(self) -> Self:
        # The default, the file's directory, is only known here: the settings must be passed on with it.
        self.model_fields_set.add("python_path")
        return self

    @property
    def on_spark(self) -> bool:
        return False

    @property
    def target(self) -> str:
        return self.handler.rpartition(":")[2].rpartition(".")[2]


Sink = Annotated[
    DeltaSinkConfig | ParquetSink | JsonlSink | KafkaSinkConfig | PythonSinkConfig,
    Field(discriminator="type"),
]
SINK_TYPES: dict[str, type[SinkConfig]] = {
    "delta": DeltaSinkConfig,
    "parquet": ParquetSink,
    "jsonl": JsonlSink,
    "kafka": KafkaSinkConfig,
    "python": PythonSinkConfig,
}


class SparkConfig(Section):
    """Settings of the Spark session."""

    master: str = Field(default="local[*]", min_length=1, description="Spark's master URL.")
    start: Literal["eager", "when_needed"] = Field(
        default="eager",
        description="When Spark is started: `eager`, with the pipeline; `when_needed`, when a backlog or a "
        "merge is too large for this process. A pipeline that never has one needs no Java.",
    )
    conf: dict[str, Setting] = Field(
        default={}, description="Spark properties under their own names; values may be references."
    )

    def settings(self) -> dict[str, str]:
        """Return `conf` with references resolved now.

        :raises TailraceError: `SECRET_MISSING`.
        """
        return {name: resolved(value) for name, value in self.conf.items()}


class RealtimeConfig(Section):
    """Settings for feeding consumers from memory, and for those that can't keep up."""

    enabled: bool = Field(
        default=False,
        description="Whether real time is on. The command `tailrace realtime` overrides this.",
    )
    buffer_bytes: Annotated[ByteCount, Field(ge=64 * 1024)] | None = Field(
        default=None,
        description="Most bytes of changes that wait in memory; with more, a consumer is fed from the log. "
        "Default: twice `log.segment_bytes`.",
    )
    return_automatically: bool = Field(
        default=False,
        description="Return to memory automatically after such a fall-back: after a second, then after twice "
        "as long each time, at most a minute. `false`: wait for `tailrace realtime on`.",
    )


def _from_switch(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool | str) else value


#: The section, or `on` or `off` instead of it.
RealtimeSection = Annotated[RealtimeConfig, BeforeValidator(_from_switch)]


#: The default of `subscriptions.token`.
TOKEN = Secret("${env:TAILRACE_TOKEN}")


def _origin(value: str) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s*]+", value):
        raise ValueError(
            "must be scheme and host, with a port if it is not the scheme's: http://localhost:3000"
        )
    return value.lower()


class SubscriptionsConfig(Section):
    """Serves changes to other processes, over HTTP on this machine."""

    port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        default=8765, description="Port on 127.0.0.1; 0: any free port; it is logged."
    )
    token: Secret = Field(
        default=TOKEN,
        description="Token that clients must send; a reference, `${env:NAME}` or `${file:/path}`. "
        "Default: `${env:TAILRACE_TOKEN}`.",
    )
    origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = Field(
        default=(),
        description="Web sites whose pages may subscribe, as `http://localhost:3000`. Only browsers need "
        "this.",
    )
    subscribers_max: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=1000, description="Most subscribers at a time."
    )


class PipelineConfig(BaseModel):
    """One pipeline: a source, its log, and the sinks that are fed from the log.

    The model of a file is `EngineConfig`, which has a `PipelineConfig` for each source.
    """

    model_config = Section.model_config

    name: Name
    source: PipelineSource
    log: LogConfig
    sinks: tuple[Sink, ...] = ()
    spark: SparkConfig = SparkConfig()
    realtime: RealtimeSection = RealtimeConfig()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        # The object is frozen, but these defaults need more than one section.
        object.__setattr__(self, "source", self.source.for_pipeline(self.name))
        object.__setattr__(self, "sinks", named_sinks(self.sinks))
        return self

    @property
    def folders(self) -> Iterator[FolderSink]:
        """The sinks whose target is a directory."""
        return (sink for sink in self.sinks if isinstance(sink, FolderSink))

    @property
    def source_name(self) -> str:
        """The source's name among several; empty if it is the only one."""
        return self.source.source_name


def named_sinks(sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    """Return `sinks` with a default name for each that has none."""
    taken = {sink.name for sink in sinks if sink.name}
    named: list[Sink] = []
    for sink in sinks:
        if not sink.name:
            stem = default_name(sink)
            name = next(
                n for n in (stem, *(f"{stem}-{k}" for k in range(2, len(sinks) + 2))) if n not in taken
            )
            taken.add(name)
            sink = sink.model_copy(update={"name": name})  # noqa: PLW2901
        named.append(sink)
    return tuple(named)


def default_name(sink: Sink) -> str:
    """Return the name of a sink that the file gives none, if no other sink has it."""
    words = f"{sink.type}-{sink.target}" if sink.target else sink.type
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", words)[:50]
