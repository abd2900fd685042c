"""What an engine with this connector shows of itself: the document that `tailrace status` reads.

Written every second from the lanes of all tasks, on a thread of its own; nothing waits for it, and
nothing is decided by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tailrace.config import EngineConfig
from tailrace.errors import NEEDS_SNAPSHOT, TailraceError
from tailrace.pipeline.background import Background
from tailrace.pipeline.lifecycle import Event, Lifecycle, toward
from tailrace.pipeline.status import StatusFile
from tailrace.pipeline.views import EngineView, SourceView

#: How often states are looked at: one that lasts less may not be seen.
_LOOK_S = 0.1
_STOP_DEADLINE_S = 5.0


class Showing:
    """Writes the status file from `start` to `stop`. `show` from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._file = StatusFile(config.log.path)
        self._views: dict[int, Callable[[], Sequence[SourceView]]] = {}
        self._life = Lifecycle()
        self._stop = threading.Event()
        self._thread = Background("status", self._run)

    def show(self, task: int, views: Callable[[], Sequence[SourceView]]) -> None:
        """Show the sources of a task, in place of those that it had in an earlier life."""
        self._views = {**self._views, task: views}

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write how it all ended. Once, when every task was stopped."""
        self._stop.set()
        self._thread.join(_STOP_DEADLINE_S)
        self._step(Event.STOP_CALLED)
        view = self.view()
        for source in view.sources:
            if (error := source.task.error) is not None and source.task.state in _FAILED:
                self._step(Event.CHANGES_LOST if error.kind in NEEDS_SNAPSHOT else Event.FAILURE)
        self._step(Event.EVERYTHING_STOPPED)
        self._write(self.view(), last=True)

    def view(self) -> EngineView:
        """Return the engine as it is now."""
        sources = tuple(source for views in self._views.values() for source in views())
        return EngineView(self._config.name, self._life.state, sources, _first_error(sources))

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            view = self.view()
            event = toward(self._life.state, (source.task.state for source in view.sources))
            if event is not None:
                self._step(event)
            self._write(view, last=False)

    def _write(self, view: EngineView, *, last: bool) -> None:
        # What lies at the log's place may be another engine's; the place of several logs is held.
        if self._config.has_several or any(source.task.log_end is not None for source in view.sources):
            (self._file.last if last else self._file.turn)(view)

    def _step(self, event: Event) -> None:
        self._life = self._life.step(event)


_FAILED = frozenset({"failed", "needs_snapshot"})


def _first_error(sources: Sequence[SourceView]) -> TailraceError | None:
    return next((source.task.error for source in sources if source.task.state in _FAILED), None)
