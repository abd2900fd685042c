"""Receives the server's messages in large runs: two transports with one interface.

`SocketTransport` takes the socket from libpq, which has connected and authenticated, while the
connection is idle. One system call receives many frames, and a compiled scan finds them. If a
busy sender has sent little, it waits half a millisecond for more: reading as soon as a byte is
available costs two system calls per frame. If the sender was idle before, it does not wait.

`LibpqTransport` gets the same frames from libpq one by one; it is for TLS and GSSAPI encryption,
whose bytes only libpq can decrypt.

A transport is used by the receiving thread; only `send` may be called from another one. No call
blocks longer than its deadline.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import psycopg
from psycopg import pq

from tailrace.errors import REPORT_STREAM, Kind, TailraceError
from tailrace.protocol.frames import XLOG_PAYLOAD_AT, Bytes
from tailrace.sources.postgres.connection.backend_messages import (
    KEEPALIVE_SIZE,
    MESSAGE_HEADER_SIZE,
    SCAN_FIELDS,
    ScanFault,
    split_wire,
)
from tailrace.sources.postgres.connection.errors import (
    STARTING,
    STREAMING,
    connection_lost,
    from_fields,
    from_notice,
    parse_fields,
)

KIB = 1024
MIB = 1024 * KIB

BUFFER_BYTES = 4 * MIB
RECEIVE_BUFFER_OF_KERNEL_BYTES = 8 * MIB

#: Bytes that are enough for one receive; for fewer, a short wait is worthwhile.
COALESCE_BYTES = MIB
COALESCE_WAIT_S = 0.0005
#: A unix socket holds some 270 small messages, regardless of their bytes: a longer wait would
#: stop the sender (measured: half a millisecond cost a third of the rate). Each wait costs two
#: context switches and the interpreter's overhead, so a shorter one costs CPU.
COALESCE_WAIT_UNIX_S = 0.00025
COALESCE_S_MAX = 0.020

#: A sender is idle after this many seconds without a message: its next one is returned at once.
IDLE_S = 0.001

#: Maximum size of notices, errors and parameters; a larger one means that the stream is out of sync.
OTHER_MESSAGE_BYTES_MAX = MIB

SEND_DEADLINE_S = 10.0
DRAIN_S = 1.0

#: Parameters that determine the text of values. They are set when connecting; if the server reports
#: a change of one, later values would be misread.
GUARDED_PARAMETERS = {
    "client_encoding": ("UTF8", "SQL_ASCII"),
    "DateStyle": ("ISO",),
    "IntervalStyle": ("postgres",),
    "TimeZone": ("UTC",),
}

_NO_BYTES: Bytes = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The last keepalive of one receive; `reply_wanted` if any of its keepalives requested a reply."""

    wal_end: int
    clock_us: int  # µs since 2000
    reply_wanted: bool


@dataclass(frozen=True, slots=True)
class Received:
    """The result of one receive.

    `data` is a view into the transport's buffer, valid until the next call: complete XLogData
    frames for replication, text for COPY. `message` is the first backend message after it that
    the transport does not handle itself, as (type, body). `silent`: not even a part of one was received.
    """

    data: Bytes
    keepalive: Keepalive | None = None
    message: tuple[bytes, bytes] | None = None
    silent: bool = False

    @property
    def nothing(self) -> bool:
        return not len(self.data) and self.keepalive is None and self.message is None


NOTHING = Received(_NO_BYTES, silent=True)


class Transport(Protocol):
    """One connection that runs one COPY command."""

    def start(self, command: bytes, deadline_s: float, waiting: Callable[[], None] = lambda: None) -> None:
        """Send `command` and wait until the server begins to copy.

        :param waiting: called repeatedly while waiting; its exceptions end the wait.
        :raises TailraceError: the server's error; `SOURCE_UNREACHABLE`.
        """

    def receive(self, wait_s: float) -> Received:
        """Return what was received; `NOTHING` if no byte was within `wait_s`.

        :raises TailraceError: `SOURCE_UNREACHABLE` if the connection ended; the server's error;
            `FRAME_TOO_LARGE`; `PROTOCOL_VIOLATION`.
        """

    def send(self, payload: bytes) -> None:
        """Send one complete CopyData message with `payload`. From any thread.

        :raises TailraceError: `SOURCE_UNREACHABLE` if it can't be sent in time.
        """

    def release(self) -> None:
        """Return the connection to libpq, after ReadyForQuery was received."""

    def close(self) -> None:
        """End the copying as orderly as possible without waiting. From any thread."""


