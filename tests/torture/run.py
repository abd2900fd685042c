"""`make torture`: cycles of fault and recovery for each sink, then the validator's judgement.

    python -m torture.run [--cycles 100] [--sink parquet …] [--seed N] [--version 18]

A cycle is one life of the pipeline ended by one fault (a life that ends well, because it never
came to the failpoint that was armed, is none). Ten cycles make a round: a new log, new
sinks, at whose end the validator reads sink and source. The faults are drawn from the seed:
half of them kill at a failpoint, the others are kills at random moments, a killed source, cut
connections and a full disk. Exit status 1 if anything was found, or if a failpoint that this
pipeline has was never reached.
"""

# ruff: noqa: T201 (it talks to a person)

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fix_postgres import SETTINGS, Database
from fix_proxy import Proxy
from tailrace.embedded.install import find_install
from tailrace.embedded.postgres import EmbeddedPostgres
from torture import disk
from torture.harness import (
    POINTS,
    SINKS,
    Fault,
    Round,
    cut_connection,
    fill_disk,
    kill_at,
    kill_at_random,
    kill_source,
)

CYCLES_A_ROUND = 10
#: Small chunks: what a killed snapshot has left is read in windows beside the stream.
SETTINGS_OF_ROUNDS: dict[str, dict[str, Any]] = {
    "source": {"snapshot_chunk_rows": 30},
    "log": {"retention": {"size_bytes": 1 << 20, "on_slow_reader": "hold"}},
}


class Torture:
    """All rounds against one server; keeps count of what struck and what was found."""

    def __init__(self, server: EmbeddedPostgres, root: Path, seed: int) -> None:
        self._server = server
        self._root = root
        self._random = random.Random(seed)
        self._names = itertools.count(1)
        self._tried: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.problems: list[str] = []

    def round(self, kind: str, cycles: int) -> None:
        """Run one round of `cycles` faults on a sink of `kind`, and judge it."""
        name = f"torture_{kind}_{next(self._names)}"
        self._server.create_database(name)
        with ExitStack() as stack:
            proxy = Proxy(self._server.port)
            proxy.start()
            stack.callback(proxy.close)
            root = self._root / name
            small = stack.enter_context(disk.small_disk(root / "disk", 64)) if disk.can_mount() else None
            database = Database(self._server, name)
            round_ = Round(
                root, database, [kind], self._random.randrange(1 << 32),
                settings=SETTINGS_OF_ROUNDS, proxy=proxy, disk=small,
            )  # fmt: skip
            stack.callback(round_.close)
            self._run(round_, cycles)
            self.hits += round_.hits()
        if not self.problems:
            shutil.rmtree(root)
            database.drop()

    def _run(self, round_: Round, cycles: int) -> None:
        round_.write_file()
        faults, struck = self._faults(round_), 0
        fault = next(faults)
        try:
            while struck < cycles:
                began = time.monotonic()
                happened = round_.undergo(fault)
                (self.struck if happened else self.missed)[fault.name] += 1
                struck += happened
                note = "" if happened else " (not reached in this life)"
                print(f"  {time.monotonic() - began:5.1f} s  {fault.name}{note}", flush=True)
                fault = next(faults)
            found = round_.judge()
        except AssertionError as error:
            found = [f"after {fault.name}: {error}"]
        self.problems += [f"{round_.database.name} (seed {round_.seed}): {problem}" for problem in found]
        verdict = "whole" if not found else "\n    ".join(["BROKEN:", *found])
        print(f"  round of {round_.workload.committed:,} transactions: {verdict}", flush=True)

    def _faults(self, round_: Round) -> Iterator[Fault]:
        others = [kill_at_random(20), kill_at_random(20), kill_source(15), cut_connection(15)]
        others += [fill_disk(15)] if round_.disk else []
        # Snapshot's points come first, for they are passed once in a log's life.
        first = self._least_tried(lambda point: point.startswith("snapshot."))
        if "window" in first:
            yield kill_at("snapshot.after_chunk")
        yield kill_at(first)
        while True:
            yield self._random.choice(others) if self._random.random() < 0.5 else self._at_a_failpoint()

    def _at_a_failpoint(self) -> Fault:
        point = self._least_tried(lambda point: not point.startswith("snapshot."))
        if "retention" in point:
            return kill_at(point, until_caught_up=False)
        return kill_at(point, self._random.choice((1, 1, 2, 3, 5)))

    def _least_tried(self, wanted: Callable[[str], bool]) -> str:
        """Return one of the wanted points that were tried least, and count it."""
        points = [point for point in sorted(POINTS) if wanted(point)]
        fewest = min(self._tried[point] for point in points)
        point = self._random.choice([point for point in points if self._tried[point] == fewest])
        self._tried[point] += 1
        return point


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--cycles", type=int, default=100, help="for each sink (default 100)")
    arguments.add_argument("--sink", action="append", choices=SINKS, help="only this one; may be repeated")
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments.add_argument("--version", type=int, default=18, help="of PostgreSQL: 15, 16 or 18")
    chosen = arguments.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="torture-"))
    with EmbeddedPostgres(find_install(chosen.version), settings=SETTINGS) as server:
        torture = Torture(server, root, chosen.seed)
        for kind in chosen.sink or SINKS:
            for first in range(0, chosen.cycles, CYCLES_A_ROUND):
                print(f"{kind}, cycles {first + 1} to {min(first + CYCLES_A_ROUND, chosen.cycles)}:")
                torture.round(kind, min(CYCLES_A_ROUND, chosen.cycles - first))
    return report(torture, root)


def report(torture: Torture, root: Path) -> int:
    """Print the totals; return the exit status."""
    print("\nfaults:")
    for name in sorted(torture.struck | torture.missed):
        print(f"  {torture.struck[name]:5} struck {torture.missed[name]:5} not reached  {name}")
    print("visits of each failpoint:")
    for name in sorted(POINTS):
        print(f"  {torture.hits[name]:9,}  {name}")
    never = sorted(name for name in POINTS if not torture.hits[name])
    if never:
        print(f"never reached: {', '.join(never)}")
    for problem in torture.problems:
        print(f"PROBLEM {problem}")
    if torture.problems:
        print(f"what was found is kept in {root}")
        return 1
    root.rmdir()
    print(f"{sum(torture.struck.values())} faults, nothing lost, doubled or torn")
    return 1 if never else 0


if __name__ == "__main__":
    sys.exit(main())
