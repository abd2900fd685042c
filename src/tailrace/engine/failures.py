"""What went wrong, as the engine tells it: with the task, and without words of others."""

from __future__ import annotations

import os
import traceback

from tailrace.errors import Kind, TailraceError


def raised_elsewhere(error: BaseException, place: str) -> None:
    """Have `named` say `place` of an error that comes from another process, where its trace stayed."""
    error.__dict__["raised_at"] = place


def named(error: BaseException) -> str:
    """Return what kind of error it is and where it was raised: its own words may quote a row."""
    if isinstance(elsewhere := getattr(error, "raised_at", None), str):
        return elsewhere
    frames = traceback.extract_tb(error.__traceback__)
    name = type(error).__name__
    return f"{name} in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else name


def as_task_failure(error: BaseException, number: int, doing: str) -> TailraceError:
    """Return the failure of a task; `error` is its cause.

    :param doing: what was attempted: `poll`.
    """
    if isinstance(error, TailraceError):
        found = TailraceError(error.kind, error.message, error.hint, {**error.context, "task": number})
    else:
        found = TailraceError(
            Kind.TASK_FAILED,
            f"{doing}: task {number} failed with {named(error)}",
            "the cause of this error has its words and its trace",
            {"task": number},
        )
    found.__cause__ = error
    return found


def as_engine_failure(error: BaseException, doing: str) -> TailraceError:
    """Return the failure of what belongs to no task, likewise."""
    if isinstance(error, TailraceError):
        return error
    found = TailraceError(
        Kind.TASK_FAILED,
        f"{doing}: failed with {named(error)}",
        "the cause of this error has its words and its trace",
    )
    found.__cause__ = error
    return found


def unkept(cause: BaseException | None) -> TailraceError:
    """Return the error of an end at which offsets were processed and could not be stored.

    :param cause: why the last write failed; None: it has not ended.
    """
    if isinstance(cause, TailraceError):
        return cause
    what = "the write has not ended in time" if cause is None else f"the store failed with {named(cause)}"
    found = TailraceError(
        Kind.OFFSETS_UNWRITABLE,
        f"store offsets at the end: {what}",
        "what was processed since the last commit comes again; look at where offsets are kept, and at "
        "engine.offset_commit.timeout_ms",
    )
    found.__cause__ = cause
    return found


def timed_out(
    attempt: str, tasks: list[int], limit_s: float, limit: str = "task_management_timeout_ms"
) -> TailraceError:
    """Return the error of what took too long.

    :param limit: its name, as the caller knows it.
    """
    return TailraceError(
        Kind.TASK_TIMED_OUT,
        f"{attempt}: not done after {limit_s:g} s",
        f"see what it waits for in the log; {limit} is how long it may take",
        {"tasks": tasks} if tasks else {},
    )
