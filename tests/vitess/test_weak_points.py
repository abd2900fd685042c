"""The weak points W9 to W19 of Debezium's connector for Vitess, as far as a stream shows them.

W12 and W15 concern single values: `test_rows` has them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from tailrace.changelog.writer import LogWriter, Tail
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.streaming import keyspace_stream
from tailrace.sources.vitess.streaming.stream_requests import table_rules
from tests.support.kafka_cluster import Authority
from tests.support.torture import disk
from tests.support.vitess.capturing import capturing
from tests.support.vitess.fake_vtgate import FakeVtgate
from tests.support.wait import wait_until


@pytest.mark.slow
def test_w9_a_transaction_larger_than_memory_is_written_as_it_comes_and_discarded_if_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyspace_stream, "OPEN_BYTES_MAX", 2_000)
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            assert vtgate.requests[0].flags.transaction_chunk_size > 0
            vtgate.change("0", is_cut=True, allowed=200)
            vtgate.write("0", *((key, 0) for key in range(400)))
            # Its end has not been sent, and is not waited for.
            found.wait_for_rows(150)
        assert found.counters() == {}
        vtgate.change("0", allowed=None)
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_rows(400)
            vtgate.write("0", (7, 1))
            found.wait_for_rows(401)
    assert found.counters() == {key: [0, 1] if key == 7 else [0] for key in range(400)}


@pytest.mark.slow
def test_w9_a_large_transaction_that_stalls_does_not_block_the_other_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyspace_stream, "OPEN_BYTES_MAX", 100)
    settings = {"receive_timeout_s": 2.5, "reconnect_delay_s": 0.1}  # heartbeats come every second
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address, **settings) as found:
        found.wait_for_shards("-80", "80-")
        vtgate.change("-80", is_cut=True, allowed=40)
        vtgate.write("-80", *((key, 0) for key in range(100)))
        found.wait_for_rows(30)
        vtgate.write("80-", (1000, 0))
        wait_until(lambda: 1000 in found.counters(), 15, "the other shard's row")
        vtgate.change("-80", allowed=None)
        wait_until(lambda: len(found.counters()) == 101, 15, "all rows")
    assert all(counters == [0] for counters in found.counters().values())


def test_w11_changes_come_over_mutual_tls_with_a_user(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTGATE_PASSWORD", "of tests")
    made = authority.certificate.parent
    key, certificate = (made / name for name in ("broker.key", "broker.pem"))
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())], authority.certificate.read_bytes(), True
    )
    settings = {
        "tls": "verify-full",
        "tls_ca": str(authority.certificate),
        "tls_certificate": str(certificate),
        "tls_key": str(key),
        "user": "cdc",
        "password": "${env:VTGATE_PASSWORD}",
    }
    with FakeVtgate("0", credentials=credentials, user=("cdc", "of tests")) as vtgate:
        with capturing(tmp_path, vtgate.address, **settings) as found:
            found.wait_for_shards("0")
            vtgate.write("0", (1, 0))
            found.wait_for_rows(1)
        stranger = {**settings, "tls_ca": str(authority.stranger), "reconnect_s_max": 1, "connect_timeout": 1}
        with capturing(tmp_path, vtgate.address, **stranger) as refused:
            wait_until(lambda: refused.failure is not None, 30, "a vtgate that nobody vouches for is refused")
    assert isinstance(refused.failure, TailraceError)
    assert refused.failure.kind is Kind.SOURCE_UNREACHABLE
    assert found.counters() == {1: [0]}


@pytest.mark.slow
def test_w11_a_message_beyond_grpcs_limit_of_4_mib_is_accepted_and_one_beyond_ours_is_refused(
    tmp_path: Path,
) -> None:
    rows = 120_000
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            vtgate.write("0", *((key, 0) for key in range(rows)))
            found.wait_for_rows(rows, 60)
            assert found.capture.progress().bytes > 4 << 20
        vtgate.write("0", *((key, 1) for key in range(rows)))
        with capturing(tmp_path, vtgate.address, message_bytes_max=1 << 20) as found:
            wait_until(lambda: found.failure is not None, 60, "the message is refused")
        assert isinstance(found.failure, TailraceError)
        assert found.failure.kind is Kind.FRAME_TOO_LARGE
        assert found.failure.hint == "raise source.message_bytes_max"
        with capturing(tmp_path, vtgate.address, message_bytes_max=64 << 20) as found:
            found.wait_for_rows(rows, 60)


@pytest.mark.slow
def test_w13_a_shard_streams_while_another_copies_and_each_row_has_the_right_kind(
    tmp_path: Path,
) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        for key in range(10):
            vtgate.write("-80", (key, 0))
            vtgate.write("80-", (100 + key, 0))
        vtgate.change("80-", allowed=5)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_mode("streaming", "-80")
            found.wait_for_mode("copying", "80-")
            vtgate.write("-80", (1, 1))
            wait_until(lambda: found.counters().get(1) == [0, 1], 30)
            vtgate.change("80-", allowed=None)
            found.wait_for_shards("-80", "80-")
            vtgate.write("80-", (101, 1))
            found.wait_for_rows(22)
    assert Counter(change.op for change in found.changes()) == {"r": 20, "c": 2}
    assert found.counters() == {
        **{key: [0, 1] if key == 1 else [0] for key in range(10)},
        **{100 + key: [0, 1] if key == 1 else [0] for key in range(10)},
    }


def test_w17_tables_are_requested_by_patterns_so_they_need_not_exist() -> None:
    """A rule with a table's bare name fails in a shard that has no such table."""
    source = VitessSource(hosts=("127.0.0.1:1",), keyspace="shop", tables=("shop.orders", "shop.new_*"))
    matches = [rule.match for rule in table_rules(source)]
    assert len(matches) == 2
    assert all(match.startswith("/") for match in matches)
    assert not any(rule.filter for rule in table_rules(source))


