"""Cycles of fault and recovery for the Kafka sink, then a check by the validator.

    python -m tests.support.torture.kafka [--cycles 200] [--seed N] [--version 18]

As `run`, on a cluster of three brokers: half of the faults kill at a failpoint; the others are
kills at random moments, killed brokers, coordinators that move or are stopped, a killed source. After
each of them, without writes, the offset is compared with the records in the topics; at the end of a
round of ten, the committed records are compared with the source.
Exit status 1 if anything was found, or if a failpoint that this pipeline has was never reached.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tailrace_servers.install import find_install
from tailrace_servers.kafka import EmbeddedKafka, find_jars
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.postgres import SETTINGS, Database
from tests.support.torture import brokers
from tests.support.torture.campaign import Campaign, arguments
from tests.support.torture.harness import Fault, Round, kill_at, kill_at_random, kill_source
from tests.support.torture.topics import Topics

CYCLES = 200

#: The failpoints on the way into Kafka, without Spark.
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


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    chosen = arguments(__doc__ or "", CYCLES).parse_args()
    print(f"seed {chosen.seed}", flush=True)  # noqa: T201 (it talks to a person)
    campaign = Campaign(Path(tempfile.mkdtemp(prefix="torture-kafka-")), chosen.seed, POINTS)
    with (
        EmbeddedPostgres(find_install(chosen.version), settings=SETTINGS) as server,
        EmbeddedKafka(find_jars(), nodes=brokers.NODES, settings=brokers.SETTINGS) as cluster,
    ):
        for name, cycles in campaign.rounds("kafka", chosen.cycles):
            server.create_database(name)
            topics = Topics(cluster.bootstrap, name, replication=brokers.NODES)
            seed = campaign.random.randrange(1 << 32)
            round_ = Round(campaign.root / name, Database(server, name), ["kafka"], seed, topics=topics)
            round_.write_file()
            if campaign.run(round_, _faults(campaign, cluster), cycles):
                campaign.remove(round_)
                topics.remove()
    return campaign.report()


def _faults(campaign: Campaign, cluster: EmbeddedKafka) -> Iterator[Fault]:
    others = [
        kill_at_random(8),
        kill_at_random(8),
        kill_source(8),
        brokers.kill_node(cluster, 6),
        brokers.move_coordinator(cluster, 6),
        brokers.kill_both(cluster, 6),
        brokers.still_coordinator(cluster, 6),
        brokers.still_for_a_start(cluster, 6),
    ]
    draw = campaign.random
    while True:
        if draw.random() < 0.5:
            yield draw.choice(others)
        else:
            yield kill_at(campaign.least_tried(), draw.choice((1, 1, 2, 3, 5)), until_caught_up=False)


if __name__ == "__main__":
    sys.exit(main())
