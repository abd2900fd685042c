"""The proxy breaks connections as it is told, at the exact byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import psycopg
import pytest

from tests.support.wait import wait_until


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that echoes what it gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(client: socket.socket) -> None:
        with client:
            try:
                while received := client.recv(65536):
                    client.sendall(received)
            except OSError:
                return

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(5)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def received_until_cut(client: socket.socket) -> bytes:
    received = b""
    try:
        while piece := client.recv(65536):
            received += piece
    except ConnectionResetError:
        return received
    raise AssertionError("the connection ended normally")


def test_bytes_pass_in_both_directions_and_so_does_the_end(proxy, echo):
    with connected(proxy(echo).port) as client:
        sent = bytes(range(256)) * 20_000
        sender = threading.Thread(target=lambda: (client.sendall(sent), client.shutdown(socket.SHUT_WR)))
        sender.start()
        received = b""
        while piece := client.recv(1 << 20):
            received += piece
        sender.join(5)
    assert received == sent


@pytest.mark.parametrize("byte_count", [0, 1, 1000, 100_001])
def test_a_cut_after_n_bytes_passes_n_bytes_and_resets(proxy, echo, byte_count):
    line = proxy(echo)
    line.cut_after(byte_count, "to_client")
    with connected(line.port) as client:
        client.sendall(b"x" * 200_000)
        assert received_until_cut(client) in (b"x" * byte_count, b"")  # a reset may overtake data
    with connected(line.port) as client:  # it happens once
        client.sendall(b"again")
        assert client.recv(10) == b"again"


def test_a_cut_towards_the_server_counts_what_the_server_gets(proxy):
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = proxy(server.getsockname()[1])
        line.cut_after(7, "to_server")
        with connected(line.port) as client:
            upstream, _ = server.accept()
            with upstream:
                upstream.settimeout(5)
                client.sendall(b"0123456789")
                assert received_until_cut(upstream) in (b"0123456", b"")


def test_a_black_hole_keeps_connections_and_bytes_until_it_ends(proxy, echo):
    line = proxy(echo)
    with connected(line.port) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
        line.pause()
        client.sendall(b"two")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(10)
        line.resume()
        client.settimeout(5)
        assert client.recv(10) == b"two"


def test_a_stopped_proxy_refuses_and_restarts_on_its_port(proxy, echo):
    line = proxy(echo)
    port = line.port
    with connected(port) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        line.stop()
        received_until_cut(client)
    with pytest.raises(ConnectionRefusedError):
        connected(port)
    line.start()
    assert line.port == port
    with connected(port) as client:
        client.sendall(b"y")
        assert client.recv(1) == b"y"


def test_standby_status_updates_are_recorded(proxy, pg):
    line = proxy(pg.port)
    options = {"host": "127.0.0.1", "port": line.port, "dbname": pg.name, "user": "postgres"}
    replication = psycopg.connect(**options, replication="database", autocommit=True)
    with contextlib.closing(replication) as connection:
        connection.execute("CREATE_REPLICATION_SLOT overheard TEMPORARY LOGICAL pgoutput")
        pgconn = connection.pgconn
        pgconn.exec_(
            b"START_REPLICATION SLOT overheard LOGICAL 0/0 (proto_version '1', publication_names 'none')"
        )
        status = b"r" + (7).to_bytes(8, "big") + (6).to_bytes(8, "big") + (5).to_bytes(8, "big")
        pgconn.put_copy_data(status + bytes(8) + b"\1")
        pgconn.flush()
        (seen,) = wait_until(line.standby_statuses, 60)
        assert (seen.written, seen.flushed, seen.applied, seen.reply_requested) == (7, 6, 5, True)
        assert not line.is_idle
        line.cut_now()
        with pytest.raises(psycopg.OperationalError):
            list(iter(lambda: pgconn.get_copy_data(0)[0] > 0, False))  # what came before the cut
    wait_until(lambda: line.is_idle, 60)