@pytest.mark.slow
def test_w19_a_capture_knows_when_it_has_everything_committed_before_the_request(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        vtgate.change("80-", is_silent=True)
        vtgate.write("-80", (1, 0))
        vtgate.write("80-", (2, 0))
        asked_us = time.time_ns() // 1000
        found.wait_for_rows(1)
        asked = vtgate.asked.count("shop:80-@primary")
        assert not found.capture.caught_up(asked_us)
        wait_until(lambda: vtgate.asked.count("shop:80-@primary") > asked, 30, "the shards are asked")
        assert not found.capture.caught_up(asked_us)
        vtgate.change("80-", is_silent=False)
        wait_until(lambda: found.capture.caught_up(asked_us), 30, "all is there")
        assert found.counters() == {1: [0], 2: [0]}


@pytest.mark.slow
def test_w19_a_row_that_is_not_durable_yet_does_not_count_as_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_sync, sync = threading.Event(), LogWriter.sync
    may_sync.set()

    def held_back(writer: LogWriter) -> Tail:
        assert may_sync.wait(60)
        return sync(writer)

    monkeypatch.setattr(LogWriter, "sync", held_back)
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        asked_us = time.time_ns() // 1000
        vtgate.write("-80", (1, 0))
        found.wait_for_rows(1)
        assert found.capture.progress().durable.position > asked_us
        vtgate.change("80-", is_silent=True)
        vtgate.write("80-", (2, 0))
        asked = vtgate.asked.count("shop:80-@primary")
        assert not found.capture.caught_up(asked_us)
        wait_until(lambda: vtgate.asked.count("shop:80-@primary") > asked, 30, "the shards are asked")
        may_sync.clear()
        vtgate.change("80-", is_silent=False)
        stream = found.capture._stream
        assert stream is not None
        wait_until(lambda: stream.has_reached(asked_us, sys.maxsize), 30, "the row is appended")
        assert not found.capture.caught_up(asked_us)
        may_sync.set()
        wait_until(lambda: found.capture.caught_up(asked_us), 30, "all is durable")
        assert found.counters() == {1: [0], 2: [0]}


@pytest.mark.slow
@pytest.mark.skipif(not disk.can_mount(), reason="mounts a small disk, which needs root")
def test_a_first_start_on_a_full_disk_waits_for_space(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate, disk.small_disk(tmp_path / "disk", 1) as small:
        vtgate.write("0", (1, 0))
        ballast = disk.fill(small)
        with capturing(small, vtgate.address, snapshot="initial", reconnect_delay_s=0.1) as found:
            error = wait_until(lambda: found.failure or found.capture.progress().error, 30)
            assert error.kind is Kind.LOG_FULL
            assert "What waits for room continues by itself" in error.hint
            ballast.unlink()
            found.wait_for_rows(1)
        assert found.counters() == {1: [0]}
