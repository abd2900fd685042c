"""The streams of a task's shards: one receiving thread for each, and the task's thread takes the responses.

A thread that waits for one stream receives a response with half the CPU of gRPC's asyncio, which passes it
from thread to thread. Measured with the stream of 40 000 transactions of one row: 15 µs a response
against 33.

The responses that are received but not taken are limited, for each shard and in total: a stream at the limit
is not read, so that vtgate waits, too.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

import grpc

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.errors import DISCONNECTED, SILENT, Status
from tailrace.sources.vitess.connection.vtgate import ResponseStream, Vtgate, status_of
from tailrace.waits import join_all

#: Limits of what is received and not taken: bytes and responses of a shard, bytes of all tasks' shards.
SHARD_BYTES_MAX = 8 << 20
SHARD_RESPONSES_MAX = 4096
BYTES_MAX = 64 << 20

#: Interval of the check for silent streams, in seconds.
_SILENCE_CHECK_S = 0.2
#: Longest wait of a full stream before it checks for room again, in seconds; normally it is notified.
_ROOM_S = 5.0
_STOP_S = 10.0


@dataclass(slots=True)
class ShardResponses:
    """The responses received in one attempt to read a shard since the last `take`; `ended`: its end."""

    attempt: int
    responses: list[bytes] = field(default_factory=list)
    ended: Status | None = None
    size: int = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more is received before these responses are taken."""
        return self.size > SHARD_BYTES_MAX or len(self.responses) > SHARD_RESPONSES_MAX


@dataclass(slots=True, eq=False)
class _ShardStream:
    """An attempt to read a shard.

    :ivar heard_s: time of the last response, monotonic; infinite while the thread doesn't receive.
    :ivar is_silent: it was ended because no response came.
    """

    shard: str
    attempt: int
    request: pb.VStreamRequest
    wait_s: float
    deadline_s: float | None
    over: threading.Event = field(default_factory=threading.Event)
    call: ResponseStream | None = None
    heard_s: float = math.inf
    is_silent: bool = False

    def end(self) -> None:
        """Make the stream's thread end soon."""
        self.over.set()
        if self.call is not None:
            self.call.cancel()


