"""Patterns of tables, columns and prefixes of logical messages.

A pattern has one of two forms:

- `schema.table` or `schema.table.column`, where `*` stands for any run of characters. The first
  dot ends the schema and, if there is a column, the last one precedes it. A name in double
  quotes is literal, including dots and stars; a quote inside is doubled, as in SQL.
- `/expression/`, a regular expression of Python that must match the whole name: its parts as in
  the catalogue, without quotes, joined by dots.

Both are case-sensitive: names are compared as they are in the catalogue. A pattern of prefixes has
one part: text in which `*` stands for any run of characters, and dots are ordinary characters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

_QUOTED = r'"(?:[^"]|"")+"'
_PART = rf'(?:{_QUOTED}|[^".]+)'
_TABLE = re.compile(rf'({_PART})\.({_QUOTED}|[^"]+)')
_COLUMN = re.compile(rf'({_PART})\.({_QUOTED}|[^"]+)\.({_PART})')
_PREFIX = re.compile(rf'({_QUOTED}|[^"]+)')

_FORMS = {1: _PREFIX, 2: _TABLE, 3: _COLUMN}


def check_pattern(text: str) -> str:
    """Return `text`, a pattern of tables.

    :raises ValueError: if it is neither of the form `schema.table` nor a regular expression.
    """
    return _checked(text, _TABLE, "schema.table, such as public.orders or sales.*")


def check_column_pattern(text: str) -> str:
    """Return `text`, a pattern of columns.

    :raises ValueError: if it is neither of the form `schema.table.column` nor a regular expression.
    """
    return _checked(text, _COLUMN, "schema.table.column, such as public.users.email or *.*.email")


def check_prefix_pattern(text: str) -> str:
    """Return `text`, a pattern of prefixes.

    :raises ValueError: if it is neither of the form of a prefix nor a regular expression.
    """
    return _checked(text, _PREFIX, "prefix, such as outbox or audit.*")


def _checked(text: str, form: re.Pattern[str], form_in_words: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a NUL byte")
    expression = _expression(text)
    if expression is not None:
        try:
            re.compile(expression, re.DOTALL)
        except re.error as error:
            raise ValueError(f"is no regular expression that Python knows: {error.msg}") from None
    elif not form.fullmatch(text):
        raise ValueError(f"must be of the form {form_in_words}; or /a regular expression/")
    return text


def _some(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns:
        raise ValueError("must name at least one table")
    return patterns


TablePattern = Annotated[str, AfterValidator(check_pattern)]
ColumnPattern = Annotated[str, AfterValidator(check_column_pattern)]
PrefixPattern = Annotated[str, AfterValidator(check_prefix_pattern)]

#: At least one pattern of tables.
Patterns = Annotated[tuple[TablePattern, ...], AfterValidator(_some)]


def matches(pattern: str, schema: str, table: str) -> bool:
    """Return whether `pattern` matches this table."""
    return _fits(pattern, (schema, table))


def matches_any(patterns: Iterable[str], schema: str, table: str) -> bool:
    """Return whether one of `patterns` matches this table."""
    return any(matches(pattern, schema, table) for pattern in patterns)


def matches_column(pattern: str, schema: str, table: str, column: str) -> bool:
    """Return whether `pattern`, a pattern of columns, matches this column."""
    return _fits(pattern, (schema, table, column))


def matches_any_prefix(patterns: Iterable[str], prefix: str) -> bool:
    """Return whether one of `patterns`, of prefixes, matches the prefix of a logical message."""
    return any(_fits(pattern, (prefix,)) for pattern in patterns)


def is_exact(pattern: str) -> bool:
    """Return whether a pattern of tables names exactly one table."""
    found = None if _expression(pattern) is not None else _TABLE.fullmatch(pattern)
    return found is not None and not any("*" in part and part[0] != '"' for part in found.groups())


def is_regular_expression(pattern: str) -> bool:
    """Return whether a pattern is a regular expression, which may take very long to fail to match."""
    return _expression(pattern) is not None


def table_expression(pattern: str, schema: str) -> str | None:
    """Return a regular expression for the names of the tables of `schema` that a pattern of tables matches.

    Empty: it matches none of them. None: the pattern is a regular expression itself.
    """
    if _expression(pattern) is not None:
        return None
    found = _TABLE.fullmatch(pattern)
    if found is None or not re.fullmatch(_of_part(found[1]), schema, re.DOTALL):
        return ""
    return f"^{_of_part(found[2])}$"


def one_column(pattern: str) -> tuple[str, str, str] | None:
    """Return schema, table and column if a pattern of columns names one column; None if it may match more."""
    found = None if _expression(pattern) is not None else _COLUMN.fullmatch(pattern)
    if found is None or any("*" in part and part[0] != '"' for part in found.groups()):
        return None
    schema, table, column = (_unquoted(part) for part in found.groups())
    return schema, table, column


def _expression(pattern: str) -> str | None:
    """Return the regular expression in `pattern`; None if it has the other form."""
    return pattern[1:-1] if len(pattern) > 2 and pattern[0] == pattern[-1] == "/" else None


def _fits(pattern: str, names: tuple[str, ...]) -> bool:
    compiled = _compiled(pattern, len(names))
    if isinstance(compiled, re.Pattern):
        return compiled.fullmatch(".".join(names)) is not None
    return len(compiled) == len(names) and all(
        part.fullmatch(name) is not None for part, name in zip(compiled, names, strict=True)
    )


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str, parts: int) -> re.Pattern[str] | tuple[re.Pattern[str], ...]:
    # One expression for the whole name, or one for each of its parts; empty if the form is wrong.
    expression = _expression(pattern)
    if expression is not None:
        return re.compile(expression, re.DOTALL)
    found = _FORMS[parts].fullmatch(pattern)
    parts_of = () if found is None else found.groups()
    return tuple(re.compile(_without_backtracking(part), re.DOTALL) for part in parts_of)


def _without_backtracking(part: str) -> str:
    # As `_of_part`, but text between two stars matches only at its first occurrence: otherwise a pattern with
    # many stars would try every way to split a name that does not match.
    first, *between = part.split("*") if not part.startswith('"') else [part]
    if not between:
        return _of_part(part)
    sought = "".join(f"(?>.*?{re.escape(piece)})" for piece in between[:-1])
    return f"{re.escape(first)}{sought}.*{re.escape(between[-1])}"


def _of_part(part: str) -> str:
    if part.startswith('"'):
        return re.escape(_unquoted(part))
    return ".*".join(re.escape(piece) for piece in part.split("*"))


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part
