"""The socket's transport against a fake server: every cut, every unusual message, every limit."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import Kind, Policy, TailraceError
from tailrace.sources.postgres.connection.backend_messages import lines
from tailrace.sources.postgres.connection.transport import (
    BUFFER_BYTES,
    LibpqTransport,
    Received,
    SocketTransport,
)
from tests.support.capture.stream_of import (
    NOTICE,
    PARAMETER,
    begin,
    commit,
    error,
    idle,
    insert,
    keepalive,
    message,
    transaction,
)

MIB = 1 << 20

STREAM = [
    keepalive(10),
    begin(100),
    insert(5),
    NOTICE,
    keepalive(50),
    keepalive(60, reply=True),
    insert(5, b"x" * 300),
    PARAMETER,
    commit(100, 148),
    keepalive(148),
]
FRAMES = b"".join(part for part in STREAM if part[:1] == b"d" and part[5:6] == b"w")


class Line:
    """A transport and the server's end of it."""

    def __init__(self, *, size_max: int = 64 * MIB, copies: bool = False) -> None:
        self.server, self._client = socket.socketpair()
        self.transport = SocketTransport(idle(self._client), size_max, copies=copies)

    def collect(self, stop_at: int | None = None) -> tuple[bytes, list[Received]]:
        data, seen = b"", []
        while stop_at is None or len(data) < stop_at:
            received = self.transport.receive(0.002)
            if received.nothing:
                break
            data += bytes(received.data)
            seen.append(received)
        return data, seen

    def close(self) -> None:
        self.server.close()
        self.transport.close()
        self._client.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


@pytest.mark.slow
def test_frames_are_returned_whole_and_without_keepalives_wherever_the_stream_is_divided() -> None:
    stream = b"".join(STREAM)
    for cut in range(len(stream) + 1):
        line = Line()
        line.server.sendall(stream[:cut])
        first, seen = line.collect()
        line.server.sendall(stream[cut:])
        second, more = line.collect()
        assert first + second == FRAMES, cut
        keepalives = [r.keepalive for r in seen + more if r.keepalive]
        assert keepalives[-1].wal_end == 148
        assert any(k.reply_wanted for k in keepalives)
        line.close()


@given(st.lists(st.sampled_from(STREAM), max_size=30), st.lists(st.integers(1, 400), max_size=40))
def test_any_order_of_messages_in_any_pieces(parts: list[bytes], sizes: list[int]) -> None:
    line = Line()
    stream = b"".join(parts)
    data, at = b"", 0
    for size in [*sizes, len(stream)]:
        line.server.sendall(stream[at : at + size])
        at += size
        data += line.collect()[0]
    assert data == b"".join(part for part in parts if part[5:6] == b"w")
    line.close()


def test_an_error_of_the_server_comes_after_the_frames_before_it(line: Line) -> None:
    line.server.sendall(transaction(100, 148, insert(5)) + error("57P01"))
    assert line.transport.receive(1).data.tobytes() == transaction(100, 148, insert(5))
    with pytest.raises(TailraceError) as raised:
        line.transport.receive(1)
    assert raised.value.kind is Kind.SOURCE_SHUTTING_DOWN
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.slow
def test_a_last_message_that_libpq_had_read_in_part_is_a_broken_connection(copies: bool) -> None:
    last = error("57P01", "database system is shutting down; administrator command; dead")
    for cut in range(len(last) + 1):
        line = Line(copies=copies)
        line.server.sendall(last[cut:])
        with pytest.raises(TailraceError) as raised:
            line.transport.start(b"START_REPLICATION", 0.1)
        assert raised.value.policy is Policy.RETRY, cut
        line.close()


def test_the_end_of_the_stream_is_returned(line: Line) -> None:
    line.server.sendall(insert(5) + message(b"C", b"COPY 0\0"))
    assert bytes(line.transport.receive(1).data) == insert(5)
    assert line.transport.receive(1).message == (b"C", b"COPY 0\0")


def test_a_connection_that_ends_raises_source_unreachable(line: Line) -> None:
    line.server.sendall(insert(5)[:20])
    line.server.close()
    with pytest.raises(TailraceError) as raised:
        line.collect()
    assert raised.value.kind is Kind.SOURCE_UNREACHABLE


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b"d" + struct.pack("!i", 3), Kind.PROTOCOL_VIOLATION),
        (b"d" + struct.pack("!i", -1), Kind.PROTOCOL_VIOLATION),
        (b"d" + struct.pack("!i", 65 * MIB) + b"w", Kind.FRAME_TOO_LARGE),
        (message(b"d", b"s" + bytes(40)), Kind.PROTOCOL_VIOLATION),  # our own kinds of frames, from a server
        (message(b"d", b"x" + bytes(40)), Kind.PROTOCOL_VIOLATION),
        (message(b"d", b"k" + bytes(3)), Kind.PROTOCOL_VIOLATION),
        (message(b"d", b"w" + bytes(24)), Kind.PROTOCOL_VIOLATION),
        (message(b"d"), Kind.PROTOCOL_VIOLATION),
        (b"E" + struct.pack("!i", 2 * MIB) + b"S", Kind.PROTOCOL_VIOLATION),
        (message(b"S", b"DateStyle\0German, DMY\0"), Kind.SOURCE_MISCONFIGURED),
    ],
)
def test_an_invalid_message_is_refused_after_the_sound_ones_before_it(
    line: Line, stream: bytes, kind: Kind
) -> None:
    line.server.sendall(insert(5) + stream)
    assert line.collect(stop_at=1)[0] == insert(5)
    with pytest.raises(TailraceError) as raised:
        line.collect()
    assert raised.value.kind is kind


