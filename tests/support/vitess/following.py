"""An engine in this process that follows a cluster, and what its handler got."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tailrace import Engine
from tailrace.config import load_engine
from tailrace.pipeline.connector import PipelineConnector
from tailrace_servers.vitess import EmbeddedVitess
from tests.support.wait import wait_until


class Following:
    """The changes: by key, the values of `counter` in order, None for a delete."""

    def __init__(self) -> None:
        self.counters: dict[int, list[int | None]] = defaultdict(list)
        self.records: list[Any] = []
        self.failures: list[BaseException] = []

    def take(self, record: Any) -> None:
        self.records.append(record)
        row = record.after or record.before
        self.counters[row["id"]].append(None if record.after is None else record.after["counter"])

    @property
    def count(self) -> int:
        return len(self.records)

    def wait_for(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until so many changes have come."""
        wait_until(lambda: self.count >= count or bool(self.failures), timeout_s, f"{count} changes")
        if self.failures:
            raise self.failures[0]

    def assert_in_order(self) -> None:
        """Check that each key's counter came as 0, 1, 2 …: none lost, none repeated, none out of order."""
        wrong = {key: found for key, found in self.counters.items() if found != list(range(len(found)))}
        assert not wrong, wrong


def settings_of(at: Path, cluster: EmbeddedVitess, table: str, **settings: object) -> dict[str, Any]:
    """Return an engine's settings for one table."""
    section = {
        "type": "vitess",
        "hosts": [cluster.address],
        "keyspace": cluster.keyspace,
        "tables": [f"{cluster.keyspace}.{table}"],
        "heartbeat_interval_s": 1,
        "snapshot": "never",
        **settings,
    }
    file = at / "pipeline.yaml"
    file.write_text(f"name: shop\nsource: {json.dumps(section)}\nlog: {{path: ./log}}\n")
    return dict(load_engine(file).as_settings())


def _engine(settings: dict[str, Any], following: Following) -> Engine:
    return Engine(name="own", connector=PipelineConnector(), settings=settings, on_record=following.take)


@contextlib.contextmanager
def followed(
    at: Path, cluster: EmbeddedVitess, table: str, found: Following | None = None, **settings: object
) -> Iterator[Following]:
    """Run an engine until the block ends; enter the block once it streams."""
    following = found or Following()
    given = settings_of(at, cluster, table, **settings)
    if not (at / "log").exists():
        _engine({**given, "until_caught_up": True}, following).run()  # later changes are captured
    engine = _engine(given, following)

    def run() -> None:
        try:
            engine.run()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            following.failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield following
    finally:
        engine.close()
        thread.join(60)
    if following.failures:
        raise following.failures[0]
