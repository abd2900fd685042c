"""Random campaigns on a real keyspace: reshards under a writer, with processes killed at any moment.

A campaign splits and merges shards at random, N to M, back and forth; kills our process, vtgate, a tablet
and its MySQL server; has our process asleep during a whole switch. Then each key's counter must have come
as 0, 1, 2 … once and in order, and the mirror must equal the table.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from tailrace.sources.vitess.resharding.transitions import ShardMode, mode_of
from tailrace_servers.vitess import EmbeddedVitess, find_vitess
from tests.support.vitess.capturing import shard_states_of
from tests.support.vitess.cluster import ORDERS, VSCHEMA, add_table, rows_of
from tests.support.vitess.end_to_end import lines_of, pipeline_file, tailrace
from tests.support.vitess.life import Life
from tests.support.vitess.writer import KEYS, STEP_S, Writer
from tests.support.wait import wait_until

TABLE = "orders"
#: Where shards may be cut; so many serve at most.
CUTS = ("20", "40", "60", "80", "a0", "c0", "e0")
SHARDS_MAX = 3


@dataclass(frozen=True)
class Step:
    """A reshard, and what is done to it."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    sleeps: bool
    goes_back: bool
    #: By step of the reshard, what is killed after it.
    kills: dict[str, str]


def shards_between(cuts: Sequence[str]) -> tuple[str, ...]:
    """Return the shards that cuts make."""
    return tuple(f"{start}-{end}" for start, end in itertools.pairwise(["", *cuts, ""]))


def planned(rng: random.Random, steps: int) -> Iterator[Step]:
    """Yield reshards that follow each other, from `-80` and `80-` on."""
    cuts = ["80"]
    for _ in range(steps):
        while True:
            first = rng.randrange(len(cuts) + 1)
            last = rng.randrange(first, len(cuts) + 1)
            inside = cuts[first:last]
            low = cuts[first - 1] if first else ""
            high = cuts[last] if last < len(cuts) else "ff"
            room = [cut for cut in CUTS if low < cut < high]
            chosen = sorted(rng.sample(room, min(len(room), rng.randrange(3))))
            after = [*cuts[:first], *chosen, *cuts[last:]]
            if not set(chosen) & set(inside) and chosen != inside and len(after) < SHARDS_MAX:
                break
        before, now = shards_between(cuts), shards_between(after)
        cuts = after
        yield Step(
            tuple(shard for shard in before if shard not in now),
            tuple(shard for shard in now if shard not in before),
            rng.random() < 0.2,
            rng.random() < 0.25,
            {
                moment: rng.choice(("us", "us", "vtgate", "tablet", "nothing"))
                for moment in ("tablets", "copied", "switched")
            },
        )


class Campaign:
    """One campaign on a cluster of its own. `run` once."""

    def __init__(self, at: Path, seed: int, steps: int) -> None:
        self._at = at
        self._rng = random.Random(seed)
        self._steps = steps

    def run(self, cluster: EmbeddedVitess) -> int:
        """Do it, and judge what came; return in how many lives it came."""
        add_table(cluster, TABLE, ORDERS)
        file = pipeline_file(self._at, cluster, TABLE, sinks=("jsonl",), snapshot="initial", **_QUICK)
        life = Life(file)
        serving = set(shards_between(["80"]))
        try:
            life.start()
            with Writer(cluster, TABLE) as writer:
                for number, step in enumerate(planned(self._rng, self._steps)):
                    writer.more()
                    self._reshard(cluster, life, f"w{number}", step)
                    serving = serving - set(step.sources) | set(step.targets)
                    life.start()
                    writer.more()
                    wait_until(functools.partial(self._reads, serving), STEP_S, f"{serving} read")
                    cluster.complete(f"w{number}", step.sources)
                writer.more()
        finally:
            life.kill()
        self._judge(cluster)
        return life.lives

    def _reshard(self, cluster: EmbeddedVitess, life: Life, workflow: str, step: Step) -> None:
        def disturb(moment: str) -> None:
            what = step.kills[moment]
            if what == "us" and not step.sleeps:
                life.kill()
                life.start()
            elif what == "vtgate":
                cluster.kill_vtgate()
                cluster.start_vtgate()
            elif what == "tablet" and moment == "tablets":
                shard = self._rng.choice(step.sources)
                cluster.kill_tablet(shard)
                cluster.kill_mysql(shard)
                cluster.start_servers(shard)

        if step.sleeps:
            life.kill()
        with self._killer(life, after_s=self._rng.uniform(0, 8), is_on=not step.sleeps):
            cluster.reshard(workflow, step.sources, step.targets, disturb)
            if step.goes_back:
                time.sleep(self._rng.uniform(0, 2))  # how far we have come by then is left to chance
                cluster.reverse(workflow)
                cluster.switch(workflow)

    @contextmanager
    def _killer(self, life: Life, after_s: float, *, is_on: bool) -> Iterator[None]:
        """Kill our process after a while, at whatever step that is; begin the next life."""
        over = threading.Event()

        def kill() -> None:
            if not over.wait(after_s) and is_on:
                life.kill()
                life.start()

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(60)

    def _reads(self, serving: set[str]) -> bool:
        states = shard_states_of(self._at / "log")
        modes = {name: mode_of(state) for name, state in states.items()}
        lost = [name for name, mode in modes.items() if mode is ShardMode.NEEDS_SNAPSHOT]
        assert not lost, f"lost: {lost}"
        read = {name for name, mode in modes.items() if mode is ShardMode.STREAMING and states[name].is_read}
        return read == serving

    def _judge(self, cluster: EmbeddedVitess) -> None:
        there = {key: int(row[3]) for key, row in rows_of(cluster, TABLE).items()}
        assert len(there) == KEYS
        # A sink that comes later reads the log from its start.
        file = pipeline_file(self._at, cluster, TABLE, snapshot="initial", **_QUICK)
        tailrace("run", file, "--until-caught-up")
        counters: dict[int, list[int]] = defaultdict(list)
        for line in lines_of(self._at, TABLE):
            counters[line["after"]["id"]].append(line["after"]["counter"])
        for key, last in there.items():
            found = counters[key]
            # Rows that were there at the start begin later than 0.
            assert found == list(range(found[0], last + 1)), (key, last, found)
        mirrored = DeltaTable(str(self._at / "mirror" / f"shop.{TABLE}")).to_pyarrow_table().to_pylist()
        assert {row["id"]: row["counter"] for row in mirrored} == there
        assert "sound" in tailrace("log", "verify", self._at / "log")


_QUICK: dict[str, Any] = {"reconnect_delay_s": 0.1, "receive_timeout_s": 20}


def campaign(at: Path, seed: int, steps: int = 3) -> int:
    """Run a campaign on a cluster that is made for it; return the count of our process' lives."""
    with EmbeddedVitess(find_vitess(), vschema=VSCHEMA) as cluster:
        return Campaign(at, seed, steps).run(cluster)
