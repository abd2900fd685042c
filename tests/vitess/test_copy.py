"""The initial snapshot by VStream's copy: rows that were there before, then changes, over restarts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogWriter
from tailrace.protocol.metadata_frames import shard_states
from tailrace_servers.vitess import EmbeddedVitess
from tests.support.vitess.cluster import add_table
from tests.support.vitess.following import Following, followed

pytestmark = [pytest.mark.vitess, pytest.mark.ci]


def test_rows_that_were_there_come_once_and_then_changes(
    tmp_path: Path, vitess: EmbeddedVitess, orders: str
) -> None:
    rows = ", ".join(f"({key}, 'before {key}')" for key in range(500))
    vitess.execute(f"insert into {orders} (id, what) values {rows}")
    found = Following()
    with followed(tmp_path, vitess, orders, found, snapshot="initial"):
        found.wait_for(500)
        vitess.execute(f"update {orders} set counter = counter + 1 where id < 10")
        found.wait_for(510)
    with followed(tmp_path, vitess, orders, found, snapshot="initial"):
        vitess.execute(f"update {orders} set counter = counter + 1 where id < 10")
        found.wait_for(520)
    found.assert_in_order()
    assert Counter(record.op for record in found.records) == {"r": 500, "u": 20}
    writer = LogWriter.open(LogDirectory.open(tmp_path / "log"), "0")
    states = shard_states(writer.schema_in_force)
    writer.close()
    assert sorted(states) == ["shop/-80", "shop/80-"]
    assert not any("copy" in state for state in states.values()), states


def test_a_table_that_is_new_is_captured_without_a_restart(tmp_path: Path, vitess: EmbeddedVitess) -> None:
    with followed(tmp_path, vitess, "new_*") as found:
        add_table(vitess, "new_one")
        vitess.execute("insert into new_one (id) values (1), (2), (3)")
        found.wait_for(3)
    assert {record.topic for record in found.records} == {"shop.new_one"}
