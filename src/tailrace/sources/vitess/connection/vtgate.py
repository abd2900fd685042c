"""A connection to vtgate: with or without TLS and a user, to the first of several hosts that answers.

A source has two HTTP/2 connections for each of its tasks, whatever the number of shards: one for queries, by
gRPC's asyncio, and one for streams, each of which is read by a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
import grpc.experimental

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.secrets import Secret, redact, remember, resolved
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.errors import CLUSTER_EVENT, WORDS_MAX, Status, from_status
from tailrace.sources.vitess.connection.event_loop import submit

VSTREAM = "/vtgateservice.Vitess/VStream"
EXECUTE = "/vtgateservice.Vitess/Execute"
#: Time in seconds that a thread waits for the event loop beyond a call's own deadline.
_GRACE_S = 5.0
#: Of several connections, the time in seconds after the first one until a late one goes to another vtgate.
_LATE_S = 1.0
#: Longest wait for the reason why there is no connection, in seconds: gRPC knows it already, or not at all.
_REASON_S = 0.2
_WATCH_AGAIN_S = 0.01  # wait before a channel is watched again

T = TypeVar("T")

Row = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class _Credentials:
    """The credentials that are sent with calls, read when the connection is created."""

    channel: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str], ...]


class ResponseStream(Protocol):
    """The responses of a VStream, undecoded, for one thread. Raises `grpc.RpcError`, which `status_of` reads,
    if the stream does not end normally.
    """

    def __iter__(self) -> Iterator[bytes]:
        """Wait for the next response."""
        ...

    def cancel(self) -> bool:
        """End the stream. Any thread."""
        ...


class Vtgate:
    """An open connection, created by `connect`. Its methods may be called from any thread."""

    def __init__(
        self, source: VitessSource, address: str, channel: grpc.aio.Channel, user: _Credentials
    ) -> None:
        """Internal: use `connect`."""
        self.address = address
        self._source = source
        self._channel = channel
        self._streams = _stream_channel(source, address, user)
        self._metadata = user.metadata

    @classmethod
    def connect(cls, source: VitessSource) -> Vtgate:
        """Connect to the first of the hosts whose vtgate answers.

        :raises TailraceError: `SOURCE_UNREACHABLE` if none answers within `source.connect_timeout` seconds
            each; `SECRET_MISSING`; `CONFIG_INVALID` if a file of TLS can't be read.
        """
        credentials = _credentials(source)
        timeout_s = source.connect_timeout * len(source.hosts)
        return _wait(_connected(source, 0, credentials), timeout_s)

    @classmethod
    def connect_each(cls, source: VitessSource, count: int, first: int = 0) -> tuple[Vtgate, ...]:
        """Create `count` connections, distributed over vtgates that answer soon. Raises like `connect`."""
        credentials = _credentials(source)
        timeout_s = source.connect_timeout * len(source.hosts)
        return _wait(_each_connected(source, first, credentials, count), timeout_s + _LATE_S)

    def query(self, sql: str, attempted: str, target: str = "") -> list[Row]:
        """Return the rows of a statement, values as text.

        :param target: such as `shop:-80@replica`, for one shard; empty: the keyspace.
        :raises TailraceError: see `from_status`.
        """
        return answer_of(self.ask(sql, attempted, target), self._source.connect_timeout + _GRACE_S, attempted)

    def ask(self, sql: str, attempted: str, target: str = "") -> Future[list[Row]]:
        """Like `query`, but return at once a future of the rows or the error."""
        return submit(self.rows(sql, attempted, target))

    def ask_result(self, sql: str, attempted: str, target: str) -> Future[pb.QueryResult]:
        """Like `ask`, but return the undecoded `QueryResult`."""
        return submit(self._execute(sql, attempted, target))

    def stream(self, request: pb.VStreamRequest, deadline_s: float | None = None) -> ResponseStream:
        """Open a VStream.

        :param deadline_s: seconds after which it ends with `DEADLINE_EXCEEDED`; None: it stays open.
        """
        # Responses stay bytes: the transcoder decodes many at once.
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._streams.unary_stream(VSTREAM)
        return method(request.SerializeToString(), timeout=deadline_s, metadata=self._metadata)

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open, as far as gRPC knows."""
        # One that is idle, such as after half an hour without a query, opens again if its vtgate is there.
        state = self._channel.get_state(try_to_connect=True)
        return state in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE}

    def close(self) -> None:
        """Close the connection and its streams. Idempotent."""
        with contextlib.suppress(FutureTimeoutError):
            submit(self.end()).result(_GRACE_S)

    async def end(self) -> None:
        """Like `close`, on the event loop."""
        self._streams.close()
        await self._channel.close()

    async def rows(self, sql: str, attempted: str, target: str) -> list[Row]:
        """Like `query`, on the event loop."""
        return [_values(row) for row in (await self._execute(sql, attempted, target)).rows]

    async def _execute(self, sql: str, attempted: str, target: str) -> pb.QueryResult:
        session = pb.Session(autocommit=True, target_string=target or self._source.keyspace)
        request = pb.ExecuteRequest(session=session, query=pb.BoundQuery(sql=sql))
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(EXECUTE)
        timeout_s = self._source.connect_timeout
        try:
            content = await method(request.SerializeToString(), timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_status(status_of(error), attempted) from None
        answer = pb.ExecuteResponse.FromString(content)
        if answer.error.code:
            raise from_status(Status(_code_name(answer.error.code), answer.error.message), attempted)
        return answer.result


def status_of(error: grpc.RpcError) -> Status:
    """Return the status with which a call ended."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    return Status(error.code().name, error.details() or "")


def answer_of(asked: Future[T], timeout_s: float, attempted: str) -> T:
    """Return the answer to a query.

    :raises TailraceError: the query's error; `SOURCE_UNREACHABLE` if there is no answer in time.
    """
    try:
        return asked.result(timeout_s)
    except FutureTimeoutError:
        asked.cancel()
        # The call's own deadline is earlier, unless the loop had no time to handle it.
        late = Status("DEADLINE_EXCEEDED", f"no answer within {timeout_s:g} s")
        raise from_status(late, attempted) from None


def _wait(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    return answer_of(submit(work), timeout_s + _GRACE_S, "connect to vtgate")


async def _each_connected(
    source: VitessSource, first: int, credentials: _Credentials, count: int
) -> tuple[Vtgate, ...]:
    async def connect(hosts: int) -> Vtgate:
        return await _connected(source, hosts, credentials)

    attempts = [asyncio.ensure_future(connect(first + number)) for number in range(count)]
    try:
        await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
        done, late = await asyncio.wait(attempts, timeout=_LATE_S)
        found = [attempt.result() for attempt in attempts if attempt in done]
        for place, attempt in enumerate(attempts):
            if attempt in late:
                attempt.cancel()  # its vtgate does not answer
                answers = source.hosts.index(found[place % len(found)].address)
                attempts[place] = asyncio.ensure_future(connect(answers))
        return tuple(await asyncio.gather(*attempts))
    except BaseException:
        for attempt in attempts:
            attempt.cancel()
        for ended in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(ended, Vtgate):
                await ended.end()
        raise


async def _connected(source: VitessSource, first: int, credentials: _Credentials) -> Vtgate:
    tried = []
    for turn in range(len(source.hosts)):
        address = source.hosts[(first + turn) % len(source.hosts)]
        channel = _channel(source, address, credentials)
        began = time.monotonic()
        try:
            await asyncio.wait_for(_ready(channel), source.connect_timeout)
        except TimeoutError:
            after_s = time.monotonic() - began
            tried.append(f"{address} ({after_s:.0f} s{await _reason(channel)})")
            await channel.close()
        except asyncio.CancelledError:
            await channel.close()
            raise
        else:
            return Vtgate(source, address, channel, credentials)
    raise TailraceError(
        Kind.SOURCE_UNREACHABLE,
        f"connect to vtgate: no answer from {', '.join(tried)}",
        "check source.hosts, which are ports of vtgate's gRPC, and whether they require TLS: source.tls, "
        "tls_ca, tls_certificate and tls_key; it is retried",
    )


async def _reason(channel: grpc.aio.Channel) -> str:
    """Return gRPC's words, after a colon, about a connection that could not be made; empty: it has none."""
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXECUTE)
    try:
        await method(b"", timeout=_REASON_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f": {redact(error.details() or '')[-WORDS_MAX:]}"
    return ""


async def _ready(channel: grpc.aio.Channel) -> None:
    """Wait until a connection is open.

    gRPC's watch for a change of state may fail without a change (grpc/grpc#42393): it is started again.
    """
    while True:
        with contextlib.suppress(RuntimeError):
            return await channel.channel_ready()
        await asyncio.sleep(_WATCH_AGAIN_S)


def _channel(source: VitessSource, address: str, credentials: _Credentials) -> grpc.aio.Channel:
    options = _options(source)
    if credentials.channel is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials.channel, options)