def take_message(kind: bytes, body: bytes, attempted: str) -> tuple[bytes, bytes] | None:
    """Handle a message that the server may send at any time; return any other message.

    :raises TailraceError: for an ErrorResponse, for a guarded parameter that changed, and for a
        notice that changes are skipped.
    """
    if kind == b"E":
        raise from_fields(parse_fields(body), attempted)
    if kind == b"S":
        name, _, rest = body.partition(b"\0")
        value = rest.rstrip(b"\0").decode("utf-8", "replace")
        wanted = GUARDED_PARAMETERS.get(name.decode("utf-8", "replace"))
        if wanted and not value.startswith(wanted):
            raise TailraceError(
                Kind.SOURCE_MISCONFIGURED,
                f"{attempted}: the server changed {name.decode()} to {value!r} during the session",
                "find what sets it for this role or database and remove it",
            )
        return None
    if kind == b"N":
        if (failure := from_notice(parse_fields(body), attempted)) is not None:
            raise failure
        return None
    if kind == b"A":  # notifications are not needed
        return None
    return kind, body


class SocketTransport:
    """Reads the socket of `pgconn` directly. libpq must be idle and is not used until `close`.

    :param copies: the command is COPY, not replication. It uses the extended protocol, which accepts only
        one statement, because a COPY may contain a user's condition.
    :param attempted: what is being done, for errors; default: replication.
    :param message_bytes_max: the buffer grows up to this for a large message, and shrinks again
        after it.
    """

    def __init__(
        self,
        pgconn: pq.abc.PGconn,
        message_bytes_max: int,
        *,
        copies: bool = False,
        attempted: str = "",
    ) -> None:
        self._pgconn = pgconn
        self._socket = socket.socket(fileno=os.dup(pgconn.socket))
        self._socket.setblocking(False)
        is_unix = self._socket.family == socket.AF_UNIX
        self._coalesce_wait_s = COALESCE_WAIT_UNIX_S if is_unix else COALESCE_WAIT_S
        if not is_unix:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_OF_KERNEL_BYTES)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(self._socket, select.POLLOUT)
        self._size_max = message_bytes_max
        self._result = np.zeros(SCAN_FIELDS, np.int64)
        self._normal: Bytes = np.empty(BUFFER_BYTES, np.uint8)
        self._buffer = self._normal
        self._view = self._buffer.data
        self._start = 0  # bytes of [start, have) are not processed yet
        self._have = 0
        self._needed = 0  # size of the message at start, if known
        self._fresh = False  # bytes were received since the last scan
        self._sending = threading.Lock()
        self._copies = copies
        self._attempted = attempted
        self._doing = attempted or STARTING
        self._closed = False

    def start(self, command: bytes, deadline_s: float, waiting: Callable[[], None] = lambda: None) -> None:
        text = command + b"\0"
        self._transmit(_extended(text) if self._copies else _message(b"Q", text), deadline_s)
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            waiting()
            received = self._receive_answer(min(0.2, deadline_s))
            if received.message is not None:
                kind, _ = received.message
                if self._copies and kind in {b"1", b"2"}:  # parsed, bound
                    continue
                if kind not in {b"W", b"H"}:
                    raise self._out_of_step()
                self._doing = self._attempted or STREAMING
                return
        raise connection_lost(self._doing, f"no answer within {deadline_s:g} s")

    def _receive_answer(self, wait_s: float) -> Received:
        try:
            received = self.receive(wait_s)
        except TailraceError as error:
            if error.kind not in {Kind.PROTOCOL_VIOLATION, Kind.FRAME_TOO_LARGE}:
                raise
            raise self._out_of_step() from None
        if len(received.data) or received.keepalive:
            raise self._out_of_step()
        return received

    def _out_of_step(self) -> TailraceError:
        # libpq keeps what it has read after the answer to its last command. An idle server sends only that it
        # ends the session, and no data before this command, so no data is lost. But if libpq has the first
        # half of that message, the rest of it is not a valid message here.
        return connection_lost(
            self._doing, "invalid bytes before the answer: the server was ending the connection"
        )

    def receive(self, wait_s: float) -> Received:
        received = self._scanned() if self._fresh else NOTHING
        if not received.nothing or not self._fill(wait_s):
            return received
        return self._scanned()

    def send(self, payload: bytes) -> None:
        self._transmit(_message(b"d", payload), SEND_DEADLINE_S)

    def release(self) -> None:
        self._closed = True
        self._socket.close()  # only the duplicate of the descriptor

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            # CopyDone, Terminate: the server releases the slot at once instead of after a timeout.
            self._socket.send(_message(b"c", b"") + _message(b"X", b""))
            self._socket.shutdown(socket.SHUT_WR)
            self._drain()
        except OSError:
            pass  # the connection has already ended
        self._socket.close()

    def _drain(self) -> None:
        # Closing a socket with unread bytes resets the connection, and the server might then
        # never read the last status message.
        until = time.monotonic() + DRAIN_S
        while self._readable.poll(max(0.0, until - time.monotonic()) * 1000):
            if not self._socket.recv(len(self._normal)) or time.monotonic() > until:
                return

    def _scanned(self) -> Received:
        """Return the buffer's content up to the first message that is not handled here."""
        while True:
            start = self._start
            split_wire(
                self._buffer, start, self._have, self._size_max, copies=self._copies, result=self._result
            )
            kept_end, consumed, needed, stopped_by, keepalives, wal_end, clock_us, reply, fault = map(
                int, self._result
            )
            self._start, self._needed = consumed, needed
            self._fresh = bool(stopped_by)
            data = self._buffer[start:kept_end] if kept_end > start else _NO_BYTES
            keepalive = Keepalive(wal_end, clock_us, bool(reply)) if keepalives else None
            message = None
            if stopped_by:
                body = self._view[consumed + MESSAGE_HEADER_SIZE : consumed + needed].tobytes()
                if keepalive or len(data):
                    # The frames before it are returned first, and the message by the next call.
                    return Received(data, keepalive)
                self._start, self._needed = consumed + needed, 0
                message = take_message(bytes([stopped_by]), body, self._doing)
                if message is None:
                    continue
            elif fault and not len(data) and keepalive is None:
                raise self._faulty(ScanFault(fault))
            elif fault:
                self._fresh = True
            return Received(data, keepalive, message)

    def _faulty(self, fault: ScanFault) -> TailraceError:
        kind = chr(self._buffer[self._start])
        if fault is ScanFault.LENGTH_OVER_LIMIT and kind == "d":
            return TailraceError(
                Kind.FRAME_TOO_LARGE,
                f"{self._doing}: a message is larger than {self._size_max} bytes",
                "raise source.frame_bytes_max, if there is memory for such a row",
            )
        return TailraceError(
            Kind.PROTOCOL_VIOLATION,
            f"{self._doing}: a message of type {kind!r}: {fault.name.lower().replace('_', ' ')}",
            REPORT_STREAM,
        )

    def _fill(self, wait_s: float) -> bool:
        """Receive into the buffer; return False if nothing was received within `wait_s`."""
        self._make_room()
        waited_from = time.monotonic()
        if not self._readable.poll(max(0, wait_s) * 1000):
            return False
        began = time.monotonic()
        busy = began - waited_from < IDLE_S
        had = self._have
        while True:
            came = self._receive_some()
            full = self._have == len(self._buffer)
            if not busy or full or self._have - had >= COALESCE_BYTES:
                break
            if came == 0 or time.monotonic() - began > COALESCE_S_MAX:
                break
            time.sleep(self._coalesce_wait_s)
        self._fresh = self._have > had
        return self._fresh

    def _receive_some(self) -> int:
        try:
            came = self._socket.recv_into(self._view[self._have :])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise connection_lost(self._doing, f"{error.strerror or 'socket closed'}") from error
        if came == 0:
            raise connection_lost(self._doing, "the server closed the connection")
        self._have += came
        return came

    def _make_room(self) -> None:
        """Move the unprocessed bytes to the buffer's front; grow for a large message, shrink after it."""
        left = self._have - self._start
        if self._needed > OTHER_MESSAGE_BYTES_MAX and self._buffer[self._start] != ord("d"):
            raise self._faulty(ScanFault.LENGTH_OVER_LIMIT)
        wanted = max(BUFFER_BYTES, self._needed)
        if wanted > len(self._buffer) or (wanted == BUFFER_BYTES < len(self._buffer)):
            # A new buffer's pages are allocated only when written: a large announced length costs nothing.
            target = self._normal if wanted == BUFFER_BYTES else np.empty(wanted, np.uint8)
            target[:left] = self._buffer[self._start : self._have]
            self._buffer, self._view = target, target.data
        elif self._start:
            self._buffer[:left] = self._buffer[self._start : self._have]
        self._start, self._have = 0, left

    def _transmit(self, message: bytes, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        rest = memoryview(message)
        with self._sending:
            if self._closed:
                raise connection_lost("send to the server", "the connection is closed")
            while rest:
                try:
                    rest = rest[self._socket.send(rest) :]
                except (BlockingIOError, InterruptedError):
                    remaining = until - time.monotonic()
                    if remaining <= 0 or not self._writable.poll(remaining * 1000):
                        raise connection_lost(
                            "send to the server", f"not accepted within {deadline_s:g} s"
                        ) from None
                except OSError as error:
                    raise connection_lost("send to the server", f"{error.strerror}") from error


class LibpqTransport:
    """Receives the same messages through libpq, which may encrypt the connection.

    libpq is not thread-safe: the lock is held for its calls, none of which waits.
    """

    def __init__(
        self,
        pgconn: pq.abc.PGconn,
        message_bytes_max: int,
        *,
        copies: bool = False,
        attempted: str = "",
    ) -> None:
        self._pgconn = pgconn
        self._pgconn.nonblocking = 1
        self._pgconn.notice_handler = self._noticed
        self._notice: TailraceError | None = None
        self._size_max = message_bytes_max
        self._copies = copies
        self._lock = threading.Lock()
        self._readable = select.poll()
        self._readable.register(pgconn.socket, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(pgconn.socket, select.POLLOUT)
        self._attempted = attempted
        self._doing = attempted or STARTING
        self._copied = False  # the server sent the last CopyData
        self._closed = False

    def start(self, command: bytes, deadline_s: float, waiting: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            if self._copies:
                self._pgconn.send_query_params(command, None)
            else:
                self._pgconn.send_query(command)
        until = time.monotonic() + deadline_s
        while True:
            waiting()
            with self._lock:
                self._consume()
                self._flush(self._doing)
                if not self._pgconn.is_busy():
                    break
            if time.monotonic() > until:
                raise connection_lost(self._doing, f"no answer within {deadline_s:g} s")
            self._readable.poll(100)
        with self._lock:
            result = self._pgconn.get_result()
        if result is None or result.status not in {pq.ExecStatus.COPY_BOTH, pq.ExecStatus.COPY_OUT}:
            raise result_failure(result, self._doing)
        self._doing = self._attempted or STREAMING

    def receive(self, wait_s: float) -> Received:
        received = self._collect()
        if not received.nothing:
            return received
        if not self._readable.poll(max(0, wait_s) * 1000):
            return NOTHING
        return replace(self._collect(), silent=False)

    def send(self, payload: bytes) -> None:
        until = time.monotonic() + SEND_DEADLINE_S
        with self._lock:
            if self._closed:
                raise connection_lost("send to the server", "the connection is closed")
            try:
                self._pgconn.put_copy_data(payload)
            except psycopg.Error as error:
                raise connection_lost("send to the server", "the connection is broken") from error
            left = self._flush("send to the server")
        while left:
            if time.monotonic() > until:
                raise connection_lost("send to the server", f"not accepted within {SEND_DEADLINE_S:g} s")
            self._writable.poll(100)
            with self._lock:
                left = self._flush("send to the server")

    def release(self) -> None:
        self._closed = True

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._pgconn.put_copy_end()
                self._pgconn.flush()
            except psycopg.Error:
                pass  # the connection has already ended

    def _collect(self) -> Received:
        out = bytearray()
        keepalive: Keepalive | None = None
        with self._lock:
            self._consume()
            while len(out) < BUFFER_BYTES and not self._copied:
                # libpq returns only one frame per call.
                size, data = self._copy_data()
                if size == 0:
                    break
                if size < 0:
                    self._copied = True
                    break
                keepalive = self._keep(data, out, keepalive)
        if self._notice is not None:
            raise self._notice  # before anything that was received after it
        if not out and keepalive is None:
            return self._ended() if self._copied else NOTHING
        return Received(np.frombuffer(out, np.uint8), keepalive)

    def _noticed(self, result: pq.abc.PGresult) -> None:
        # libpq calls this while it reads, where no exception may be raised.
        self._notice = self._notice or from_notice(result_fields(result), self._doing)

    def _copy_data(self) -> tuple[int, memoryview]:
        try:
            return self._pgconn.get_copy_data(1)
        except psycopg.Error as error:
            raise connection_lost(self._doing, "the connection is broken") from error

    def _keep(self, data: memoryview, out: bytearray, keepalive: Keepalive | None) -> Keepalive | None:
        size = len(data) + MESSAGE_HEADER_SIZE
        if size > self._size_max:
            raise TailraceError(
                Kind.FRAME_TOO_LARGE,
                f"{self._doing}: a message is larger than {self._size_max} bytes",
                "raise source.frame_bytes_max, if there is memory for such a row",
            )
        if self._copies:
            out += data
            return None
        kind = data[0:1].tobytes()
        if kind == b"w" and size > XLOG_PAYLOAD_AT:
            out += b"d" + struct.pack("!i", len(data) + 4)
            out += data
            return keepalive
        if kind == b"k" and size >= KEEPALIVE_SIZE:
            wal_end, clock_us, reply = struct.unpack_from("!Qqb", data, 1)
            wanted = bool(reply) or (keepalive is not None and keepalive.reply_wanted)
            return Keepalive(wal_end, clock_us, wanted)
        raise TailraceError(
            Kind.PROTOCOL_VIOLATION, f"{self._doing}: a CopyData message of kind {kind!r}", REPORT_STREAM
        )

    def _ended(self) -> Received:
        """Return the message with which the server ended the copying."""
        with self._lock:
            if self._pgconn.is_busy():
                return NOTHING
            result = self._pgconn.get_result()
        if result is None:
            return Received(_NO_BYTES, None, (b"Z", b"I"))
        if result.status in {pq.ExecStatus.COMMAND_OK, pq.ExecStatus.COPY_IN}:
            return Received(_NO_BYTES, None, (b"C", (result.command_status or b"") + b"\0"))
        raise result_failure(result, self._doing)

    def _consume(self) -> None:
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            raise connection_lost(self._doing, "the connection is broken") from error

    def _flush(self, attempted: str) -> int:
        try:
            return self._pgconn.flush()
        except psycopg.Error as error:
            raise connection_lost(attempted, "the connection is broken") from error


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _extended(statement: bytes) -> bytes:
    """Return Parse, Bind, Execute and Sync for one statement without parameters; it ends with a zero."""
    return (
        _message(b"P", b"\0" + statement + struct.pack("!h", 0))
        + _message(b"B", b"\0\0" + struct.pack("!hhh", 0, 0, 0))
        + _message(b"E", b"\0" + struct.pack("!i", 0))
        + _message(b"S", b"")
    )


def result_fields(result: pq.abc.PGresult) -> dict[str, str]:
    """Return the fields of an error or notice by the protocol's letters."""
    return {
        letter: (result.error_field(field) or b"").decode("utf-8", "replace")
        for letter, field in (
            ("C", pq.DiagnosticField.SQLSTATE),
            ("M", pq.DiagnosticField.MESSAGE_PRIMARY),
            ("R", pq.DiagnosticField.SOURCE_FUNCTION),
        )
    }


def result_failure(result: pq.abc.PGresult | None, attempted: str) -> TailraceError:
    """Return the error for a failed result of libpq."""
    fields = {} if result is None else result_fields(result)
    if not fields.get("C"):
        return connection_lost(attempted, "the connection ended")
    return from_fields(fields, attempted)
