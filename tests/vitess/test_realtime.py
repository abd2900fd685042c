"""A handler of a keyspace gets changes from memory and from the log in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace import Engine
from tailrace.pipeline.connector import PipelineConnector
from tailrace_servers.vitess import EmbeddedVitess
from tests.support.wait import wait_until

pytestmark = [pytest.mark.vitess, pytest.mark.timeout(400)]

TIMEOUT_S = 120.0
#: Rows that make one transaction of a shard larger than the buffer.
MANY = 2_000


def test_a_handler_gets_each_row_of_both_shards_once_from_memory_and_from_the_log(
    tmp_path: Path, vitess: EmbeddedVitess, orders: str
) -> None:
    source: dict[str, Any] = {"type": "vitess", "hosts": [vitess.address], "keyspace": vitess.keyspace}
    source |= {"tables": [f"{vitess.keyspace}.{orders}"], "heartbeat_interval_s": 1}
    seen: list[int] = []
    realtime = {"enabled": True, "buffer_bytes": "64KiB", "return_automatically": True}
    engine = Engine(
        name="shop",
        connector=PipelineConnector(),
        settings={"source": source, "log": {"path": str(tmp_path / "log")}, "realtime": realtime},
        on_batch=lambda batch: seen.extend(record.after["id"] for record in batch),
    )

    def wait_for(mode: str, fall_backs: int) -> None:
        wanted = {"mode": mode, "fall_backs": fall_backs}.items()

        def shown() -> dict[str, Any]:
            return dict(engine.realtime_status()[0]) if (tmp_path / "log" / "identity.json").exists() else {}

        wait_until(lambda: wanted <= shown().items(), TIMEOUT_S, f"real time {mode}")

    def insert(first: int, count: int) -> None:
        rows = ", ".join(f"({number}, 'row {number}', 1.50)" for number in range(first, first + count))
        vitess.execute(f"insert into {orders} (id, what, amount) values {rows}")
        wait_until(lambda: len(seen) >= first + count - 1, TIMEOUT_S, "the rows")
        assert sorted(seen) == list(range(1, first + count))

    with engine:
        wait_for("on", 0)
        for number in range(1, 11):
            insert(number, 1)
        insert(11, MANY)
        wait_until(lambda: engine.realtime_status()[0]["fall_backs"] >= 1, TIMEOUT_S, "the fall-back")
        wait_for("on", engine.realtime_status()[0]["fall_backs"])
        insert(11 + MANY, 1)
