"""Random campaigns on a real keyspace: reshards under a writer, with processes killed at any moment.

A campaign splits and merges shards at random, N to M, back and forth; kills our process, vtgate, a tablet
and its MySQL server; stops our process during a whole switch; adds columns before one; starts each process of
ours with another number of tasks. Then each key's counter must have come as 0, 1, 2 … once and in order in
JSON Lines and Kafka, and the mirror must equal the table.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from tailrace.errors import TailraceError
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.resharding.transitions import ShardMode, mode_of
from tailrace_servers.vitess import EmbeddedVitess, find_vitess
from tests.support.kafka.reading import read_topic
from tests.support.vitess.capturing import Copies, copies_in, shard_states_of
from tests.support.vitess.cluster import ORDERS, VSCHEMA, add_table, rows_of
from tests.support.vitess.end_to_end import lines_of, pipeline_file, tailrace
from tests.support.vitess.life import Life
from tests.support.vitess.streams import position_now
from tests.support.vitess.writer import KEYS, STEP_S, Writer
from tests.support.wait import wait_until

TABLE = "orders"
#: Where shards may be cut; at most so many serve.
CUTS = ("20", "40", "60", "80", "a0", "c0", "e0")
SHARDS_MAX = 3
#: Our process has at most so many tasks.
TASKS_MAX = 8


@dataclass(frozen=True)
class Step:
    """A reshard, and its disturbances."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    sleeps: bool
    goes_back: bool
    #: By step of the reshard, what is killed after it.
    kills: dict[str, str]
    #: What is killed at some moment during the reshard.
    during: str


def shards_between(cuts: Sequence[str]) -> tuple[str, ...]:
    """Return the shards that cuts make."""
    return tuple(f"{start}-{end}" for start, end in itertools.pairwise(["", *cuts, ""]))


def planned(rng: random.Random, steps: int) -> Iterator[Step]:
    """Yield reshards that follow each other, from `-80` and `80-` on.

    None of them leads back to shards from which traffic was switched to and fro: Vitess 22 gives the last
    switch the id of the one back then, finds that journal, and writes no other. No client can follow that.
    """
    cuts = ["80"]
    reversed_: set[str] = set()
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
            before, now = shards_between(cuts), shards_between(after)
            is_back = bool(reversed_.intersection(set(now) - set(before)))
            if not set(chosen) & set(inside) and chosen != inside and len(after) < SHARDS_MAX and not is_back:
                break
        cuts = after
        during = rng.choice(("us", "us", "vtgate"))
        killed = ("us", "us", "tablet", "nothing") if during == "vtgate" else ("us", "vtgate", "tablet")
        sources = tuple(shard for shard in before if shard not in now)
        goes_back = rng.random() < 0.25
        if goes_back:
            reversed_.update(sources)
        yield Step(
            sources,
            tuple(shard for shard in now if shard not in before),
            rng.random() < 0.2,
            goes_back,
            {moment: rng.choice(killed) for moment in ("tablets", "copied", "switched")},
            during,
        )


