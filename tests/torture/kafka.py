"""Cycles of fault and recovery for the Kafka sink, then the validator's judgement.

    python -m torture.kafka [--cycles 200] [--seed N] [--version 18]

As `torture.run`, on a cluster of three brokers: half of the faults kill at a failpoint; the others are
kills at random moments, killed brokers, coordinators that move, a killed source. After each of them,
with nobody writing, the offset and the records in the topics are held against each other; at the end
of a round of ten, the topics, as a reader of committed records sees them, against the source.
Exit status 1 if anything was found, or if a failpoint that this pipeline has was never reached.
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
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from fix_postgres import SETTINGS, Database
from tailrace.embedded.install import find_install
from tailrace.embedded.kafka import EmbeddedKafka, find_jars
from tailrace.embedded.postgres import EmbeddedPostgres
from torture import brokers
from torture.harness import Fault, Round, kill_at, kill_at_random, kill_source
from torture.topics import Topics

CYCLES_A_ROUND = 10

#: The failpoints that the way into Kafka has, without Spark.
POINTS = {
    "kafka.after_begin",
    "kafka.in_batch",
    "kafka.before_offset",
    "kafka.before_commit",
    "kafka.after_commit",
    "sink.before_write",
    "sink.after_write",
    "sink.before_commit",
    "sink.after_commit",
}


class Torture:
    """All rounds against one source and one cluster; keeps count of what struck and what was found."""

    def __init__(self, server: EmbeddedPostgres, cluster: EmbeddedKafka, root: Path, seed: int) -> None:
        self._server = server
        self._cluster = cluster
        self._root = root
        self._random = random.Random(seed)
        self._names = itertools.count(1)
        self._tried: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.problems: list[str] = []

    def round(self, cycles: int) -> None:
        """Run one round of `cycles` faults, and judge it."""
        name = f"torture_kafka_{next(self._names)}"
        self._server.create_database(name)
        with ExitStack() as stack:
            database = Database(self._server, name)
            round_ = Round(
                self._root / name, database, ["kafka"], self._random.randrange(1 << 32),
                topics=Topics(self._cluster.bootstrap, name, replication=brokers.NODES),
            )  # fmt: skip
            stack.callback(round_.close)
            self._run(round_, cycles)
            self.hits += round_.hits()
        if not self.problems:
            shutil.rmtree(self._root / name)
            database.drop()

    def _run(self, round_: Round, cycles: int) -> None:
        round_.write_file()
        faults, struck, found = self._faults(), 0, []
        fault = next(faults)
        try:
            while struck < cycles and not found:
                began = time.monotonic()
                happened = round_.undergo(fault)
                (self.struck if happened else self.missed)[fault.name] += 1
                struck += happened
                note = "" if happened else " (not reached in this life)"
                print(f"  {time.monotonic() - began:5.1f} s  {fault.name}{note}", flush=True)
                found = [f"after {fault.name}: {problem}" for problem in round_.disagreements()]
                fault = next(faults)
            found += round_.judge() + round_.disagreements()
        except AssertionError as error:
            found += [f"after {fault.name}: {error}"]
        self.problems += [f"{round_.database.name} (seed {round_.seed}): {problem}" for problem in found]
        verdict = "whole" if not found else "\n    ".join(["BROKEN:", *found])
        print(f"  round of {round_.workload.committed:,} transactions: {verdict}", flush=True)

    def _faults(self) -> Iterator[Fault]:
        others = [
            kill_at_random(8),
            kill_at_random(8),
            kill_source(8),
            brokers.kill_node(self._cluster, 6),
            brokers.move_coordinator(self._cluster, 6),
            brokers.kill_both(self._cluster, 6),
        ]
        while True:
            yield self._random.choice(others) if self._random.random() < 0.5 else self._at_a_failpoint()

    def _at_a_failpoint(self) -> Fault:
        """Return a kill at one of the points that were tried least."""
        fewest = min(self._tried[point] for point in POINTS)
        point = self._random.choice([point for point in sorted(POINTS) if self._tried[point] == fewest])
        self._tried[point] += 1
        return kill_at(point, self._random.choice((1, 1, 2, 3, 5)), until_caught_up=False)


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--cycles", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments.add_argument("--version", type=int, default=18, help="of PostgreSQL: 15, 16 or 18")
    chosen = arguments.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="torture-kafka-"))
    with (
        EmbeddedPostgres(find_install(chosen.version), settings=SETTINGS) as server,
        EmbeddedKafka(find_jars(), nodes=brokers.NODES, settings=brokers.SETTINGS) as cluster,
    ):
        torture = Torture(server, cluster, root, chosen.seed)
        for first in range(0, chosen.cycles, CYCLES_A_ROUND):
            print(f"cycles {first + 1} to {min(first + CYCLES_A_ROUND, chosen.cycles)}:", flush=True)
            torture.round(min(CYCLES_A_ROUND, chosen.cycles - first))
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
    print(f"{sum(torture.struck.values())} faults, nothing lost, doubled, torn or out of step")
    return 1 if never else 0


if __name__ == "__main__":
    sys.exit(main())
