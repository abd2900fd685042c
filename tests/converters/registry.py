"""A schema registry over real HTTP, for tests: the part of Confluent's API that writers use.

The real one is a JVM program whose jars are not among ours. What is imitated here is its wire protocol:
subjects, versions, ids that are shared by equal schemas, compatibility (by fields: a field may go if it
has a default, and come if it has one, and keeps its type), error codes, and its failures on demand.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit


@dataclass
class Fault:
    """What the next requests meet: a status, or silence for some seconds."""

    status: int = 0
    silent_s: float = 0.0
    times: int = 1


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: those who refuse its certificate go away."""


@dataclass
class FakeRegistry:
    """Starts when entered; `url` is its address."""

    username: str = ""
    password: str = ""
    token: str = ""
    keystore: Path | None = None  # key and certificate: then it speaks TLS
    clients: Path | None = None  # who must have signed clients' certificates
    level: str = "BACKWARD"
    compares_all: bool = True  # at one question, as its level says; older ones compare with one version
    subjects: dict[str, list[int]] = field(default_factory=dict)
    schemas: list[tuple[str, str]] = field(default_factory=list)  # (kind, text); the id is the place + 1
    requests: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)

    def __enter__(self) -> Self:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def _answer(self, method: str) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"null")
                status, document = registry.reply(method, self.path, body, self.headers.get("Authorization"))
                content = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = _Server(("127.0.0.1", 0), Handler)
        if self.keystore is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.keystore)
            if self.clients is not None:
                context.load_verify_locations(self.clients)
                context.verify_mode = ssl.CERT_REQUIRED
            # Not while it accepts: who does not shake hands must not hold others up.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._lock = threading.Lock()
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        scheme = "http" if self.keystore is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.server_address[1]}"

    def schema(self, number: int) -> Any:
        """Return the schema with this id, parsed."""
        return json.loads(self.schemas[number - 1][1])

    def reply(self, method: str, target: str, body: Any, authorization: str | None) -> tuple[int, Any]:
        """Return status and document of a request."""
        path = [unquote(part) for part in urlsplit(target).path.split("/")[1:]]
        with self._lock:
            self.requests[f"{method} /{path[0]}"] += 1
            fault = self._fault()
        if fault is not None:
            time.sleep(fault.silent_s)
            if fault.status:
                return fault.status, {"error_code": fault.status, "message": "on demand"}
        if authorization != self._expected():
            # As careless ones do: it tells what it was told.
            return 401, {"error_code": 401, "message": f"Unauthorized: {authorization}"}
        with self._lock:
            return self._route(method, path, body)

    def _expected(self) -> str | None:
        if self.token:
            return f"Bearer {self.token}"
        both = b64encode(f"{self.username}:{self.password}".encode()).decode()
        return f"Basic {both}" if self.username else None

    def _fault(self) -> Fault | None:
        if not self.faults:
            return None
        fault = self.faults[0]
        fault.times -= 1
        if fault.times <= 0:
            self.faults.pop(0)
        return fault

    def _route(self, method: str, path: list[str], body: Any) -> tuple[int, Any]:
        match method, path:
            case "POST", ["subjects", subject, "versions"]:
                return self._register(subject, body)
            case "POST", ["subjects", subject]:
                return self._find(subject, body)
            case "GET", ["subjects", subject, "versions", "latest"] if subject in self.subjects:
                versions = self.subjects[subject]
                return 200, {"version": len(versions), "schema": self.schemas[versions[-1] - 1][1]}
            case "GET", ["subjects", subject, "versions"] if subject in self.subjects:
                return 200, list(range(1, len(self.subjects[subject]) + 1))
            case "GET", ["subjects", subject, "versions", version] if subject in self.subjects:
                number = self.subjects[subject][int(version) - 1]
                return 200, {"version": int(version), "schema": self.schemas[number - 1][1]}
            case "GET", ["schemas", "types"]:
                return 200, ["JSON", "AVRO"]
            case "POST", ["compatibility", "subjects", subject, *_] if subject not in self.subjects:
                return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
            case "GET", ["config", _]:
                return 200, {"compatibilityLevel": self.level}
            case "POST", ["compatibility", "subjects", subject, "versions"] if self.compares_all:
                found = self._conflicts(subject, body["schema"])
                return 200, {"is_compatible": not found, "messages": found}
            case "POST", ["compatibility", "subjects", subject, "versions", version]:
                last = len(self.subjects[subject]) if version == "latest" else int(version)
                found = self._conflicts_with(self.subjects[subject][last - 1], body["schema"])
                return 200, {"is_compatible": not found, "messages": found}
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _register(self, subject: str, body: Any) -> tuple[int, Any]:
        kind, text = body.get("schemaType", "AVRO"), body["schema"]
        if kind == "AVRO" and not _is_avro(text):
            return 422, {"error_code": 42201, "message": "Invalid schema"}
        versions = self.subjects.get(subject, [])
        known = self.schemas.index((kind, text)) + 1 if (kind, text) in self.schemas else 0
        if known in versions:
            return 200, {"id": known}
        if conflicts := self._conflicts(subject, text):
            words = f"Schema being registered is incompatible with an earlier schema; {conflicts}"
            return 409, {"error_code": 409, "message": words}
        if not known:
            self.schemas.append((kind, text))
            known = len(self.schemas)
        self.subjects.setdefault(subject, []).append(known)
        return 200, {"id": known}

    def _find(self, subject: str, body: Any) -> tuple[int, Any]:
        if subject not in self.subjects:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        for number in self.subjects[subject]:
            if self.schemas[number - 1][1] == body["schema"]:
                return 200, {"subject": subject, "id": number, "schema": body["schema"]}
        return 404, {"error_code": 40403, "message": "Schema not found"}

    def _conflicts(self, subject: str, text: str) -> list[str]:
        if self.level == "NONE" or not self.subjects.get(subject):
            return []
        compared = self.subjects[subject][0 if self.level.endswith("_TRANSITIVE") else -1 :]
        return [found for number in compared for found in self._conflicts_with(number, text)]

    def _conflicts_with(self, number: int, text: str) -> list[str]:
        was, now = _fields(self.schema(number)), _fields(json.loads(text))
        lacking = [name for name in now if name not in was and "default" not in now[name]]
        other = [name for name in now if name in was and _kind(now[name]) != _kind(was[name])]
        return [f"READER_FIELD_MISSING_DEFAULT_VALUE: {name}" for name in lacking] + [
            f"TYPE_MISMATCH: {name}" for name in other
        ]


def _is_avro(text: str) -> bool:
    import fastavro

    try:
        fastavro.parse_schema(json.loads(text))
    except (ValueError, TypeError, KeyError, fastavro.schema.SchemaParseException):
        return False
    return True


def _fields(schema: Any) -> dict[str, Any]:
    # Fields of all records, by record and name; properties of JSON Schema likewise.
    found: dict[str, Any] = {}
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            for one in part.get("fields", []):
                found[f"{part['name']}.{one['name']}"] = one
            for name, one in part.get("properties", {}).items():
                found[name] = {"type": one, "default": None}
            stack += [value for value in part.values() if isinstance(value, dict | list)]
    return found


def _kind(field: Any) -> str:
    kind = field["type"]
    if isinstance(kind, dict) and kind.get("type") == "record":
        return "record"
    return json.dumps([one if isinstance(one, str) else _kind({"type": one["type"]}) for one in kind]
                      if isinstance(kind, list) else kind, sort_keys=True)  # fmt: skip
