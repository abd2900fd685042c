"""Creates sinks from their configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.changelog.reader import LogReader
from tailrace.config.kafka import KafkaSinkConfig as KafkaConfig
from tailrace.config.sections import DeltaSinkConfig as DeltaConfig
from tailrace.config.sections import JsonlSink as JsonlConfig
from tailrace.config.sections import ParquetSink as ParquetConfig
from tailrace.config.sections import PythonSinkConfig as PythonConfig
from tailrace.config.sinks import FolderSink, SinkConfig
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.errors import REPORT, Kind, TailraceError
from tailrace.model import ValueModes
from tailrace.sinks.contract import Sink, ahead_of_log
from tailrace.sinks.delta.append import DeltaAppend
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.delta.sink import DeltaMode, DeltaSink, recorded_delta_position, require_path
from tailrace.sinks.files.jsonl import JSONL
from tailrace.sinks.files.parquet import parquet_format
from tailrace.sinks.files.sink import FileSink, recorded_files_position
from tailrace.sinks.target import require_ours_or_unused
from tailrace.sinks.write_job import SinkInput
from tailrace.transforms.tables import NO_STEPS, TableChain, table_chain

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.changelog.directory import LogDirectory
    from tailrace.config.source.section import SourceSection


def build(config: SinkConfig, source: SourceSection, log_path: Path) -> Sink:
    """Return the sink for `config`, not yet opened.

    :param source: the log's source, for its masks, handling modes and snapshots.
    :param log_path: path of the log that feeds the sink.
    """
    rules, modes = source.disclosure, source.value_modes
    if isinstance(config, FolderSink):
        given = SinkInput(config.tables, rules, modes, chain_of(config))
        return _of_tables(config, given, reads_once=source.snapshot_has_keys_once)
    if isinstance(config, PythonConfig):
        # Imported here because it loads the engine's processing.
        from tailrace.sinks.python import PythonSink

        return PythonSink(config, log_path, rules, modes)
    if isinstance(config, KafkaConfig):
        return _kafka(config, rules, modes)
    raise _unknown(config)


def _of_tables(config: FolderSink, given: SinkInput, *, reads_once: bool) -> Sink:
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
    """Return the transformations that a sink of tables applies to changes before it writes them.

    :raises TailraceError: `CONFIG_INVALID`, `SECRET_MISSING`.
    """
    if not config.transformations:
        return NO_STEPS
    keeps_keys = isinstance(config, DeltaConfig) and config.mode == "mirror"
    return table_chain(config.transformations, config.predicates, keeps_keys=keeps_keys)


def recorded_position(config: SinkConfig, pipeline: str, log: LogDirectory, task: str) -> int | None:
    """Return a sink's recorded position, whether or not an engine writes to it.

    Reads only: takes no lock and completes no interrupted commit. None: nothing was written yet.

    :raises TailraceError: `SINK_FOREIGN`, `SINK_DAMAGED`, and errors of a Kafka cluster.
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


def check_target(config: FolderSink, pipeline: str, log: LogDirectory | None, task: str) -> None:
    """Check that the sink may write into its directory: it is the sink's own, or unused. Reads only.

    :param log: None: there is none yet.
    :raises TailraceError: `SINK_FOREIGN`, `SINK_DAMAGED`, `SINK_AHEAD_OF_LOG`; `CONFIG_INVALID` for a path
        that is not allowed.
    """
    if isinstance(config, DeltaConfig):
        require_path(config.name, config.path)
    kind = f"delta {config.mode}" if isinstance(config, DeltaConfig) else getattr(config, "type", "")
    identity = None if log is None else log.identity
    require_ours_or_unused(config.name, config.path, kind, identity, pipeline)
    if log is not None and task in log.tasks():
        require_target_within_log(config, pipeline, log, task)


def require_target_within_log(config: FolderSink, pipeline: str, log: LogDirectory, task: str) -> None:
    """Check that the log has all changes up to the recorded position of a sink. Reads only.

    :raises TailraceError: `SINK_AHEAD_OF_LOG`; as `recorded_position`; `LOG_MISSING`, `LOG_CORRUPT`.
    """
    position = recorded_position(config, pipeline, log, task) or 0
    with LogReader.open(log, task) as reader:
        if position > reader.end().offset and position > (end := reader.end_on_disk()):
            raise ahead_of_log(config.name, task, position, end)


def _kafka(config: KafkaConfig, rules: ColumnPolicy, modes: ValueModes) -> Sink:
    # Imported here so that pipelines without Kafka do not load its client.
    from tailrace.converters import factory as converters
    from tailrace.sinks.kafka.sink import KafkaSink
    from tailrace.transforms import factory as transformations

    converter = converters.build(config.converter.type, config.converter_options())
    chain = transformations.build(config.transformations, config.predicates, splits_updates=True)
    return KafkaSink(config, converter, chain, rules, modes)


def _unknown(config: SinkConfig) -> TailraceError:
    what = type(config).__name__
    return TailraceError(
        Kind.INTERNAL, f"create a sink: {what} is not a known configuration", REPORT, {"sink": config.name}
    )
