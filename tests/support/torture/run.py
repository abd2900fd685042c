"""`make torture`: cycles of fault and recovery for each sink, then a check by the validator.

    python -m tests.support.torture.run [--cycles 100] [--sink parquet …] [--seed N] [--version 18]

A cycle is one life of the pipeline ended by one fault (a life that ends normally, as it never
reached the armed failpoint, does not count). Ten cycles make a round: a new log and new
sinks, at whose end the validator reads sink and source. The faults are drawn from the seed:
half of them kill at a failpoint, the others are kills at random moments, a killed source, cut
connections and a full disk. Exit status 1 if anything was found, or if a failpoint that this
pipeline has was never reached.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tailrace_servers.install import find_install
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.postgres import SETTINGS, Database
from tests.support.proxy import Proxy
from tests.support.torture import disk
from tests.support.torture.campaign import Campaign, arguments
from tests.support.torture.harness import (
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

CYCLES = 100
#: Small chunks: the rest of a killed snapshot is read in windows beside the stream.
SETTINGS_OF_ROUNDS: dict[str, dict[str, Any]] = {
    "source": {"snapshot_chunk_rows": 30},
    "log": {"retention": {"size_bytes": 1 << 20, "on_slow_reader": "hold"}},
}


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = arguments(__doc__ or "", CYCLES)
    parser.add_argument("--sink", action="append", choices=SINKS, help="only this one; may be repeated")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)  # noqa: T201 (it talks to a person)
    campaign = Campaign(Path(tempfile.mkdtemp(prefix="torture-")), chosen.seed, POINTS)
    with EmbeddedPostgres(find_install(chosen.version), settings=SETTINGS) as server:
        for kind in chosen.sink or SINKS:
            for name, cycles in campaign.rounds(kind, chosen.cycles):
                _round(campaign, server, kind, name, cycles)
    return campaign.report()


def _round(campaign: Campaign, server: EmbeddedPostgres, kind: str, name: str, cycles: int) -> None:
    server.create_database(name)
    root = campaign.root / name
    with ExitStack() as stack:
        proxy = Proxy(server.port)
        proxy.start()
        stack.callback(proxy.close)
        small = stack.enter_context(disk.small_disk(root / "disk", 64)) if disk.can_mount() else None
        round_ = Round(
            root, Database(server, name), [kind], campaign.random.randrange(1 << 32),
            settings=SETTINGS_OF_ROUNDS, proxy=proxy, disk=small,
        )  # fmt: skip
        round_.write_file()
        whole = campaign.run(round_, _faults(campaign, round_), cycles)
    if whole:
        campaign.remove(round_)


def _faults(campaign: Campaign, round_: Round) -> Iterator[Fault]:
    others = [kill_at_random(20), kill_at_random(20), kill_source(15), cut_connection(15)]
    others += [fill_disk(15)] if round_.disk else []
    # The snapshot's failpoints come first: they are passed once for each log.
    first = campaign.least_tried(_is_of_snapshot)
    if "window" in first:
        yield kill_at("snapshot.after_chunk")
    yield kill_at(first)
    draw = campaign.random
    while True:
        yield draw.choice(others) if draw.random() < 0.5 else _at_a_failpoint(campaign)


def _at_a_failpoint(campaign: Campaign) -> Fault:
    point = campaign.least_tried(lambda point: not _is_of_snapshot(point))
    if "retention" in point:
        return kill_at(point, until_caught_up=False)
    return kill_at(point, campaign.random.choice((1, 1, 2, 3, 5)))


def _is_of_snapshot(point: str) -> bool:
    return point.startswith("snapshot.")


if __name__ == "__main__":
    sys.exit(main())
