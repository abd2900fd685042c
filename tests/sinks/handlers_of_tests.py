"""Functions that sinks of tests call, found by their names."""

from __future__ import annotations

import asyncio

from tailrace.engine.processing import manual

seen: list = []
faults: dict = {}


def batch(records) -> None:
    seen.append([(record.topic, record.after["id"], record.source["log_offset"]) for record in records])
    fault = faults.pop("batch", None)
    if fault is not None:
        raise fault


def record(one) -> None:
    if one.after["id"] in faults:
        raise faults.pop(one.after["id"])
    seen.append(one.after["id"])


def event(one) -> None:
    seen.append((one.topic, one.key, one.value))


async def on_a_loop(_) -> None:
    seen.append(asyncio.get_running_loop())


by_itself = manual(lambda *_: None)


def with_committer(records, committer) -> None:
    seen.append((records, committer))


nothing = 3
