"""The configuration: a pipeline's YAML file as a frozen value.

Start with `load`, or with `load_engine` for files that may have several sources. The models state
every setting with its default, unit and meaning; `docs/configuration.md` is generated from them.
"""

from __future__ import annotations

from tailrace.config.engine import EngineConfig
from tailrace.config.engine_options import EngineOptions
from tailrace.config.load import load, load_engine, read
from tailrace.config.patterns import is_exact, matches, matches_any, matches_column
from tailrace.config.problems import ConfigProblem
from tailrace.config.sections import (
    DeltaSinkConfig,
    JsonlSink,
    LogConfig,
    ParquetSink,
    PipelineConfig,
    PythonSinkConfig,
    RetentionConfig,
    SparkConfig,
)
from tailrace.config.sinks import FolderSink, SinkConfig
from tailrace.config.source.column_policy import ColumnMask, ColumnPolicy
from tailrace.config.source.postgres import NamedSource, PostgresSource
from tailrace.secrets import Secret

__all__ = [
    "ColumnMask",
    "ColumnPolicy",
    "ConfigProblem",
    "DeltaSinkConfig",
    "EngineConfig",
    "EngineOptions",
    "FolderSink",
    "JsonlSink",
    "LogConfig",
    "NamedSource",
    "ParquetSink",
    "PipelineConfig",
    "PostgresSource",
    "PythonSinkConfig",
    "RetentionConfig",
    "Secret",
    "SinkConfig",
    "SparkConfig",
    "is_exact",
    "load",
    "load_engine",
    "matches",
    "matches_any",
    "matches_column",
    "read",
]
