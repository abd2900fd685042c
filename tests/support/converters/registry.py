"""A fake schema registry over real HTTP: the part of Confluent's API that writers use.

The real one is a JVM program that the tests do not have. This one imitates its wire protocol: subjects,
versions, ids that equal schemas share, compatibility (a field that the reader alone has needs a default, in
JSON Schema there may be none, and it keeps its type), error codes, and failures on demand.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit


@dataclass
class Fault:
    """What the next requests get: a status, some seconds of silence, a closed connection, or another page."""

    status: int = 0
    silent_s: float = 0.0
    times: int = 1
    is_cut: bool = False
    page: bytes = b""
    code: int = 0  # in the answer; 0: the status


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that refuse the certificate disconnect."""


@dataclass
class FakeRegistry:
    """Starts when entered; `url` is its address."""

    username: str = ""
    password: str = ""
    token: str = ""
    keystore: Path | None = None  # key and certificate: it speaks TLS
    clients: Path | None = None  # the authority that must have signed clients' certificates
    level: str = "BACKWARD"
    levels: dict[str, str] = field(default_factory=dict)  # by subject, where it differs from `level`
    idle_s: float | None = None  # closes connections that were idle for so long
    tells_all: bool = True  # answers a registration with the schema, as it is kept, besides the id
    compares_all: bool = True  # knows the path for all versions of the level; older ones do not
    subjects: dict[str, list[int]] = field(default_factory=dict)
    schemas: list[tuple[str, str]] = field(default_factory=list)  # (kind, text); the id is the index + 1
    requests: Counter[str] = field(default_factory=Counter)
    queries: list[str] = field(default_factory=list)  # requests with a query: method, path and query
    headers: list[dict[str, str]] = field(default_factory=list)  # of the last request, names in lower case
    connected: int = 0
    open: int = 0  # open connections
    faults: list[Fault] = field(default_factory=list)

    def __enter__(self) -> Self:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # keep connections open
            timeout = registry.idle_s
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with registry._lock:
                    registry.connected += 1
                    registry.open += 1

            def finish(self) -> None:
                with registry._lock:
                    registry.open -= 1
                super().finish()

            def log_message(self, *args: Any) -> None:
                """Print nothing."""

            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def do_PUT(self) -> None:
                self._answer("PUT")

            def _answer(self, method: str) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"null")
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, document = registry.reply(method, self.path, body, headers)
                if not status:
                    self.close_connection = True
                    return
                content = document if isinstance(document, bytes) else json.dumps(document).encode()
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
            # Not in `accept`: a client that does not do its part of the handshake must not block the others.
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

    def reply(self, method: str, target: str, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
        """Return status and document for a request; status 0: the connection is closed without an answer."""
        path = [unquote(part) for part in urlsplit(target).path.split("/")[1:]]
        query = dict(parse_qsl(urlsplit(target).query))
        with self._lock:
            self.requests[f"{method} /{path[0]}"] += 1
            self.headers.append(headers)
            if query:
                self.queries.append(f"{method} {target}")
            fault = self._fault()
        if fault is not None:
            time.sleep(fault.silent_s)
            if fault.is_cut:
                return 0, None
            if fault.page:
                return fault.status or 200, fault.page
            if fault.status:
                return fault.status, {"error_code": fault.code or fault.status, "message": "on demand"}
        authorization = headers.get("authorization")
        if authorization != self._expected():
            # As careless registries do: the message repeats the credentials.
            return 401, {"error_code": 401, "message": f"Unauthorized: {authorization}"}
        with self._lock:
            return self._route(method, path, body, query.get("normalize", "").lower() == "true")

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

    def _route(self, method: str, path: list[str], body: Any, normalize: bool) -> tuple[int, Any]:
        match method, path:
            case "POST", ["subjects", subject, "versions"]:
                return self._register(subject, body, normalize)
            case "POST", ["subjects", subject]:
                return self._find(subject, body, normalize)
            case "GET", ["schemas", "ids", number] if 0 < int(number) <= len(self.schemas):
                kind, text = self.schemas[int(number) - 1]
                return 200, {"schema": text, "schemaType": kind}
            case "GET", ["schemas", "ids", _]:
                return 404, {"error_code": 40403, "message": "Schema not found"}
            case "GET", ["schemas", "types"]:
                return 200, ["JSON", "AVRO"]
            case "PUT", ["config", subject] if subject in self.subjects:
                self.levels[subject] = body["compatibility"]
                return 200, body
            case "POST", ["compatibility", "subjects", subject, *_] if subject not in self.subjects:
                return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
            case "POST", ["compatibility", "subjects", subject, "versions"] if self.compares_all:
                return 200, {"is_compatible": not self._conflicts(subject, body["schema"])}
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _registered(self, subject: str, number: int) -> dict[str, Any]:
        kind, text = self.schemas[number - 1]
        version = self.subjects[subject].index(number) + 1
        said = {} if kind == "AVRO" else {"schemaType": kind}
        return {"subject": subject, "version": version, "id": number, **said, "schema": text}

    def _register(self, subject: str, body: Any, normalize: bool) -> tuple[int, Any]:
        kind, text = body.get("schemaType", "AVRO"), body["schema"]
        if kind == "AVRO" and not _is_avro(text):
            return 422, {"error_code": 42201, "message": "Invalid schema"}
        known = self._number(self.subjects.get(subject, []), kind, text, normalize)
        if not known:
            if conflicts := self._conflicts(subject, text):
                words = f"Schema being registered is incompatible with an earlier schema; {conflicts}"
                return 409, {"error_code": 409, "message": words}
            known = self._number(range(1, len(self.schemas) + 1), kind, text, normalize)
        if not known:
            self.schemas.append((kind, _normal(text) if normalize else text))
            known = len(self.schemas)
        if known not in self.subjects.setdefault(subject, []):
            self.subjects[subject].append(known)
        if not self.tells_all:
            return 200, {"id": known}
        return 200, {**self._registered(subject, known), "schema": _normal(text)}

    def _find(self, subject: str, body: Any, normalize: bool) -> tuple[int, Any]:
        if subject not in self.subjects:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        kind, text = body.get("schemaType", "AVRO"), body["schema"]
        if known := self._number(self.subjects[subject], kind, text, normalize):
            return 200, self._registered(subject, known)
        return 404, {"error_code": 40403, "message": "Schema not found"}

    def _number(self, among: Iterable[int], kind: str, text: str, normalize: bool) -> int:
        same = _normal if normalize else str
        wanted = (kind, same(text))
        for number in among:
            its, schema = self.schemas[number - 1]
            if (its, same(schema)) == wanted:
                return number
        return 0

    def _conflicts(self, subject: str, text: str) -> list[str]:
        level = self.levels.get(subject, self.level)
        if level == "NONE" or not self.subjects.get(subject):
            return []
        compared = self.subjects[subject][0 if level.endswith("_TRANSITIVE") else -1 :]
        pairs = [(self.schema(number), json.loads(text)) for number in compared]
        found = [_unreadable(was, now) for was, now in pairs if not level.startswith("FORWARD")]
        found += [_unreadable(now, was) for was, now in pairs if level.startswith(("FORWARD", "FULL"))]
        return [each for one in found for each in one]


def _unreadable(writer: Any, reader: Any) -> list[str]:
    """Return why a reader of one schema can't read what was written with the other."""
    is_json = "$schema" in reader
    lacks = "PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL" if is_json else "READER_FIELD_MISSING_DEFAULT_VALUE"
    was, now = _fields(writer), _fields(reader)
    lacking = [name for name in now if name not in was and "default" not in now[name]]
    other = [name for name in now if name in was and _kind(now[name]) != _kind(was[name])]
    return [*(f"{lacks}: {name}" for name in lacking), *(f"TYPE_MISMATCH: {name}" for name in other)]


def _normal(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True)


def _is_avro(text: str) -> bool:
    import fastavro

    try:
        fastavro.parse_schema(json.loads(text))
    except (ValueError, TypeError, KeyError, fastavro.schema.SchemaParseException):
        return False
    return True


def _fields(schema: Any) -> dict[str, Any]:
    # Fields of all records, by record and name; likewise properties of JSON Schema.
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
                found[name] = {"type": _without_members(one)}
            stack += [value for value in part.values() if isinstance(value, dict | list)]
    return found


def _without_members(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_members(one) for one in part]
    if not isinstance(part, dict):
        return part
    own = part.keys() - {"properties", "required", "connect.index"}
    return {name: _without_members(part[name]) for name in own}


def _kind(field: Any) -> str:
    kind = field["type"]
    if isinstance(kind, dict) and kind.get("type") == "record":
        return "record"
    return json.dumps([one if isinstance(one, str) else _kind({"type": one["type"]}) for one in kind]
                      if isinstance(kind, list) else kind, sort_keys=True)  # fmt: skip
