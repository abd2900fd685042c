"""The type of source that a name stands for: PostgreSQL, or what a package announces."""

from __future__ import annotations

import functools

from tailrace import extensions
from tailrace.sources.contract import Source

#: Methods that a class announced as a source must have.
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

        return PostgresSourceType()  # type: ignore[return-value]  # its methods take its own section
    made: Source = extensions.factory(extensions.SOURCES, name, METHODS)()
    return made
