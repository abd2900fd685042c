"""One pipeline, one YAML file, one frozen value.

Start with `load`, or with `load_engine` where several sources may be. The models state every
setting with its default, unit and meaning; `docs/configuration.md` is generated from them.
"""

from __future__ import annotations

from tailrace.config.disclosure import Disclosure, Mask
from tailrace.config.engine import EngineConfig
from tailrace.config.engine_options import EngineOptions
from tailrace.config.load import load, load_engine, read
from tailrace.config.patterns import is_exact, matches, matches_any, matches_column
from tailrace.config.postgres import NamedSource, PostgresSource
from tailrace.config.problems import Problem
from tailrace.config.sections import (
    DeltaSink,
    JsonlSink,
    LogConfig,
    ParquetSink,
    PipelineConfig,
    PythonSink,
    RetentionConfig,
    SparkConfig,
)
from tailrace.config.sinks import FolderSink, SinkConfig
from tailrace.secrets import Secret

__all__ = [
    "DeltaSink",
    "Disclosure",
    "EngineConfig",
    "EngineOptions",
    "FolderSink",
    "JsonlSink",
    "LogConfig",
    "Mask",
    "NamedSource",
    "ParquetSink",
    "PipelineConfig",
    "PostgresSource",
    "Problem",
    "PythonSink",
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
