"""A process that joins topics into Kafka, exactly once, until it is killed; its argument is its settings.

It may have a planted bug, which the check of the joined topics must find.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from tailrace import Engine
from tailrace.join import connector, partition
from tailrace.join.extraction import Extraction
from tailrace.join.merge import Joined, Position
from tailrace.join.messages import MessageReader
from tailrace.join.options import JoinedTopics
from tailrace.kafka.client import settings as client_options


def _skips(joined: Joined, row: int) -> Position:
    # After a row there may be a marker of the Kafka transaction: one offset further might skip nothing.
    sound = SOUND_POSITION(joined, row)
    return replace(sound, data=sound.data + 3)


def _repeats(joined: Joined, row: int) -> Position:
    return SOUND_POSITION(joined, max(0, row - 1))


def _uncommitted(options: JoinedTopics, _extraction: Extraction) -> MessageReader:
    common = client_options.client(options.bootstrap_servers, {}, 30_000)
    return MessageReader(client_options.consumer(common, "read_uncommitted"), client_options.admin(common))


def _neighbours(window: partition.TransactionWindow, joined: Joined) -> object:
    # Each row gets the facts of the transaction before its own: between the two `END`s there are at most a
    # marker of the Kafka transaction and a `BEGIN`.
    return SOUND_FACTS(window, replace(joined, offsets=joined.offsets - 3))


SOUND_POSITION, SOUND_FACTS = Joined.position, partition.TransactionWindow.facts
PLANTED = {
    "the position is behind the next row": (Joined, "position", _skips),
    "the position is that of the row before": (Joined, "position", _repeats),
    "uncommitted messages are read": (connector, "reader_of", _uncommitted),
    "the transaction is the one before": (partition.TransactionWindow, "facts", _neighbours),
}


def main() -> None:
    given = json.loads(sys.argv[1])
    if bug := given.get("planted"):
        setattr(*PLANTED[bug])
    Engine(
        connector="kafka-join",
        settings=given["settings"],
        name=given["name"],
        tasks_max=given["tasks"],
        converter="bytes",
        options={
            "kafka": {
                "bootstrap_servers": given["settings"]["bootstrap_servers"],
                "offsets_topic": f"{given['name']}-offsets",
            },
            "atomic_source_offset_commit": True,
            "record_processing": {"batch_records_max": given.get("batch_records_max", 65_536)},
        },
    ).run()


if __name__ == "__main__":
    main()
