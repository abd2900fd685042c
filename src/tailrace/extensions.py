"""Finds connectors, sources, transformations, converters and other extensions by entry point.

A package announces them in its `pyproject.toml`, under the group of their kind:

    [project.entry-points."tailrace.connectors"]
    mydb = "mypackage.connector:MyConnector"

A package is imported only when one of its names is used.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tailrace.errors import Kind, TailraceError

CONNECTORS = "tailrace.connectors"
SOURCES = "tailrace.sources"
TRANSFORMATIONS = "tailrace.transformations"
PREDICATES = "tailrace.predicates"
CONVERTERS = "tailrace.converters"
RUNNERS = "tailrace.runners"

#: The singular noun for the extensions of each group, for messages.
_WORDS = {
    CONNECTORS: "connector",
    SOURCES: "source",
    TRANSFORMATIONS: "transformation",
    PREDICATES: "predicate",
    CONVERTERS: "converter",
    RUNNERS: "runner",
}


def names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages announce in `group`, sorted."""
    return tuple(sorted({found.name for found in entry_points(group=group)}))


def factory(group: str, name: str, methods: Sequence[str]) -> Callable[..., Any]:
    """Return the class, or the function that creates an object, with the name `name` in `group`.

    :param methods: methods that a class must have; the caller checks the objects of a function.
    :raises TailraceError: `CONFIG_INVALID` if there is no such name, several packages announce it, or it is
        neither; `ENVIRONMENT_UNFIT` if its package can't be imported.
    """
    word = _WORDS.get(group, group)
    found = _announced(group, name, word)
    where = {"name": name, "entry_point": found.value, "package": found.dist.name if found.dist else ""}
    try:
        made = found.load()
    except Exception as error:
        missing = error.name if isinstance(error, ImportError) and error.name else ""
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"load the {word} {name!r}: importing {found.value} raised {type(error).__name__}"
            + (f", there is no module {missing!r}" if missing else ""),
            f"install the package that has {missing.partition('.')[0]!r}" if missing else "see its package",
            where,
        ) from error
    lacking = [method for method in methods if isinstance(made, type) and not hasattr(made, method)]
    if not callable(made) or lacking:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"load the {word} {name!r}: {found.value} is not a {word}, it "
            + (f"has no {', '.join(lacking)}" if lacking else "can't be called"),
            f"its entry point must name a class with {', '.join(methods)}"
            + ("" if group == SOURCES else ", or a function that creates one"),
            where,
        )
    return made  # type: ignore[no-any-return]


def _announced(group: str, name: str, word: str) -> EntryPoint:
    found = {entry.value: entry for entry in entry_points(group=group) if entry.name == name}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"find the {word} {name!r}: several packages announce it: {', '.join(sorted(found))}",
            "uninstall all but one of them",
        )
    known = names(group)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    raise TailraceError(
        Kind.CONFIG_INVALID,
        f"find the {word} {name!r}: no installed package announces it",
        (f"did you mean {near[0]!r}? " if near else "")
        + (f"there are: {', '.join(known)}" if known else f"none is installed (entry points {group})"),
    )
