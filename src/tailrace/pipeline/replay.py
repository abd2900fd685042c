"""Replay: one sink fed from the log as it stands, without source or engine.

What a replay may do follows from the sinks' promise that a change is never in them twice. A
target that is new, or was emptied by its owner, is built anew from the log. A target that
holds data keeps it: only what it lacks is added. Nothing is ever wiped here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.readers import Readers
from tailrace.config import FolderSink, PipelineConfig, SinkConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import Background
from tailrace.pipeline.feed import TASK, Feed
from tailrace.pipeline.lifecycle import State
from tailrace.pipeline.points import Point, locate
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.views import EngineView, SourceView, TaskView
from tailrace.sinks.build import build
from tailrace.spark.java import require_java

_TURN_S = 0.05
_STOP_DEADLINE_S = 10.0


def choose_sink(pipeline: PipelineConfig, which: str) -> SinkConfig:
    """Return the sink that `which` names: by its name, or by its number from 0.

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


class Replay:
    """Feeds `sink` up to the log's end of this moment. `run` once.

    :param begin: where a target that holds nothing begins; None: at the very start of the log,
        or not at all if retention has removed that.
    :param into: a directory to build a second copy in, beside the sink's own.
    :raises TailraceError: `CONFIG_INVALID` for `into` where the sink's target is no directory.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        sink: SinkConfig,
        *,
        begin: Point | None = None,
        into: Path | None = None,
        observe: Callable[[EngineView], None] = lambda _: None,
    ) -> None:
        self._pipeline = pipeline
        self._sink = sink
        if into is not None and not isinstance(sink, FolderSink):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"replay sink {sink.name!r} into a directory: its target is none",
                "leave --into out",
            )
        if into is not None:
            self._sink = sink.model_copy(update={"path": into, "name": f"{sink.name}-replay"})
        self._is_copy = into is not None
        self._begin = begin
        self._observe = observe
        self._stop = threading.Event()
        self._feed: Feed | None = None
        self._end = 0

    def stop(self) -> None:
        """Ask for the end after the batch that is being written. Any thread."""
        self._stop.set()

    def run(self) -> None:
        """Bring the sink to the log's end.

        :raises TailraceError: `LOG_MISSING`; `LOG_RANGE_GONE` if retention has removed what is
            needed; `SINK_LOCKED` if an engine is writing the sink; `CONFIG_INVALID` for a mirror
            that is to begin later; what stopped the sink.
        """
        if self._begin is not None and getattr(self._sink, "mode", "append") == "mirror":
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"replay sink {self._sink.name!r} from a later place: a mirror is the sum of all changes",
                "leave --from out",
            )
        if self._sink.on_spark:
            require_java()
        directory = LogDirectory.open(self._pipeline.log.path)
        with LogReader.open(directory, TASK) as reader:
            tail = reader.end()
            begin = None if self._begin is None else locate(reader, self._begin)
        self._end = tail.offset
        spark = SparkHost(self._pipeline)
        name, source = self._pipeline.name, self._pipeline.source
        rules, modes = source.disclosure, source.value_modes
        self._feed = Feed(
            self._sink,
            name,
            directory.path,
            lambda: build(self._sink, rules, modes, directory.path),
            spark,
            begin_at=begin,
        )
        self._feed.finish_at(tail.offset)
        feeding = Background("replay", self._feed.run)
        feeding.start()
        try:
            self._watch(feeding, TaskView.at_rest(TASK, tail))
        finally:
            if self._is_copy:
                Readers(directory).remove(self._sink.name)  # nobody goes on feeding it
            spark.stop()

    def summary(self) -> str:
        """Return in words what the replay did."""
        assert self._feed is not None
        view = self._feed.view
        if view.rows == 0 and view.bytes == 0:
            held = f"sink {view.name} already holds everything up to {self._end}; nothing was written again."
            if not isinstance(self._sink, FolderSink):
                return held
            return (
                f"{held} To build it anew, move {os.fspath(self._sink.path)} away first, or name another "
                "place with --into."
            )
        return f"sink {view.name}: {view.rows:,} rows written, now at {view.position}"

    def _watch(self, feeding: Background, task: TaskView) -> None:
        assert self._feed is not None
        stop_by_s: float | None = None
        while not feeding.join(_TURN_S):
            if self._stop.is_set() and stop_by_s is None:
                self._feed.stop()
                stop_by_s = time.monotonic() + _STOP_DEADLINE_S
            if stop_by_s is not None and time.monotonic() > stop_by_s:
                return  # given up: the batch is written again at the next start
            source = SourceView(self._pipeline.source_name, 0, task, (self._feed.view,))
            self._observe(EngineView(self._pipeline.name, State.STREAMING, (source,), None))
        if feeding.error is not None:
            raise feeding.error
