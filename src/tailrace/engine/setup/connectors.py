"""Which connector: by name, by class, or the object itself."""

from __future__ import annotations

from collections.abc import Callable

from tailrace import extensions
from tailrace.engine.contracts import SourceConnector
from tailrace.errors import Kind, TailraceError

#: What a connector must be able to do.
METHODS = ("start", "task_settings", "create_task", "stop")


def connector_of(given: SourceConnector | Callable[[], SourceConnector] | str) -> SourceConnector:
    """Return the connector; a name is one of the entry points `tailrace.connectors`.

    :raises TailraceError: `CONFIG_INVALID`, `ENVIRONMENT_UNFIT`.
    """
    if isinstance(given, str):
        given = extensions.factory(extensions.CONNECTORS, given, METHODS)
    if isinstance(given, type) or not isinstance(given, SourceConnector):
        given = _made(given)
    lacking = [method for method in METHODS if not callable(getattr(given, method, None))]
    if lacking:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: {type(given).__name__} is no connector, it has no {', '.join(lacking)}",
            "a connector is a tailrace.engine.contracts.SourceConnector",
        )
    return given


def _made(make: Callable[[], SourceConnector]) -> SourceConnector:
    if not callable(make):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: {type(make).__name__} is no connector",
            "give a name, a class, or a tailrace.engine.contracts.SourceConnector",
        )
    try:
        return make()
    except TailraceError:
        raise
    except Exception as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: making the connector raised {type(error).__name__}",
            "a connector is made without arguments; what it needs comes with start",
        ) from error
