"""Which tables a pattern means: `schema.table`, where `*` stands for any run of characters.

The first dot ends the schema. A name in double quotes is taken as it stands, dots and stars
included; a quote inside is doubled, as in SQL. Case matters: names are compared as the
catalogue holds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

_PART = r'(?:"(?:[^"]|"")+"|[^".]+)'
_PATTERN = re.compile(rf'({_PART})\.("(?:[^"]|"")+"|[^"]+)')


def check_pattern(text: str) -> str:
    """Return `text`.

    :raises ValueError: if it is not of the form `schema.table`.
    """
    if not _PATTERN.fullmatch(text) or "\0" in text:
        raise ValueError("must be of the form schema.table, such as public.orders or sales.*")
    return text


def _some(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns:
        raise ValueError("must name at least one table")
    return patterns


#: A field of patterns, at least one.
Patterns = Annotated[tuple[Annotated[str, AfterValidator(check_pattern)], ...], AfterValidator(_some)]


def matches(pattern: str, schema: str, table: str) -> bool:
    """Tell whether `pattern` means this table."""
    found = _PATTERN.fullmatch(pattern)
    return found is not None and _fits(found[1], schema) and _fits(found[2], table)


def matches_any(patterns: Iterable[str], schema: str, table: str) -> bool:
    """Tell whether one of `patterns` means this table."""
    return any(matches(pattern, schema, table) for pattern in patterns)


def _fits(part: str, name: str) -> bool:
    if part.startswith('"'):
        return part[1:-1].replace('""', '"') == name
    expression = ".*".join(re.escape(piece) for piece in part.split("*"))
    return re.fullmatch(expression, name, re.DOTALL) is not None
