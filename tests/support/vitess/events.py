"""Reads the changes in a keyspace's log as Debezium's JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.changelog.reader import LogReader
from tailrace.converters.debezium import JsonConverter
from tailrace.decode.json.debezium import SourceInfo
from tailrace.ranges.changes import decoded_batches
from tailrace.ranges.plan import InputSplit
from tailrace.records.group import Group

ORIGIN = SourceInfo("shop", "shop", "3.6.0", "vitess")


def events_of(log: Path) -> list[Any]:
    """Return the events of all changes in the log, in order, with their transactions."""
    with LogReader.open(log, "0") as reader:
        start, end = reader.start, reader.end().offset
        return events_in(reader, [InputSplit("0", 0, start, end, tuple(reader.blocks(start, end)))])


def events_in(reader: LogReader, splits: Sequence[InputSplit]) -> list[Any]:
    """Return the events of splits, each split read alone."""
    found: list[tuple[int, Any]] = []
    for split in splits:
        for decoded in decoded_batches(reader, split):
            for changes in decoded.changes:
                group = Group.of_changes("t", np.arange(changes.count), changes, ORIGIN)
                converter = JsonConverter(provide_transaction_metadata=True, tombstones_on_delete=False)
                events = map(json.loads, converter.convert(group).values.to_pylist())
                found += zip(changes.log_offset.tolist(), events, strict=True)
    return [event for _, event in sorted(found, key=lambda each: each[0])]


def gtid_of(event: Any) -> str:
    """Return the position in an event's VGTID, which has one shard."""
    [position] = json.loads(event["source"]["vgtid"])
    assert (position["keyspace"], position["shard"]) == ("shop", event["source"]["shard"])
    return str(position["gtid"])


def rank_of(event: Any) -> int:
    """Return the rank of an event's transaction."""
    return int.from_bytes(base64.b64decode(event["transaction"]["transaction_rank"]), signed=True)
