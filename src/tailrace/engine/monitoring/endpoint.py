"""Where Prometheus fetches an engine's numbers, if a port was given for it: `http://<host>:<port>/metrics`."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import structlog

from tailrace.config import EngineOptions
from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from tailrace.engine.monitoring.metrics import EngineMetrics

log = structlog.get_logger(__name__)

#: How long somebody who has connected may take to ask.
ASK_S = 10.0
#: How soon the thread that serves sees that it shall end.
LOOK_S = 0.5


class MetricsEndpoint:
    """Serves numbers while an engine runs. Opened and closed by the engine's own thread.

    :param name: of the engine, for the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._server: WSGIServer | None = None
        self._metrics: EngineMetrics | None = None
        self._thread: threading.Thread | None = None

    def open(self, options: EngineOptions, metrics: EngineMetrics) -> None:
        """Serve, if there is to be a port.

        :raises TailraceError: `ENVIRONMENT_UNFIT` if the port can't be had.
        """
        host, port = options.metrics_host, options.metrics_port
        if port is None:
            return
        try:
            self._server = _server(host, port, metrics)
        except OSError as error:
            raise TailraceError(
                Kind.ENVIRONMENT_UNFIT,
                f"serve metrics at {host}:{port}: {error.strerror or error}",
                "choose another engine.metrics_port or metrics_host, or leave metrics_port out",
                {"host": host, "port": port},
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_S,), name=f"{self._name} metrics", daemon=True
        )
        self._thread.start()
        self._metrics = metrics
        metrics.port = self._server.server_port
        log.info("metrics are served", engine=self._name, host=host, port=self._server.server_port)

    def close(self) -> None:
        """Serve no longer."""
        if self._server is None or self._thread is None or self._metrics is None:
            return
        self._metrics.port = None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2 * LOOK_S)


def _server(host: str, port: int, metrics: EngineMetrics) -> WSGIServer:
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

    from prometheus_client import make_wsgi_app

    # A thread for each request, so that one who asks for nothing keeps nobody else waiting.
    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

    class Handler(WSGIRequestHandler):
        timeout = ASK_S

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            """Nothing is written to standard error."""

    return make_server(host, port, make_wsgi_app(metrics.registry), Server, Handler)