def test_the_buffer_grows_for_a_large_frame_and_shrinks_again() -> None:
    line = Line()
    large = insert(5, b"y" * (3 * BUFFER_BYTES))
    stream = insert(5) + large + insert(6)
    data, at = b"", 0
    while len(data) < len(stream):
        at += line.server.send(stream[at : at + 60_000])
        data += line.transport.receive(0.01).data.tobytes()
    assert data == stream
    line.server.sendall(insert(7))
    line.transport.receive(1)
    assert len(line.transport._buffer) == BUFFER_BYTES
    line.close()


def test_a_length_without_its_bytes_allocates_no_memory() -> None:
    line = Line(size_max=1 << 30)
    before = _resident()
    line.server.sendall(b"d" + struct.pack("!i", (1 << 30) - 1) + b"w" + bytes(1000))
    assert all(line.transport.receive(0.01).nothing for _ in range(3))
    assert _resident() - before < 8 * MIB
    line.close()


def test_a_wait_ends_at_its_timeout(line: Line) -> None:
    began = time.monotonic()
    assert line.transport.receive(0.05).nothing
    assert 0.04 < time.monotonic() - began < 1


def test_a_part_of_a_message_is_no_silence(line: Line) -> None:
    line.server.sendall(insert(5)[:-1])
    received = line.transport.receive(1)
    assert received.nothing
    assert not received.silent
    assert line.transport.receive(0.01).silent
    # As of a TLS connection, of which libpq keeps the part.
    libpq = SimpleNamespace(consume_input=lambda: None, get_copy_data=lambda _: (0, b""))
    server, client = socket.socketpair()
    with server, client:
        libpq.socket = client.fileno()
        transport = LibpqTransport(cast(Any, libpq), MIB)
        assert transport.receive(0.01).silent
        server.sendall(b"w")
        received = transport.receive(1)
    assert received.nothing
    assert not received.silent


def test_a_single_frame_after_silence_is_returned_at_once(line: Line) -> None:
    line.transport.receive(0.01)
    delays = []
    for _ in range(20):
        line.server.sendall(insert(5))
        began = time.monotonic()
        assert len(line.transport.receive(1).data)
        delays.append(time.monotonic() - began)
    assert sorted(delays)[10] < 0.02


def test_each_send_is_one_copy_data_message(line: Line) -> None:
    line.transport.send(b"r123")
    assert line.server.recv(100) == message(b"d", b"r123")


def test_a_tls_connection_that_breaks_while_a_message_waits_raises_source_unreachable() -> None:
    server, client = socket.socketpair()
    left = iter([1, 1])

    def flush() -> int:
        if (bytes_wait := next(left, None)) is None:
            raise psycopg.OperationalError("flushing failed: SSL connection has been closed unexpectedly")
        return bytes_wait

    libpq = SimpleNamespace(socket=client.fileno(), put_copy_data=lambda _: None, flush=flush)
    with server, client, pytest.raises(TailraceError) as caught:
        LibpqTransport(cast(Any, libpq), MIB).send(b"r123")
    assert (caught.value.kind, caught.value.policy) == (Kind.SOURCE_UNREACHABLE, Policy.RETRY)


def test_copied_rows_are_returned_without_message_headers() -> None:
    line = Line(copies=True)
    rows = [b"1\ta\n", b"2\t\\n\n", b"\n", b"3\t" + b"z" * 5000 + b"\n"]
    stream = b"".join(message(b"d", row) for row in rows)
    end = message(b"c") + message(b"C", b"COPY 4\0") + message(b"Z", b"T")
    text, messages = b"", []
    for piece in (stream[:7], stream[7:], end):
        line.server.sendall(piece)
        data, seen = line.collect()
        text += data
        messages += [r.message for r in seen if r.message]
    assert text == b"".join(rows)
    assert [kind for kind, _ in messages] == [b"c", b"C", b"Z"]
    line.close()


def test_lines_are_counted_and_the_last_end_found() -> None:
    assert lines(np.frombuffer(bytearray(b"a\nb\nc"), np.uint8)) == (2, 4)
    assert lines(np.frombuffer(bytearray(b"abc"), np.uint8)) == (0, 0)


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
