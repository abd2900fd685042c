"""Replay: feeds one sink from the existing log, without source or engine.

A change is never written to a sink twice. So a target that is new, or was emptied by its owner, is built
again from the log, and a target with data gets only the changes that it lacks. A replay deletes nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import kept_disclosure
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.config import ColumnPolicy, EngineConfig, FolderSink, PipelineConfig, SinkConfig
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.patterns import one_column
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import Background
from tailrace.pipeline.log.root import is_running, require_owner
from tailrace.pipeline.log.schemas import versions
from tailrace.pipeline.sink_worker import SinkWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status.document import document
from tailrace.pipeline.status.views import CaptureView, PipelineState, PipelineView, SinkState, SourceView
from tailrace.protocol.renames import Renames
from tailrace.ranges.positions import LogPoint, locate
from tailrace.sinks.build import build
from tailrace.spark.java import require_java

_TURN_S = 0.05
_STOP_DEADLINE_S = 10.0


def choose_sink(pipeline: PipelineConfig, which: str) -> SinkConfig:
    """Return the sink with the name or the number (from 0) `which`.

    :raises TailraceError: `CONFIG_INVALID` if there is none.
    """
    for sink in pipeline.sinks:
        if sink.name == which:
            return sink
    if which.isdecimal() and int(which) < len(pipeline.sinks):
        return pipeline.sinks[int(which)]
    known = ", ".join(f"{number} or {sink.name}" for number, sink in enumerate(pipeline.sinks))
    raise TailraceError(
        Kind.CONFIG_INVALID,
        f"choose sink {which!r}: the configuration has {known or 'no sinks'}",
        "name one of them with --sink",
    )


def _require_apart(into: Path, pipeline: PipelineConfig) -> None:
    """Check that a copy overlaps neither the log nor a sink.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    held = {"the log": pipeline.log.path}
    held |= {f"sink {sink.name!r}": sink.path for sink in pipeline.sinks if isinstance(sink, FolderSink)}
    place = into.resolve()
    for owner, path in held.items():
        other = path.resolve()
        if place.is_relative_to(other) or other.is_relative_to(place):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"replay into {os.fspath(into)}: it overlaps the directory of {owner}",
                "name a new directory with --into",
            )


def require_not_fed(config: EngineConfig, pipeline: PipelineConfig, sink: SinkConfig) -> None:
    """Check that no engine feeds a Kafka sink: a replay would fence its producer, and the sink would stop.

    Other sinks lock their targets.

    :raises TailraceError: `SINK_LOCKED`.
    """
    if not isinstance(sink, KafkaSinkConfig) or not is_running(config):
        return
    ended = (SinkState.FAILED, SinkState.STOPPED)
    fed = {
        (each.get("source", ""), each["name"])
        for each in document(config)["sinks"]
        if each["state"] not in ended
    }
    if (pipeline.source_name, sink.name) in fed:
        raise TailraceError(
            Kind.SINK_LOCKED,
            f"replay sink {sink.name!r}: the pipeline is running, and writes it",
            "it needs no replay while the pipeline writes it; otherwise stop the pipeline first",
            {"sink": sink.name},
        )


