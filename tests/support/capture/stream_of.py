"""A fake server end of a socket, and messages as a server sends them."""

from __future__ import annotations

import socket
import struct
from typing import Any, cast

from psycopg import pq

from tailrace.protocol import frames


class Idle:
    """What a transport uses of a libpq connection: the socket of an idle one."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end.fileno()


def idle(end: socket.socket) -> pq.abc.PGconn:
    return cast("Any", Idle(end))


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def keepalive(wal_end: int, *, reply: bool = False) -> bytes:
    return message(b"d", struct.pack("!cQqb", b"k", wal_end, 77, reply))


def xlog(payload: bytes) -> bytes:
    return frames.xlog_frame(1, 2, 3, payload)


def begin(commit_lsn: int) -> bytes:
    return xlog(b"B" + struct.pack("!QqI", commit_lsn, 0, 7))


def commit(commit_lsn: int, end_lsn: int) -> bytes:
    return xlog(b"C" + struct.pack("!bQQq", 0, commit_lsn, end_lsn, 0))


def insert(relation: int, text: bytes = b"1") -> bytes:
    return xlog(b"I" + struct.pack("!IcHci", relation, b"N", 1, b"t", len(text)) + text)


def relation(oid: int) -> bytes:
    return xlog(b"R" + struct.pack("!I", oid) + b"public\0t\0d" + struct.pack("!H", 0))


def logical_message(lsn: int, *, transactional: bool = False, prefix: bytes = b"p") -> bytes:
    head = b"M" + struct.pack("!bQ", transactional, lsn)
    return xlog(head + prefix + b"\0" + struct.pack("!i", 1) + b"x")


def transaction(commit_lsn: int, end_lsn: int, *changes: bytes) -> bytes:
    return begin(commit_lsn) + b"".join(changes) + commit(commit_lsn, end_lsn)


def error(sqlstate: str, text: str = "so it is", routine: str = "somewhere") -> bytes:
    return message(b"E", f"SFATAL\0C{sqlstate}\0M{text}\0Dsecret\0R{routine}\0\0".encode())


NOTICE = message(b"N", b"SNOTICE\0C00000\0Mhm\0\0")
PARAMETER = message(b"S", b"in_hot_standby\0off\0")
