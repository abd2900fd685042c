"""Reshards of a real cluster under a writer, read by several tasks: each counter is in the log as 0, 1, 2 …,
once and in order.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import TailraceError
from tailrace.sources.vitess.connection.metadata import ask_gtids, ask_gtids_of_any
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace_servers.vitess import EmbeddedVitess, find_vitess
from tests.support.vitess.capturing import capturing
from tests.support.vitess.cluster import ORDERS, VSCHEMA, add_table, rows_of
from tests.support.vitess.writer import KEYS, STEP_S, Writer

pytestmark = [pytest.mark.vitess, pytest.mark.ci]

TABLE = "orders"


def test_n_to_m_split_merge_and_back_lose_no_change(tmp_path: Path) -> None:
    with EmbeddedVitess(find_vitess(), vschema=VSCHEMA) as cluster:
        add_table(cluster, TABLE, ORDERS)
        with capturing(tmp_path, cluster.address, receive_timeout_s=30, tasks_max=3) as found:
            found.wait_for_shards("-80", "80-", timeout_s=STEP_S)
            with Writer(cluster, TABLE) as writer:
                writer.more()
                cluster.reshard("w1", ["-80", "80-"], ["-40", "40-c0", "c0-"])
                writer.more()
                _assert_a_shard_that_does_not_serve_is_asked(cluster)
                found.wait_for_shards("-40", "40-c0", "c0-", timeout_s=STEP_S)
                cluster.complete("w1", ["-80", "80-"])
                cluster.reshard("w2", ["c0-"], ["c0-e0", "e0-"])
                writer.more()
                found.wait_for_shards("-40", "40-c0", "c0-e0", "e0-", timeout_s=STEP_S)
                cluster.complete("w2", ["c0-"])
                cluster.reshard("w3", ["-40", "40-c0"], ["-c0"])
                writer.more()
                found.wait_for_shards("-c0", "c0-e0", "e0-", timeout_s=STEP_S)
                cluster.reverse("w3")
                writer.more()
                found.wait_for_shards("-40", "40-c0", "c0-e0", "e0-", timeout_s=STEP_S)
            counters = {key: int(row[3]) for key, row in rows_of(cluster, TABLE).items()}
            found.wait_for_rows(sum(counters.values()) + len(counters), STEP_S)
        assert len(counters) == KEYS
        assert found.counters() == {key: list(range(last + 1)) for key, last in counters.items()}
        states = found.states()
        assert states["-40"].epoch == 3
        assert states["-c0"].children == ("-40", "40-c0")


def _assert_a_shard_that_does_not_serve_is_asked(cluster: EmbeddedVitess) -> None:
    source = VitessSource.model_validate({"hosts": [cluster.address], "keyspace": cluster.keyspace})
    with closing(Vtgate.connect(source)) as vtgate:
        with pytest.raises(TailraceError):
            ask_gtids(vtgate, source, "-80").result(30)
        ((executed, purged),) = ask_gtids_of_any(vtgate, source, "-80").result(30)
    assert executed is not None
    assert executed.startswith("MySQL56/")
    assert purged == ""
