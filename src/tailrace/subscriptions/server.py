"""The HTTP server for subscribers, which listens on loopback and runs on a separate thread."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

from tailrace.config.sections import SubscriptionsConfig
from tailrace.errors import REPORT, Kind, TailraceError
from tailrace.subscriptions.requests import resolved_token
from tailrace.subscriptions.served_log import LogPlace, ServedLog

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

log = structlog.get_logger(__name__)

HOST = "127.0.0.1"
#: Number of threads that read and decode for subscriptions that are behind.
THREADS = 4
#: Timeouts of the server's start, and of requests that still run when it stops, in seconds.
START_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 5.0
#: Number of open files in addition to those of subscribers.
_FILES_BESIDE = 512


@contextlib.contextmanager
def serving(places: Sequence[LogPlace], settings: SubscriptionsConfig) -> Iterator[int]:
    """Serve the changes of some logs within the context; yields the port.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if the port can't be bound, or a package is missing;
        `SECRET_MISSING`.
    """
    require_ready(settings)
    from tailrace.subscriptions.app import SEND_DEADLINE_S, ChangesEndpoint, application
    from tailrace.subscriptions.hub import Hub

    _allow_files(settings.subscribers_max + _FILES_BESIDE)
    with (
        _listening(settings.port, SEND_DEADLINE_S) as listener,
        ThreadPoolExecutor(THREADS, "subscriptions") as pool,
    ):
        hubs = {place.name: Hub(ServedLog(place), pool) for place in places}
        loops: list[asyncio.AbstractEventLoop] = []
        started = threading.Event()

        def on_start() -> None:
            loops.append(asyncio.get_running_loop())
            started.set()

        server = _server(application(ChangesEndpoint(settings, hubs, pool), settings, on_start))
        thread = threading.Thread(
            target=server.run, args=([listener],), name="subscriptions server", daemon=True
        )
        thread.start()
        if not started.wait(START_DEADLINE_S):
            raise TailraceError(
                Kind.INTERNAL, "serve subscriptions: the server did not start in time", REPORT
            )
        port = listener.getsockname()[1]
        log.info("changes are served", url=f"http://{HOST}:{port}/changes")
        try:
            yield port
        finally:
            for hub in hubs.values() if thread.is_alive() else ():
                loops[0].call_soon_threadsafe(hub.close)
            server.should_exit = True
            thread.join(2 * CLOSE_DEADLINE_S)


def require_ready(settings: SubscriptionsConfig) -> None:
    """Check the requirements of serving, except for the port.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if a package is missing; `SECRET_MISSING`.
    """
    try:
        for name in ("starlette", "uvicorn", "websockets"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"serve subscriptions: the package {error.name} is not installed",
            "pip install 'tailrace[subscriptions]'",
        ) from None
    resolved_token(settings.token)


def _server(app: Starlette) -> uvicorn.Server:
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="websockets-sansio",
            ws_max_size=4096,  # messages of clients are ignored
            ws_per_message_deflate=False,  # takes about 300 kB per connection, and loopback is fast
            lifespan="on",
            # Its log lines have the query, and with it the token.
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(CLOSE_DEADLINE_S),
        )
    )


def _listening(port: int, unread_s: float) -> socket.socket:
    """Return a listening socket whose connections end if the client reads nothing for `unread_s` seconds."""
    try:
        listener = socket.create_server((HOST, port), backlog=2048)
        # Closing a connection waits until the client has read everything: without a timeout, for ever.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_s * 1000))
        return listener
    except OSError as error:
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"serve subscriptions at {HOST}:{port}: {error.strerror or error}",
            "choose another port: --port, or subscriptions.port in the pipeline's file; 0: any that is free",
            {"host": HOST, "port": port},
        ) from error


def _allow_files(count: int) -> None:
    """Raise the process's limit of open files to `count`: each subscriber needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < count:
        log.warning("the limit of open files is lower than subscribers_max requires", files_max=most)
