"""Subscriptions over HTTP: `/changes` as Server-Sent Events, and the same as a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from tailrace.config.sections import SubscriptionsConfig
from tailrace.errors import Kind, TailraceError
from tailrace.subscriptions.events import EventLines
from tailrace.subscriptions.filters import ChangeFilter
from tailrace.subscriptions.hub import Hub
from tailrace.subscriptions.requests import (
    COOKIE,
    document_of,
    require_origin,
    require_token,
    status_of,
    understood,
)

T = TypeVar("T")

log = structlog.get_logger(__name__)

#: Time after which a subscriber that accepts no data is disconnected, in seconds. It may resume later.
SEND_DEADLINE_S = 30.0
#: Wait of a browser before it reconnects, in ms.
RETRY_MS = 1000

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
#: Close codes of WebSockets: the server stops; it has failed.
_GOING_AWAY, _FAILED = 1001, 1011


class ChangesEndpoint:
    """The ASGI application of `/changes`.

    :param hubs: by the name of the source.
    :param pool: for functions that read files.
    """

    def __init__(
        self,
        settings: SubscriptionsConfig,
        hubs: Mapping[str, Hub],
        pool: ThreadPoolExecutor,
        *,
        send_deadline_s: float = SEND_DEADLINE_S,
    ) -> None:
        self._settings, self._hubs, self._pool = settings, hubs, pool
        self._send_deadline_s = send_deadline_s
        self._subscribers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = HTTPConnection(scope)
        send = self._within_deadline(send)
        try:
            if scope["type"] == "http" and scope["method"] != "GET":
                await Response(status_code=405, headers={"allow": "GET"})(scope, receive, send)
                return
            await self._authorize(connection)
            with self._counted():
                request = await self._in_pool(
                    understood,
                    connection.query_params.multi_items(),
                    connection.headers.get("last-event-id"),
                    tuple(self._hubs),
                )
                hub = self._hubs[request.source]
                at, mark = await hub.position(request.wanted, request.begin)
                serve = self._socket if scope["type"] == "websocket" else self._stream
                await _until_gone(serve(hub, request.wanted, at, mark, send), receive)
        except TailraceError as error:
            await _refuse(error, scope, receive, send)
        except TimeoutError:
            log.info("a subscriber accepted no data for too long and was disconnected")

    async def _authorize(self, connection: HTTPConnection) -> None:
        require_origin(connection.headers.get("origin"), self._settings.origins)
        await self._in_pool(
            require_token,
            self._settings.token,
            connection.headers,
            connection.query_params.get("token"),
            connection.cookies.get(COOKIE),
        )

    async def _in_pool(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self._subscribers >= (most := self._settings.subscribers_max):
            raise TailraceError(
                Kind.SUBSCRIBERS_EXCEEDED,
                f"subscribe: there are {most} subscribers, which is the limit",
                "end some, or raise subscriptions.subscribers_max",
                {"subscribers_max": most},
            )
        self._subscribers += 1
        try:
            yield
        finally:
            self._subscribers -= 1

    async def _stream(self, hub: Hub, wanted: ChangeFilter, at: int, mark: str, send: Send) -> None:
        async def say(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await say(f"retry: {RETRY_MS}\nid: {at}{mark}\n\n")
        try:
            async with contextlib.aclosing(hub.deliveries(wanted, at, EventLines.as_stream)) as deliveries:
                async for part, place in deliveries:
                    if part is None:
                        await say(f": heartbeat\nid: {place}{mark}\n\n")
                    else:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
        except TailraceError as error:
            _log_failure(error)
            await say(f"event: failure\ndata: {json.dumps(document_of(error), default=str)}\n\n")
        await send({"type": "http.response.body", "body": b""})

    async def _socket(self, hub: Hub, wanted: ChangeFilter, at: int, mark: str, send: Send) -> None:
        async def say(text: str) -> None:
            await send({"type": "websocket.send", "text": text})

        await send({"type": "websocket.accept"})
        await say(f'{{"from":"{at}{mark}"}}')
        code = _GOING_AWAY
        try:
            async with contextlib.aclosing(hub.deliveries(wanted, at, EventLines.as_messages)) as deliveries:
                async for messages, place in deliveries:
                    for message in messages or [f'{{"from":"{place}{mark}"}}']:
                        await say(message)
        except TailraceError as error:
            _log_failure(error)
            await say(json.dumps(document_of(error), default=str))
            code = _FAILED
        await send({"type": "websocket.close", "code": code})

    def _within_deadline(self, send: Send) -> Send:
        async def sent(message: Message) -> None:
            async with asyncio.timeout(self._send_deadline_s):
                await send(message)

        return sent


def application(
    endpoint: ChangesEndpoint, settings: SubscriptionsConfig, on_start: Callable[[], None]
) -> Starlette:
    """Return the ASGI application that serves `/changes`.

    :param on_start: called on the event loop when it runs.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        on_start()
        yield

    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.origins,
        allow_credentials=True,
        allow_methods=["GET"],
        allow_headers=["Authorization", "Last-Event-ID"],
    )
    routes = [Route("/changes", endpoint), WebSocketRoute("/changes", endpoint)]
    return Starlette(routes=routes, middleware=[cors], lifespan=lifespan)


async def _until_gone(serving: Awaitable[None], receive: Receive) -> None:
    """Await `serving`, or cancel it when the client has disconnected."""
    working = asyncio.ensure_future(serving)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
    try:
        await working
    except asyncio.CancelledError:
        return
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        # The client disconnected during a send.


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        """Ignore messages of the client."""


async def _refuse(error: TailraceError, scope: Scope, receive: Receive, send: Send) -> None:
    status = status_of(error)
    if status == 500:
        _log_failure(error)
    headers = {"cache-control": "no-store"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    await JSONResponse(document_of(error), status, headers)(scope, receive, send)


def _log_failure(error: TailraceError) -> None:
    log.warning("a subscription ended with an error", kind=str(error.kind), error=error.message)
