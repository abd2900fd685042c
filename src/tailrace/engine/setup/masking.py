"""Settings as they may be logged: without what may be a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tailrace.secrets import REFERENCE, redact

MASK = "***"

#: Names of settings whose values are never shown.
_SECRET = re.compile(
    r"pass(word|wd|phrase|file)?|pwd|secret|token|credential|private|api_?key|salt", re.IGNORECASE
)

#: Passwords within connection strings: of a URL, up to its last `@`, and of a list of settings.
_WITHIN = re.compile(r"(://[^:/@\s]*:)\S*(?=@)|(password\s*=\s*)('[^']*'|[^&;\s]*)", re.IGNORECASE)


def masked(value: Any, name: str = "") -> Any:
    """Return `value` as it may be shown; `name` is what it is called. References are shown as they are."""
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if isinstance(value, str):
        if _SECRET.search(name) and not REFERENCE.fullmatch(value):
            return MASK
        return _WITHIN.sub(lambda found: (found[1] or found[2]) + MASK, redact(value))
    if value is None or isinstance(value, bool):
        return value
    return MASK if _SECRET.search(name) else value
