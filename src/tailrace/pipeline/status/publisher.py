"""Publishes the status of a running engine to the display and to `tailrace status`.

It reads the sources' views ten times a second, on its own thread; no other thread waits for it, and no
decision depends on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from tailrace.changelog.durable import NO_ROOM, write_whole
from tailrace.config import EngineConfig
from tailrace.errors import TailraceError
from tailrace.pipeline.background import Background
from tailrace.pipeline.status.document import FILE_NAME
from tailrace.pipeline.status.views import (
    ENDED,
    PipelineState,
    PipelineView,
    SourceView,
    state_at_end,
    state_while_running,
)

log = structlog.get_logger(__name__)

#: Interval at which states are read, in seconds; a state that lasts less may be missed.
_LOOK_S = 0.1
_STOP_DEADLINE_S = 5.0
WRITE_INTERVAL_S = 1.0


class StatusFile:
    """Writes the status file of a running engine, once a second. One thread."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._next_s = 0.0
        self._has_warned = False

    def turn(self, view: PipelineView) -> None:
        """Write `view` if `WRITE_INTERVAL_S` have passed."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + WRITE_INTERVAL_S
            self.last(view)

    def last(self, view: PipelineView) -> None:
        """Write `view` now. If the file can't be written, a warning is logged once.

        Only for the engine that holds the log's lock.
        """
        path, content = self._log_path / FILE_NAME, json.dumps(view.as_json()).encode()
        try:
            write_whole(path, content)
        except OSError as error:
            is_written = error.errno in NO_ROOM and _is_overwritten(path, content)
            if not is_written and not self._has_warned:
                log.warning("could not write the status file", file=str(path), reason=error.strerror)
                self._has_warned = True


def _is_overwritten(path: Path, content: bytes) -> bool:
    """Write the content over the file's old one, which needs no room; return whether that succeeded.

    A reader may see a half-written file, which counts as none. So `status` shows what a full disk delays.
    """
    with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
        return file.write(content) == len(content) and file.truncate() == len(content)
    return False


class StatusPublisher:
    """Publishes the engine's status from `start` to `stop`. Other methods may be called from any thread.

    :param observe: called with each view, about every 0.1 s, and with the last one.
    """

    def __init__(self, config: EngineConfig, observe: Callable[[PipelineView], None]) -> None:
        self._config = config
        self._observe = observe
        self._file = StatusFile(config.log.path)
        self._views: dict[int, Callable[[], Sequence[SourceView]]] = {}
        self._ending: threading.Event | None = None
        self._state = PipelineState.STARTING
        self._broken: TailraceError | None = None  # a failure that belongs to no source
        self._failed: dict[str, TailraceError] = {}  # by source, in the order in which they failed
        self._stop = threading.Event()
        self._thread = Background("status", self._run)

    def show(self, task: int, views: Callable[[], Sequence[SourceView]], ending: threading.Event) -> None:
        """Publish the sources of a task, instead of those of an earlier attempt.

        :param ending: set when the engine ends.
        """
        self._views = {**self._views, task: views}
        self._ending = ending

    def fail(self, error: TailraceError) -> None:
        """Publish a failure that belongs to no source."""
        self._broken = error

    @property
    def failure(self) -> TailraceError | None:
        """The engine's present or later failure: the first one, naming the others."""
        if self._broken is not None or not self._failed:
            return self._broken
        first, *others = self._failed
        error = self._failed[first]
        return error.changed({"failed_too": ", ".join(others)}) if others else error

    def start(self) -> None:
        """Start to publish."""
        self._thread.start()

    def stop(self) -> None:
        """Publish the final status. Called once, after all tasks were stopped."""
        self._stop.set()
        self._thread.join(_STOP_DEADLINE_S)
        sources = self._sources()
        self._look_for_failures(sources)
        self._enter(state_at_end((self._broken, *self._failed.values())))
        self._show(sources, last=True)

    def view(self) -> PipelineView:
        """Return the present view of the engine."""
        return self._view(self._sources())

    def _view(self, sources: tuple[SourceView, ...]) -> PipelineView:
        return PipelineView(self._config.name, self._state, sources, self.failure, os.getpid())

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            # Read once per turn: most of this thread's cost while nothing happens.
            sources = self._sources()
            self._look_for_failures(sources)
            phases = (source.task.state for source in sources)
            is_ending = self._ending is not None and self._ending.is_set()
            self._enter(PipelineState.STOPPING if is_ending else state_while_running(phases, self._state))
            self._show(sources, last=False)

    def _sources(self) -> tuple[SourceView, ...]:
        found = [source for views in self._views.values() for source in views()]
        # In the order of the pipeline file, whatever their tasks.
        places = {pipeline.source_name: place for place, pipeline in enumerate(self._config.pipelines)}
        return tuple(sorted(found, key=lambda source: places[source.name]))

    def _look_for_failures(self, sources: tuple[SourceView, ...]) -> None:
        now = {source.name: source.task for source in sources}
        failed = {name: task.error for name, task in now.items() if task.state in _FAILED and task.error}
        # A source whose capture was restarted no longer counts as failed.
        self._failed = {
            **{name: failed[name] for name in self._failed if name in failed},
            **{name: error for name, error in failed.items() if name not in self._failed},
        }

    def _show(self, sources: tuple[SourceView, ...], *, last: bool) -> None:
        view = self._view(sources)
        (self._file.last if last else self._file.turn)(view)
        self._observe(view)

    def _enter(self, state: PipelineState) -> None:
        if state is not self._state and self._state not in ENDED:
            self._state = state
            log.info("pipeline", state=str(state))


_FAILED = frozenset({PipelineState.FAILED, PipelineState.NEEDS_SNAPSHOT})