def _stream_channel(source: VitessSource, address: str, credentials: _Credentials) -> grpc.Channel:
    # The thread that waits for a response takes it from gRPC itself, without another thread between.
    options = [*_options(source), (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)]
    if credentials.channel is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials.channel, options)


def _options(source: VitessSource) -> list[tuple[str, str | int]]:
    keepalive_ms = int(source.keepalive_s * 1000)
    options: list[tuple[str, str | int]] = [
        ("grpc.max_receive_message_length", source.message_bytes_max),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.max_pings_without_data", 0),
        # Sources in one process don't share connections.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if source.tls_server_name is not None:
        options.append(("grpc.ssl_target_name_override", source.tls_server_name))
    return options


def _credentials(source: VitessSource) -> _Credentials:
    metadata: tuple[tuple[str, str], ...] = ()
    if source.user is not None and source.password is not None:
        password = source.password.resolve()
        remember(password)
        metadata = (("username", resolved(source.user)), ("password", password))
    if not source.uses_tls:
        return _Credentials(None, metadata)
    authorities, key, certificate = (
        None if name is None else _file(name)
        for name in (source.tls_ca, source.tls_key, source.tls_certificate)
    )
    return _Credentials(grpc.ssl_channel_credentials(authorities, key, certificate), metadata)


def _file(name: str | Secret) -> bytes:
    path = resolved(name)
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"read a file of TLS, {path}: {error.strerror}",
            "correct source.tls_ca, source.tls_certificate or source.tls_key",
        ) from None


def _values(row: pb.Row) -> Row:
    found: list[str | None] = []
    at = 0
    for length in row.lengths:
        found.append(None if length < 0 else row.values[at : at + length].decode("utf-8", "replace"))
        at += max(length, 0)
    return tuple(found)


def _code_name(number: int) -> str:
    # Vitess' codes are gRPC's, and one more that vtgate uses in answers to queries (`vtrpc.Code`).
    names = {code.value[0]: code.name for code in grpc.StatusCode} | {17: CLUSTER_EVENT}
    return names.get(number, str(number))
