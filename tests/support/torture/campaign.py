"""Runs rounds of faults: chooses faults, counts those that took effect, collects problems, reports."""

# ruff: noqa: T201 (it talks to a person)

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tests.support.torture.harness import Fault, Round

CYCLES_A_ROUND = 10


class Campaign:
    """All rounds of one run.

    :param root: an empty directory; files of rounds with problems are kept there.
    :param seed: from which all faults are drawn.
    :param points: the failpoints to kill at, each of which must be reached.
    """

    def __init__(self, root: Path, seed: int, points: Collection[str]) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.problems: list[str] = []
        self._points = sorted(points)
        self._numbers = itertools.count(1)
        self._tried: Counter[str] = Counter()
        self._struck: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()

    def rounds(self, kind: str, cycles: int) -> Iterator[tuple[str, int]]:
        """Yield the name of each round on a sink of `kind`, and its number of faults."""
        for first in range(0, cycles, CYCLES_A_ROUND):
            count = min(CYCLES_A_ROUND, cycles - first)
            print(f"{kind}, cycles {first + 1} to {first + count}:", flush=True)
            yield f"torture_{kind}_{next(self._numbers)}", count

    def run(self, round_: Round, faults: Iterator[Fault], cycles: int) -> bool:
        """Apply faults to a round until `cycles` of them took effect, check it, and end it; return whether it
        had no problems.
        """
        with contextlib.closing(round_):
            found = self._undergo(round_, faults, cycles)
            self._hits += round_.hits()
        self.problems += [f"{round_.database.name} (seed {round_.seed}): {problem}" for problem in found]
        verdict = "whole" if not found else "\n    ".join(["BROKEN:", *found])
        print(f"  round of {round_.workload.committed:,} transactions: {verdict}", flush=True)
        return not found

    def remove(self, round_: Round) -> None:
        """Remove a round without problems; keep the others for analysis."""
        shutil.rmtree(round_.root)
        round_.database.drop()

    def _undergo(self, round_: Round, faults: Iterator[Fault], cycles: int) -> list[str]:
        struck, fault = 0, next(faults)
        try:
            while struck < cycles:
                began = time.monotonic()
                happened = round_.undergo(fault)
                (self._struck if happened else self._missed)[fault.name] += 1
                struck += happened
                note = "" if happened else " (not reached in this life)"
                print(f"  {time.monotonic() - began:5.1f} s  {fault.name}{note}", flush=True)
                if found := round_.disagreements():
                    return [f"after {fault.name}: {problem}" for problem in found]
                fault = next(faults)
            return round_.judge() + round_.disagreements()
        except AssertionError as error:
            return [f"after {fault.name}: {error}"]

    def least_tried(self, wanted: Callable[[str], bool] = lambda _: True) -> str:
        """Return one of the wanted failpoints that were tried least, and count it."""
        points = [point for point in self._points if wanted(point)]
        fewest = min(self._tried[point] for point in points)
        point = self.random.choice([point for point in points if self._tried[point] == fewest])
        self._tried[point] += 1
        return point

    def report(self) -> int:
        """Print the totals; return the exit status."""
        print("\nfaults:")
        for name in sorted(self._struck | self._missed):
            print(f"  {self._struck[name]:5} struck {self._missed[name]:5} not reached  {name}")
        print("visits of each failpoint:")
        for name in self._points:
            print(f"  {self._hits[name]:9,}  {name}")
        never = [name for name in self._points if not self._hits[name]]
        if never:
            print(f"never reached: {', '.join(never)}")
        for problem in self.problems:
            print(f"PROBLEM {problem}")
        if self.problems:
            print(f"what was found is kept in {self.root}")
            return 1
        self.root.rmdir()
        print(f"{sum(self._struck.values())} faults, nothing lost, doubled, torn or out of step")
        return 1 if never else 0


def arguments(document: str, cycles: int) -> argparse.ArgumentParser:
    """Parse the arguments that every run has on its command line.

    :param document: of the module, whose first line says what it does.
    :param cycles: how many there are by default.
    """
    found = argparse.ArgumentParser(description=document.splitlines()[0])
    found.add_argument("--cycles", type=int, default=cycles, help=f"for each sink (default {cycles})")
    found.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    found.add_argument("--version", type=int, default=18, help="of PostgreSQL: 15, 16 or 18")
    return found