def _require_columns(directory: LogDirectory, rules: ColumnPolicy, renames: Renames) -> None:
    """Check that each pattern for a single column finds it in the log, unless capture has used the pattern.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    known = {pattern for _, pattern in kept_disclosure(directory, TASK).column_patterns()}
    new = [
        (place, pattern, one)
        for place, pattern in rules.column_patterns()
        if pattern not in known and (one := one_column(pattern)) is not None
    ]
    if not new:
        return
    names = renames.names() | {
        (version.relation.schema, version.relation.table, column.name)
        for version in versions(directory, TASK, None, ColumnPolicy())
        for column in version.columns
    }
    for place, pattern, one in new:
        if one not in names:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"look for the columns of {place}: {pattern!r} names no column that the log knows",
                f"correct {place}; or run the pipeline with it first, which asks the source",
            )


class Replay:
    """Feeds `sink` up to the current end of the log. `run` once.

    :param begin: where an empty target begins: with the whole transaction that contains this place; None:
        at the very start of the log, or not at all if retention has removed that.
    :param into: a directory for a second copy of the target.
    :raises TailraceError: `CONFIG_INVALID` for `into` if the sink's target is not a directory.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        sink: SinkConfig,
        *,
        begin: LogPoint | None = None,
        into: Path | None = None,
        observe: Callable[[PipelineView], None] = lambda _: None,
    ) -> None:
        self._pipeline = pipeline
        self._sink = sink
        if into is not None and not isinstance(sink, FolderSink):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"replay sink {sink.name!r} into a directory: its target is not a directory",
                "leave --into out",
            )
        if into is not None:
            _require_apart(into, pipeline)
            self._sink = sink.model_copy(update={"path": into})
        self._is_copy = into is not None
        self._begin = begin
        self._observe = observe
        self._stop = threading.Event()
        self._feed: SinkWorker | None = None
        self._end = 0
        self._is_at_end = False

    def stop(self) -> None:
        """Ask for the end after the current batch. Any thread."""
        self._stop.set()

    def run(self) -> None:
        """Feed the sink up to the log's end.

        :raises TailraceError: `LOG_MISSING`; `LOG_RANGE_GONE` if retention has removed what is
            needed; `SINK_LOCKED` if an engine is writing the sink; `CONFIG_INVALID` for a mirror
            with `begin`; `ENVIRONMENT_UNFIT` if root runs it for another user's pipeline; the error that
            stopped the sink.
        """
        if self._begin is not None and getattr(self._sink, "mode", "append") == "mirror":
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"replay sink {self._sink.name!r} from a later place: a mirror is the sum of all changes",
                "leave --from out",
            )
        if self._sink.on_spark and self._pipeline.spark.start == "eager":
            require_java()
        directory = LogDirectory.open(self._pipeline.log.path)
        if not self._is_copy and not isinstance(self._sink, KafkaSinkConfig):
            attempted, way_out = f"replay sink {self._sink.name!r}", "name another directory with --into"
            require_owner(directory.path, attempted, way_out)
        with LogReader.open(directory, TASK) as reader:
            tail = reader.end()
            _require_columns(directory, self._pipeline.source, reader.renames())
            begin = None if self._begin is None else reader.boundary_up_to(locate(reader, self._begin))
        self._end = tail.offset
        self._is_at_end = begin == tail.offset
        with contextlib.ExitStack() as stack:
            known_as = ""
            if self._is_copy:  # under a name that no sink can have: the copy is not fed any further
                known_as = stack.enter_context(Readers(directory).temporary(f"replay:{self._sink.name}"))
            spark = SparkHost(self._pipeline)
            stack.callback(spark.stop)
            name, source = self._pipeline.name, self._pipeline.source
            self._feed = SinkWorker(
                self._sink,
                name,
                directory.path,
                lambda: build(self._sink, source, directory.path),
                spark,
                begin_at=begin,
                source=self._pipeline.source_name,
                reader=known_as,
            )
            self._feed.finish_at(tail.offset)
            feeding = Background("replay", self._feed.run)
            feeding.start()
            self._watch(feeding, CaptureView.at_rest(TASK, tail))

    def summary(self) -> str:
        """Return a sentence that says what the replay wrote."""
        assert self._feed is not None
        view = self._feed.view
        if self._stop.is_set() and (view.position or 0) < self._end:
            return (
                f"sink {view.name}: stopped, {view.rows:,} rows written, {view.position or 0} of {self._end} "
                "reached; the same command continues."
            )
        if self._is_at_end:
            return (
                f"sink {view.name}: nothing was written, because the log has nothing from {self._end} on. "
                "Repeat the command when it has new changes."
            )
        if view.rows == 0 and view.bytes == 0:
            held = f"sink {view.name} already holds everything up to {self._end}; nothing was written again."
            if not isinstance(self._sink, FolderSink):
                return held
            return (
                f"{held} To build it again, move {os.fspath(self._sink.path)} away first, or name another "
                "place with --into."
            )
        return f"sink {view.name}: {view.rows:,} rows written, now at {view.position}"

    def _watch(self, feeding: Background, task: CaptureView) -> None:
        assert self._feed is not None
        stop_by_s: float | None = None
        while not feeding.join(_TURN_S):
            if self._stop.is_set() and stop_by_s is None:
                self._feed.stop()
                stop_by_s = time.monotonic() + _STOP_DEADLINE_S
            if stop_by_s is not None and time.monotonic() > stop_by_s:
                return  # without waiting any longer: the batch is written again at the next start
            source = SourceView(self._pipeline.source_name, 0, task, (self._feed.view,))
            self._observe(PipelineView(self._pipeline.name, PipelineState.STREAMING, (source,), None))
        if feeding.error is not None:
            raise feeding.error
