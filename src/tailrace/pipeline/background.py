"""Runs a function on its own thread and keeps its outcome."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points

import structlog

from tailrace import extensions
from tailrace.errors import RAISE_LIMIT, REPORT, TOO_MANY_FILES, Kind, TailraceError
from tailrace.secrets import redact

log = structlog.get_logger(__name__)


#: What was attempted, and what to do, if the operating system refuses something, by the kind of the error.
_REFUSED = {
    Kind.SINK_WRITE_FAILED: ("work with a file", "check room, permissions and the health of the disk"),
    Kind.ENVIRONMENT_UNFIT: ("work with a file", "check room, permissions and the health of the disk"),
    Kind.SOURCE_UNREACHABLE: ("read from the source", "check that it can be reached, and read by this user"),
}


class Background:
    """Runs `function` once, on a daemon thread: a hung one can't keep the process alive.

    :param refused: as of `as_failure`.
    """

    def __init__(
        self, name: str, function: Callable[[], None], refused: Kind = Kind.SINK_WRITE_FAILED
    ) -> None:
        self._name = name
        self._refused = refused
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
        """The error that the function raised; None if it has not ended, or returned."""
        return self._error

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the function to end; return whether it has."""
        return self._ended.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            failure = as_failure(error, self._refused)
            if failure is not error:
                failure.__cause__ = error  # --debug shows it
            self._error = failure
            log.debug("thread ended by an error", thread=self._name, exc_info=True)
        finally:
            self._ended.set()


def _is_from_spark(error: BaseException) -> bool:
    """Return whether `error` comes from PySpark, also where its context was stopped or its JVM died.

    PySpark sets the parts of a stopped context to None, so later calls raise an AttributeError there. Calls
    to a JVM that died raise the error of the connection to it.
    """
    place = type(error).__module__
    if isinstance(error, AttributeError | ConnectionError):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = str(frame.f_globals.get("__name__", ""))
            place = place if name == "socket" else name  # at the end: the innermost frame's
    return place.partition(".")[0] in ("pyspark", "py4j")


def _package(error: BaseException) -> str:
    """Return the package of a user's type of source from whose code `error` comes; empty: there is none."""
    packages = {entry.module.partition(".")[0] for entry in entry_points(group=extensions.SOURCES)}
    places = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__))
    found = (place.partition(".")[0] for place in places)
    return next((package for package in found if package in packages - {"tailrace"}), "")


def as_failure(error: BaseException, refused: Kind = Kind.SINK_WRITE_FAILED) -> TailraceError:
    """Return `error` as a TailraceError, with passwords removed from texts of other libraries.

    :param refused: the kind of an error of the operating system, which depends on the failed part; one that
        a user's type of source got is `SOURCE_UNREACHABLE`.
    """
    if isinstance(error, TailraceError):
        return error
    if _is_from_spark(error):
        from tailrace.spark.jobs import translated

        found = translated(error)
        return found.changed(message=redact(found.message))
    # TimeoutError is an OSError, too; one of a wait that timed out has no errno.
    if isinstance(error, OSError) and not (isinstance(error, TimeoutError) and error.errno is None):
        refused = Kind.SOURCE_UNREACHABLE if _package(error) else refused
        attempted, hint = _REFUSED[refused]
        return TailraceError(
            refused,
            f"{attempted}: {error.strerror or type(error).__name__}",
            RAISE_LIMIT if error.errno in TOO_MANY_FILES else hint,
            {"file": str(error.filename)} if error.filename else {},
        )
    # The text of an unexpected error may quote anything, so only its type is shown.
    if package := _package(error):
        return TailraceError(
            Kind.TASK_FAILED,
            f"use the type of source of the package {package!r}: {type(error).__name__} was raised",
            "see that package; --debug shows the trace",
        )
    return TailraceError(
        Kind.INTERNAL,
        f"unexpected {type(error).__name__}",
        REPORT,
    )
