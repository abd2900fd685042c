"""Names and texts as SQL and replication commands hold them. Pure."""

from __future__ import annotations


def quote_identifier(name: str) -> str:
    """Return `name` as an SQL or replication command holds it."""
    return '"' + name.replace('"', '""') + '"'


def quote_table(schema: str, name: str) -> str:
    """Return the name of a relation with its schema, as SQL holds it."""
    return f"{quote_identifier(schema)}.{quote_identifier(name)}"


def quote_literal(text: str) -> str:
    """Return `text` as a literal, in SQL under `standard_conforming_strings` or a command."""
    return "'" + text.replace("'", "''") + "'"
