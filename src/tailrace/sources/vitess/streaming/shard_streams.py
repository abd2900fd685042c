"""The streams of a task's shards: received on gRPC's loop, taken by the task's thread.

What was received and not taken yet is bounded, for each shard and in all: a stream that is ahead is not read
on, and vtgate then waits, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.errors import DISCONNECTED, SILENT, Status
from tailrace.sources.vitess.connection.event_loop import event_loop, submit
from tailrace.sources.vitess.connection.vtgate import Vtgate, status_of

#: Received and not taken yet: bytes and responses of one shard, and bytes of all shards of all tasks.
SHARD_BYTES_MAX = 8 << 20
SHARD_RESPONSES_MAX = 4096
BYTES_MAX = 64 << 20

_STOP_S = 10.0


@dataclass(slots=True)
class ShardResponses:
    """What came of one attempt to read a shard since it was last taken. `ended`: nothing comes after it."""

    attempt: int
    responses: list[bytes] = field(default_factory=list)
    ended: Status | None = None
    size: int = 0

    @property
    def is_full(self) -> bool:
        """Whether no more is to be received before it was taken."""
        return self.size > SHARD_BYTES_MAX or len(self.responses) > SHARD_RESPONSES_MAX


class ShardStreams:
    """The open streams of one task, over one connection. `take` is for one thread, the rest for any.

    :param silence_s: after so long without any response, heartbeats among them, a stream is over.
    :param bytes_max: received and not taken yet, of all its shards.
    """

    def __init__(self, vtgate: Vtgate, silence_s: float, bytes_max: int = BYTES_MAX) -> None:
        self._vtgate = vtgate
        self._silence_s = silence_s
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._received: dict[str, ShardResponses] = {}
        self._size = 0  # of all that was received and not taken
        self._attempts: dict[str, int] = {}
        # On the loop only.
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._room: dict[tuple[str, int], asyncio.Event] = {}

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

        :param wait_s: before it is opened.
        :param deadline_s: after which it is over; None: it stays open.
        """
        with self._changed:
            self._attempts[shard] = attempt
        receiving = self._receive(shard, attempt, request, wait_s, deadline_s)
        event_loop().call_soon_threadsafe(self._begin, (shard, attempt), receiving)

    def stop(self, shard: str, attempt: int) -> None:
        """End the stream of a shard, and forget what came of it and was not taken."""
        with self._changed:
            if self._attempts.get(shard) == attempt:
                del self._attempts[shard]
            if (received := self._received.get(shard)) is not None and received.attempt == attempt:
                self._size -= self._received.pop(shard).size
        event_loop().call_soon_threadsafe(self._cancel, (shard, attempt))

    def take(self, timeout_s: float, only: str | None = None) -> dict[str, ShardResponses]:
        """Return what came since the last call, by shard; wait for something at most so long.

        :param only: leave what came of other shards where it is.
        """
        with self._changed:
            if not self._received or (only is not None and only not in self._received):
                self._changed.wait(timeout_s)
            if only is None:
                found, self._received = self._received, {}
            else:
                found = {only: self._received.pop(only)} if only in self._received else {}
            was_full = self._size > self._bytes_max or any(each.is_full for each in found.values())
            self._size -= sum(each.size for each in found.values())
        if was_full:
            event_loop().call_soon_threadsafe(self._receive_on)
        return found

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were received and not taken."""
        return self._size

    def close(self) -> None:
        """End all streams."""
        with self._changed:
            self._attempts.clear()
            self._received.clear()
            self._size = 0
        with contextlib.suppress(TimeoutError):
            submit(self._cancel_all()).result(_STOP_S)

    # On the loop

    def _begin(self, key: tuple[str, int], receiving: Coroutine[Any, Any, None]) -> None:
        self._room[key] = asyncio.Event()
        self._tasks[key] = asyncio.ensure_future(receiving)

    async def _receive(
        self, shard: str, attempt: int, request: pb.VStreamRequest, wait_s: float, deadline_s: float | None
    ) -> None:
        ended = Status("CANCELLED")
        try:
            await asyncio.sleep(wait_s)
            async with asyncio.timeout(deadline_s):
                ended = await self._receive_until_end(shard, attempt, request)
        except TimeoutError:
            ended = Status("DEADLINE_EXCEEDED", f"it did not end within {deadline_s:g} s")
        except grpc.aio.AioRpcError as error:
            ended = status_of(error)
            if not self._vtgate.is_connected:
                ended = Status(DISCONNECTED, ended.words)
        finally:
            del self._tasks[shard, attempt], self._room[shard, attempt]
            self._keep(shard, attempt, None, ended)

    async def _receive_until_end(self, shard: str, attempt: int, request: pb.VStreamRequest) -> Status:
        clock, room = asyncio.get_running_loop().time, self._room[shard, attempt]
        responses = self._vtgate.stream(request)
        heard = clock()
        async with contextlib.aclosing(responses):
            while True:
                try:
                    async with asyncio.timeout_at(heard + self._silence_s):
                        response = await anext(responses, None)
                except TimeoutError:
                    return Status(SILENT, f"nothing came for {self._silence_s:g} s, not even a heartbeat")
                if response is None:
                    return Status("OK", "it ended the stream")
                self._keep(shard, attempt, response, None)
                while self._is_full(shard):
                    room.clear()
                    if self._is_full(shard):
                        await room.wait()
                heard = clock()

    def _keep(self, shard: str, attempt: int, response: bytes | None, ended: Status | None) -> None:
        """Keep what came until it is taken."""
        with self._changed:
            if self._attempts.get(shard) != attempt:
                return
            received = self._received.get(shard)
            if received is None:
                received = self._received[shard] = ShardResponses(attempt)
                self._changed.notify()
            received.ended = ended
            if response is not None:
                received.responses.append(response)
                received.size += len(response)
                self._size += len(response)

    def _is_full(self, shard: str) -> bool:
        with self._changed:
            received = self._received.get(shard)
            return self._size > self._bytes_max or (received is not None and received.is_full)

    def _receive_on(self) -> None:
        for room in self._room.values():
            room.set()

    def _cancel(self, key: tuple[str, int]) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