class Campaign:
    """One campaign on a cluster of its own. `run` once.

    :param kafka: brokers; empty: none.
    :param launcher: of `planted`, in place of the command line.
    """

    def __init__(self, at: Path, seed: int, steps: int, kafka: str = "", launcher: str = "") -> None:
        self._at = at
        self._rng = random.Random(seed)
        self._steps = steps
        self._kafka = kafka
        self._module = f"tests.support.torture.planted.{launcher}" if launcher else "tailrace"
        self._tasks = random.Random(seed)
        self._columns = random.Random(seed)

    def run(self, cluster: EmbeddedVitess) -> int:
        """Run the campaign and check the result; return how many processes of ours it had."""
        add_table(cluster, TABLE, ORDERS)
        life = Life(lambda: self._file(cluster), self._module)
        serving = set(shards_between(["80"]))
        try:
            life.start()
            with Writer(cluster, TABLE, 2) as writer:
                for number, step in enumerate(planned(self._rng, self._steps)):
                    writer.more()
                    self._reshard(cluster, life, f"w{number}", step)
                    serving = serving - set(step.sources) | set(step.targets)
                    life.start()
                    writer.more()
                    # Only then: we may still be before an earlier journal, when the same shards served.
                    ends = {shard: GtidSet.parse(position_now(cluster, shard)) for shard in serving}
                    wait_until(functools.partial(self._reads, ends), STEP_S, f"{serving} read")
                    cluster.complete(f"w{number}", step.sources)
                writer.more()
        finally:
            life.kill()
        assert not life.ended, "our process ended by itself: run.log says why"
        self._judge(cluster)
        return life.lives

    def _file(self, cluster: EmbeddedVitess) -> Path:
        """Write the pipeline for its next process."""
        tasks_max = self._tasks.randint(1, TASKS_MAX)
        settings: dict[str, Any] = {"snapshot": "initial", "tasks_max": tasks_max, **_QUICK}
        return pipeline_file(self._at, cluster, TABLE, kafka=self._kafka, **settings)

    def _reshard(self, cluster: EmbeddedVitess, life: Life, workflow: str, step: Step) -> None:
        def disturb(moment: str) -> None:
            what = step.kills[moment]
            if what == "us" and not step.sleeps:
                life.kill()
                life.start()
            elif what == "vtgate":
                cluster.kill_vtgate()
                cluster.start_vtgate()
            elif what == "tablet" and moment != "copied":
                serving = step.targets if moment == "switched" else step.sources
                shard = self._rng.choice(serving)
                cluster.kill_tablet(shard)
                cluster.kill_mysql(shard)
                cluster.start_servers(shard)

        if step.sleeps:
            life.kill()
        if self._columns.random() < 0.5:
            added = f"alter table {TABLE} add column of_{workflow} int not null default 7"
            cluster.ctl("ApplySchema", "--sql", added, cluster.keyspace)
        with self._killer(cluster, life, step, after_s=self._rng.uniform(0, 8)):
            cluster.reshard(workflow, step.sources, step.targets, disturb)
            if step.goes_back:
                time.sleep(self._rng.uniform(0, 2))  # how far we have come by then is left to chance
                _insist(functools.partial(cluster.reverse, workflow))
                _insist(functools.partial(cluster.switch, workflow))

    @contextmanager
    def _killer(self, cluster: EmbeddedVitess, life: Life, step: Step, after_s: float) -> Iterator[None]:
        """Kill our process or vtgate after a while, at whatever step that is, and start our next process."""
        over = threading.Event()

        def kill() -> None:
            if over.wait(after_s):
                return
            if step.during == "vtgate":
                cluster.kill_vtgate()
                cluster.start_vtgate()
            elif not step.sleeps:
                life.kill()
                life.start()

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(60)

    def _reads(self, ends: dict[str, GtidSet]) -> bool:
        """Tell whether exactly these shards are read, and up to these positions."""
        if not (self._at / "log" / "tasks" / "0").exists():
            return False  # no process has come so far
        states = shard_states_of(self._at / "log")
        modes = {name: mode_of(state) for name, state in states.items()}
        lost = [name for name, mode in modes.items() if mode is ShardMode.NEEDS_SNAPSHOT]
        assert not lost, f"lost: {lost}"
        read = {name for name, mode in modes.items() if mode is ShardMode.STREAMING and states[name].is_read}
        return read == ends.keys() and all(
            GtidSet.parse(states[shard].gtid).contains(end) for shard, end in ends.items()
        )

    def _judge(self, cluster: EmbeddedVitess) -> None:
        there = {key: int(row[3]) for key, row in rows_of(cluster, TABLE).items()}
        assert len(there) == KEYS
        tailrace("run", self._file(cluster), "--until-caught-up")
        # Rows of a snapshot are in separate files: the log offset tells what came before them.
        lines = sorted(
            lines_of(self._at, TABLE),
            key=lambda line: (line["position"]["log_offset"], line["position"]["ordinal"]),
        )
        self._judge_lines(lines, copies_in(self._at / "log"), there)
        if self._kafka:
            messages = read_topic(self._kafka, f"{self._at.name}.shop.{TABLE}")
            assert _by_key(each.document for each in messages) == _by_key(lines)
        mirrored = DeltaTable(str(self._at / "mirror" / f"shop.{TABLE}")).to_pyarrow_table().to_pylist()
        assert {row["id"]: row["counter"] for row in mirrored} == there
        assert "sound" in tailrace("log", "verify", self._at / "log")

    @staticmethod
    def _judge_lines(lines: Iterable[dict[str, Any]], copies: Copies, there: dict[int, int]) -> None:
        found: dict[int, int] = {}
        for line in lines:
            key, counter, at = line["after"]["id"], line["after"]["counter"], line["position"]["log_offset"]
            before = found.get(key)
            if at < copies.all_until:
                is_right = before is None or line["op"] == "r" or counter <= before + 1
            elif at < copies.rows_until and line["op"] == "r":
                is_right = before in {None, counter}
            else:
                is_right = counter == (0 if before is None else before + 1)
            assert is_right, ("jsonl", before, line)
            found[key] = counter
        assert found == there, "jsonl"


def _by_key(changes: Iterable[dict[str, Any]]) -> dict[int, list[tuple[str, int]]]:
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for change in changes:
        found[change["after"]["id"]].append((change["op"], change["after"]["counter"]))
    return found


def _insist(action: Callable[[], None]) -> None:
    """Repeat until Vitess accepts it: it refuses while its own streams look for a killed tablet."""

    def is_taken() -> bool:
        try:
            action()
        except TailraceError as error:
            if "cannot switch traffic" in error.message:
                time.sleep(1.0)
                return False
            raise
        return True

    wait_until(is_taken, STEP_S, "the switch of traffic")


_QUICK: dict[str, Any] = {"reconnect_delay_s": 0.1, "receive_timeout_s": 20}


def campaign(at: Path, seed: int, steps: int = 3, *, kafka: str = "", launcher: str = "") -> int:
    """Run a campaign on a cluster made for it; return the number of our processes."""
    with EmbeddedVitess(find_vitess(), vschema=VSCHEMA) as cluster:
        return Campaign(at, seed, steps, kafka, launcher).run(cluster)
