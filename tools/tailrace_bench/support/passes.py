"""Passes of a benchmark: timed, taken in turn with those of their reference, and compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tailrace_bench.support.report import median, median_interval

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Pass:
    """One timed pass; `cpu_seconds` of the processes that were asked for."""

    seconds: float
    cpu_seconds: float


def timed(work: Callable[[], object], cpu_s: Callable[[], float] = time.process_time) -> Pass:
    """Return how long some work took.

    :param cpu_s: seconds of CPU so far; default: of this process.
    """
    cpu, began = cpu_s(), time.perf_counter()
    work()
    return Pass(time.perf_counter() - began, cpu_s() - cpu)


def in_turn(number: int, *works: Callable[[], Found]) -> tuple[Found, ...]:
    """Do each of some works, and return what they gave; each comes first in as many turns.

    :param number: of the turn.
    """
    order = [(number + step) % len(works) for step in range(len(works))]
    found = {place: works[place]() for place in order}
    return tuple(found[place] for place in range(len(works)))


def compared(ratios: list[float]) -> dict[str, Any]:
    """Return the ratios of all turns as details of a result."""
    return {
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio_interval_95": [round(end, 3) for end in median_interval(ratios)],
    }


def cpu_us(passes: Sequence[Pass], records: int) -> float:
    """Return the median microseconds of CPU for each of so many records a pass."""
    return round(median([each.cpu_seconds for each in passes]) / records * 1e6, 2)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
