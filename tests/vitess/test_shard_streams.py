"""The streams of a task's shards: nothing is lost, out of order or unbounded; each ends on request."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import grpc
import pytest
from grpc.aio import _channel as grpc_channel

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection import vtgate as vtgate_module
from tailrace.sources.vitess.connection.errors import DISCONNECTED, SILENT, Status
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace.sources.vitess.streaming import shard_streams
from tailrace.sources.vitess.streaming.shard_streams import ShardResponses, ShardStreams
from tests.support.vitess.fake_vtgate import KEYSPACE, FakeVtgate
from tests.support.wait import wait_until

RESPONSES_MAX = 5


class _Call:
    """A stream that sends the given responses, then waits until it is cancelled."""

    def __init__(self, responses: list[bytes]) -> None:
        self._responses = responses
        self._is_over = threading.Event()
        self.sent = 0

    def __iter__(self) -> Iterator[bytes]:
        for response in self._responses:
            if self._is_over.is_set():
                return
            self.sent += 1
            yield response
        self._is_over.wait(30)

    def cancel(self) -> bool:
        self._is_over.set()
        return True


class _Vtgate:
    """Gives each request the stream of the shard that it names."""

    is_connected = True

    def __init__(self, **responses: list[bytes]) -> None:
        self.calls = {shard: _Call(found) for shard, found in responses.items()}

    def stream(self, request: pb.VStreamRequest, deadline_s: float | None = None) -> _Call:
        return self.calls[request.vgtid.shard_gtids[0].shard]


@pytest.mark.parametrize("seed", range(20))
def test_responses_come_in_order_and_the_queue_is_bounded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_streams, "SHARD_RESPONSES_MAX", RESPONSES_MAX)
    monkeypatch.setattr(shard_streams, "SHARD_BYTES_MAX", 400)
    chance = random.Random(seed)
    sent = {
        shard: [bytes([number % 256]) * chance.randint(1, 200) for number in range(chance.randint(0, 300))]
        for shard in "abc"
    }
    vtgate = _Vtgate(**sent)
    came: dict[str, list[bytes]] = {shard: [] for shard in sent}
    with closing(_streams(vtgate, bytes_max=700)) as streams:
        for shard in sent:
            streams.start(shard, 1, _request(shard))

        def take() -> bool:
            only = chance.choice([None, None, *sent])
            for shard, found in streams.take(0.001, only).items():
                assert only in {None, shard}
                assert found.attempt == 1
                assert len(found.responses) <= RESPONSES_MAX + 1
                assert found.size == sum(map(len, found.responses))
                came[shard] += found.responses
            # A thread adds one response before it checks for space.
            assert streams.waiting_bytes <= 700 + 3 * 200
            return came == sent

        wait_until(lambda: any(take() for _ in range(50)), 30, "everything has come")
        assert streams.waiting_bytes == 0


def test_a_shard_with_a_full_queue_is_not_read_until_it_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_streams, "SHARD_RESPONSES_MAX", RESPONSES_MAX)
    vtgate = _Vtgate(a=[b"x"] * 100, b=[b"y"] * 3)
    with closing(_streams(vtgate)) as streams:
        streams.start("a", 1, _request("a"))
        wait_until(lambda: streams.waiting_bytes == RESPONSES_MAX + 1, 10, "it is full")
        streams.start("b", 1, _request("b"))
        wait_until(lambda: vtgate.calls["b"].sent == 3, 10, "another one comes")
        assert vtgate.calls["a"].sent == RESPONSES_MAX + 1
        streams.take(1)
        wait_until(lambda: vtgate.calls["a"].sent > RESPONSES_MAX + 1, 10, "it goes on")


@pytest.mark.slow
def test_a_shard_whose_queue_is_emptied_goes_on_although_other_queues_are_full() -> None:
    vtgate = _Vtgate(a=[b"x" * 10] * 50, b=[b"y" * 1000] * 2)
    with closing(_streams(vtgate, bytes_max=500)) as streams:
        streams.start("b", 1, _request("b"))
        wait_until(lambda: streams.waiting_bytes > 500, 10, "there is no room")
        streams.start("a", 1, _request("a"))
        came: list[bytes] = []

        def take() -> bool:
            for found in streams.take(0.1, "a").values():
                came.extend(found.responses)
            return len(came) == 50

        wait_until(take, 20, "all of it has come")


def test_responses_of_a_stopped_attempt_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_streams, "SHARD_RESPONSES_MAX", RESPONSES_MAX)
    vtgate = _Vtgate(a=[b"x"] * 100)
    with closing(_streams(vtgate)) as streams:
        streams.start("a", 1, _request("a"))
        wait_until(lambda: streams.waiting_bytes == RESPONSES_MAX + 1, 10, "it waits for room")
        streams.stop("a", 1)
        assert streams.waiting_bytes == 0
        vtgate.calls["a"] = _Call([b"y"])
        streams.start("a", 2, _request("a"))
        streams.stop("a", 1)  # too late: it belongs to another attempt
        found = _taken(streams, "a")
        assert (found.attempt, found.responses, found.ended) == (2, [b"y"], None)
        wait_until(lambda: _threads("a") == 1, 10, "the first one's thread ends")
    assert _threads("a") == 0


def test_a_stream_that_waits_before_it_opens_can_be_stopped() -> None:
    with closing(_streams(_Vtgate())) as streams:
        streams.start("a", 1, _request("a"), wait_s=60)
        streams.stop("a", 1)
        wait_until(lambda: _threads("a") == 0, 10, "its thread ends")
        assert streams.take(0) == {}


def test_the_limit_of_threads_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with closing(_streams(_Vtgate(a=[]))) as streams:
        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(TailraceError, match="for the shard a, with 0 running") as caught:
            streams.start("a", 1, _request("a"))
    assert caught.value.kind is Kind.ENVIRONMENT_UNFIT


@pytest.mark.slow
def test_a_stream_reports_how_it_ended() -> None:
    with FakeVtgate("-80", "80-") as server, _real(server, silence_s=1.5) as streams:
        server.change("-80", is_silent=True)
        streams.start("-80", 1, _request("-80", heartbeat_s=0))
        assert _ended(streams, "-80") == Status(SILENT, "no response for 1.5 s, not even a heartbeat")
        streams.start("-80", 2, _request("-80", heartbeat_s=0), deadline_s=0.3)
        assert _ended(streams, "-80") == Status("DEADLINE_EXCEEDED", "it did not end within 0.3 s")
        streams.start("x", 1, _request("x"))
        assert _ended(streams, "x").code == "FAILED_PRECONDITION"
        streams.start("80-", 1, _request("80-"))
        wait_until(lambda: server.open_streams == 1, 10, "the stream is open")
        server.restart()
        assert _ended(streams, "80-").code in {DISCONNECTED, "UNAVAILABLE", "CANCELLED"}


@pytest.mark.slow
def test_a_stream_that_waits_for_space_in_its_queue_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_streams, "SHARD_RESPONSES_MAX", 1)
    vtgate = _Vtgate(a=[b"x"] * 4)
    with closing(_streams(vtgate, silence_s=0.3)) as streams:
        streams.start("a", 1, _request("a"))
        wait_until(lambda: streams.waiting_bytes == 2, 10, "it waits for room")
        for _ in range(3):
            assert streams.take(0.3, "none") == {}
        assert not vtgate.calls["a"]._is_over.is_set()
        assert _taken(streams, "a").responses == [b"x"] * 2


def _streams(vtgate: _Vtgate, *, silence_s: float = 60.0, bytes_max: int = 1 << 20) -> ShardStreams:
    return ShardStreams(cast("Vtgate", vtgate), silence_s, bytes_max)


@contextmanager
def _real(server: FakeVtgate, silence_s: float) -> Iterator[ShardStreams]:
    source = VitessSource.model_validate({"hosts": [server.address], "keyspace": KEYSPACE})
    with closing(Vtgate.connect(source)) as vtgate, closing(ShardStreams(vtgate, silence_s)) as streams:
        yield streams


def _request(shard: str, heartbeat_s: int = 1) -> pb.VStreamRequest:
    request = pb.VStreamRequest(flags=pb.VStreamFlags(heartbeat_interval=heartbeat_s))
    request.vgtid.shard_gtids.add(keyspace=KEYSPACE, shard=shard, gtid="current")
    return request


def _taken(streams: ShardStreams, shard: str) -> ShardResponses:
    found: dict[str, Any] = {}

    def take() -> bool:
        found.update(streams.take(0.1))
        return shard in found

    wait_until(take, 10, f"something of {shard}")
    return cast("ShardResponses", found[shard])


def _ended(streams: ShardStreams, shard: str) -> Status:
    while (found := _taken(streams, shard)).ended is None:
        pass
    return found.ended


def _threads(shard: str) -> int:
    return sum(thread.name == f"tailrace-vitess-{shard}" for thread in threading.enumerate())


def test_a_failed_watch_of_a_connection_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, failed = grpc_channel.Channel.wait_for_state_change, []

    async def fails_once(self: grpc_channel.Channel, state: grpc.ChannelConnectivity) -> None:
        if not failed:
            failed.append(state)
            raise RuntimeError("gRPC channel connectivity state watch failed unexpectedly.")
        await wait(self, state)

    monkeypatch.setattr(grpc_channel.Channel, "wait_for_state_change", fails_once)
    with FakeVtgate("0") as fake:
        source = VitessSource.model_validate({"hosts": [fake.address], "keyspace": KEYSPACE})
        with closing(Vtgate.connect(source)) as vtgate:
            assert vtgate.is_connected
    assert failed


def test_a_connection_without_queries_for_long_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    options = vtgate_module._options
    idle = ("grpc.client_idle_timeout_ms", 1000)
    monkeypatch.setattr(vtgate_module, "_options", lambda source: [*options(source), idle])
    with FakeVtgate("0") as fake:
        source = VitessSource.model_validate({"hosts": [fake.address], "keyspace": KEYSPACE})
        with closing(Vtgate.connect(source)) as vtgate:
            vtgate.query("show tables", "list the tables")
            wait_until(lambda: vtgate._channel.get_state() is grpc.ChannelConnectivity.IDLE, 10)
            assert vtgate.is_connected
            wait_until(lambda: vtgate._channel.get_state() is grpc.ChannelConnectivity.READY, 10)
            fake._wait(fake._server.stop(None))
            wait_until(lambda: not vtgate.is_connected, 10)
