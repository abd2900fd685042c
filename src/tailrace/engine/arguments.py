"""The arguments of an engine, and their checks before anything is created.

A wrong argument is refused where the program passes it: found later, on a thread of the engine, it would
look like a failure of user code; and a generator or coroutine function as a handler would lose records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from tailrace.config import EngineConfig, EngineOptions
from tailrace.engine.contracts import (
    BatchHandler,
    Callbacks,
    Clock,
    CommitPolicy,
    OffsetStore,
    RecordHandler,
    RecordProcessor,
    Settings,
    SourceConnector,
)
from tailrace.errors import Kind, TailraceError

#: By name of an argument: a check of its value, and a description of valid values.
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
    "commit_policy": (callable, "a class or a function that makes a CommitPolicy for each attempt of a task"),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of `Engine`, by name."""

    config: EngineConfig | Mapping[str, Any] | str | PathLike[str] | None = None
    connector: SourceConnector | Callable[[], SourceConnector] | str | None = None
    settings: Settings | None = None
    name: str | None = None
    tasks_max: int | None = None
    on_batch: BatchHandler | None = None
    on_record: RecordHandler | None = None
    processor: Callable[[], RecordProcessor] | None = None
    converter: Any = None
    transformations: Sequence[Any] = ()
    predicates: Mapping[str, Any] | None = None
    offsets: OffsetStore | None = None
    commit_policy: Callable[[], CommitPolicy] | None = None
    callbacks: Callbacks | None = None
    clock: Clock | None = None
    options: EngineOptions | Mapping[str, Any] | None = None

    def check(self) -> None:
        """Refuse arguments of wrong types or values; None is always allowed.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        for name, (fits, form) in _FORMS.items():
            given = getattr(self, name)
            if given is not None and not fits(given):
                shown = given if isinstance(given, int) else type(given).__name__
                raise invalid(f"{name} can't be {shown}", f"it is {form}")
        if self.callbacks is not None:
            for name in self.callbacks.__slots__:
                check_called(f"callbacks.{name}", getattr(self.callbacks, name))


def check_called(name: str, given: Any, *, may_be_async: bool = False) -> None:
    """Refuse a value that is not a function, or whose call does nothing until it is awaited or iterated.

    :param may_be_async: whether the caller awaits it.
    :raises TailraceError: `CONFIG_INVALID`.
    """
    if not callable(given):
        raise invalid(
            f"{name} is called: {type(given).__name__} can't be", "pass a function or another callable object"
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
                "pass a plain function; it may run the async one with asyncio.run, or submit it to a running "
                "loop and wait for its result",
            )
        if inspect.isgeneratorfunction(each):
            raise invalid(f"{name} is a generator: calling it would do nothing", "leave out its `yield`")


def invalid(found: str, hint: str) -> TailraceError:
    """Return the error of an engine that can't be created."""
    return TailraceError(Kind.CONFIG_INVALID, f"create the engine: {found}", hint)
