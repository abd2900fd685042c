"""The result of a benchmark: a value, the ratio to its reference, and what limits the value."""

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

    `ratio` is `value` divided by the reference's value, above 1 if Tailrace is better, or, for a cost,
    if it is worse; `None` without a reference in the run. `limit` names what keeps the value from
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
        """Print to standard output: one JSON document, or lines of text."""
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
    """Return the facts about this machine on which figures depend."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def median(values: list[float]) -> float:
    """Return the median of at least one value."""
    return statistics.median(values)


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval of the median, as two of `values`.

    It is that of the sign test, which assumes nothing about the distribution, only that the values are
    independent. For fewer than six values it is the smallest and the largest.
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
