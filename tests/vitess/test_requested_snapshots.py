"""Requested snapshots, between a capture and a fake vtgate: real gRPC, a real log."""

from __future__ import annotations

import base64
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import SourceFingerprint
from tailrace.protocol import frames
from tailrace.protocol.metadata_frames import kept_frames
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.shard_state import ShardState
from tailrace.sources.vitess.rows.copy_keys import before_all, common_key, key_text
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.snapshots import AskedSnapshot, VitessSnapshots
from tailrace.sources.vitess.streaming.asked_snapshots import AskedSnapshots
from tests.support.vitess.capturing import Capturing, capturing
from tests.support.vitess.end_to_end import pipeline_file, tailrace
from tests.support.vitess.fake_vtgate import TABLE, FakeVtgate
from tests.support.wait import wait_until

WHOLE = f"shop.{TABLE}"


def _wait_for_end(at: Path, state: str = "done") -> None:
    snapshots = VitessSnapshots(at / "log")
    wait_until(lambda: snapshots.known()[-1]["state"] in ("done", "failed"), 30, "the snapshot's end")
    assert snapshots.known()[-1]["state"] == state, snapshots.known()
    assert not snapshots.is_request_open


def _read_from(found: Capturing) -> int:
    in_force = dict(kept_frames(found.frames()))
    (facts,) = [frame for key, frame in in_force.items() if key.startswith("F")]
    return int(frames.control_json(facts).get("read_from", 0))


