"""From a sink's configuration to the sink."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.config.kafka import KafkaSinkConfig as KafkaConfig
from tailrace.config.sections import DeltaSinkConfig as DeltaConfig
from tailrace.config.sections import JsonlSink as JsonlConfig
from tailrace.config.sections import ParquetSink as ParquetConfig
from tailrace.config.sections import PythonSinkConfig as PythonConfig
from tailrace.config.sinks import FolderSink, SinkConfig
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.errors import REPORT, Kind, TailraceError
from tailrace.model import ValueModes
from tailrace.sinks.contract import Sink
from tailrace.sinks.delta.append import DeltaAppend
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.delta.sink import DeltaMode, DeltaSink, recorded_delta_position
from tailrace.sinks.files.jsonl import JSONL
from tailrace.sinks.files.parquet import parquet_format
from tailrace.sinks.files.sink import FileSink, recorded_files_position
from tailrace.sinks.write_job import SinkInput
from tailrace.transforms.tables import NO_STEPS, TableChain, table_chain

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.changelog.directory import LogDirectory


def build(
    config: SinkConfig, rules: ColumnPolicy, modes: ValueModes, log_path: Path, reads_once: bool = False
) -> Sink:
    """Return the sink that `config` describes, not yet opened.

    :param log_path: of the log that it is fed from.
    :param rules: which columns are delivered, and how they are masked.
    :param modes: how the source wants values to be given.
    :param reads_once: the source's snapshots have each key once (`SourceSection.snapshot_has_keys_once`).
    """
    if isinstance(config, FolderSink):
        return _of_tables(config, rules, modes, reads_once=reads_once)
    if isinstance(config, PythonConfig):
        # Only now: it brings the engine's processing.
        from tailrace.sinks.python import PythonSink

        return PythonSink(config, log_path, rules, modes)
    if isinstance(config, KafkaConfig):
        return _kafka(config, rules, modes)
    raise _unknown(config)


def _of_tables(config: FolderSink, rules: ColumnPolicy, modes: ValueModes, *, reads_once: bool) -> Sink:
    given = SinkInput(config.tables, rules, modes, chain_of(config))
    if isinstance(config, ParquetConfig):
        return FileSink(config.name, config.path, parquet_format(config.compression), given)
    if isinstance(config, JsonlConfig):
        return FileSink(config.name, config.path, JSONL, given)
    if isinstance(config, DeltaConfig):
        mode: DeltaMode = DeltaAppend(config.on_type_change)
        if config.mode == "mirror":
            mode = DeltaMirror(config.keyless, config.on_type_change, reads_once=reads_once)
        return DeltaSink(config.name, config.path, mode, given)
    raise _unknown(config)


def chain_of(config: FolderSink) -> TableChain:
    """Return what a sink of tables does to changes before it writes them.

    :raises TailraceError: `CONFIG_INVALID`, `SECRET_MISSING`.
    """
    if not config.transformations:
        return NO_STEPS
    keeps_keys = isinstance(config, DeltaConfig) and config.mode == "mirror"
    return table_chain(config.transformations, config.predicates, keeps_keys=keeps_keys)


def recorded_position(config: SinkConfig, pipeline: str, log: LogDirectory, task: str) -> int | None:
    """Return how far a sink has recorded to be, whether or not an engine writes to it.

    Reads only: no lock, nothing brought to its end. None: nothing was written yet.

    :raises TailraceError: `SINK_FOREIGN`, `SINK_DAMAGED`, and what asking a cluster meets.
    """
    if isinstance(config, DeltaConfig):
        return recorded_delta_position(config.name, config.path, config.mode, pipeline, log.identity, task)
    if isinstance(config, ParquetConfig | JsonlConfig):
        return recorded_files_position(config.name, config.path, config.type, pipeline, log.identity, task)
    if isinstance(config, PythonConfig):
        from tailrace.sinks.python import recorded_python_position

        return recorded_python_position(log, config.name, task)
    if isinstance(config, KafkaConfig):
        from tailrace.sinks.kafka.sink import recorded_kafka_position

        return recorded_kafka_position(config, pipeline, log.identity)
    raise _unknown(config)


def _kafka(config: KafkaConfig, rules: ColumnPolicy, modes: ValueModes) -> Sink:
    # Only now: pipelines without Kafka need not load its client.
    from tailrace.converters import factory as converters
    from tailrace.sinks.kafka.sink import KafkaSink
    from tailrace.transforms import factory as transformations

    converter = converters.build(config.converter.type, config.converter_options())
    chain = transformations.build(config.transformations, config.predicates, splits_updates=True)
    return KafkaSink(config, converter, chain, rules, modes)


def _unknown(config: SinkConfig) -> TailraceError:
    what = type(config).__name__
    return TailraceError(
        Kind.INTERNAL, f"look for a sink: nothing is known of {what}", REPORT, {"sink": config.name}
    )
