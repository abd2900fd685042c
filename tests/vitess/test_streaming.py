"""Streams of a real cluster that breaks: nothing is lost or repeated, and keys keep their order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogWriter
from tailrace.protocol.metadata_frames import shard_states
from tailrace.sources.vitess.streaming import keyspace_stream
from tailrace_servers.vitess import EmbeddedVitess, find_vitess
from tests.support.vitess.cluster import ORDERS, VSCHEMA, add_table
from tests.support.vitess.following import Following, followed
from tests.support.vitess.writer import STEP_S, Writer
from tests.support.wait import wait_until

pytestmark = pytest.mark.vitess

TABLE = "orders"


@pytest.fixture
def cluster() -> Iterator[EmbeddedVitess]:
    """A cluster for one test, which may break it."""
    with EmbeddedVitess(find_vitess(), vschema=VSCHEMA) as made:
        add_table(made, TABLE, ORDERS)
        yield made


def _write(cluster: EmbeddedVitess, table: str, keys: range, times: int = 1) -> int:
    """Insert the missing keys, and raise each one's counter; return the number of changes."""
    known = {row[0] for row in cluster.execute(f"select id from {table}")}
    count = 0
    for _ in range(times):
        for key in keys:
            if key in known:
                cluster.execute(f"update {table} set counter = counter + 1 where id = {key}")
            else:
                cluster.execute(f"insert into {table} (id, what) values ({key}, 'ä {key}')")
                known.add(key)
            count += 1
    return count


def _last(found: Following, without: set[int], counter: int) -> bool:
    return all(values[-1] == counter for key, values in found.counters.items() if key not in without)


def _segments(at: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (at / "log" / "tasks" / "0").glob("*.seg"))


def _states(at: Path) -> dict[str, dict]:
    writer = LogWriter.open(LogDirectory.open(at / "log"), "0")
    try:
        return shard_states(writer.schema_in_force)
    finally:
        writer.close()


def test_a_transaction_larger_than_memory_goes_into_the_log_as_it_comes(
    tmp_path: Path, vitess: EmbeddedVitess, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyspace_stream, "OPEN_BYTES_MAX", 100_000)
    text = "x" * 60
    with followed(tmp_path, vitess, orders) as found:
        with vitess.connection() as connection, connection.cursor() as cursor:
            connection.begin()
            for first in range(0, 12_000, 1_000):
                rows = ", ".join(f"({key}, '{text}')" for key in range(first, first + 1_000))
                cursor.execute(f"insert into {orders} (id, what) values {rows}")
            connection.commit()
        vitess.execute(f"update {orders} set counter = counter + 1 where id = 7")
        found.wait_for(12_001, 120)
    found.assert_in_order()


def test_the_capture_goes_on_after_vtgate_was_killed(tmp_path: Path, cluster: EmbeddedVitess) -> None:
    with followed(tmp_path, cluster, TABLE, reconnect_delay_s_max=1) as found:
        count = _write(cluster, TABLE, range(20))
        found.wait_for(count)
        cluster.kill_vtgate()
        cluster.start_vtgate()
        count += _write(cluster, TABLE, range(20))
        found.wait_for(count)
    found.assert_in_order()


def test_a_shard_goes_on_once_its_servers_are_back_and_the_other_meanwhile(
    tmp_path: Path, cluster: EmbeddedVitess
) -> None:
    with followed(tmp_path, cluster, TABLE) as found:
        count = _write(cluster, TABLE, range(20))
        found.wait_for(count)
        cluster.kill_tablet("80-")
        cluster.kill_mysql("80-")
        # The keys of the other shard.
        kept = [
            row[0] for row in cluster.execute(f"select id from {TABLE}", target=f"{cluster.keyspace}/-80")
        ]
        for key in kept:
            cluster.execute(f"update {TABLE} set counter = counter + 1 where id = {key}")
        found.wait_for(count + len(kept))
        cluster.start_servers("80-")
        count += len(kept) + _write(cluster, TABLE, range(20))
        found.wait_for(count, 120)
    found.assert_in_order()


