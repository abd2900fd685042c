"""What a benchmark says: a value, a ratio to its reference, and the limit that it ran into."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark's result, in the form of `bench --json`.

    `ratio` is `value` to the reference's value, above 1 where Tailrace is better, of a cost where it
    is worse; `None` where there is no reference in the run. `limit` names what kept the value from
    being higher.
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


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return between which two of `values` the median of what they were drawn from lies.

    The sign test turned round: it supposes nothing of how they are spread, only that none depends
    on another. Of fewer than six values, the least and the greatest.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, below = 0, 0.0
    while outside < (count - 1) // 2:
        below += math.comb(count, outside) / 2**count
        if 2 * below > 1 - confidence:
            break
        outside += 1
    least = max(0, outside - 1)
    return ordered[least], ordered[count - 1 - least]
