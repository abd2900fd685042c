"""What preflight finds: a problem, how bad it is, and the SQL or setting that repairs it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from tailrace.errors import Kind, TailraceError


class Severity(enum.StrEnum):
    """Whether the pipeline can't run, or should not run without a look."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. `table` is `schema.table` where it is one table's.

    `source` is the name of the source that has it, where there are several. `everywhere`: it is
    one only if every source has it; then it is the file's.
    """

    kind: Kind
    severity: Severity
    message: str
    repair: str = ""
    table: str = ""
    source: str = ""
    everywhere: bool = False

    @property
    def is_configuration(self) -> bool:
        """Whether the file itself is wrong."""
        return self.kind in (Kind.CONFIG_INVALID, Kind.SECRET_MISSING)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as `check --json` shows it."""
        found = {
            "kind": str(self.kind),
            "severity": str(self.severity),
            "message": self.message,
            "repair": self.repair,
        }
        for name in ("table", "source"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        return found


def error(kind: Kind, message: str, repair: str = "", table: str = "") -> Finding:
    """Return a finding that keeps the pipeline from running."""
    return Finding(kind, Severity.ERROR, message, repair, table)


def warning(kind: Kind, message: str, repair: str = "", table: str = "") -> Finding:
    """Return a finding that a person should know of."""
    return Finding(kind, Severity.WARNING, message, repair, table)


def from_failure(failure: TailraceError) -> Finding:
    """Return the finding that a failed check amounts to."""
    return error(failure.kind, failure.message, failure.hint)
