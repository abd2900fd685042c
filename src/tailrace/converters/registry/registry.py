"""A schema registry, as a writer needs it: ids of schemas, and what is said when one is refused.

The conversation is that of confluent-kafka's client. What is ours is around it: attempts until a deadline,
which the client's own know nothing of, at one address after another; and what to do about a refusal.

Source: Confluent Schema Registry API reference (error codes 40401, 40402, 40403, 40408, 409, 42201).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from tailrace.converters.registry.clients import Access, PassingError, RefusedError, RegistryClients
from tailrace.converters.registry.differences import differences
from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient

T = TypeVar("T")
_Version = int | Literal["latest"]

#: Waits between attempts, the last one again and again.
_WAITS_S = (0.1, 0.3, 1.0, 2.0)
_SUBJECT_MISSING, _VERSION_MISSING, _SCHEMA_MISSING, _LEVEL_MISSING = 40401, 40402, 40403, 40408
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
        self._clients = RegistryClients(access)
        self._clock = clock
        self._sleep = sleep
        # The client's own go by the text that a registry gives back, which may be another form of it.
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
        try:
            self._asked(lambda client: _of(list, client.get_schema_types()))
        except RefusedError as refused:
            raise _unexpected("its kinds of schemas", refused) from None

    def check(self, subject: str, schema: str, kind: str, *, register: bool, normalize: bool = False) -> None:
        """As `id_of`, but nothing is registered: only whether it could be, as far as that can be asked.

        :raises TailraceError: as `id_of`. Whether one may write the subject shows when it is written.
        """
        offered = _schema(schema, kind)
        try:
            self._asked(_lookup(subject, offered, normalize))
        except RefusedError as refused:
            if refused.code not in (_SUBJECT_MISSING, _SCHEMA_MISSING):
                raise self._refusal(subject, offered, refused) from None
            if not register:
                raise _not_registered(subject, refused) from None
            if refused.code == _SUBJECT_MISSING:
                return  # the first schema is compatible
        else:
            return
        try:
            is_compatible = self._is_compatible(subject, offered, normalize)
        except RefusedError as refused:
            if refused.code not in (_SUBJECT_MISSING, _VERSION_MISSING):
                raise self._refusal(subject, offered, refused) from None
            return
        if not is_compatible:
            raise self._incompatible(subject, offered, "the registry does not say what differs")

    def close(self) -> None:
        """Let go of connections; another question makes new ones."""
        self._clients.close()

    def _is_compatible(self, subject: str, schema: Schema, normalize: bool) -> bool:
        # With those versions that the subject's level is about.
        try:
            return self._asked(
                lambda client: _of(bool, client.test_compatibility_all_versions(subject, schema, normalize))
            )
        except RefusedError as refused:
            if refused.code not in _NO_SUCH_QUESTION:
                raise
        # An older registry, or another maker's: one version at a question.
        for version in self._versions_compared(subject, self._level(subject)):
            if not self._asked(_comparison(subject, schema, version, normalize)):
                return False
        return True

    def _versions_compared(self, subject: str, level: str) -> list[_Version]:
        """Return the versions that a new schema must be compatible with, newest first."""
        if not level.endswith("_TRANSITIVE"):
            return ["latest"]
        listed = self._look(lambda client: _of(list, client.get_versions(subject)))
        return list(listed[: -_VERSIONS_MAX - 1 : -1]) if listed else ["latest"]

    def _level(self, subject: str) -> str:
        try:
            found = self._asked(lambda client: client.get_compatibility(subject), attempts=1)
        except RefusedError as refused:
            if refused.code not in (_LEVEL_MISSING, 404):
                return "unknown"
            found = self._look(lambda client: client.get_compatibility()) or "unknown"
        except TailraceError:
            return "unknown"
        return str(found)

    def _ask(self, subject: str, schema: str, kind: str, register: bool, normalize: bool) -> int:
        offered = _schema(schema, kind)
        question = _registration if register else _lookup
        try:
            return self._asked(question(subject, offered, normalize))
        except RefusedError as refused:
            raise self._refusal(subject, offered, refused) from None

    def _refusal(self, subject: str, schema: Schema, refused: RefusedError) -> TailraceError:
        if refused.code in (_SUBJECT_MISSING, _SCHEMA_MISSING):
            return _not_registered(subject, refused)
        if refused.status == 409:
            return self._incompatible(subject, schema, refused.words)
        if refused.status == 422:
            return _refused(subject, f"it is not valid to the registry: {refused.words}", _AS_BUG)
        return _unexpected(repr(subject), refused, subject=subject)

    def _incompatible(self, subject: str, schema: Schema, words: str) -> TailraceError:
        # What has changed is worked out here, from the newest schema that it does not go with.
        level = self._level(subject)
        before = self._opponent(subject, level, schema)
        changed: list[str] = []
        if before is not None:
            changed = differences(
                str(before.schema.schema_str), str(schema.schema_str), str(schema.schema_type)
            )
        newest = "an earlier version" if before is None else f"version {before.version}"
        return TailraceError(
            Kind.SCHEMA_REFUSED,
            f"register a schema under {subject!r}: it is not compatible ({level}) with {newest}: "
            f"{'; '.join(changed[:10]) or words}",
            f'let the change through (`PUT /config/{subject}` with {{"compatibility": "NONE"}}, or what '
            "readers can bear, and back afterwards), or undo it in the table, or write to other topics: "
            "topic_prefix, routes or another subject strategy. Nothing with this schema was written",
            {"subject": subject, "compatibility": level},
        )

    def _opponent(self, subject: str, level: str, schema: Schema) -> RegisteredSchema | None:
        """Return the newest version that a schema is not compatible with, as far as that can be told."""
        deadline = self._clock() + self._access.deadline_s
        versions = self._versions_compared(subject, level)
        if len(versions) == 1:
            return self._look(lambda client: client.get_version(subject))
        for version in versions:
            if self._look(_comparison(subject, schema, version)) is False:
                return self._look(_version(subject, version))
            if self._clock() > deadline:
                break
        return None

    def _look(self, question: Callable[[SchemaRegistryClient], T]) -> T | None:
        # What is asked only to explain: no answer is none.
        try:
            return self._asked(question, attempts=1)
        except (RefusedError, TailraceError):
            return None

    def _asked(self, question: Callable[[SchemaRegistryClient], T], attempts: int | None = None) -> T:
        deadline = self._clock() + self._access.deadline_s
        attempt = 0
        while True:
            place = (self._first + attempt) % len(self._access.urls)
            url = self._access.urls[place]
            try:
                found = self._clients.ask(url, question)
            except RefusedError:
                self._first = place
                raise
            except PassingError as failure:
                last = str(failure)
            else:
                self._first = place
                return found
            attempt += 1
            wait_s = _WAITS_S[min(attempt, len(_WAITS_S)) - 1]
            if attempt == attempts or self._clock() + wait_s > deadline:
                raise _unreachable(url, attempt, last)
            self._sleep(wait_s)


def _schema(text: str, kind: str) -> Schema:
    from confluent_kafka.schema_registry import Schema

    return Schema(text, kind)


def _of(kind: type[T], answer: object) -> T:
    # The client gives what it got: of somebody else it may be anything.
    if not isinstance(answer, kind):
        raise TypeError
    return answer


def _registration(subject: str, schema: Schema, normalize: bool) -> Callable[[SchemaRegistryClient], int]:
    return lambda client: _of(int, client.register_schema(subject, schema, normalize))


def _lookup(subject: str, schema: Schema, normalize: bool) -> Callable[[SchemaRegistryClient], int]:
    return lambda client: _of(int, client.lookup_schema(subject, schema, normalize).schema_id)


def _comparison(
    subject: str, schema: Schema, version: _Version, normalize: bool = False
) -> Callable[[SchemaRegistryClient], bool]:
    return lambda client: _of(bool, client.test_compatibility(subject, schema, version, normalize))


def _version(subject: str, version: _Version) -> Callable[[SchemaRegistryClient], RegisteredSchema]:
    return lambda client: client.get_version(subject, version)


_AS_BUG = "please report it with the table's definition, or exclude the table"


def _refused(subject: str, found: str, hint: str) -> TailraceError:
    return TailraceError(
        Kind.SCHEMA_REFUSED, f"register a schema under {subject!r}: {found}", hint, {"subject": subject}
    )


def _not_registered(subject: str, refused: RefusedError) -> TailraceError:
    missing = (
        "the subject does not exist" if refused.code == _SUBJECT_MISSING else "this schema is none of its"
    )
    return TailraceError(
        Kind.SCHEMA_REFUSED,
        f"look for a schema under {subject!r}: {missing}",
        "register it first, or let it be registered: auto_register_schemas: true",
        {"subject": subject},
    )


def _unexpected(about: str, refused: RefusedError, **context: str) -> TailraceError:
    return TailraceError(
        Kind.SCHEMA_REFUSED,
        f"ask the registry about {about}: it answered {refused.code} {refused.words}".rstrip(),
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