class ShardStreams:
    """The open streams of one task, over one connection. Call `take` from one thread, the rest from any.

    :param silence_s: seconds without any response, heartbeats included, after which a stream is ended.
    :param bytes_max: limit of the bytes that are received and not taken, of all its shards.
    """

    def __init__(self, vtgate: Vtgate, silence_s: float, bytes_max: int = BYTES_MAX) -> None:
        self._vtgate = vtgate
        self._silence_s = silence_s
        self._bytes_max = bytes_max
        lock = threading.Lock()
        self._came, self._room = threading.Condition(lock), threading.Condition(lock)
        self._received: dict[str, ShardResponses] = {}
        self._size = 0  # bytes received and not taken
        self._streams: dict[str, _ShardStream] = {}  # the current ones
        self._threads: set[threading.Thread] = set()
        self._checked_s = 0.0

    def start(
        self,
        shard: str,
        attempt: int,
        request: pb.VStreamRequest,
        *,
        wait_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> None:
        """Open the stream of a shard that has none.

        :param wait_s: seconds to wait before it is opened.
        :param deadline_s: seconds after which it is ended; None: it stays open.
        :raises TailraceError: `ENVIRONMENT_UNFIT` if the process can't start another thread.
        """
        stream = _ShardStream(shard, attempt, request, wait_s, deadline_s)
        thread = threading.Thread(
            target=self._receive, args=(stream,), name=f"tailrace-vitess-{shard}", daemon=True
        )
        with self._came:
            try:
                thread.start()
            except RuntimeError as error:
                raise TailraceError(
                    Kind.ENVIRONMENT_UNFIT,
                    f"start a thread for the shard {shard}, with {len(self._threads)} running: {error}",
                    "each shard needs a thread: raise the user's or the container's limit of processes",
                    {"shard": shard},
                ) from None
            self._streams[shard] = stream
            self._threads.add(thread)

    def stop(self, shard: str, attempt: int) -> None:
        """End the stream of a shard, and discard its responses that were not taken."""
        with self._came:
            stream = self._streams.get(shard)
            if stream is not None and stream.attempt == attempt:
                del self._streams[shard]
            if (received := self._received.get(shard)) is not None and received.attempt == attempt:
                self._size -= self._received.pop(shard).size
            self._room.notify_all()
        if stream is not None and stream.attempt == attempt:
            stream.end()

    def take(self, timeout_s: float, only: str | None = None) -> dict[str, ShardResponses]:
        """Return the responses since the last call, by shard; wait at most `timeout_s` seconds for one.

        :param only: take only this shard's responses.
        """
        self._end_silent(time.monotonic())
        with self._came:
            if not self._received or (only is not None and only not in self._received):
                self._came.wait(timeout_s)
            if only is None:
                found, self._received = self._received, {}
            else:
                found = {only: self._received.pop(only)} if only in self._received else {}
            if self._size > self._bytes_max or any(each.is_full for each in found.values()):
                self._room.notify_all()
            self._size -= sum(each.size for each in found.values())
        return found

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes that were received and not taken."""
        return self._size

    def close(self) -> None:
        """End all streams."""
        with self._came:
            streams, threads = list(self._streams.values()), list(self._threads)
            self._streams.clear()
            self._received.clear()
            self._size = 0
            self._room.notify_all()
        for stream in streams:
            stream.end()
        join_all(threads, _STOP_S)

    def _end_silent(self, now_s: float) -> None:
        if now_s < self._checked_s + _SILENCE_CHECK_S:
            return
        self._checked_s = now_s
        with self._came:
            streams = list(self._streams.values())
        for stream in streams:
            if now_s - stream.heard_s > self._silence_s and stream.call is not None:
                stream.is_silent = True
                stream.call.cancel()

    # Called on the thread of a stream

    def _receive(self, stream: _ShardStream) -> None:
        ended = Status("CANCELLED")
        try:
            if not stream.over.wait(stream.wait_s):
                ended = self._receive_until_end(stream)
        finally:
            self._end(stream, ended)

    def _receive_until_end(self, stream: _ShardStream) -> Status:
        stream.heard_s = time.monotonic()
        call = stream.call = self._vtgate.stream(stream.request, stream.deadline_s)
        try:
            if not stream.over.is_set():  # else it was ended before `call` was set
                for response in call:
                    if not self._keep(stream, response):
                        return Status("CANCELLED")
        except grpc.RpcError as error:
            return self._failed(stream, status_of(error))
        finally:
            call.cancel()
        return Status("OK", "it ended the stream")

    def _failed(self, stream: _ShardStream, status: Status) -> Status:
        if stream.is_silent:
            return Status(SILENT, f"no response for {self._silence_s:g} s, not even a heartbeat")
        if stream.deadline_s is not None and status.code == "DEADLINE_EXCEEDED":
            return Status(status.code, f"it did not end within {stream.deadline_s:g} s")
        return status if self._vtgate.is_connected else Status(DISCONNECTED, status.words)

    def _keep(self, stream: _ShardStream, response: bytes) -> bool:
        """Keep a response until it is taken, and wait for room; return whether the stream is current."""
        shard = stream.shard
        with self._came:
            if self._streams.get(shard) is not stream:
                return False
            received = self._responses_of(stream)
            received.responses.append(response)
            received.size += len(response)
            self._size += len(response)
            while self._is_full(shard):
                stream.heard_s = math.inf
                self._room.wait(_ROOM_S)
                if self._streams.get(shard) is not stream:
                    return False
        stream.heard_s = time.monotonic()
        return True

    def _end(self, stream: _ShardStream, ended: Status) -> None:
        with self._came:
            self._threads.discard(threading.current_thread())
            if self._streams.get(stream.shard) is stream:
                del self._streams[stream.shard]
                self._responses_of(stream).ended = ended

    def _responses_of(self, stream: _ShardStream) -> ShardResponses:
        received = self._received.get(stream.shard)
        if received is None or received.attempt != stream.attempt:
            self._size -= received.size if received is not None else 0
            received = self._received[stream.shard] = ShardResponses(stream.attempt)
            self._came.notify()
        return received

    def _is_full(self, shard: str) -> bool:
        received = self._received.get(shard)
        if received is None:
            return False  # whatever the other shards have: `take` may wait for this shard only
        return self._size > self._bytes_max or received.is_full
