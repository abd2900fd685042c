"""The initial snapshot by VStream's copy: existing rows, then changes, over restarts."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pymysql
import pytest
from deltalake import DeltaTable

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogWriter
from tailrace.protocol.metadata_frames import shard_states
from tailrace.sources.vitess.streaming import copy_plan, keyspace_stream, shard_streams
from tailrace_servers.vitess import EmbeddedVitess
from tests.support.vitess.capturing import Capturing, capturing
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


def _fill(vitess: EmbeddedVitess, table: str, keys: int, begin: int = 0, what: str = "") -> None:
    for first in range(begin, keys, 1_000):
        rows = ", ".join(
            f"({key}, '{what or f'before {key}'}')" for key in range(first, min(first + 1_000, keys))
        )
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


def test_a_delete_from_a_table_that_one_stream_has_finished_is_not_lost_when_vtgate_goes_on_by_itself(
    tmp_path: Path, vitess: EmbeddedVitess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_streams, "SHARD_BYTES_MAX", 1 << 18)
    monkeypatch.setattr(keyspace_stream, "BACKLOG_INTERVAL_S", 0.1)
    for table in ("swept_a", "swept_b"):
        add_table(vitess, table, "create table {name} (id bigint primary key, what varchar(4000))")
    _fill(vitess, "swept_a", 4_000)
    _fill(vitess, "swept_b", 6_000, what="x" * 4_000)
    settings = {"snapshot": "initial", "snapshot_connections": 1, "tables": ["shop.swept_*"]}
    over = threading.Event()

    def sweep() -> None:
        for key in range(4_000):
            vitess.execute(f"delete from swept_a where id = {key}")
            if over.wait(0.005):
                return

    def kill_the_copy() -> bool:
        with contextlib.suppress(pymysql.err.MySQLError):
            vitess.mysql(
                "-80",
                "select id into @id from information_schema.processlist "
                "where info like 'select%from swept%b%' and id <> connection_id() limit 1",
                "kill query @id",
            )
            return True
        return False

    with capturing(tmp_path, vitess.address, **settings) as found:
        found.wait_for_rows(4_000, 60)
        sweeper = threading.Thread(target=sweep, daemon=True)
        sweeper.start()
        wait_until(kill_the_copy, 30, "the copy's query")
        found.wait_for_shards("-80", "80-", timeout_s=120)
        over.set()
        sweeper.join(30)
        there = set(rows_of(vitess, "swept_a"))
        wait_until(lambda: _keys_in(found, "shop.swept_a") == there, 30, "all deletes")
        assert len(_keys_in(found, "shop.swept_b")) == 6_000


def test_a_delete_from_a_table_that_was_empty_at_its_turn_is_not_lost_when_the_copy_is_interrupted(
    tmp_path: Path, vitess: EmbeddedVitess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in ("idle_a", "idle_b", "idle_bb", "idle_c"):
        add_table(vitess, table, "create table {name} (id bigint primary key, what varchar(4000))")
    _fill(vitess, "idle_b", 100)
    _fill(vitess, "idle_c", 4_000, what="x" * 4_000)
    settings = {"snapshot": "initial", "snapshot_connections": 1, "tables": ["shop.idle_*"]}
    with monkeypatch.context() as slow:
        slow.setattr(shard_streams, "SHARD_BYTES_MAX", 1 << 18)
        slow.setattr(keyspace_stream, "BACKLOG_INTERVAL_S", 0.1)
        with capturing(tmp_path, vitess.address, **settings) as found:
            found.wait_for_rows(1, 60)  # of the second table
            _fill(vitess, "idle_a", 100)
            found.wait_for_rows(700, 60)  # of the last table, too
    assert len(_keys_in(found, "shop.idle_a")) == 100
    assert any(state.copy is not None for state in found.states().values())
    vitess.execute("delete from idle_a")
    with capturing(tmp_path, vitess.address, **settings) as found:
        found.wait_for_shards("-80", "80-", timeout_s=60)
        wait_until(lambda: not _keys_in(found, "shop.idle_a"), 30, "all deletes")
        assert len(_keys_in(found, "shop.idle_c")) == 4_000


def _keys_in(found: Capturing, table: str) -> set[int]:
    """Return the keys of a table's rows, as a mirror has them."""
    last = {int(change.row["id"] or 0): change.op for change in found.changes() if change.table == table}
    return {key for key, op in last.items() if op != "d"}


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


def test_an_interrupted_copy_of_a_table_with_a_text_as_key_is_continued_with_its_changes(
    tmp_path: Path, vitess: EmbeddedVitess, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, keys = "by_name", 4_000
    ddl = f"create table {table} (name varchar(40) primary key, n int not null default 0, what varchar(4000))"
    vitess.ctl("ApplySchema", "--sql", ddl, vitess.keyspace)
    vitess.execute(f"alter vschema on {vitess.keyspace}.{table} add vindex names(name) using xxhash")
    for first in range(0, keys, 1_000):
        rows = (f"('name {key:05}', repeat('x', 4000))" for key in range(first, first + 1_000))
        vitess.execute(f"insert into {table} (name, what) values {', '.join(rows)}")
    settings = {"snapshot": "initial", "snapshot_connections": 4, "tables": [f"shop.{table}"]}
    with monkeypatch.context() as slow:
        slow.setattr(shard_streams, "SHARD_BYTES_MAX", 1 << 18)
        slow.setattr(keyspace_stream, "BACKLOG_INTERVAL_S", 0.1)
        with capturing(tmp_path, vitess.address, **settings) as found:
            found.wait_for_rows(keys // 4, 60)
    assert all(state.copy is not None for state in found.states().values())
    changed = ", ".join(f"'name {key:05}'" for key in range(0, keys, 7))
    vitess.execute(f"update {table} set n = 1 where name in ({changed})")
    with capturing(tmp_path, vitess.address, **settings) as found:
        found.wait_for_shards("-80", "80-", timeout_s=60)
        there = dict(vitess.execute(f"select name, n from {table}"))
        wait_until(lambda: _newest(found, "name", "n") == there, 30, "all changes")


def _newest(found: Capturing, key: str, column: str) -> dict[str | None, int]:
    return {change.row[key]: int(change.row[column] or 0) for change in found.changes()}
