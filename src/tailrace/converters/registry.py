"""A schema registry's client: the calls of Confluent's REST API that a writer needs.

Why not the one that comes with confluent-kafka: that one wants httpx, authlib (with cryptography),
cachetools, attrs and fastavro, five packages and what they need, for what are four requests over
HTTP; its serializers go record by record; and it raises what the registry said, not what to do about
it. This one is made of the standard library, so that Avro comes with Tailrace itself.

Ids are kept for as long as the client lives: an id of a registry never means another schema. Threads
share one client; each request has a connection of its own, since there is one for each new schema.

Source: Confluent Schema Registry API reference (paths, error codes 40401, 40403, 409, 42201).
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from tailrace.converters.differences import differences
from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact

_CONTENT = "application/vnd.schemaregistry.v1+json"
#: Waits between attempts, the last one again and again.
_WAITS_S = (0.1, 0.3, 1.0, 2.0)
#: A reply that is longer is none of a registry.
_REPLY_BYTES_MAX = 16 << 20
#: Statuses that may pass.
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_SUBJECT_MISSING, _SCHEMA_MISSING = 40401, 40403


@dataclass(frozen=True, slots=True)
class Access:
    """Where registries are, and how one is let in. It holds resolved secrets, and shows none.

    :param urls: of one registry or of several that serve the same; the next is asked where one fails.
    :param timeout_s: longest that one request may take.
    :param deadline_s: longest that a question may take with all its attempts.
    """

    urls: tuple[str, ...]
    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = field(default="", repr=False)
    timeout_s: float = 10.0
    deadline_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What a registry answered, if it is not 200: its own code and words."""

    status: int
    document: Any

    @property
    def code(self) -> int:
        """The registry's error code, or the status."""
        found = self.document.get("error_code") if isinstance(self.document, dict) else None
        return found if isinstance(found, int) else self.status

    @property
    def words(self) -> str:
        """What it said, shortened, without what this process knows to be a secret."""
        found = self.document.get("message", "") if isinstance(self.document, dict) else ""
        return redact(str(found))[:2000]


class Registry:
    """A registry.

    :param clock: seconds, rising; and `sleep` waits for as many.
    """

    def __init__(
        self,
        access: Access,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._access = access
        self._clock = clock
        self._sleep = sleep
        self._ids: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self._first = 0  # the registry that answered last

    def id_of(self, subject: str, schema: str, kind: str, *, register: bool, normalize: bool = False) -> int:
        """Return the id of a schema under a subject, which is asked for once. Any thread.

        :param schema: its text.
        :param kind: `AVRO` or `JSON`.
        :param register: whether it is registered if it is not there yet.
        :param normalize: whether the registry compares schemas in a normal form.
        :raises TailraceError: `SCHEMA_REFUSED` if it is not compatible, not valid or not there;
            `REGISTRY_REFUSED`, `REGISTRY_UNREACHABLE`.
        """
        known = self._ids.get((subject, schema))
        if known is not None:
            return known
        with self._lock:  # one question, whoever else waits for the same
            if (subject, schema) not in self._ids:
                self._ids[subject, schema] = self._ask(subject, schema, kind, register, normalize)
            return self._ids[subject, schema]

    def _ask(self, subject: str, schema: str, kind: str, register: bool, normalize: bool) -> int:
        path = f"/subjects/{quote(subject, safe='')}" + ("/versions" if register else "")
        query = "?normalize=true" if normalize else ""
        body = {"schema": schema, **({} if kind == "AVRO" else {"schemaType": kind})}
        reply = self._call("POST", path + query, body)
        if reply.status == 200 and isinstance(reply.document, dict) and isinstance(reply.document["id"], int):
            return int(reply.document["id"])
        if reply.code in (_SUBJECT_MISSING, _SCHEMA_MISSING):
            raise _not_registered(subject, reply)
        if reply.status == 409:
            raise self._incompatible(subject, schema, kind, body, reply)
        if reply.status == 422:
            raise _refused(subject, f"it is not valid to the registry: {reply.words}", _AS_BUG)
        raise _unexpected(subject, reply)

    def _incompatible(
        self, subject: str, schema: str, kind: str, body: Mapping[str, str], reply: Reply
    ) -> TailraceError:
        # What has changed is worked out here, and asked for where the registry tells more; a registry
        # that does not answer any more must not hide what it said before.
        name = quote(subject, safe="")
        level = _member(self._look(f"/config/{name}?defaultToGlobal=true"), "compatibilityLevel") or "unknown"
        before = self._look(f"/subjects/{name}/versions/latest")
        version, old = _member(before, "version"), _member(before, "schema")
        told = self._look(f"/compatibility/subjects/{name}/versions/latest?verbose=true", body)
        changed = differences(str(old), schema, kind) if old else []
        messages = _member(told, "messages")
        said = [redact(str(one))[:300] for one in messages[:5]] if isinstance(messages, list) else []
        found = "; ".join(changed[:10]) or "; ".join(said) or reply.words
        newest = f"version {version}" if version else "an earlier version"
        return TailraceError(
            Kind.SCHEMA_REFUSED,
            f"register a schema under {subject!r}: it is not compatible ({level}) with {newest}: {found}",
            f'let the change through (`PUT /config/{subject}` with {{"compatibility": "NONE"}}, or what '
            "readers can bear, and back afterwards), or undo it in the table, or write to other topics: "
            "topic_prefix, routes or another subject strategy. Nothing of the batch was written",
            {"subject": subject, "compatibility": str(level)},
        )

    def _look(self, path: str, body: Mapping[str, str] | None = None) -> Any:
        try:
            reply = self._call("GET" if body is None else "POST", path, body, attempts=1)
        except TailraceError:
            return None
        return reply.document if reply.status == 200 else None

    def _call(
        self, method: str, path: str, body: Mapping[str, str] | None, attempts: int | None = None
    ) -> Reply:
        deadline = self._clock() + self._access.deadline_s
        attempt, last = 0, ""
        while True:
            place = (self._first + attempt) % len(self._access.urls)
            url = self._access.urls[place]
            try:
                reply = _request(self._access, url, method, path, body)
            except (OSError, http.client.HTTPException) as error:
                last = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
            else:
                if reply.status in (401, 403):
                    raise _denied(url, reply)
                if reply.status not in _PASSING:
                    self._first = place
                    return reply
                last = f"status {reply.status} {reply.words}".rstrip()
            attempt += 1
            wait_s = _WAITS_S[min(attempt, len(_WAITS_S)) - 1]
            if attempt == attempts or self._clock() + wait_s > deadline:
                raise _unreachable(url, attempt, last)
            self._sleep(wait_s)


def _request(access: Access, url: str, method: str, path: str, body: Mapping[str, str] | None) -> Reply:
    parts = urlsplit(url)
    headers = {"Accept": _CONTENT, "Content-Type": _CONTENT, "User-Agent": "tailrace"}
    if access.token:
        headers["Authorization"] = f"Bearer {access.token}"
    elif access.username:
        both = f"{access.username}:{access.password}".encode()
        headers["Authorization"] = f"Basic {b64encode(both).decode()}"
    host, port = parts.hostname or "", parts.port
    connection = (
        http.client.HTTPSConnection(host, port, timeout=access.timeout_s, context=_tls(access))
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=access.timeout_s)
    )
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, parts.path.rstrip("/") + path, data, headers)
        response = connection.getresponse()
        content = response.read(_REPLY_BYTES_MAX)
    finally:
        connection.close()
    try:
        return Reply(response.status, json.loads(content))
    except ValueError:
        # A proxy's page, or a place that is no registry.
        return Reply(response.status if response.status != 200 else 502, None)


