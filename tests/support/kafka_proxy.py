"""A proxy before the brokers of a cluster that knows which messages are requests and which are answers.

It stands at the advertised address of each broker's listener (`EmbeddedKafka(proxied=True)`). A planned fault
applies to one request: its answer is made up, replaced, held back or lost.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Self

import pytest

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka import wire

#: `refuse`: answered with `error`; the broker does not get the request. `belie`: the broker executes it,
#: but the answer is `error`. `hold`: executed, answered only after `release`. `lose`: executed, and the
#: connection is cut instead of an answer. `swallow`: the connection is cut, and nothing is executed.
How = Literal["refuse", "belie", "hold", "lose", "swallow"]

#: No answer is held longer.
_HELD_MAX_S = 120.0
_JOIN_S = 10.0


@dataclass
class Fault:
    """What happens to the next request of this name from a producer; requests of groups do not count.

    :param commits_only: for `EndTxn`, whether only commits count.
    """

    name: str
    how: How
    error: int = 0
    commits_only: bool = True
    struck: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def fits(self, asked: wire.Request) -> bool:
        """Tell whether the fault applies to this request."""
        wanted = wire.NAMES[self.name]
        if asked.key != wanted or asked.is_of_a_group:
            return False
        return wanted != wire.END_TXN or not self.commits_only or asked.commits

    def release(self) -> None:
        """Let a held answer pass."""
        self.released.set()


class KafkaProxy:
    """Stands before every broker of a cluster; a context manager."""

    def __init__(self, cluster: EmbeddedKafka) -> None:
        self._doors = cluster.doors
        self._lock = threading.Lock()
        self._planned: list[Fault] = []
        self._listeners: list[socket.socket] = []
        self._connections: set[_Connection] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False

    @property
    def bootstrap(self) -> str:
        """`bootstrap.servers` for clients that are to go through this proxy."""
        return ",".join(f"127.0.0.1:{door.outside}" for door in self._doors)

    def plan(self, fault: Fault) -> Fault:
        """Plan `fault`, to strike once; several wait in the order in which they were planned."""
        with self._lock:
            self._planned.append(fault)
        return fault

    def forget(self) -> None:
        """Cancel the planned faults, and let all held answers pass."""
        with self._lock:
            planned, self._planned = self._planned, []
        for fault in planned:
            fault.release()

    def __enter__(self) -> Self:
        for door in self._doors:
            listener = socket.create_server(("127.0.0.1", door.outside))
            self._listeners.append(listener)
            thread = threading.Thread(target=self._accept, args=(listener, door.inside), daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self.forget()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in list(self._connections):
            connection.cut()
            connection.join()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def take(self, asked: wire.Request) -> Fault | None:
        """Return the fault that applies to this request and remove it from the plan."""
        with self._lock:
            for fault in self._planned:
                if fault.fits(asked):
                    self._planned.remove(fault)
                    return fault
        return None

    def ended(self, connection: _Connection) -> None:
        """Forget a closed connection."""
        with self._lock:
            self._connections.discard(connection)

    def _accept(self, listener: socket.socket, inside: int) -> None:
        while not self._closing:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(("127.0.0.1", inside), timeout=5)
            except OSError:
                client.close()
                continue
            broker.settimeout(None)
            connection = _Connection(self, client, broker)
            with self._lock:
                self._connections.add(connection)
            connection.start()


class _Connection:
    """One client's connection to one broker: a thread for each direction."""

    def __init__(self, proxy: KafkaProxy, client: socket.socket, broker: socket.socket) -> None:
        self._proxy, self._client, self._broker = proxy, client, broker
        self._sending = threading.Lock()  # two threads may answer the client
        self._struck: dict[int, tuple[Fault, bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._ended = 0
        for end in (client, broker):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        works = (self._requests, self._answers)
        self._threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for both threads, after the connection is cut or its ends have closed."""
        for thread in self._threads:
            thread.join(_JOIN_S)

    def cut(self) -> None:
        """Close both ends at once."""
        for end in (self._client, self._broker):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, EOFError):
            pass
        finally:
            self.cut()
            with self._sending:
                self._ended += 1
                if self._ended == len(self._threads):
                    self._client.close()
                    self._broker.close()
            self._proxy.ended(self)

    def _requests(self) -> None:
        while True:
            frame = _read(self._client)
            asked = wire.request(frame)
            fault = self._proxy.take(asked)
            if fault is None:
                _write(self._broker, frame)
                continue
            if fault.how == "swallow":
                fault.struck.set()
                return
            if fault.how == "refuse":
                # May overtake earlier answers: librdkafka matches them by number, not by order.
                with self._sending:
                    _write(self._client, wire.answer(asked, fault.error))
                fault.struck.set()
                continue
            self._struck[asked.correlation] = fault, wire.answer(asked, fault.error)
            _write(self._broker, frame)

    def _answers(self) -> None:
        while True:
            frame = _read(self._broker)
            (correlation,) = struct.unpack_from("!i", frame)
            fault, instead = self._struck.pop(correlation, (None, b""))
            if fault is not None:
                fault.struck.set()
                if fault.how == "lose":
                    return
                if fault.how == "hold":
                    fault.released.wait(_HELD_MAX_S)
                elif fault.how == "belie":
                    frame = instead
            with self._sending:
                _write(self._client, frame)


def _read(end: socket.socket) -> bytes:
    (size,) = struct.unpack("!i", _exactly(end, 4))
    return _exactly(end, size)


def _write(end: socket.socket, frame: bytes) -> None:
    end.sendall(struct.pack("!i", len(frame)) + frame)


def _exactly(end: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        split = end.recv(min(size - len(found), 1 << 18))
        if not split:
            raise EOFError
        found += split
    return bytes(found)


@pytest.fixture
def kafka_proxy(kafka: EmbeddedKafka) -> Iterator[KafkaProxy]:
    """A proxy before the session's broker; its clients are sent through it by the brokers' addresses, too."""
    with KafkaProxy(kafka) as proxy:
        yield proxy
