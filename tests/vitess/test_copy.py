"""The initial snapshot by VStream's copy: existing rows, then changes, over restarts."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest
from deltalake import DeltaTable

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogWriter
from tailrace.protocol.metadata_frames import shard_states
from tailrace.sources.vitess.streaming import copy_plan
from tailrace_servers.vitess import EmbeddedVitess
from tests.support.vitess.capturing import capturing
from tests.support.vitess.cluster import add_table, rows_of
from tests.support.vitess.end_to_end import lines_of, pipeline_file, tailrace
from tests.support.vitess.following import Following, followed
from tests.support.wait import wait_until

pytestmark = [pytest.mark.vitess, pytest.mark.ci]


def test_existing_rows_come_once_and_changes_follow(
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


@pytest.mark.parametrize("snapshot", ["never", "initial"])
def test_a_new_table_is_captured_without_a_restart(
    tmp_path: Path, vitess: EmbeddedVitess, snapshot: str
) -> None:
    table = f"new_{snapshot}"
    with followed(tmp_path, vitess, f"{table}*", snapshot=snapshot) as found:
        add_table(vitess, table)
        vitess.execute(f"insert into {table} (id) values (1), (2), (3)")
        found.wait_for(3)
    assert {record.topic for record in found.records} == {f"shop.{table}"}


@pytest.mark.parametrize("connections", [1, 4])
def test_a_keyspace_without_a_table_is_streamed(
    tmp_path: Path, vitess: EmbeddedVitess, connections: int
) -> None:
    settings = {"snapshot": "initial", "snapshot_connections": connections, "tables": ["shop.none_*"]}
    with capturing(tmp_path, vitess.address, **settings) as found:
        found.wait_for_shards("-80", "80-")
        assert not found.capture.progress().warnings


def test_a_copy_by_one_stream_excludes_views(tmp_path: Path, vitess: EmbeddedVitess, orders: str) -> None:
    view = f"create view {orders}_seen as select * from {orders}"
    vitess.ctl("ApplySchema", "--sql", view, vitess.keyspace)
    vitess.execute(f"insert into {orders} (id) values (1), (2), (3)")
    settings = {"snapshot": "initial", "snapshot_connections": 1, "tables": [f"shop.{orders}*"]}
    with capturing(tmp_path, vitess.address, **settings) as found:
        found.wait_for_shards("-80", "80-")
        found.wait_for_rows(3)
    assert Counter(change.table for change in found.changes()) == {f"shop.{orders}": 3}


def _fill(vitess: EmbeddedVitess, table: str, keys: int, begin: int = 0) -> None:
    for first in range(begin, keys, 2_000):
        rows = ", ".join(f"({key}, 'before {key}')" for key in range(first, min(first + 2_000, keys)))
        vitess.execute(f"insert into {table} (id, what) values {rows}")


class _Writer:
    """Changes tables until it is stopped: raises counters, deletes and inserts rows."""

    def __init__(self, vitess: EmbeddedVitess, tables: Sequence[str], keys: int) -> None:
        self._vitess, self._tables, self._keys = vitess, tables, keys
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self.rounds = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _write(self) -> None:
        chance = random.Random(7)
        while not self._over.is_set():
            table, key = chance.choice(self._tables), chance.randrange(self._keys)
            self._vitess.execute(
                f"update {table} set counter = counter + 1 where id between {key} and {key + 20}",
                f"delete from {table} where id = {chance.randrange(self._keys)}",
                f"insert into {table} (id, what) values ({self._keys + self.rounds}, 'new')",
            )
            self.rounds += 1


def test_mirrors_are_right_after_parallel_copies_of_changing_tables(
    tmp_path: Path, vitess: EmbeddedVitess, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = 8_000
    monkeypatch.setattr(copy_plan, "RANGE_ROWS_MIN", 1_000)
    tables = [f"ranged_{number}" for number in range(3)]
    for table in tables:
        add_table(vitess, table)
        _fill(vitess, table, keys)
    _fill(vitess, tables[0], 0, -keys)
    settings = {
        "snapshot": "initial",
        "snapshot_connections": 8,
        "tables": [f"shop.{name}" for name in tables],
    }
    with _Writer(vitess, tables, keys) as writer:
        for _ in range(4):
            with capturing(tmp_path, vitess.address, **settings) as found:
                found.wait_for_rows(3_000, 60)
        with capturing(tmp_path, vitess.address, **settings) as found:
            found.wait_for_shards("-80", "80-", timeout_s=120)
            wait_until(lambda: not any(state.ahead for state in found.states().values()), 60)
    assert writer.rounds > 0
    with capturing(tmp_path, vitess.address, **settings) as found:
        found.wait_for_shards("-80", "80-")
        vitess.execute(*(f"insert into {table} (id, what) values (1000000, 'last')" for table in tables))
        wait_until(lambda: Counter(change.row["what"] for change in found.changes())["last"] == 3, 60)
    by_key: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for change in found.changes():
        by_key[change.table, int(change.row["id"] or 0)].append((change.op, int(change.row["counter"] or 0)))
    for table in tables:
        there = {key: row[3] for key, row in rows_of(vitess, table).items()}
        mirrored = {
            key: changes[-1][1]
            for (of, key), changes in by_key.items()
            if of == f"shop.{table}" and changes[-1][0] != "d"
        }
        assert mirrored == there
    for where, changes in by_key.items():
        ops = [op for op, _ in changes]
        assert ops.count("r") <= 1, (where, changes)
        at = ops.index("r") if "r" in ops else 0
        counters = [counter for op, counter in changes[at:] if op != "d"]
        assert counters == list(range(counters[0], counters[0] + len(counters))) if counters else True, (
            changes
        )
        assert ops[at:].count("d") <= 1, (where, changes)


def test_a_copy_of_several_tables_is_continued_after_a_kill_anywhere(
    tmp_path: Path, vitess: EmbeddedVitess
) -> None:
    keys = 4_000
    tables = [f"killed_{number}" for number in range(4)]
    for table in tables:
        add_table(vitess, table)
        _fill(vitess, table, keys)
    file = pipeline_file(tmp_path, vitess, "killed_*", snapshot="initial", snapshot_connections=6)
    with _Writer(vitess, tables, keys):
        for number in (1, 2, 5, 8):
            tailrace(
                "run", file, "--until-caught-up", failpoints=f"capture.after_append=kill@{number}", status=-9
            )
    tailrace("run", file, "--until-caught-up")
    for table in tables:
        rows = DeltaTable(str(tmp_path / "mirror" / f"shop.{table}")).to_pyarrow_table().to_pylist()
        mirrored = {row["id"]: (row["what"], row["counter"]) for row in rows}
        assert mirrored == {key: (row[1], row[3]) for key, row in rows_of(vitess, table).items()}
        read = Counter(line["after"]["id"] for line in lines_of(tmp_path, table) if line["op"] == "r")
        assert set(read.values()) == {1}
