"""Timed passes of a benchmark, alternating with those of the reference, and their comparison."""

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
    """One timed pass; `cpu_seconds` is the CPU time of the measured processes."""

    seconds: float
    cpu_seconds: float


def timed(work: Callable[[], object], cpu_s: Callable[[], float] = time.process_time) -> Pass:
    """Call `work` and return its duration.

    :param cpu_s: returns the CPU time so far, in seconds; default: of this process.
    """
    cpu, began = cpu_s(), time.perf_counter()
    work()
    return Pass(time.perf_counter() - began, cpu_s() - cpu)


def in_turn(number: int, *works: Callable[[], Found]) -> tuple[Found, ...]:
    """Call each of `works`, and return their results; another one is first in each turn.

    :param number: number of the turn.
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
    """Return the median CPU time per record, in microseconds, of passes with `records` records each."""
    return round(median([each.cpu_seconds for each in passes]) / records * 1e6, 2)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
