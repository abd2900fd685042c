"""Findings of preflight: a problem, its severity, and the SQL or setting that repairs it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from tailrace.errors import Kind, TailraceError


class Severity(enum.StrEnum):
    """Severity of a finding: with an error the pipeline can't run; a warning should be read first."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. `table` is `schema.table` if it concerns one table.

    `source` is the name of the source that has it, if there are several. `everywhere`: it is a problem
    of the file, and only if every source has it.
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
    """Return a finding that prevents the pipeline from running."""
    return Finding(kind, Severity.ERROR, message, repair, table)


def warning(kind: Kind, message: str, repair: str = "", table: str = "") -> Finding:
    """Return a finding that the user should know."""
    return Finding(kind, Severity.WARNING, message, repair, table)


def from_failure(failure: TailraceError) -> Finding:
    """Return the finding for the error of a failed check."""
    return error(failure.kind, failure.message, failure.hint)
