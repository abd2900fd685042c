"""Requested snapshots on a real cluster: lost keys are copied again, and mirrors are right."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tailrace.sources.vitess.snapshots import VitessSnapshots
from tailrace.sources.vitess.streaming import serving_shards, silent_shards
from tailrace_servers.vitess import EmbeddedVitess, find_vitess
from tests.support.vitess.capturing import capturing
from tests.support.vitess.cluster import ORDERS, VSCHEMA, add_table, rows_of
from tests.support.vitess.end_to_end import lines_of, pipeline_file, tailrace
from tests.support.vitess.writer import STEP_S
from tests.support.wait import wait_until

pytestmark = pytest.mark.vitess

TABLE = "orders"


@pytest.fixture
def cluster() -> Iterator[EmbeddedVitess]:
    """A cluster for one test, which may break it."""
    with EmbeddedVitess(find_vitess(), vschema=VSCHEMA) as made:
        add_table(made, TABLE, ORDERS)
        yield made


def _mirrored(at: Path, table: str) -> dict[int, tuple[object, ...]]:
    rows = DeltaTable(str(at / "mirror" / f"shop.{table}")).to_pyarrow_table().to_pylist()
    return {row["id"]: (row["what"], str(row["amount"]), row["counter"]) for row in rows}


def _there(cluster: EmbeddedVitess, table: str) -> dict[int, tuple[object, ...]]:
    return {key: (row[1], str(row[2]), row[3]) for key, row in rows_of(cluster, table).items()}


def _insert(cluster: EmbeddedVitess, table: str, keys: range) -> None:
    rows = ", ".join(f"({key}, 'row {key}', 1.50)" for key in keys)
    cluster.execute(f"insert into {table} (id, what, amount) values {rows}")


def test_a_mirror_is_right_after_a_table_was_read_again(
    tmp_path: Path, vitess: EmbeddedVitess, orders: str
) -> None:
    _insert(vitess, orders, range(200))
    file = pipeline_file(tmp_path, vitess, orders, snapshot="initial", shard_column="_shard")
    tailrace("run", file, "--until-caught-up")
    assert _mirrored(tmp_path, orders) == _there(vitess, orders)
    # Changes that the binlogs do not have.
    for shard in ("-80", "80-"):
        vitess.mysql(
            shard,
            "set sql_log_bin = 0",
            f"delete from vt_shop.{orders} where id % 7 = 3",
            f"update vt_shop.{orders} set counter = 5 where id % 7 = 4",
        )
    _insert(vitess, orders, range(200, 220))
    tailrace("run", file, "--until-caught-up")
    assert _mirrored(tmp_path, orders) != _there(vitess, orders)
    assert "no engine runs" in tailrace("snapshot", file, "--table", f"shop.{orders}")
    _insert(vitess, orders, range(220, 240))
    tailrace("run", file, "--until-caught-up")
    assert _mirrored(tmp_path, orders) == _there(vitess, orders)
    (listed,) = json.loads(tailrace("snapshot", file, "--list", "--json"))["snapshots"]
    assert listed["state"] == "done"
    read = Counter(line["op"] for line in lines_of(tmp_path, orders))
    assert read["r"] == 200 + len(_there(vitess, orders))
    rows = DeltaTable(str(tmp_path / "mirror" / f"shop.{orders}")).to_pyarrow_table().to_pylist()
    for shard in ("-80", "80-"):
        there = {row[0] for row in vitess.execute(f"select id from {orders}", target=f"shop/{shard}")}
        assert {row["id"] for row in rows if row["_shard"] == shard} == there


def test_tables_with_keys_of_times_and_dates_are_read_again(tmp_path: Path, vitess: EmbeddedVitess) -> None:
    add_table(
        vitess,
        "moments",
        "create table {name} (id bigint, d date, t time(3), at datetime, seen timestamp, "
        "primary key (id, d, t, at, seen))",
    )
    add_table(vitess, "days", "create table {name} (d date primary key, id bigint)")
    columns = "insert into moments (id, d, t, at, seen) values"
    for key in range(6):
        vitess.execute(f"{columns} ({key}, '2020-01-01', '-10:00:00', '2020-01-01', '2020-01-01')")
    tables = ["shop.moments", "shop.days"]
    with capturing(tmp_path, vitess.address, snapshot="initial", tables=tables) as found:
        found.wait_for_rows(6, 60)
        found.wait_for_shards("-80", "80-")
        snapshots = VitessSnapshots(tmp_path / "log")
        snapshots.request(["shop.moments"], "")
        wait_until(lambda: snapshots.known()[-1]["state"] == "done", 60)
        vitess.execute("insert into days (d, id) values ('1999-12-31', 1), ('2020-01-01', 2)")
        found.wait_for_rows(14, 30)
    read = Counter((change.table, change.op) for change in found.changes())
    assert read == {("shop.moments", "r"): 12, ("shop.days", "c"): 2}


def test_no_change_is_lost_while_a_table_is_read_again(tmp_path: Path, cluster: EmbeddedVitess) -> None:
    _insert(cluster, TABLE, range(3_000))
    add_table(cluster, "others", ORDERS)
    _insert(cluster, "others", range(100))
    with capturing(tmp_path, cluster.address, snapshot="initial", receive_timeout_s=30) as found:
        found.wait_for_rows(3_100, 120)
        found.wait_for_shards("-80", "80-")
        VitessSnapshots(tmp_path / "log").request([f"shop.{TABLE}"], "")
        rounds = 0
        while VitessSnapshots(tmp_path / "log").known()[-1]["state"] != "done":
            for table in (TABLE, "others"):
                cluster.execute(f"update {table} set counter = counter + 1 where id < 50")
            rounds += 1
            assert rounds < 5_000
        found.wait_for_rows(6_100 + 100 * rounds, 60)
    changes = [change for change in found.changes() if change.table == "shop.orders"]
    assert Counter(change.op for change in changes) == {"r": 6_000, "u": 50 * rounds}
    by_key: dict[int, list[int]] = {}
    for change in changes:
        by_key.setdefault(int(change.row["id"] or 0), []).append(int(change.row["counter"] or 0))
    for key, counters in by_key.items():
        assert counters == sorted(counters), (key, counters)
        assert set(counters) == set(range(rounds + 1 if key < 50 else 1)), (key, counters)
    others = Counter(change.op for change in found.changes() if change.table == "shop.others")
    assert others == {"r": 100, "u": 50 * rounds}


def test_after_missing_a_whole_reshard_the_lost_keys_are_copied_again(
    tmp_path: Path, cluster: EmbeddedVitess
) -> None:
    _insert(cluster, TABLE, range(100))
    file = pipeline_file(tmp_path, cluster, TABLE, snapshot="initial")
    tailrace("run", file, "--until-caught-up")
    gone = next(row[0] for row in cluster.execute(f"select id from {TABLE}", target="shop/80-"))
    cluster.execute(f"update {TABLE} set counter = 1 where id < 50")
    cluster.reshard("split", ["80-"], ["80-c0", "c0-"])
    cluster.complete("split", ["80-"])
    cluster.execute(f"delete from {TABLE} where id = {gone}")
    with capturing(tmp_path, cluster.address, snapshot="initial") as found:
        found.wait_for_mode("needs_snapshot", "80-")
        (warning,) = found.capture.progress().warnings
        assert (warning.key, "--lost" in warning.repair) == ("shard_needs_snapshot 80-", True)
    tailrace("snapshot", file, "--lost")
    cluster.execute(f"update {TABLE} set counter = counter + 1 where id < 20")
    tailrace("run", file, "--until-caught-up")
    # The keys of the other shard were not read again: it is unknown which of the lost ones are gone.
    expected = _there(cluster, TABLE)
    mirrored = _mirrored(tmp_path, TABLE)
    assert {key: row for key, row in mirrored.items() if key != gone} == expected
    tailrace("snapshot", file, "--table", f"shop.{TABLE}")
    tailrace("run", file, "--until-caught-up")
    assert _mirrored(tmp_path, TABLE) == _there(cluster, TABLE)


def test_a_switch_back_to_former_shards_without_a_journal_is_detected_and_their_keys_are_copied_again(
    tmp_path: Path, cluster: EmbeddedVitess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 2.0)
    monkeypatch.setattr(serving_shards, "LIST_INTERVAL_S", 1.0)
    _insert(cluster, TABLE, range(100))
    file = pipeline_file(tmp_path, cluster, TABLE, snapshot="initial")
    tailrace("run", file, "--until-caught-up")
    with capturing(tmp_path, cluster.address, snapshot="initial") as found:
        cluster.reshard("merge", ["-80", "80-"], ["-"])
        found.wait_for_shards("-", timeout_s=STEP_S)
        cluster.reverse("merge")
        found.wait_for_shards("-80", "80-", timeout_s=STEP_S)
        cluster.switch("merge")
        found.wait_for_shards("-", timeout_s=STEP_S)
        cluster.complete("merge", ["-80", "80-"])
        cluster.execute(f"update {TABLE} set counter = 1 where id < 60")
        # The streams of this reshard have the ids of those that switched the traffic back before: Vitess 22
        # takes the journal that it wrote then for one of this switch.
        cluster.reshard("split", ["-"], ["-80", "80-"])
        cluster.execute(f"delete from {TABLE} where id < 10", f"update {TABLE} set counter = 2 where id < 30")
        if cluster.release == "22":
            found.wait_for_mode("needs_snapshot", "-")
            (warning,) = found.capture.progress().warnings
            assert "no journal of a reshard" in warning.message
        else:  # it writes a journal
            found.wait_for_shards("-80", "80-")
    if cluster.release == "22":
        assert _mirrored(tmp_path, TABLE) != _there(cluster, TABLE)
        tailrace("snapshot", file, "--lost")
    cluster.execute(f"update {TABLE} set counter = counter + 1 where id < 20")
    tailrace("run", file, "--until-caught-up")
    assert _mirrored(tmp_path, TABLE) == _there(cluster, TABLE)


def test_a_snapshot_recovers_from_purged_binlogs(tmp_path: Path, cluster: EmbeddedVitess) -> None:
    _insert(cluster, TABLE, range(100))
    file = pipeline_file(tmp_path, cluster, TABLE, snapshot="initial")
    tailrace("run", file, "--until-caught-up")
    cluster.execute(f"delete from {TABLE} where id < 10")
    cluster.execute(f"update {TABLE} set counter = 1 where id < 50")
    for shard in ("-80", "80-"):
        cluster.mysql(shard, "flush binary logs", "purge binary logs before now() + interval 1 hour")
    with capturing(tmp_path, cluster.address, snapshot="initial") as found:
        found.wait_for_mode("needs_snapshot", "-80", "80-")
    tailrace("snapshot", file, "--lost")
    tailrace("run", file, "--until-caught-up")
    # All keys were read again, so deleted rows are gone from the mirror, too.
    assert _mirrored(tmp_path, TABLE) == _there(cluster, TABLE)


@pytest.mark.parametrize(
    "change",
    [
        "alter table {name} drop column at",
        "alter table {name} modify counter bigint not null default 0",
        "drop table {name}",
        "alter table {name} add column seen timestamp(6) null after counter",  # also the values of `at`
    ],
    ids=["column dropped", "type changed", "table dropped", "column added between"],
)
def test_a_table_altered_while_no_capture_ran_is_copied_again(
    tmp_path: Path, vitess: EmbeddedVitess, orders: str, change: str
) -> None:
    def apply(statement: str) -> None:
        vitess.ctl("ApplySchema", "--sql", statement.format(name=orders), vitess.keyspace)

    _insert(vitess, orders, range(20))
    file = pipeline_file(tmp_path, vitess, orders, snapshot="initial")
    tailrace("run", file, "--until-caught-up")
    _insert(vitess, orders, range(20, 40))
    apply(change)
    tables = [f"{vitess.keyspace}.{orders}"]
    is_lost = vitess.release == "22" or "modify" not in change  # Vitess 24 sends rows of another type
    if is_lost:
        with capturing(tmp_path, vitess.address, snapshot="initial", tables=tables) as found:
            found.wait_for_mode("needs_snapshot", "-80", "80-")
            assert "no longer knows the columns of a table" in found.capture.progress().warnings[0].message
    if "drop table" in change:
        apply(ORDERS)
        _insert(vitess, orders, range(30))
    if is_lost:
        tailrace("snapshot", file, "--lost")
    vitess.execute(f"update {orders} set counter = counter + 1 where id < 10")
    tailrace("run", file, "--until-caught-up")
    counters = dict(vitess.execute(f"select id, counter from {orders}"))
    assert {key: row[2] for key, row in _mirrored(tmp_path, orders).items()} == counters


def test_a_shard_restored_from_a_backup_is_copied_again(
    tmp_path: Path, cluster: EmbeddedVitess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 2.0)
    _insert(cluster, TABLE, range(100))
    file = pipeline_file(tmp_path, cluster, TABLE, snapshot="initial")
    tailrace("run", file, "--until-caught-up")
    ((backup,),) = cluster.execute("select @@global.gtid_executed", target="shop/80-")
    cluster.execute(f"update {TABLE} set counter = 1 where id < 50")
    tailrace("run", file, "--until-caught-up")
    cluster.mysql(
        "80-",
        "reset master",
        f"set global gtid_purged = '{backup}'",
        "set sql_log_bin = 0",
        f"update vt_shop.{TABLE} set counter = 0",
    )
    with capturing(tmp_path, cluster.address, snapshot="initial") as found:
        found.wait_for_mode("needs_snapshot", "80-")
        assert "lacks transactions" in found.capture.progress().warnings[0].message
    assert _mirrored(tmp_path, TABLE) != _there(cluster, TABLE)
    tailrace("snapshot", file, "--lost")
    cluster.execute(f"update {TABLE} set counter = counter + 1 where id < 20")
    tailrace("run", file, "--until-caught-up")
    assert _mirrored(tmp_path, TABLE) == _there(cluster, TABLE)