def test_a_shard_with_purged_binlogs_needs_a_snapshot_and_the_other_goes_on(
    tmp_path: Path, cluster: EmbeddedVitess
) -> None:
    with followed(tmp_path, cluster, TABLE) as found:
        count = _write(cluster, TABLE, range(20))
        found.wait_for(count)
    _write(cluster, TABLE, range(20))
    cluster.mysql("80-", "flush binary logs", "purge binary logs before now() + interval 1 hour")
    lost = {row[0] for row in cluster.execute(f"select id from {TABLE}", target=f"{cluster.keyspace}/80-")}
    with followed(tmp_path, cluster, TABLE, found):
        wait_until(lambda: set(found.counters) and _last(found, lost, 1), 60, "the other shard's changes")
        assert all(found.counters[key] == [0] for key in lost)
        wait_until(lambda: b'"lost"' in _segments(tmp_path), 60, "the shard's state")
    states = _states(tmp_path)
    assert "purged" in states[f"{cluster.keyspace}/80-"]["lost"]
    assert "lost" not in states[f"{cluster.keyspace}/-80"]


def test_an_added_columns_old_value_is_known_after_a_missed_switch(
    tmp_path: Path, cluster: EmbeddedVitess
) -> None:
    with followed(tmp_path, cluster, TABLE) as found:
        count = _write(cluster, TABLE, range(20))
        found.wait_for(count)
    _alter(cluster, "add column extra int not null default 5")
    count += _write(cluster, TABLE, range(20))
    # The shard no longer says what older rows have in the column: it does not serve.
    cluster.reshard("split", ["80-"], ["80-c0", "c0-"])
    count += _write(cluster, TABLE, range(20))
    with followed(tmp_path, cluster, TABLE, found):
        found.wait_for(count, 120)
    found.assert_in_order()
    assert [found.records[n].after.get("extra") for n in (0, -1)] == [None, 5]


def test_online_ddl_loses_no_change(tmp_path: Path, cluster: EmbeddedVitess) -> None:
    with followed(tmp_path, cluster, TABLE) as found:
        with Writer(cluster, TABLE) as writer:
            for change in (
                "modify what varchar(100), add column extra varchar(20) not null default 'é'",
                "drop column amount",
            ):
                writer.more()
                migration = _alter(cluster, change, "--ddl-strategy", "vitess")
                wait_until(partial(_is_over, cluster, migration), STEP_S, "the shards' migration")
            writer.more()
        counters = cluster.execute(f"select counter from {TABLE}")
        found.wait_for(sum(1 + counter for (counter,) in counters), 60)
    found.assert_in_order()
    assert {record.topic for record in found.records} == {f"shop.{TABLE}"}
    last = found.records[-1].after
    assert (last["extra"], "amount" in last) == ("é", False)


def _alter(cluster: EmbeddedVitess, change: str, *options: str) -> str:
    """Alter the table; return the migration's id, if `options` make it one."""
    statement = f"alter table {TABLE} {change}"
    return cluster.ctl("ApplySchema", *options, "--sql", statement, cluster.keyspace).strip()


def _is_over(cluster: EmbeddedVitess, migration: str) -> bool:
    """Return whether both shards have completed a migration."""
    shown = json.loads(cluster.ctl("OnlineDDL", "show", "--json", cluster.keyspace, migration))
    states = [each["status"] for each in shown["migrations"]]
    assert not any("FAIL" in state for state in states), shown
    return states == ["COMPLETE"] * 2


def test_the_capture_follows_a_split_and_a_merge_by_itself(tmp_path: Path, cluster: EmbeddedVitess) -> None:
    found = Following()
    count = 0
    with followed(tmp_path, cluster, TABLE, found):
        count += _write(cluster, TABLE, range(20))
        cluster.reshard("split", ["80-"], ["80-c0", "c0-"])
        count += _write(cluster, TABLE, range(30))
        found.wait_for(count, 120)
        cluster.complete("split", ["80-"])
        cluster.reshard("merge", ["-80", "80-c0"], ["-c0"])
        count += _write(cluster, TABLE, range(40))
        found.wait_for(count, 120)
        cluster.complete("merge", ["-80", "80-c0"])
        count += _write(cluster, TABLE, range(40))
        found.wait_for(count)
    with followed(tmp_path, cluster, TABLE, found):
        count += _write(cluster, TABLE, range(40))
        found.wait_for(count)
    found.assert_in_order()
    assert found.count == count
