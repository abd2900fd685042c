"""What a program gives to an engine, looked at before anything is made of it.

A wrong argument is refused where it was written. Found out later, on a thread of the engine, it would
be a failure of somebody's code; and a function that only looks like one that is called would lose records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from tailrace.config import EngineConfig, EngineOptions
from tailrace.engine.contracts import Callbacks, OffsetStore
from tailrace.errors import Kind, TailraceError

#: By name of an argument: whether a value that was given is one, and what else it should be.
_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "config": (
        lambda given: isinstance(given, EngineConfig | Mapping | str | PathLike),
        "a path, a mapping with a file's content, or an EngineConfig",
    ),
    "settings": (lambda given: isinstance(given, Mapping), "a mapping"),
    "name": (lambda given: isinstance(given, str) and bool(given), "text that is not empty"),
    "tasks_max": (
        lambda given: isinstance(given, int) and not isinstance(given, bool) and given > 0,
        "a number of tasks, at least 1",
    ),
    "transformations": (
        lambda given: isinstance(given, Sequence) and not isinstance(given, str),
        "a list of transformations",
    ),
    "predicates": (lambda given: isinstance(given, Mapping), "a mapping from names to predicates"),
    "offsets": (
        lambda given: isinstance(given, OffsetStore) and not isinstance(given, type),
        "an object with start, read, write and stop (tailrace.engine.contracts.OffsetStore)",
    ),
    "commit_policy": (callable, "a class or a function that makes a CommitPolicy for each life of a task"),
    "clock": (
        lambda given: all(callable(getattr(given, name, None)) for name in ("monotonic", "time_us", "wait")),
        "an object with monotonic, time_us and wait (tailrace.engine.contracts.Clock)",
    ),
    "callbacks": (lambda given: isinstance(given, Callbacks), "a tailrace.Callbacks"),
    "options": (
        lambda given: isinstance(given, EngineOptions | Mapping),
        "a mapping with keys of the section engine, or EngineOptions",
    ),
}


def check(**arguments: Any) -> None:
    """Refuse what can't be what it was given for, by the names of `Engine`; None is always allowed.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    for name, (fits, form) in _FORMS.items():
        given = arguments.get(name)
        if given is not None and not fits(given):
            shown = given if isinstance(given, int) else type(given).__name__
            raise invalid(f"{name} can't be {shown}", f"it is {form}")
    if (callbacks := arguments.get("callbacks")) is not None:
        for name in callbacks.__slots__:
            check_called(f"callbacks.{name}", getattr(callbacks, name))


def check_called(name: str, given: Any, *, may_be_async: bool = False) -> None:
    """Refuse what is no function, and one whose call does nothing until somebody awaits or iterates.

    :param may_be_async: whether somebody awaits.
    :raises TailraceError: `CONFIG_INVALID`.
    """
    if not callable(given):
        raise invalid(
            f"{name} is called: {type(given).__name__} can't be", "give a function, or an object that is one"
        )
    called = given if inspect.isroutine(given) else getattr(given, "__call__", given)  # noqa: B004
    for each in (given, called):
        if inspect.isasyncgenfunction(each):
            raise invalid(
                f"{name} is an async generator: calling it would do nothing", "leave out its `yield`"
            )
        if inspect.iscoroutinefunction(each) and not may_be_async:
            raise invalid(
                f"{name} is an async function: calling it would do nothing",
                "give a plain function; it may run the other one with asyncio.run, or hand it to a loop that "
                "runs and wait for its result",
            )
        if inspect.isgeneratorfunction(each):
            raise invalid(f"{name} is a generator: calling it would do nothing", "leave out its `yield`")


def invalid(found: str, hint: str) -> TailraceError:
    """Return the error of an engine that can't be created."""
    return TailraceError(Kind.CONFIG_INVALID, f"create the engine: {found}", hint)
