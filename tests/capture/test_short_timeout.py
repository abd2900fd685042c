"""A server with a short wal_sender_timeout keeps the connection while the stream waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import CREATE_ITEMS, capturing, read_log
from tests.support.capture.requested import await_end, request
from tests.support.wait import wait_until


@pytest.mark.parametrize("point", ["snapshot.in_window", "capture.before_append"])
def test_a_stream_that_waits_longer_than_wal_sender_timeout_keeps_its_connection(
    make_server: Callable[..., EmbeddedPostgres], tmp_path: Path, point: str
) -> None:
    server, log = make_server(wal_sender_timeout="1500ms"), tmp_path / "log"
    server.execute(CREATE_ITEMS)
    # As by default, unrequested status updates are ten seconds apart.
    with capturing(server.dsn(), log, status_interval_s=10.0, slot_watch={"interval_s": 0}) as running:
        running.wait_for("streaming")
        server.execute("insert into items select g, 'x' from generate_series(1, 100) g")
        running.catch_up(server.query)
        failpoints.arm(f"{point}=sleep:6000@1")
        try:
            asked = request(log, "public.items")
            # More than the sockets between hold: the server waits for us in the middle of it.
            server.execute("insert into items select g, repeat('x', 2000) from generate_series(101, 20000) g")
            assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        finally:
            failpoints.arm("")
        wait_until(lambda: 20000 in read_log(log).inserts, 60, "the stream")
        assert running.task.progress().reconnects == 0
