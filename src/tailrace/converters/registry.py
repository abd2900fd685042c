"""A schema registry's client: the calls of Confluent's REST API that a writer needs.

Why not the one that comes with confluent-kafka: that one wants httpx, authlib (with cryptography),
cachetools, attrs and fastavro, five packages and what they need, for what are a few requests over
HTTP; its serializers go record by record; and it raises what the registry said, not what to do about
it. This one is made of the standard library, so that Avro comes with Tailrace itself.

Ids are kept for as long as the client lives: an id of a registry never means another schema. Threads
share one client; each request has a connection of its own, since there is one for each new schema.

Source: Confluent Schema Registry API reference (paths, error codes 40401, 40403, 409, 42201).
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote

from tailrace.converters.differences import differences
from tailrace.converters.registry_request import Access, Reply, request
from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact

#: Waits between attempts, the last one again and again.
_WAITS_S = (0.1, 0.3, 1.0, 2.0)
#: Statuses that may pass.
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_SUBJECT_MISSING, _VERSION_MISSING, _SCHEMA_MISSING = 40401, 40402, 40403
#: Of HTTP itself: the registry does not know the path, or not for questions.
_NO_SUCH_QUESTION = frozenset({404, 405})
#: How many versions a schema is compared with one by one.
_VERSIONS_MAX = 100


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

    def require_reachable(self) -> None:
        """Ask for what concerns no subject, and whoever is let in may know.

        :raises TailraceError: `REGISTRY_REFUSED`, `REGISTRY_UNREACHABLE`; `SCHEMA_REFUSED` if this is no
            registry.
        """
        reply = self._call("GET", "/schemas/types", None)
        if reply.status != 200 or not isinstance(reply.document, list):
            raise _unexpected("its kinds of schemas", reply)

    def check(self, subject: str, schema: str, kind: str, *, register: bool, normalize: bool = False) -> None:
        """As `id_of`, but nothing is registered: only whether it could be, as far as that can be asked.

        :raises TailraceError: as `id_of`. Whether one may write the subject shows when it is written.
        """
        name, body, query = quote(subject, safe=""), _body(schema, kind), _query(normalize)
        found = self._call("POST", f"/subjects/{name}{query}", body)
        if found.status == 200:
            return
        if found.code not in (_SUBJECT_MISSING, _SCHEMA_MISSING):
            raise self._refusal(subject, schema, kind, found)
        if not register:
            raise _not_registered(subject, found)
        if found.code == _SUBJECT_MISSING:
            return  # the first schema is compatible
        told = self._compared(name, body, normalize)
        if told.status == 200 and told.member("is_compatible") is True:
            return
        if told.status == 200 and told.member("is_compatible") is False:
            raise self._incompatible(subject, schema, kind, told, told)
        if told.code not in (_SUBJECT_MISSING, _VERSION_MISSING):
            raise self._refusal(subject, schema, kind, told)

    def _compared(self, name: str, body: Mapping[str, str], normalize: bool = False) -> Reply:
        """Return what the registry says of a schema and those that the subject's level compares it with."""
        query = "?verbose=true" + ("&normalize=true" if normalize else "")
        told = self._call("POST", f"/compatibility/subjects/{name}/versions{query}", body)
        if told.code not in _NO_SUCH_QUESTION:
            return told
        # An older registry, or another maker's: one version at a question.
        for version in self._versions_compared(name, self._level(name)):
            told = self._call("POST", f"/compatibility/subjects/{name}/versions/{version}{query}", body)
            if told.member("is_compatible") is not True:
                break
        return told

    def _versions_compared(self, name: str, level: str) -> list[object]:
        """Return the versions that a new schema must be compatible with, newest first."""
        if not level.endswith("_TRANSITIVE"):
            return ["latest"]
        listed = self._look(f"/subjects/{name}/versions").document
        return listed[: -_VERSIONS_MAX - 1 : -1] if isinstance(listed, list) and listed else ["latest"]

    def _level(self, name: str) -> str:
        found = self._look(f"/config/{name}?defaultToGlobal=true").member("compatibilityLevel")
        return str(found or "unknown")

    def _ask(self, subject: str, schema: str, kind: str, register: bool, normalize: bool) -> int:
        path = f"/subjects/{quote(subject, safe='')}" + ("/versions" if register else "")
        reply = self._call("POST", path + _query(normalize), _body(schema, kind))
        found = reply.member("id")
        if reply.status == 200 and isinstance(found, int):
            return found
        raise self._refusal(subject, schema, kind, reply)

    def _refusal(self, subject: str, schema: str, kind: str, reply: Reply) -> TailraceError:
        if reply.code in (_SUBJECT_MISSING, _SCHEMA_MISSING):
            return _not_registered(subject, reply)
        if reply.status == 409:
            # It is asked what differs; but if it does not answer any more, that must not hide what it said.
            try:
                explained = self._compared(quote(subject, safe=""), _body(schema, kind))
            except TailraceError:
                explained = _NO_REPLY
            return self._incompatible(subject, schema, kind, reply, explained)
        if reply.status == 422:
            return _refused(subject, f"it is not valid to the registry: {reply.words}", _AS_BUG)
        return _unexpected(repr(subject), reply, subject=subject)

    def _incompatible(
        self, subject: str, schema: str, kind: str, refused: Reply, explained: Reply
    ) -> TailraceError:
        # What has changed is worked out here, from the newest schema that it does not go with.
        name = quote(subject, safe="")
        level = self._level(name)
        before = self._opponent(name, level, _body(schema, kind))
        version, old = before.member("version"), before.member("schema")
        changed = differences(str(old), schema, kind) if old else []
        messages = explained.member("messages")
        said = [redact(str(one))[:300] for one in messages[:5]] if isinstance(messages, list) else []
        found = "; ".join(changed[:10]) or "; ".join(said) or refused.words
        newest = f"version {version}" if version else "an earlier version"
        return TailraceError(
            Kind.SCHEMA_REFUSED,
            f"register a schema under {subject!r}: it is not compatible ({level}) with {newest}: {found}",
            f'let the change through (`PUT /config/{subject}` with {{"compatibility": "NONE"}}, or what '
            "readers can bear, and back afterwards), or undo it in the table, or write to other topics: "
            "topic_prefix, routes or another subject strategy. Nothing with this schema was written",
            {"subject": subject, "compatibility": level},
        )

    def _opponent(self, name: str, level: str, body: Mapping[str, str]) -> Reply:
        """Return the newest version that a schema is not compatible with, as far as that can be told."""
        deadline = self._clock() + self._access.deadline_s
        versions = self._versions_compared(name, level)
        for version in versions if len(versions) > 1 else ():
            told = self._look(f"/compatibility/subjects/{name}/versions/{version}", body)
            if told.member("is_compatible") is False:
                return self._look(f"/subjects/{name}/versions/{version}")
            if self._clock() > deadline:
                break
        return self._look(f"/subjects/{name}/versions/latest") if len(versions) == 1 else _NO_REPLY

    def _look(self, path: str, body: Mapping[str, str] | None = None) -> Reply:
        # What is asked only to explain: no answer is none.
        try:
            reply = self._call("GET" if body is None else "POST", path, body, attempts=1)
        except TailraceError:
            return _NO_REPLY
        return reply if reply.status == 200 else _NO_REPLY

    def _call(
        self, method: str, path: str, body: Mapping[str, str] | None, attempts: int | None = None
    ) -> Reply:
        deadline = self._clock() + self._access.deadline_s
        attempt, last = 0, ""
        while True:
            place = (self._first + attempt) % len(self._access.urls)
            url = self._access.urls[place]
            try:
                reply = request(self._access, url, method, path, body)
            except (OSError, http.client.HTTPException) as error:
                last = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
            else:
                if reply.status not in _PASSING:
                    self._first = place
                    return reply
                last = f"status {reply.status} {reply.words}".rstrip()
            attempt += 1
            wait_s = _WAITS_S[min(attempt, len(_WAITS_S)) - 1]
            if attempt == attempts or self._clock() + wait_s > deadline:
                raise _unreachable(url, attempt, last)
            self._sleep(wait_s)


_NO_REPLY = Reply(0, None)


def _body(schema: str, kind: str) -> dict[str, str]:
    return {"schema": schema, **({} if kind == "AVRO" else {"schemaType": kind})}


def _query(normalize: bool) -> str:
    return "?normalize=true" if normalize else ""


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


def _unexpected(about: str, reply: Reply, **context: str) -> TailraceError:
    return TailraceError(
        Kind.SCHEMA_REFUSED,
        f"ask the registry about {about}: it answered {reply.code} {reply.words}".rstrip(),
        "see whether registry_url is that of a schema registry, and what its own log says",
        context,
    )


def _unreachable(url: str, attempts: int, last: str) -> TailraceError:
    return TailraceError(
        Kind.REGISTRY_UNREACHABLE,
        f"ask the schema registry: no answer after {attempts} attempts, the last: {last}",
        "see whether it runs and can be reached from here, and whether registry_url is rightly http or "
        "https; changes wait in the log meanwhile",
        {"registry": url},
    )
