"""Runs Python functions as Spark jobs: with errors as values, and cancelled by job group or tags.

An error that an executor raises reaches the driver as text inside a Java exception. The text of a
`TailraceError` has its kind, message, context and hint, so it can be parsed: the user sees the cause, not
"stage 3 failed four times".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger(__name__)

Work = TypeVar("Work")
Result = TypeVar("Result")

_RAISED = re.compile(
    r"tailrace\.errors\.TailraceError: (?P<kind>[a-z_]+): (?P<message>[^\n]*)"
    r"(?:\n\s*hint: (?P<hint>[^\n]*))?"
)
_CONTEXT = re.compile(r" \((\w+=[^()]*)\)$")
_KINDS = frozenset(str(kind) for kind in Kind)
#: Limit of Spark's message, of which only the first line is used, in characters.
_MESSAGE_CHARS_MAX = 300
#: Hint of `SPARK_FAILED`: Spark's log does not repeat the error of a failed job.
IN_CAUSE = "the cause of this error has Spark's message and its stack trace (--debug shows them)"


@dataclass(frozen=True, slots=True)
class JobGroup:
    """Jobs that are cancelled together; `description` is for Spark's user interface."""

    name: str
    description: str

    def cancel(self, session: SparkSession) -> None:
        """Cancel the group's jobs, including those that are about to start. Never raises."""
        try:
            # Unlike `cancelJobGroup`, this also cancels a job that is about to start.
            session.sparkContext._jsc.sc().cancelJobGroupAndFutureJobs(self.name)  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 - a Spark that has ended runs no jobs
            what = self.description
            log.warning("Spark's jobs could not be cancelled", what=what, error=type(error).__name__)


def collect(
    session: SparkSession,
    function: Callable[[Iterable[Work]], Iterable[Result]],
    work: Sequence[Work],
    tasks: int,
    group: JobGroup | None = None,
) -> list[Result]:
    """Run `function` as one job, each of its `tasks` on a part of `work`; return all results in order.

    :param group: of this job, and of later jobs that the calling thread starts without a group.
    :raises Exception: of PySpark or py4j; `translated` converts it.
    """
    context = session.sparkContext
    if group is not None:
        context.setJobGroup(group.name, group.description, interruptOnCancel=True)
    found: list[Result] = context.parallelize(work, tasks).mapPartitions(function).collect()
    return found


def on_every_core(
    session: SparkSession, function: Callable[[Iterable[int]], Iterable[Result]]
) -> list[Result]:
    """Run `function` in as many tasks as executors have cores; return all results.

    A core may run another task when its first one ends early.
    :raises TailraceError: as `translated` returns.
    """
    count = session.sparkContext.defaultParallelism
    try:
        return collect(session, function, range(count), count)
    except Exception as error:
        raise translated(error) from error


@dataclass(frozen=True, slots=True)
class ExecutorFailure:
    """An error that an executor returns to the driver as a value."""

    error: TailraceError


def run(
    session: SparkSession | None,
    work: Sequence[Work],
    function: Callable[[Work], Result],
    error_of: Callable[[Exception], TailraceError],
) -> list[Result]:
    """Call `function` with each item of `work`, in one job with a task per item; return the results in order.

    Executors return errors as values. If raised, they would reach the driver as text in Java's messages,
    and PyArrow's messages may quote rows.

    :param session: None: call the function in this process, one item after the other.
    :param function: importable, or a `partial` of such a function: it is sent to executors, as `error_of` is.
    :param error_of: converts an error of `function`; called where it was raised.
    :raises TailraceError: the first error of a call; `SPARK_FAILED` if Spark itself failed.
    """
    if not work:
        return []
    found: Iterable[Result | ExecutorFailure]
    if session is None:
        found = _each(function, error_of, work)
    else:
        try:
            found = collect(session, partial(_each, function, error_of), work, len(work))
        except Exception as error:
            raise translated(error) from error
    results: list[Result] = []
    for each in found:
        if isinstance(each, ExecutorFailure):
            raise each.error
        results.append(each)
    return results


def _each(
    function: Callable[[Work], Result], error_of: Callable[[Exception], TailraceError], work: Iterable[Work]
) -> Iterator[Result | ExecutorFailure]:
    for each in work:
        try:
            yield function(each)
        except Exception as error:  # noqa: BLE001 - `run` raises it on the driver
            yield ExecutorFailure(error_of(error))


def with_tags_of(spark: SparkSession | None) -> Callable[[], None]:
    """Return a function that a new thread calls first, so that its jobs have the calling thread's tags.

    Jobs are cancelled by their tags, which they get from the thread that starts them.
    """
    if spark is None:
        return lambda: None
    context = spark.sparkContext
    tags = set(context.getJobTags())

    def add_tags() -> None:
        for tag in tags:
            context.addJobTag(tag)

    return add_tags


def translated(error: BaseException) -> TailraceError:
    """Return the `TailraceError` that an executor raised, or else `SPARK_FAILED` with Spark's message.

    :param error: any error of PySpark or py4j; a `TailraceError` is returned unchanged.
    """
    if isinstance(error, TailraceError):
        return error
    text = str(error)
    found = next((raised for raised in _RAISED.finditer(text) if raised["kind"] in _KINDS), None)
    if found is None:
        failure = TailraceError(
            Kind.SPARK_FAILED,
            f"run a Spark job: {type(error).__name__}: {_first_line(text)}",
            IN_CAUSE,
        )
        failure.__cause__ = error
        return failure
    message = found["message"].strip()
    context: dict[str, str] = {}
    if (at := _CONTEXT.search(message)) is not None:
        context = dict(item.partition("=")[::2] for item in at[1].split(", ") if "=" in item)
        message = message[: at.start()]
    return TailraceError(Kind(found["kind"]), message, (found["hint"] or "").strip(), context)


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line), "no message")[:_MESSAGE_CHARS_MAX]