@pytest.mark.slow
def test_a_table_is_read_again_in_all_shards_while_its_changes_go_on(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        for key in range(10):
            vtgate.write("-80" if key % 2 else "80-", (key, 0))
        found.wait_for_rows(10)
        VitessSnapshots(tmp_path / "log").request([WHOLE], "")
        for key in range(10):
            vtgate.write("-80" if key % 2 else "80-", (key, 1))
        _wait_for_end(tmp_path)
        found.wait_for_shards("-80", "80-")
        for key in range(10):
            vtgate.write("-80" if key % 2 else "80-", (key, 2))
        found.wait_for_rows(40)
        assert _read_from(found) > 0
    ops = Counter(change.op for change in found.changes())
    assert ops["r"] == 10
    for counters in found.counters().values():
        # A row is read as its newest change left it; no change is lost or undone.
        assert counters == sorted(counters)
        assert set(counters) == {0, 1, 2}


@pytest.mark.slow
def test_only_the_keys_of_a_lost_shard_are_copied_again(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
            vtgate.write("-80", (1, 0))
            vtgate.write("80-", (2, 0))
            found.wait_for_rows(2)
        vtgate.write("80-", (2, 1))
        vtgate.reshard(["80-"], ["80-c0", "c0-"])
        vtgate.change("80-c0", rows={})
        vtgate.complete("80-")
        with capturing(tmp_path, vtgate.address) as found:
            wait_until(lambda: found.shards().get("80-") == "needs_snapshot", 30)
            (warning,) = found.capture.progress().warnings
            assert "tailrace snapshot FILE --lost" in warning.repair
            VitessSnapshots(tmp_path / "log").request([], "")
            _wait_for_end(tmp_path)
            found.wait_for_shards("-80", "80-c0", "c0-")
            vtgate.write("c0-", (2, 2))
            vtgate.write("-80", (1, 1))
            wait_until(lambda: found.counters().get(2, [])[-1:] == [2], 30)
            wait_until(lambda: found.counters()[1] == [0, 1], 30)
            # Rows of the other keys were not read again: it is unknown which rows are gone.
            assert _read_from(found) == 0
            assert not found.capture.progress().warnings
    assert found.counters() == {1: [0, 1], 2: [0, 1, 2]}
    assert Counter(change.op for change in found.changes())["r"] == 1
    assert found.states()["80-"].children == ("80-c0", "c0-")


@pytest.mark.parametrize("snapshot", ["initial", "never"])
@pytest.mark.slow
def test_a_shard_that_is_gone_at_the_next_start_needs_a_snapshot_even_if_it_was_caught_up(
    tmp_path: Path, snapshot: str
) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        vtgate.write("80-", (2, 0))
        with capturing(tmp_path, vtgate.address, snapshot=snapshot) as found:
            now = time.time_ns() // 1000
            wait_until(lambda: found.capture.caught_up(now), 30)
        vtgate.reshard(["80-"], ["80-c0", "c0-"])
        vtgate.complete("80-")
        with capturing(tmp_path, vtgate.address, snapshot=snapshot) as found:
            found.wait_for_mode("needs_snapshot", "80-")


@pytest.mark.slow
def test_after_all_keys_were_copied_again_a_mirror_learns_which_rows_are_gone(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            vtgate.write("0", (1, 0), (2, 0))
            found.wait_for_rows(2)
        vtgate.write("0", (1, 1))
        vtgate.change("0", purged=len(vtgate.shards["0"].binlog), rows={1: 1})
        with capturing(tmp_path, vtgate.address) as found:
            wait_until(lambda: found.shards().get("0") == "needs_snapshot", 30)
        asked = VitessSnapshots(tmp_path / "log").request([], "")
        assert not asked["engine_runs"]
        with capturing(tmp_path, vtgate.address) as found:
            wait_until(lambda: found.counters()[1] == [0, 1], 60)
            found.wait_for_shards("0")
            wait_until(lambda: _read_from(found) > 0, 30)
    assert found.counters() == {1: [0, 1], 2: [0]}


@pytest.mark.slow
def test_a_request_made_while_nothing_runs_is_taken_and_kept_over_a_restart(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            vtgate.write("0", *((key, 0) for key in range(20)))
            found.wait_for_rows(20)
        VitessSnapshots(tmp_path / "log").request([WHOLE], "")
        file = pipeline_file(tmp_path, vtgate, TABLE)
        assert f"    {WHOLE}: 0 rows" in tailrace("snapshot", file, "--list").splitlines()
        assert VitessSnapshots(tmp_path / "log").known()[-1]["state"] == "waiting"
        with capturing(tmp_path, vtgate.address) as found:
            _wait_for_end(tmp_path)
        # The number of rows is not counted, so none is shown.
        assert f"    {WHOLE}" in tailrace("snapshot", file, "--list").splitlines()
        assert VitessSnapshots(tmp_path / "log").known()[-1]["tables"][0]["rows"] is None
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
    assert found.counters() == {key: [0, 0] for key in range(20)}


@pytest.mark.slow
@pytest.mark.parametrize("unreadable", ["shop.nothing", f"other.{TABLE}"])
def test_a_request_for_an_unreadable_table_fails_alone(tmp_path: Path, unreadable: str) -> None:
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("0")
        snapshots = VitessSnapshots(tmp_path / "log")
        snapshots.request([unreadable], "")
        _wait_for_end(tmp_path, "failed")
        assert [warning.key for warning in snapshots.warnings] == [
            f"snapshot_failed:{snapshots.known()[-1]['id']}"
        ]
        assert list(found.capture.progress().warnings) == snapshots.warnings
        with pytest.raises(TailraceError) as refused:
            snapshots.request([WHOLE], "id > 5")
        assert refused.value.kind is Kind.CONFIG_INVALID
        vtgate.write("0", (1, 0))
        found.wait_for_rows(1)
        snapshots.request([WHOLE], "")
        _wait_for_end(tmp_path)
        assert not snapshots.warnings
        assert not found.capture.progress().warnings


class _Vtgate:
    """Answers with tables, and for each the last key."""

    def query(self, *_: str) -> list[tuple[str, str | None, str | None]]:
        keyed = [(name, "id", "bigint") for name in (TABLE, "excluded", "other", "secret", "uncaptured")]
        return [("keyless", None, None), *keyed]

    def ask_result(self, sql: str, _attempted: str, _target: str) -> Future[pb.QueryResult]:
        found: Future[pb.QueryResult] = Future()
        if "`secret`" in sql:
            found.set_exception(TailraceError(Kind.SOURCE_AUTH_FAILED, "refused", "none"))
            return found
        row = pb.Row(lengths=[len(sql)], values=sql.encode())
        found.set_result(pb.QueryResult(fields=[pb.Field(name="id", type=265)], rows=[row]))
        return found


def test_of_excluded_tables_no_row_is_read_behind_the_last_one(tmp_path: Path) -> None:
    tables = tuple(f"shop.{name}" for name in (TABLE, "excluded", "keyless", "other", "secret"))
    left_out = ("shop.excluded", "shop.keyless", "shop.secret")
    source = VitessSource(hosts=("127.0.0.1:1",), keyspace="shop", tables=tables, tables_exclude=left_out)
    coordinator = Coordinator({"0": ShardState("MySQL56/00000000-0000-11eb-b894-04ed332e05c2:1-3")})
    directory = LogDirectory.create_or_open(tmp_path / "log", SourceFingerprint("vitess", "shop", "shop", ""))
    asked = AskedSnapshots(directory, source, _Vtgate(), None, LogTables({}), coordinator, lambda _: None)  # type: ignore[arg-type]
    ((shard, keys),) = asked._keys(AskedSnapshot("1", 0, (f"shop.{TABLE}",)))
    assert (shard, sorted(keys)) == ("0", [TABLE, "excluded", "other"])
    last = pb.TableLastPk.FromString(base64.b64decode(keys["excluded"])).last_pk
    assert last.rows[0].values.startswith(b"select `id` from `excluded` order by `id` desc")


def _key(*values: str, kinds: tuple[int, ...] = (265,)) -> str:
    row = pb.Row(lengths=[len(value) for value in values], values="".join(values).encode())
    return key_text("t", pb.QueryResult(fields=[pb.Field(type=kind) for kind in kinds], rows=[row]))


def test_the_copy_of_a_merged_shard_continues_after_the_key_that_all_parents_had() -> None:
    assert common_key([_key("9"), _key("10"), _key("11")]) == _key("9")
    assert common_key([_key("2", "9", kinds=(265, 265)), _key("2", "10", kinds=(265, 265))]) == _key(
        "2", "9", kinds=(265, 265)
    )
    assert common_key([None, None]) is None


def test_if_the_order_of_keys_is_unknown_all_rows_are_copied_again() -> None:
    # A key of any type without a value: the server begins at the table's start, and leaves no change out.
    texts, numbers, moments = (
        key_text("t", before_all([pb.Field(type=kind), pb.Field(type=265)])) for kind in (6165, 778, 2062)
    )
    assert common_key([_key("b", kinds=(6165,)), _key("a", kinds=(6165,))]) == texts
    assert common_key([_key("9", kinds=(778,)), None]) == numbers
    assert common_key([_key("2020-01-01", "1", kinds=(2062, 265)), None]) == moments
    assert common_key([numbers, _key("9", kinds=(778,))]) == numbers
    assert common_key([numbers, numbers]) == numbers
