"""A pipeline's file, run by the engine: what `tailrace run` does, with somebody who watches it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tailrace.config import EngineConfig
from tailrace.engine.engine import Engine
from tailrace.errors import TailraceError
from tailrace.pipeline.postgres_connector import UNTIL_CAUGHT_UP, PostgresConnector
from tailrace.pipeline.status.lifecycle import PipelineState
from tailrace.pipeline.status.views import PipelineView

#: How soon a wish to stop is heard.
_TURN_S = 0.05


class Run:
    """One run of a pipeline, from one source or from several.

    :param until_caught_up: end by itself when everything that the sources had committed at the start
        is in the log and in every sink.
    :param observe: called with the engine's view again and again, on a thread of its own, and once at
        the very end; it must return at once and not raise.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        until_caught_up: bool = False,
        observe: Callable[[PipelineView], None] = lambda _: None,
    ) -> None:
        self._name = config.name
        self._connector = PostgresConnector(observe)
        settings = {**config.as_settings(), UNTIL_CAUGHT_UP: until_caught_up}
        self._engine = Engine(config, connector=self._connector, settings=settings)
        self._stop_wanted = threading.Event()

    def run(self) -> None:
        """Run until `stop`, until caught up, or until it can't go on. Once, on one thread.

        A source fails alone, and so does a sink while its source has another one; when no source
        can go on, nor can the engine.

        :raises TailraceError: at once, `LOG_LOCKED` if a log has a writer, `SECRET_MISSING` or
            `CONFIG_INVALID` if a mask has no salt; at the end, the first
            of what ended a capture, and of what stopped a sink. If all sinks of a source have stopped,
            that is its end; else the pipeline goes on with the others, and the error is raised when it is
            stopped. With several sources, the context has the `source`, and under `failed_too` those that
            failed after it.
        """
        try:
            with self._engine as engine:
                while not self._stop_wanted.is_set() and not engine.wait(_TURN_S):
                    pass
        except TailraceError as error:
            # Of several sources it tells more than the task's error.
            raise self._connector.failure or error from error.__cause__

    def stop(self) -> None:
        """Ask for the end: sinks finish their batch, capture makes durable and acknowledges.

        Any thread, any number of times, also from a signal's handler; returns at once.
        """
        self._stop_wanted.set()

    def view(self) -> PipelineView:
        """Return the pipeline as it is now. Any thread."""
        return self._connector.view() or PipelineView(self._name, PipelineState.STARTING, (), None)
