"""Runs a function on its own thread and keeps its outcome."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import structlog

from tailrace.errors import REPORT, Kind, TailraceError
from tailrace.secrets import redact

log = structlog.get_logger(__name__)


class Background:
    """Runs `function` once, on a daemon thread: a hung one can't keep the process alive."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ended = threading.Event()
        self._error: TailraceError | None = None

    def start(self) -> None:
        """Start the thread. Called once."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the function has returned or raised."""
        return self._ended.is_set()

    @property
    def error(self) -> TailraceError | None:
        """What the function raised, once it has ended."""
        return self._error

    def join(self, timeout_s: float) -> bool:
        """Wait for the end, at most `timeout_s`; return whether it came."""
        return self._ended.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            failure = as_failure(error)
            if failure is not error:
                failure.__cause__ = error  # --debug shows it
            self._error = failure
            log.debug("thread ended by an error", thread=self._name, exc_info=True)
        finally:
            self._ended.set()


def _is_of_spark(error: BaseException) -> bool:
    """Return whether Spark's Python raised it, or fell over a context that was stopped or died under it.

    It forgets such a context's parts: who works with it afterwards gets an AttributeError from there. Who
    asks a Java process that has died gets what the connection to it met.
    """
    place = type(error).__module__
    if isinstance(error, AttributeError | ConnectionError):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = str(frame.f_globals.get("__name__", ""))
            place = place if name == "socket" else name  # the innermost in the end
    return place.partition(".")[0] in ("pyspark", "py4j")


def as_failure(error: BaseException) -> TailraceError:
    """Return the failure that `error` means, with passwords cut out of words of others."""
    if isinstance(error, TailraceError):
        return error
    if _is_of_spark(error):
        from tailrace.spark.jobs import translated

        found = translated(error)
        return TailraceError(found.kind, redact(found.message), found.hint, found.context)
    # A wait that was too long raises a kind of OSError, too: without a number, as no file was asked for.
    if isinstance(error, OSError) and not (isinstance(error, TimeoutError) and error.errno is None):
        return TailraceError(
            Kind.SINK_WRITE_FAILED,
            f"work with a file: {error.strerror or type(error).__name__}",
            "check room, permissions and the health of the disk",
            {"file": str(error.filename)} if error.filename else {},
        )
    # The text of an unexpected error may quote anything, so only its type is shown.
    return TailraceError(
        Kind.INTERNAL,
        f"unexpected {type(error).__name__}",
        REPORT,
    )
