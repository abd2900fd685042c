"""What tests of several producers share: a log made by hand, sinks with any number of producers, a reader."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tailrace import failpoints
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config.kafka import KafkaSinkConfig as KafkaConfig
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.converters.debezium import JsonConverter
from tailrace.model import OWN_FORMS, LogRange
from tailrace.ranges.plan import InputSplit
from tailrace.sinks.contract import SinkCommit
from tailrace.sinks.kafka.sink import KafkaSink
from tailrace.transforms.chain import Chain
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import read_topic
from tests.support.sinks.rig import InProcess, rekey, relation
from tests.support.spark.wire import INT8, TEXT, HandmadeLog, delete, insert, update

ORDERS = relation(1, "public.orders", {"id": INT8, "note": TEXT})
NOTES = relation(2, "public.notes", {"id": INT8, "note": TEXT}, key=())
TOPICS = ("public.orders", "public.notes")
PARTITIONS = 3

#: By topic, then by key: values in order; tombstones are None.
Content = dict[str, dict[str, list[Any]]]


def fill(log: HandmadeLog, transactions: int, first: int = 0) -> list[int]:
    """Write transactions that insert, update, delete and change keys; return their ends."""
    ends = []
    for at in range(first, first + transactions):
        described = (ORDERS, NOTES) if at == 0 else ()
        changes = [insert(1, 10 * at + n, f"order {at}.{n}") for n in range(5)]
        changes += [update(1, 10 * at + n, f"order {at}.{n} again") for n in range(5)]
        changes += [rekey(1, (10 * at, None), (10 * at + 9, "another key")), delete(1, 10 * at + 1, None)]
        changes += [insert(2, at, f"note {at}.{n}") for n in range(2)]
        ends.append(log.commit(*described, *changes))
    return ends


def sink_of(
    kafka: EmbeddedKafka,
    name: str,
    producers: int,
    *,
    prefix: str = "",
    converter: Any = None,
    chain: Chain | None = None,
    **more: Any,
) -> KafkaSink:
    """Return a sink of the group `name`, not yet opened.

    :param producers: 0: in process.
    """
    given = {
        "type": "kafka",
        "name": "kafka",
        "bootstrap_servers": kafka.bootstrap,
        "topic_prefix": prefix or name,
        "group": name,
        "offsets_topic": f"{name}-offsets",
        "atomic_source_offset_commit": True,
        "topics": [{"tables": ["*.*"], "partitions": PARTITIONS}],
        "offset_flush_timeout_ms": 60_000,
        **({"runs_on": "spark", "producers": producers} if producers else {}),
        **more,
    }
    converter = converter or JsonConverter(schemas_enable=False)
    config = KafkaConfig.model_validate(given)
    return KafkaSink(config, converter, chain or Chain(), ColumnPolicy(), OWN_FORMS)


def with_two(kafka: Any, name: str) -> KafkaSink:
    """Return a sink of two producers with short waits."""
    return sink_of(kafka, name, 2, offset_flush_timeout_ms=8_000)


def open_until_killed(bootstrap: str, name: str, log: Path, point: str) -> None:
    """Open the sink in another process, which is killed at a failpoint."""
    failpoints.arm(f"{point}=kill")
    with_two(SimpleNamespace(bootstrap=bootstrap), name).open(LogDirectory.open(log).identity, "shop")


def opened(sink: KafkaSink, log: HandmadeLog) -> KafkaSink:
    sink.open(log.directory.identity, "shop")
    return sink


def write(sink: KafkaSink, log: HandmadeLog, end: int, spark: Any = None) -> SinkCommit:
    """Write from the sink's position to `end` as its feed does, but with a split for each transaction.

    :param spark: None: tasks run in this process.
    """
    start = sink.position("0") or 0
    if spark is None and sink._config.on_spark:
        spark = InProcess()
    return sink.write(spark, log.path, LogRange("0", start, end), splits_of(log, start, end))


def splits_of(log: HandmadeLog, start: int, end: int) -> tuple[InputSplit, ...]:
    """Return a split for each transaction of a range."""
    at, splits = start, []
    with LogReader.open(log.path, "0") as reader:
        while at < end:
            upto = reader.boundary_within(at, 1, 1, end)
            splits.append(InputSplit("0", len(splits), at, upto, tuple(reader.blocks(at, upto))))
            at = upto
    return tuple(splits)


def content(kafka: EmbeddedKafka, prefix: str) -> Content:
    """Return all that is committed, by topic and key."""
    found: Content = {topic: defaultdict(list) for topic in TOPICS}
    for topic, of_key in found.items():
        for key, value in records(kafka, f"{prefix}.{topic}"):
            of_key["" if key is None else key.decode()].append(value and _told(json.loads(value)))
    return {topic: dict(of_key) for topic, of_key in found.items()}


def places(kafka: EmbeddedKafka, prefix: str) -> dict[str, list[tuple[int, int, bytes | None]]]:
    """Return partition, offset and value of everything in the topics, committed or not, for a failure."""
    return {
        f"{topic}, {isolation}": [
            (each.partition, each.offset, each.value)
            for each in read_topic(kafka.bootstrap, f"{prefix}.{topic}", isolation)
        ]
        for topic in TOPICS
        for isolation in ("read_committed", "read_uncommitted")
    }


def records(kafka: EmbeddedKafka, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """Return the keys and values of all committed records, those of each partition in order."""
    return [(message.key, message.value) for message in read_topic(kafka.bootstrap, topic)]


def _told(value: dict[str, Any]) -> tuple[Any, ...]:
    return value["op"], value["source"]["lsn"], str(value["before"]), str(value["after"])


def alone(kafka: EmbeddedKafka, name: str, log: HandmadeLog, end: int) -> Content:
    """Return what one producer in this process writes of the log up to `end`."""
    sink = opened(sink_of(kafka, f"{name}-alone", 0), log)
    write(sink, log, end)
    sink.close()
    return unordered(content(kafka, f"{name}-alone"))


def unordered(found: Content) -> Content:
    """Return the content with records without a key sorted: they are spread over partitions."""
    for of_key in found.values():
        if "" in of_key:
            of_key[""].sort(key=str)
    return found


def log_at(path: Path) -> HandmadeLog:
    return HandmadeLog(path)