def _tls(access: Access) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=access.ca_file or None)
    if access.certificate_file:
        context.load_cert_chain(access.certificate_file, access.key_file or None)
    return context


def _member(document: Any, name: str) -> Any:
    return document.get(name) if isinstance(document, dict) else None


_AS_BUG = "please report it with the table's definition, or exclude the table"


def _refused(subject: str, found: str, hint: str) -> TailraceError:
    return TailraceError(
        Kind.SCHEMA_REFUSED, f"register a schema under {subject!r}: {found}", hint, {"subject": subject}
    )


def _not_registered(subject: str, reply: Reply) -> TailraceError:
    missing = "the subject does not exist" if reply.code == _SUBJECT_MISSING else "this schema is none of its"
    return TailraceError(
        Kind.SCHEMA_REFUSED,
        f"look for a schema under {subject!r}: {missing}",
        "register it first, or let it be registered: auto_register_schemas: true",
        {"subject": subject},
    )


def _unexpected(subject: str, reply: Reply) -> TailraceError:
    return TailraceError(
        Kind.SCHEMA_REFUSED,
        f"ask the registry about {subject!r}: it answered {reply.code} {reply.words}".rstrip(),
        "see whether registry_url is that of a schema registry, and what its own log says",
        {"subject": subject},
    )


def _denied(url: str, reply: Reply) -> TailraceError:
    hint = (
        "check registry_username and registry_password, or registry_token"
        if reply.status == 401
        else "the user needs to read and write the subject (and, to explain refusals, its configuration)"
    )
    return TailraceError(
        Kind.REGISTRY_REFUSED,
        f"ask the schema registry: it answered {reply.status} {reply.words}".rstrip(),
        hint,
        {"registry": url},
    )


def _unreachable(url: str, attempts: int, last: str) -> TailraceError:
    return TailraceError(
        Kind.REGISTRY_UNREACHABLE,
        f"ask the schema registry: no answer after {attempts} attempts, the last: {last}",
        "see whether it runs and can be reached from here; changes wait in the log meanwhile",
        {"registry": url},
    )
