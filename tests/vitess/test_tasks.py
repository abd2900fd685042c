"""Shards assigned to several tasks: whatever their number, one order, one state of each shard."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogWriter
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.metadata_frames import shard_states
from tailrace.sources.findings import Severity
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace.sources.vitess.preflight import VitessCheck
from tailrace.sources.vitess.resharding.transitions import ShardMode, mode_of
from tailrace.sources.vitess.streaming import keyspace_stream, silent_shards
from tailrace_servers.ports import free_port
from tests.support.vitess.capturing import Capturing, capturing, shard_states_of
from tests.support.vitess.end_to_end import lines_of, pipeline_file, tailrace
from tests.support.vitess.fake_vtgate import KEYSPACE, TABLE, FakeVtgate
from tests.support.vitess.life import Life
from tests.support.wait import wait_until

QUARTERS = ("-40", "40-80", "80-c0", "c0-")


def _tasks(found: Capturing) -> dict[str, int]:
    """Return the task of each shard that is read, as `status` shows it."""
    health = found.capture.progress().health
    assert health is not None
    shards = health.details["shards"]
    return {name: each["task"] for name, each in shards.items() if each["task"] is not None}


@pytest.mark.slow
def test_each_task_reads_its_shards_over_its_own_connection(tmp_path: Path) -> None:
    eighths = ("-20", "20-40", "40-60", "60-80", "80-a0", "a0-c0", "c0-e0", "e0-")
    with FakeVtgate(*eighths) as vtgate, capturing(tmp_path, vtgate.address, tasks_max=3) as found:
        found.wait_for_shards(*eighths)
        tasks = list(_tasks(found).values())
        assert sorted(tasks.count(task) for task in range(3)) == [2, 3, 3]
        assert len(vtgate.peers) == 3
        health = found.capture.progress().health
        assert health is not None
        assert health.details["tasks"] == dict.fromkeys("012", vtgate.address)
        for counter in range(20):
            for key, shard in enumerate(eighths):
                vtgate.write(shard, (key, counter))
        found.wait_for_rows(20 * 8)
    assert found.counters() == {key: list(range(20)) for key in range(8)}


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.slow
def test_a_merge_of_shards_on_different_tasks_is_followed(tmp_path: Path, is_lost: bool) -> None:
    with FakeVtgate(*QUARTERS) as vtgate, capturing(tmp_path, vtgate.address, tasks_max=4) as found:
        found.wait_for_shards(*QUARTERS)
        tasks = _tasks(found)
        assert len(set(tasks.values())) == 4
        for key, shard in enumerate(QUARTERS):
            vtgate.write(shard, (key, 0))
            vtgate.change(shard, loses_journal=is_lost)
        vtgate.reshard(["-40", "40-80", "80-c0"], ["-60", "60-c0"])
        for key, shard in enumerate(["-60", "-60", "60-c0", "c0-"]):
            vtgate.write(shard, (key, 1))
        found.wait_for_shards("-60", "60-c0", "c0-")
        found.wait_for_rows(8)
        # Of the tasks that lost their shards, two have the new ones; the one of `c0-` has kept it.
        after = _tasks(found)
        assert after["c0-"] == tasks["c0-"]
        assert len(set(after.values())) == 3
    assert found.counters() == {key: [0, 1] for key in range(4)}
    states = found.states()
    assert states["60-c0"].parents == ("40-80", "80-c0")


@pytest.mark.slow
def test_tasks_max_changes_between_killed_processes_and_shards_merge_across_tasks(
    tmp_path: Path,
) -> None:
    written = dict.fromkeys(range(8), 0)

    def write(vtgate: FakeVtgate, shards: Sequence[str]) -> None:
        for _ in range(10):
            for key in written:
                vtgate.write(shards[key * len(shards) // 8], (key, written[key]))
                written[key] += 1

    with FakeVtgate(*QUARTERS) as vtgate:
        tasks = iter([1, 3, 2])
        life = Life(lambda: _file(tmp_path, vtgate, next(tasks)))
        try:
            life.start()
            wait_until(lambda: _streamed(tmp_path) == set(QUARTERS), 60, "four shards, one task")
            write(vtgate, QUARTERS)
            life.kill()
            write(vtgate, QUARTERS)
            vtgate.reshard(["40-80", "80-c0"], ["40-c0"])  # of different tasks in the next process
            after = ["-40", "-40", "40-c0", "40-c0", "40-c0", "40-c0", "c0-", "c0-"]
            write(vtgate, after)
            life.start()
            write(vtgate, after)
            wait_until(lambda: _streamed(tmp_path) == {"-40", "40-c0", "c0-"}, 60, "a merge, three tasks")
            life.kill()
            kept, opened = _kept(tmp_path), len(vtgate.requests)
            life.start()
            wait_until(lambda: len(vtgate.requests) >= opened + 3, 60, "three shards, two tasks")
            positions = [each.vgtid.shard_gtids[0] for each in vtgate.requests[opened:]]
            assert {each.shard: each.gtid for each in positions} == {
                name: state["gtid"] for name, state in kept.items() if "to" not in state
            }
            vtgate.reshard(["40-c0", "c0-"], ["40-"])
            write(vtgate, ["-40", "-40", *["40-"] * 6])
            wait_until(lambda: _streamed(tmp_path) == {"-40", "40-"}, 60, "another merge, two tasks")
        finally:
            life.kill()
        tailrace("run", _file(tmp_path, vtgate, 8), "--until-caught-up")
    counters: dict[int, list[int]] = {}
    for line in lines_of(tmp_path, TABLE):
        counters.setdefault(line["after"]["id"], []).append(line["after"]["counter"])
    assert counters == {key: list(range(count)) for key, count in written.items()}
    assert life.lives == 3


def _file(at: Path, vtgate: FakeVtgate, tasks_max: int) -> Path:
    quick: dict[str, Any] = {"snapshot": "never", "reconnect_delay_s": 0.1}
    return pipeline_file(at, vtgate, TABLE, sinks=("jsonl",), tasks_max=tasks_max, **quick)


def _streamed(at: Path) -> set[str]:
    if not (at / "log" / "tasks" / "0").exists():
        return set()
    states = shard_states_of(at / "log")
    return {name for name, kept in states.items() if mode_of(kept) is ShardMode.STREAMING and kept.is_read}


def _kept(at: Path) -> dict[str, dict[str, Any]]:
    """Return the states of shards that the next process finds in a log that is not being written."""
    writer = LogWriter.open(LogDirectory.open(at / "log"), "0")
    try:
        states = shard_states(writer.schema_in_force)
    finally:
        writer.close()
    return {name.partition("/")[2]: state for name, state in states.items()}


@pytest.mark.parametrize("tasks_max", [1, 2])
@pytest.mark.slow
def test_while_the_log_is_inside_a_large_transaction_other_shards_wait_whatever_their_task(
    tmp_path: Path, tasks_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyspace_stream, "OPEN_BYTES_MAX", 2_000)
    with (
        FakeVtgate("-80", "80-") as vtgate,
        capturing(tmp_path, vtgate.address, tasks_max=tasks_max) as found,
    ):
        found.wait_for_shards("-80", "80-")
        for turn in range(3):
            vtgate.change("-80", is_cut=True, allowed=200)
            vtgate.write("-80", *((key, turn) for key in range(400)))
            found.wait_for_rows(turn * 500 + 150)
            for counter in range(100):
                vtgate.write("80-", (1000, turn * 100 + counter))
            vtgate.change("-80", allowed=None)
            found.wait_for_rows(turn * 500 + 500)
    assert found.counters() == {
        **{key: [0, 1, 2] for key in range(400)},
        1000: list(range(300)),
    }


@pytest.mark.slow
def test_transactions_that_come_during_a_large_one_wait_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyspace_stream, "OPEN_BYTES_MAX", 2_000)
    monkeypatch.setattr(keyspace_stream, "APPEND_INTERVAL_S", 0.5)  # so that one turn brings much of both
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        for turn in range(3):
            vtgate.change("-80", is_cut=True, allowed=200)
            vtgate.write("-80", *((key, turn) for key in range(400)))
            vtgate.write("80-", (1000, turn))
            found.wait_for_rows(turn * 401 + 150)
            vtgate.change("-80", allowed=None)
            found.wait_for_rows(turn * 401 + 401)
    assert found.counters() == {key: [0, 1, 2] for key in [*range(400), 1000]}


@pytest.mark.slow
def test_an_interrupted_copy_continues_in_other_tasks_without_repeating_rows(tmp_path: Path) -> None:
    with FakeVtgate(*QUARTERS) as vtgate:
        for number, shard in enumerate(QUARTERS):
            for key in range(50):
                vtgate.write(shard, (100 * number + key, 0))
            vtgate.change(shard, allowed=20)
        with capturing(tmp_path, vtgate.address, tasks_max=3, snapshot="initial") as found:
            found.wait_for_rows(4 * 15)
        for shard in QUARTERS:
            vtgate.change(shard, allowed=None)
        with capturing(tmp_path, vtgate.address, tasks_max=2, snapshot="initial") as found:
            found.wait_for_shards(*QUARTERS)
            vtgate.write("-40", (7, 1))
            wait_until(lambda: found.counters().get(7) == [0, 1], 30)
        keys = [100 * number + key for number in range(4) for key in range(50)]
        assert found.counters() == {key: [0, 1] if key == 7 else [0] for key in keys}


@pytest.mark.slow
def test_an_error_of_one_task_ends_all_and_names_the_shard(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address, tasks_max=2) as found:
        found.wait_for_shards("-80", "80-")
        assert _tasks(found)["80-"] == 1
        vtgate.change("80-", errors=[(grpc.StatusCode.PERMISSION_DENIED, "not for you")])
        vtgate.write("80-", (1, 0))
        wait_until(lambda: found.failure is not None, 30, "the capture ends")
        found.thread.join(30)
        assert isinstance(found.failure, TailraceError)
        assert (found.failure.kind, found.failure.context["shard"]) == (Kind.SOURCE_AUTH_FAILED, "80-")
        assert not [each for each in threading.enumerate() if each.name.startswith("tailrace-vitess")]


@pytest.mark.slow
def test_a_shard_without_a_tablet_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 1.0)

    def told() -> list[str]:
        return [each.message for each in found.capture.progress().warnings]

    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address, tasks_max=2) as found:
        found.wait_for_shards("-80", "80-")
        vtgate.change("80-", has_tablet=False)
        vtgate.write("80-", (2, 0))
        (message,) = wait_until(told, 15, "the shard is named after one question")
        assert "the shard 80- is delayed" in message
        assert "no healthy tablet" in message
        vtgate.write("-80", (1, 0))
        found.wait_for_rows(1)
        vtgate.change("80-", has_tablet=True)
        found.wait_for_rows(2)
        wait_until(lambda: not told(), 15)
        # Without changes, only an answer shows that the shard is there again.
        vtgate.change("80-", has_tablet=False)
        wait_until(told, 15)
        vtgate.change("80-", has_tablet=True)
        wait_until(lambda: not told(), 15)
    assert found.counters() == {1: [0], 2: [0]}


@pytest.mark.slow
def test_a_shard_without_a_tablet_delays_catching_up_but_no_other_shard(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        vtgate.change("80-", has_tablet=False)
        asked, asked_us = len(vtgate.asked), time.time_ns() // 1000
        assert not found.capture.caught_up(asked_us)
        wait_until(lambda: vtgate.asked[asked:].count("shop:80-@primary") > 1, 30, "it is asked again")
        vtgate.write("-80", (1, 0))
        found.wait_for_rows(1)
        assert not found.capture.caught_up(asked_us)
        vtgate.change("80-", has_tablet=True)
        wait_until(lambda: found.capture.caught_up(asked_us), 30, "all is there")
        assert found.capture.progress().reconnects == 0


@pytest.mark.slow
def test_a_stream_throttled_by_a_tablet_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 0.5)
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        vtgate.change("80-", is_silent=True)
        vtgate.write("80-", (2, 0))
        (warning,) = wait_until(lambda: found.capture.progress().warnings, 15, "it is named")
        assert warning.key == "shard_delayed 80-"
        assert "throttled" in warning.message


@pytest.mark.slow
def test_all_tasks_go_on_when_vtgate_was_restarted(tmp_path: Path) -> None:
    with FakeVtgate(*QUARTERS) as vtgate, capturing(tmp_path, vtgate.address, tasks_max=3) as found:
        found.wait_for_shards(*QUARTERS)
        for counter in range(3):
            for key, shard in enumerate(QUARTERS):
                vtgate.write(shard, (key, counter))
            vtgate.restart()
        wait_until(lambda: found.rows >= 12 or found.failure is not None, 30)
    assert found.counters() == {key: [0, 1, 2] for key in range(4)}


@pytest.mark.slow
def test_tasks_use_all_vtgates_and_one_that_does_not_answer_blocks_no_task() -> None:
    with FakeVtgate("0") as one, FakeVtgate("0") as other:
        nobody = f"127.0.0.1:{free_port()}"
        for hosts, used in (
            ([one.address, other.address], [one.address, other.address, one.address]),
            ([nobody, one.address, other.address], [one.address, one.address, other.address]),
        ):
            source = VitessSource.model_validate(
                {"hosts": hosts, "keyspace": KEYSPACE, "connect_timeout": 300}
            )
            connections = Vtgate.connect_each(source, 3)
            assert [each.address for each in connections] == used
            for each in connections:
                each.close()


def test_no_host_answers_any_task() -> None:
    hosts = [f"127.0.0.1:{free_port()}"]
    source = VitessSource.model_validate({"hosts": hosts, "keyspace": KEYSPACE, "connect_timeout": 0.5})
    with pytest.raises(TailraceError, match=f"{hosts[0]} .*Connection refused"):
        Vtgate.connect_each(source, 3)


def test_a_list_without_any_shard_is_no_answer(tmp_path: Path) -> None:
    # vtgate 22 gives one to a request that comes while it reads its keyspaces for another client.
    with FakeVtgate("-80", "80-") as vtgate:
        vtgate.empty_lists = 2
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
        assert vtgate.empty_lists == 0


def test_check_reports_tasks_without_shards() -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        for tasks_max, count in ((2, 0), (5, 1)):
            source = VitessSource.model_validate(
                {"hosts": [vtgate.address], "keyspace": KEYSPACE, "tasks_max": tasks_max}
            )
            check = VitessCheck(source)
            try:
                assert not [*check.connect()]
                found = [each for each in check.findings() if "tasks_max" in each.message]
            finally:
                check.close()
            assert len(found) == count
            assert all("2 shards" in each.message for each in found)


@pytest.mark.parametrize(("image", "severity"), [("MINIMAL", Severity.ERROR), ("NOBLOB", Severity.WARNING)])
def test_check_refuses_row_images_that_vitess_does_not_stream(image: str, severity: Severity) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        vtgate.row_image = image
        source = VitessSource.model_validate({"hosts": [vtgate.address], "keyspace": KEYSPACE})
        check = VitessCheck(source)
        try:
            assert not [*check.connect()]
            found = [each for each in check.findings() if image in each.message]
        finally:
            check.close()
    assert [each.severity for each in found] == [severity] * 2


def test_check_names_the_foreign_keys_whose_changes_are_in_no_binlog() -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        vtgate.cascades = [[TABLE, "of_parent"], ["other", "of_another"]]
        given = {"hosts": [vtgate.address], "keyspace": KEYSPACE, "tables_exclude": [f"{KEYSPACE}.other"]}
        check = VitessCheck(VitessSource.model_validate(given))
        try:
            assert not [*check.connect()]
            [found] = [each for each in check.findings() if "foreign key" in each.message]
        finally:
            check.close()
    assert (found.severity, found.table) == (Severity.WARNING, f"{KEYSPACE}.{TABLE}")
    assert "of_parent" in found.message
