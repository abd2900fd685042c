"""Finds a type of source by its name: PostgreSQL, or an entry point of another package."""

from __future__ import annotations

import functools

from tailrace import extensions
from tailrace.sources.contract import Source

#: Methods and attributes that a class must have to be a source.
METHODS = (
    "settings", "capture", "end", "look", "snapshots", "check", "findings_together", "with_recovery",
    "leftover_repair",
)  # fmt: skip


@functools.cache
def source_type(name: str) -> Source:
    """Return the type of source called `name`.

    :raises TailraceError: `CONFIG_INVALID` if there is none; `ENVIRONMENT_UNFIT` if its package can't be
        imported.
    """
    if name == "postgresql":
        from tailrace.sources.postgres.source import PostgresSourceType

        return PostgresSourceType()  # type: ignore[return-value]  # its methods take its own settings class
    made: Source = extensions.factory(extensions.SOURCES, name, METHODS)()
    return made
