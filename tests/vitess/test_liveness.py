"""A real cluster that sends only heartbeats: the shard is reported, and goes on by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tailrace.sources.progress import SourceWarning
from tailrace.sources.vitess.streaming import silent_shards
from tailrace_servers.vitess import EmbeddedVitess, find_vitess
from tests.support.vitess.capturing import Capturing, capturing
from tests.support.vitess.cluster import ORDERS, VSCHEMA, add_table
from tests.support.wait import wait_until

pytestmark = pytest.mark.vitess

TABLE = "orders"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 2.0)


def _told(found: Capturing) -> Sequence[SourceWarning]:
    return found.capture.progress().warnings


def test_shards_without_a_tablet_of_the_type_are_reported(tmp_path: Path, vitess: EmbeddedVitess) -> None:
    with capturing(tmp_path, vitess.address, tablet_type="rdonly", connect_timeout=2) as found:
        wait_until(lambda: len(_told(found)) == 2, 30, "both shards are named")
        assert [each.key for each in _told(found)] == ["shard_delayed -80", "shard_delayed 80-"]
        assert "no healthy tablet" in _told(found)[0].message, _told(found)[0].message


def test_a_stream_throttled_by_its_tablet_is_reported_and_continues_afterwards(tmp_path: Path) -> None:
    def throttle(*arguments: str) -> None:
        cluster.ctl("UpdateThrottlerConfig", "--enable", *arguments, cluster.keyspace)

    with EmbeddedVitess(find_vitess(), vschema=VSCHEMA, shards=("0",)) as cluster:
        add_table(cluster, TABLE, ORDERS)
        with capturing(tmp_path, cluster.address) as found:
            found.wait_for_shards("0")
            cluster.execute(f"insert into {TABLE} (id) values (1)")
            found.wait_for_rows(1)
            throttle("--throttle-app", "vstreamer", "--throttle-app-ratio", "1")

            def is_told() -> bool:
                # The tablet applies it after a while.
                cluster.execute(f"update {TABLE} set counter = counter + 1 where id = 1")
                return any("throttled" in each.message for each in _told(found))

            wait_until(is_told, 60, "the throttled shard is named")
            throttle("--unthrottle-app", "vstreamer")
            last = cluster.execute(f"select counter from {TABLE}")[0][0]
            found.wait_for_rows(int(last) + 1, 60)
            wait_until(lambda: not _told(found), 30, "nothing is told any more")
        assert found.counters() == {1: list(range(int(last) + 1))}
