"""What converters make of the cases of `customers`, as text, if not compared with Debezium (`test_peer`).

`python -m tests.support.converters.golden` writes the files again; review the differences before a commit.
Each event is a line for its topic, key, value and headers.
"""

from __future__ import annotations

import json
from pathlib import Path

from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.contract import Converter
from tailrace.converters.debezium import JsonConverter
from tailrace.records.batch import Batch
from tailrace.records.events import Events
from tailrace.records.group import Group
from tests.support.converters.customers import CASES, groups_of

DIRECTORY = Path(__file__).parents[2] / "converters" / "golden"

#: The time of a fixed clock, in nanoseconds since 1970, for events without a time.
NOW_NS = 1_559_033_904_961_654_789

CONVERTERS: dict[str, Converter] = {
    "plain": JsonConverter(now_ns=lambda: NOW_NS),
    "schemas": JsonConverter(now_ns=lambda: NOW_NS, schemas_enable=True),
    "transactions": JsonConverter(
        now_ns=lambda: NOW_NS, provide_transaction_metadata=True, event_time="processing",
        tombstones_on_delete=False, rows_in_part="filled",
    ),
    "cloudevents": CloudEventsConverter(now_ns=lambda: NOW_NS, provide_transaction_metadata=True),
    "cloudevents_bare": CloudEventsConverter(
        now_ns=lambda: NOW_NS, extension_attributes_enable=False, schemas_enable=True, topic_prefix='a"b',
    ),
}  # fmt: skip

#: Cases whose text is kept in files; `test_peer` compares the others with Debezium itself.
KEPT = [way for way in CONVERTERS if way not in {"plain", "schemas"}]


def text_of(converter: Converter, groups: list[Group]) -> str:
    """Return the events of groups as lines."""
    lines: list[str] = []
    for group in groups:
        batch = Batch({}, (group,), len(group), [{}] * len(group))
        for event in Events(batch, (converter.convert(group),)):
            lines += [event.topic, str(event.key), str(event.value), json.dumps(dict(event.headers)), ""]
    return "\n".join(lines)


def path_of(way: str, case: str) -> Path:
    return DIRECTORY / f"{case}.{way}.txt"


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for way in KEPT:
        for case in CASES:
            path_of(way, case).write_text(text_of(CONVERTERS[way], groups_of(case)))
