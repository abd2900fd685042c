"""Clients of subscriptions, and the events that they receive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from tailrace_servers.ports import free_port
from tests.support.wait import wait_until

#: The token of all clients here.
TOKEN = "a token of tests"


@dataclass(slots=True)
class ServerSentEvent:
    """One event as the specification defines it; `id` is the last one received, also with earlier events."""

    id: str
    kind: str = "message"
    data: str = ""

    @property
    def document(self) -> Any:
        return json.loads(self.data)


@dataclass(slots=True)
class EventStream:
    """Reads Server-Sent Events from a response, as a browser does."""

    response: httpx2.Response
    id: str = ""
    comments: list[str] = field(default_factory=list)
    retry_ms: int | None = None
    lines: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.response.iter_lines()

    def __iter__(self) -> Iterator[ServerSentEvent]:
        """Yield events with data until the server ends."""
        kind, data = "message", []
        for line in self.lines:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if data:
                    yield ServerSentEvent(self.id, kind, "\n".join(data))
                kind, data = "message", []
            elif not name:
                self.comments.append(value)
            elif name == "id":
                self.id = value
            elif name == "event":
                kind = value
            elif name == "data":
                data.append(value)
            elif name == "retry":
                self.retry_ms = int(value)


@contextmanager
def subscribed(port: int, *, last_event_id: str | None = None, **query: Any) -> Iterator[EventStream]:
    """Subscribe by Server-Sent Events, with the token in a header."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    if last_event_id is not None:
        headers["Last-Event-ID"] = last_event_id
    url = f"http://127.0.0.1:{port}/changes"
    named = {name.rstrip("_"): value for name, value in query.items()}
    with (
        httpx2.Client(timeout=60, trust_env=False, verify=False) as client,
        client.stream("GET", url, params=named, headers=headers) as response,
    ):
        assert response.status_code == 200, response.read()
        yield EventStream(response)


def refused(port: int, *, headers: dict[str, str] | None = None, **query: Any) -> tuple[int, dict[str, Any]]:
    """Send a request that is to be refused; return the status and the error. Without `headers` it has the
    token.
    """
    sent = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
    named = {name.rstrip("_"): value for name, value in query.items()}
    url = f"http://127.0.0.1:{port}/changes"
    with (
        httpx2.Client(timeout=60, trust_env=False, verify=False) as client,
        client.stream("GET", url, params=named, headers=sent) as response,
    ):
        assert response.status_code != 200
        return response.status_code, json.loads(response.read())["error"]


def ids(stream: EventStream, count: int) -> list[int]:
    """Return the column `id` of the next `count` events."""
    return [event.document["after"]["id"] for event in islice(stream, count)]


@contextmanager
def socket_to(port: int, *, origin: str | None = None, **query: Any) -> Iterator[ClientConnection]:
    """Subscribe by WebSocket, with the token in a header."""
    named = urlencode({name.rstrip("_"): value for name, value in query.items()})
    url = f"ws://127.0.0.1:{port}/changes?{named}"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with connect(
        url, additional_headers=headers, origin=Origin(origin) if origin else None, proxy=None
    ) as found:
        yield found


def changes(connection: ClientConnection, count: int) -> list[dict[str, Any]]:
    """Return the next `count` messages that hold a change."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        message = json.loads(connection.recv(timeout=60))
        if "change" in message:
            found.append(message)
    return found


@dataclass(slots=True)
class ServedPipeline:
    """A pipeline's file with subscriptions on a fixed port, and its processes."""

    folder: Path
    dsn: str
    source: dict[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    @property
    def file(self) -> Path:
        return self.folder / "shop.yaml"

    def write(self, *, in_run: bool) -> None:
        """Write the file; `in_run`: `tailrace run` serves, too."""
        found: dict[str, Any] = {
            "name": "shop",
            "source": {"dsn": self.dsn, "tables": ["public.*"], **self.source},
            "log": {"path": "shop.log"},
        }
        if in_run:
            found["subscriptions"] = {"port": self.port}
        self.file.write_text(json.dumps(found), "utf-8")

    def start(self, command: str, *options: str) -> subprocess.Popen[str]:
        """Start `tailrace run` or `tailrace serve`; its output goes to a file beside the pipeline's."""
        words = [sys.executable, "-m", "tailrace", command, str(self.file), *options]
        if command == "serve":
            words += ["--port", str(self.port)]
        environment = os.environ | {"TAILRACE_TOKEN": TOKEN}
        with (self.folder / f"{command}.out").open("a", encoding="utf-8") as said:
            return subprocess.Popen(words, stdout=said, stderr=said, text=True, env=environment)

    def wait_until_served(self, process: subprocess.Popen[str]) -> None:
        """Wait until a subscription to the captured changes can begin."""

        def is_served() -> bool:
            assert process.poll() is None, (self.folder / "shop.yaml", "its process has ended")
            try:
                return (
                    refused(self.port, tabel="x")[0] == 400 and refused(self.port, table="no.such")[0] == 404
                )
            except httpx2.TransportError:
                return False

        wait_until(is_served, 120, "the server")


class Returning(threading.Thread):
    """A client that reconnects whenever its connection is lost, with the last position that it received.

    :param last: the number after which it ends.
    """

    def __init__(self, port: int, *, by_socket: bool, last: int, **query: Any) -> None:
        super().__init__(daemon=True)
        self.numbers: list[int] = []
        self.connections = 0
        self.refused = ""
        self.failures: list[str] = []
        self._port, self._by_socket, self._last, self._query = port, by_socket, last, query
        self._place = "0"

    def run(self) -> None:
        while self.numbers[-1:] != [self._last]:
            try:
                (self._take_messages if self._by_socket else self._take_events)()
            # The server may also be killed during the connection attempt.
            except (httpx2.TransportError, ConnectionClosed, InvalidMessage, OSError):
                time.sleep(0.05)  # as `retry` asks of a browser
            except (AssertionError, InvalidStatus) as error:
                self.refused = f"from {self._place}: {error}"
                return

    def _take_events(self) -> None:
        with subscribed(self._port, last_event_id=self._place, **self._query) as stream:
            self.connections += 1
            for event in stream:
                if event.kind == "failure":
                    self.failures.append(event.data)
                    return
                self.numbers.append(event.document["after"]["id"])
                self._place = event.id
                if self.numbers[-1] == self._last:
                    return

    def _take_messages(self) -> None:
        with socket_to(self._port, from_=self._place, **self._query) as connection:
            self.connections += 1
            while self.numbers[-1:] != [self._last]:
                message = json.loads(connection.recv(timeout=60))
                if "error" in message:
                    self.failures.append(str(message))
                    return
                if "change" in message:
                    self.numbers.append(message["change"]["after"]["id"])
                self._place = message["from"]
