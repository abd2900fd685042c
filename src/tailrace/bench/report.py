"""What a benchmark says: a value, a ratio to its reference, and the limit that it ran into."""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark's result, in the form of `bench --json`.

    `ratio` is `value` to the reference's value, above 1 where Tailrace is better; `None` where
    there is no reference in the run. `limit` names what kept the value from being higher.
    """

    name: str
    value: float
    unit: str
    ratio: float | None
    reference: str
    limit: str
    setup: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)

    def print(self, *, as_json: bool) -> None:
        """Print to standard output: one JSON document, or lines for a person."""
        if as_json:
            print(json.dumps(asdict(self), indent=2))
            return
        ratio = "" if self.ratio is None else f", {self.ratio:.2f} × {self.reference}"
        print(
            f"{self.name}: {self.value:,.3g} {self.unit}{ratio}"
            if self.value < 100
            else f"{self.name}: {self.value:,.0f} {self.unit}{ratio}"
        )
        print(f"  limit: {self.limit}")
        for title, facts in (("details", self.details), ("setup", self.setup)):
            for key, value in facts.items():
                print(f"  {title}.{key}: {value}")


def machine() -> dict[str, Any]:
    """Return the facts about this machine that a figure means nothing without."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def median(values: list[float]) -> float:
    """Return the median of at least one value."""
    return statistics.median(values)
