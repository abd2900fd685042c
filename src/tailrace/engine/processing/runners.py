"""Where records are processed: in this process, or by a runner that another package announces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tailrace import extensions
from tailrace.config import SparkConfig
from tailrace.engine.contracts import RecordProcessor
from tailrace.engine.processing.context import Order, ProcessingConfig
from tailrace.engine.processing.handlers import Handler
from tailrace.engine.processing.processors import processor_for
from tailrace.engine.processing.stage import Convert, Transform


class Runner(Protocol):
    """Makes the record processors of an engine, whose work is done somewhere else.

    Found by the entry point `tailrace.runners`, and made with the engine's name and the settings of Spark.
    """

    def check(
        self, handler: Handler, order: Order, transform: Transform | None, convert: Convert | None
    ) -> None:
        """Check, before anything is started, that all of this can be done there.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        ...

    def processor_for(self, terms: ProcessingConfig) -> RecordProcessor:
        """Return the processor of one life of a task."""
        ...

    def close(self) -> None:
        """Let go of what is held; called once, after the last processor was closed."""
        ...


class InProcess:
    """The runner on threads of this process."""

    def check(
        self, handler: Handler, order: Order, transform: Transform | None, convert: Convert | None
    ) -> None:
        """There is nothing that can't be done here."""

    processor_for = staticmethod(processor_for)

    def close(self) -> None:
        """Nothing is held."""


def runner_of(runs_on: str, name: str, spark: SparkConfig | None) -> Runner:
    """Return the runner that `record_processing.runs_on` names.

    :raises TailraceError: `CONFIG_INVALID`, `ENVIRONMENT_UNFIT`.
    """
    if runs_on == "threads":
        return InProcess()
    make: Callable[[str, SparkConfig | None], Runner] = extensions.factory(
        extensions.RUNNERS, runs_on, ("check", "processor_for", "close")
    )
    return make(name, spark)
