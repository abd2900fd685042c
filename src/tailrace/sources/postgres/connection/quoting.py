"""Quotes names and literals for SQL and replication commands. Pure."""

from __future__ import annotations


def quote_identifier(name: str) -> str:
    """Return `name`, quoted for SQL or a replication command."""
    return '"' + name.replace('"', '""') + '"'


def quote_table(schema: str, name: str) -> str:
    """Return the name of a relation with its schema, quoted for SQL."""
    return f"{quote_identifier(schema)}.{quote_identifier(name)}"


def quote_literal(text: str) -> str:
    """Return `text` as a literal for SQL, under `standard_conforming_strings`, or a replication command."""
    return "'" + text.replace("'", "''") + "'"
