"""A TCP proxy on loopback that breaks connections on command and records messages.

It stands between a client and PostgreSQL: cuts after so many bytes, cuts now, passes nothing on,
refuses connections, starts again. It splits what clients send into messages, so that a test can
check the standby status updates, on which the server may act.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import pytest

from tailrace_servers.ports import free_port

Direction = Literal["to_client", "to_server"]

_CHUNK = 256 * 1024
_COMMAND_TIMEOUT_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


@dataclass(frozen=True, slots=True)
class StandbyStatus:
    """A standby status update, as the client sent it."""

    written: int
    flushed: int
    applied: int
    reply_requested: bool


@dataclass(slots=True)
class _Splitter:
    """Splits what a client sends into messages (type, payload), without the start-up packet.

    A connection that changes to TLS can't be read: nothing is split from then on.
    """

    buffer: bytearray = field(default_factory=bytearray)
    started: bool = False
    encrypted: bool = False

    def feed(self, received: bytes) -> Iterator[tuple[bytes, bytes]]:
        self.buffer += received
        while True:
            self.encrypted = self.encrypted or (not self.started and self.buffer[:1] not in (b"", b"\0"))
            if self.encrypted:
                self.buffer.clear()
                return
            type_size = 1 if self.started else 0
            if len(self.buffer) < type_size + 4:
                return
            size = type_size + struct.unpack_from("!I", self.buffer, type_size)[0]
            if len(self.buffer) < size:
                return
            message = bytes(self.buffer[:size])
            del self.buffer[:size]
            if self.started:
                yield message[:1], message[5:]
            else:  # protocol 3; encryption requests come before it and have other codes
                self.started = message[4:6] == b"\x00\x03"


@dataclass(slots=True, eq=False)
class _Pipe:
    """One direction of one connection. Reads only after everything read before was passed on."""

    source: socket.socket
    target: socket.socket
    direction: Direction
    pending: bytes = b""
    ended: bool = False


class Proxy:
    """Forwards a listening port to an upstream port, both on 127.0.0.1.

    One thread moves all bytes; every command takes effect before the call returns.
    """

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.port = free_port()
        self.connections_made = 0
        self.messages: deque[tuple[bytes, bytes]] = deque(maxlen=100_000)
        self._commands: queue.Queue[tuple[Callable[[], None], threading.Event]] = queue.Queue()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._listener: socket.socket | None = None
        self._pipes: list[_Pipe] = []
        self._splitters: dict[_Pipe, _Splitter] = {}
        self._budget: dict[Direction, int] = {}
        self._paused = False
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread.start()

    # ------------------------------------------------------------------ commands

    def start(self) -> None:
        """Accept connections, on the same port as before."""
        self._do(self._listen)

    def stop(self) -> None:
        """Refuse new connections and cut the existing ones."""
        self._do(self._refuse)

    def cut_now(self) -> None:
        """Reset every connection; new ones are accepted."""
        self._do(self._cut)

    def cut_after(self, byte_count: int, direction: Direction = "to_client") -> None:
        """Reset every connection once `byte_count` more bytes went in that direction, counted over all
        connections: exactly so many arrive. Happens once.
        """
        self._do(lambda: self._budget.update({direction: byte_count}))

    def pause(self) -> None:
        """Pass nothing on, in either direction, with all connections open: a black hole."""
        self._do(lambda: setattr(self, "_paused", True))

    def resume(self) -> None:
        """Pass bytes on again, from where it stopped."""
        self._do(lambda: setattr(self, "_paused", False))

    def close(self) -> None:
        """End the proxy and its thread. Idempotent."""
        if self._thread.is_alive():
            self._do(lambda: setattr(self, "_closing", True))
            self._thread.join(_COMMAND_TIMEOUT_S)

    @property
    def is_idle(self) -> bool:
        """Whether no connection is open."""
        return not self._pipes

    def standby_statuses(self) -> list[StandbyStatus]:
        """Return the status updates that clients sent so far, in order."""
        found = []
        for kind, payload in list(self.messages):
            if kind == b"d" and payload[:1] == b"r":
                written, flushed, applied, _, reply = struct.unpack("!QQQqB", payload[1:])
                found.append(StandbyStatus(written, flushed, applied, bool(reply)))
        return found

    # ------------------------------------------------------------------ the thread

    def _do(self, command: Callable[[], None]) -> None:
        done = threading.Event()
        self._commands.put((command, done))
        self._wake_writer.send(b"\0")
        if not done.wait(_COMMAND_TIMEOUT_S):
            raise TimeoutError("the proxy's thread does not answer")

    def _serve(self) -> None:
        while not self._closing:
            for key, mask in self._selector.select(timeout=1.0):
                if key.fileobj is self._wake_reader:
                    self._run_commands()
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._move(key.fileobj, mask)  # type: ignore[arg-type]
            self._watch()
        self._refuse()
        for each in (self._wake_reader, self._wake_writer, self._selector):
            each.close()

    def _run_commands(self) -> None:
        self._wake_reader.recv(4096)
        while not self._commands.empty():
            command, done = self._commands.get()
            command()
            self._watch()
            done.set()

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _refuse(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._cut()

    def _cut(self) -> None:
        for end in {end for pipe in self._pipes for end in (pipe.source, pipe.target)}:
            self._close_end(end, reset=True)
        self._pipes.clear()
        self._splitters.clear()

    def _accept(self) -> None:
        assert self._listener is not None
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self.upstream_port), timeout=5)
        except OSError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        self.connections_made += 1
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        to_server = _Pipe(client, server, "to_server")
        self._pipes += [to_server, _Pipe(server, client, "to_client")]
        self._splitters[to_server] = _Splitter()

    def _move(self, end: socket.socket, mask: int) -> None:
        for pipe in list(self._pipes):
            if pipe.source is end and mask & selectors.EVENT_READ and not pipe.pending:
                self._read(pipe)
            if pipe in self._pipes and pipe.pending and (pipe.target is end or pipe.source is end):
                self._write(pipe)

    def _read(self, pipe: _Pipe) -> None:
        try:
            received = pipe.source.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._drop(pipe, reset=True)
            return
        if not received:
            pipe.ended = True
            with contextlib.suppress(OSError):
                pipe.target.shutdown(socket.SHUT_WR)
            if all(other.ended for other in self._pair(pipe)):
                self._drop(pipe, reset=False)
            return
        pipe.pending = received

    def _write(self, pipe: _Pipe) -> None:
        budget = self._budget.get(pipe.direction)
        split = pipe.pending if budget is None else pipe.pending[:budget]
        try:
            sent = pipe.target.send(split) if split else 0
        except BlockingIOError:
            return
        except OSError:
            self._drop(pipe, reset=True)
            return
        if pipe in self._splitters:
            self.messages.extend(self._splitters[pipe].feed(split[:sent]))
        pipe.pending = pipe.pending[sent:]
        if budget is not None:
            self._budget[pipe.direction] = budget - sent
            if budget == sent:
                del self._budget[pipe.direction]
                self._cut()

    def _pair(self, pipe: _Pipe) -> list[_Pipe]:
        return [other for other in self._pipes if pipe.source in (other.source, other.target)]

    def _drop(self, pipe: _Pipe, *, reset: bool) -> None:
        for end in (pipe.source, pipe.target):
            self._close_end(end, reset=reset)
        for other in self._pair(pipe):
            self._pipes.remove(other)
            self._splitters.pop(other, None)

    def _close_end(self, end: socket.socket, *, reset: bool) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(end)
        if reset:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        end.close()

    def _watch(self) -> None:
        """Register each socket for the events that its pipes wait for, and no others."""
        wanted: dict[socket.socket, int] = {}
        for pipe in self._pipes:
            wanted.setdefault(pipe.source, 0)
            wanted.setdefault(pipe.target, 0)
            if self._paused:
                continue
            if pipe.pending:
                wanted[pipe.target] |= selectors.EVENT_WRITE
            elif not pipe.ended:
                wanted[pipe.source] |= selectors.EVENT_READ
        watched = self._selector.get_map()
        for end, events in wanted.items():
            if end in watched and not events:
                self._selector.unregister(end)
            elif end in watched:
                self._selector.modify(end, events)
            elif events:
                self._selector.register(end, events)


@pytest.fixture
def proxy() -> Iterator[Callable[[int], Proxy]]:
    """Makes proxies: `proxy(upstream_port)` returns one that is started."""
    made: list[Proxy] = []

    def make(upstream_port: int) -> Proxy:
        made.append(Proxy(upstream_port))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close()
