"""A client of the schema registry: ids of schemas, and errors with hints.

confluent-kafka's client sends requests, retries, tries the next address, authenticates and caches answers.
This module makes its settings, and translates its errors: they contain no secret, and no page of a proxy. The
client's package is imported with the first registry: that takes a third of a second.

Source: Confluent Schema Registry API reference (error codes 40401, 40402, 40403, 409, 42201, 42205).
"""

from __future__ import annotations

import os
import ssl
import weakref
from base64 import b64encode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.config.converters import RegistryAddress, RegistryOptions
from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact, remember, resolved

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError

T = TypeVar("T")

#: Retries after the first attempt at each address. Waits are random, up to RETRY_WAIT_MS, then twice that.
RETRIES_MAX = 2
RETRY_WAIT_MS = 500

_SUBJECT_MISSING, _VERSION_MISSING, _SCHEMA_MISSING = 40401, 40402, 40403
_READ_ONLY = 42205
_STATUSES_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
#: TLS errors that are not refusals: the connection was cut.
_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


class Registry:
    """A schema registry; its connections stay open until `close`, or until the object is garbage-collected.

    :raises TailraceError: `SECRET_MISSING`; `CONFIG_INVALID` for a file, token or proxy that can't be used.
    """

    def __init__(self, options: RegistryAddress) -> None:
        self._options = options
        self._registers = isinstance(options, RegistryOptions) and options.auto_register_schemas
        self._connect(_credentials(options))

    def _connect(self, credentials: dict[str, str]) -> None:
        self._credentials = credentials
        self._client = _client(self._options, credentials)
        # On Spark's executors nothing calls `close` of the unpickled converter.
        self.close = weakref.finalize(self, self._client.close)

    def id_of(self, subject: str, text: str, kind: str) -> int:
        """Return the id of a schema under a subject, and register it first if the options say so.

        :param text: of the schema.
        :param kind: `AVRO` or `JSON`.
        :raises TailraceError: `SCHEMA_REFUSED` if it is not compatible, not valid or not registered;
            `REGISTRY_REFUSED`, `REGISTRY_UNREACHABLE`.
        """
        from confluent_kafka.schema_registry import Schema

        schema = Schema(text, kind)
        if self._registers:
            return self._ask(int, lambda client: client.register_schema(subject, schema), subject)
        return self._ask(int, lambda client: client.lookup_schema(subject, schema).schema_id, subject)

    def check(self, subject: str, text: str, kind: str) -> None:
        """Check, as far as possible without registering, that `id_of` would return an id.

        :raises TailraceError: as `id_of`.
        """
        from confluent_kafka.schema_registry import Schema

        schema = Schema(text, kind)
        try:
            self._ask(int, lambda client: client.lookup_schema(subject, schema).schema_id, subject)
        except TailraceError as error:
            is_missing = error.context.get("code") in (_SUBJECT_MISSING, _SCHEMA_MISSING)
            if not is_missing or not self._registers:
                raise
        else:
            return
        try:
            is_compatible = self._ask(
                bool,
                lambda client: client.test_compatibility_all_versions(subject, schema),
                subject,
            )
        except TailraceError as error:
            # There is no version yet, or this registry does not support the request.
            if error.context.get("code") not in (_SUBJECT_MISSING, _VERSION_MISSING, 404, 405):
                raise
        else:
            if not is_compatible:
                raise _incompatible("the registry reports the reason at registration", subject, 409)

    def schema_of(self, schema_id: int) -> tuple[str, str]:
        """Return the text and the kind (`AVRO`, `JSON`) of the schema with an id.

        :raises TailraceError: `SCHEMA_REFUSED` if it does not exist; `REGISTRY_REFUSED`,
            `REGISTRY_UNREACHABLE`.
        """
        try:
            text, kind = self._ask(
                tuple,
                lambda client: (
                    (found := client.get_schema(schema_id)).schema_str,
                    found.schema_type or "AVRO",
                ),
                "",
            )
        except TailraceError as error:
            if error.context.get("code") != _SCHEMA_MISSING:
                raise
            raise error.changed(
                message=f"ask the schema registry: it has no schema {schema_id}",
                hint="see whether registry_url is that of the registry with which the topic was written",
            ) from None
        return str(text), str(kind)

    def require_reachable(self) -> None:
        """Check that the registry answers a request that concerns no subject.

        :raises TailraceError: `REGISTRY_REFUSED`, `REGISTRY_UNREACHABLE`; `SCHEMA_REFUSED` if not a registry.
        """
        self._ask(list, lambda client: client.get_schema_types(), "")

    def forget(self) -> None:
        """Clear the cache of ids."""
        self._client.clear_caches()  # type: ignore[no-untyped-call]

    def _ask(self, kind: type[T], question: Callable[[SchemaRegistryClient], object], subject: str) -> T:
        """Return the answer to a request, which must have the type `kind`.

        A request that is refused is repeated if other credentials are in their places now.

        :raises TailraceError: as `_answer`.
        """
        try:
            return self._answer(kind, question, subject)
        except TailraceError as error:
            if error.kind is not Kind.REGISTRY_REFUSED:
                raise
            if (now := _credentials(self._options)) == self._credentials:
                raise
        self.close()
        self._connect(now)
        return self._answer(kind, question, subject)

    def _answer(self, kind: type[T], question: Callable[[SchemaRegistryClient], object], subject: str) -> T:
        """Return the answer to a request, which must have the type `kind`.

        :raises TailraceError: with the registry's `code` in its context if it refuses.
        """
        import httpx2
        from confluent_kafka.schema_registry import SchemaRegistryError

        where = {"registry": ", ".join(self._options.urls)}
        try:
            answer = question(self._client)
        except SchemaRegistryError as error:
            raise _refused(error, subject, where) from None
        except httpx2.InvalidURL as error:
            raise _not_usable(f"registry_url ({error})", "see its host and port", where) from None
        except httpx2.RequestError as error:
            raise _failed(error, where) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            answer = None
        if not isinstance(answer, kind):
            self.forget()  # the client caches even ids that are not numbers
            raise _unreachable("an answer that does not come from a registry", where)
        return answer


def _client(options: RegistryAddress, credentials: dict[str, str]) -> SchemaRegistryClient:
    import httpx2
    from confluent_kafka.schema_registry import SchemaRegistryClient

    settings: dict[str, Any] = {
        "url": ",".join(options.urls),
        "timeout": options.registry_timeout_ms / 1000,
        "max.retries": RETRIES_MAX,
        "retries.wait.ms": RETRY_WAIT_MS,
        **credentials,
    }
    files: dict[str, str] = {}
    tls = any(url.startswith("https:") for url in options.urls)
    # Without TLS there is nothing to verify, and reading the certificates takes 40 ms.
    settings["ssl.ca.location"] = _system_roots() if tls else False
    if tls:
        ways = {"ca": options.registry_ca_file, "certificate": options.registry_certificate_file,
                "key": options.registry_key_file}  # fmt: skip
        files = {f"ssl.{name}.location": resolved(file) for name, file in ways.items() if file}
    if "ssl.certificate.location" in files:
        settings["ssl.key.password"] = ""  # otherwise OpenSSL would ask for it at the terminal
    try:
        return SchemaRegistryClient({**settings, **files})
    except OSError as error:
        why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise _not_usable(
            f"registry_ca_file, registry_certificate_file, registry_key_file or SSL_CERT_FILE ({why})",
            "name files in PEM that this user may read; a key without a password",
            {"file": ", ".join(files.values()) or os.environ.get("SSL_CERT_FILE") or _system_roots() or ""},
        ) from None
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        # Without the error's message: a proxy's address may contain a password.
        raise _not_usable(
            f"the proxy that the environment names ({type(error).__name__})",
            "see HTTPS_PROXY, HTTP_PROXY and ALL_PROXY (http:// and https:// can be used), or set NO_PROXY",
        ) from None


def _credentials(options: RegistryAddress) -> dict[str, str]:
    # A registry's answers may repeat secrets, also in their encoded form.
    if not options.registry_token:
        user, password = resolved(options.registry_username), resolved(options.registry_password)
        remember(password)
        remember(b64encode(f"{user}:{password}".encode()).decode() if password else "")
        return {"basic.auth.user.info": f"{user}:{password}"} if user else {}
    token = resolved(options.registry_token)
    remember(token)
    if not (token.isascii() and token.isprintable() and token == token.strip()):
        raise _not_usable(
            "registry_token contains what no header can (a line break, spaces around it, or non-ASCII): it",
            "make sure that the variable or file contains the token and nothing else",
        )
    # The client requires the name of a cluster in Confluent's cloud, which may be empty.
    return {
        "bearer.auth.credentials.source": "STATIC_TOKEN",
        "bearer.auth.token": token,
        "bearer.auth.logical.cluster": "",
    }


def _system_roots() -> str | None:
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return None  # the client uses these
    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath


def _refused(error: SchemaRegistryError, subject: str, where: dict[str, str]) -> TailraceError:
    status = error.http_status_code
    code: Any = error.error_code  # None if the answer has none, despite the client's type
    # -1: the answer is not a registry's, and the client's message would contain all of it.
    words = "" if code == -1 else redact(str(error.error_message or ""))[:2000]
    said = f"it answered {status} {words}".rstrip()
    is_page = code == -1  # of a proxy, whose registry may be down
    code = code if isinstance(code, int) and code > 0 else status
    if status in _STATUSES_RETRIED:
        return _unreachable(said, where)
    if is_page and status not in (401, 403):
        found = f"an answer that does not come from a registry ({status})"
        return _unreachable(found, where).changed({"code": code})
    if status in (401, 403):
        hint = "check registry_username and registry_password, or registry_token, and their permissions"
        return TailraceError(Kind.REGISTRY_REFUSED, f"ask the schema registry: {said}", hint, where)
    if status == 409:
        return _incompatible(words, subject, code)
    if code in (_SUBJECT_MISSING, _SCHEMA_MISSING):
        missing = "the subject does not exist" if code == _SUBJECT_MISSING else "it does not have this schema"
        return _schema_refused(
            missing, "register it first, or let it be registered: auto_register_schemas: true", subject, code
        )
    if code == _READ_ONLY:
        hint = (
            f'end that mode (`PUT /mode/{subject}`, or `PUT /mode`, with {{"mode": "READWRITE"}}), '
            "or set registry_url to a registry that takes schemas"
        )
        return _schema_refused(f"it takes none now: {words}", hint, subject, code)
    if status == 422:
        hint = "please report it with the table's definition, or exclude the table"
        return _schema_refused(f"the registry calls the schema invalid: {words}", hint, subject, code)
    hint = "see whether registry_url is that of a schema registry, and look into the registry's log"
    return _schema_refused(said, hint, subject, code)


def _incompatible(words: str, subject: str, code: int) -> TailraceError:
    return _schema_refused(
        f"the schema is not compatible: {words}",
        f'let the change through (`PUT /config/{subject}` with {{"compatibility": "NONE"}}, or a level that '
        "readers accept, and back afterwards), or undo it in the table, or write to other topics: "
        "topic_prefix, routes or another subject strategy. Nothing with this schema was written",
        subject,
        code,
    )


def _schema_refused(found: str, hint: str, subject: str, code: int) -> TailraceError:
    about = f" about {subject!r}" if subject else ""
    return TailraceError(
        Kind.SCHEMA_REFUSED,
        f"ask the schema registry{about}: {found}",
        hint,
        {"subject": subject, "code": code} if subject else {"code": code},
    )


def _not_usable(what: str, hint: str, context: dict[str, str] | None = None) -> TailraceError:
    return TailraceError(Kind.CONFIG_INVALID, f"ask the schema registry: {what} can't be used", hint, context)


def _unreachable(last: str, where: dict[str, str]) -> TailraceError:
    return TailraceError(
        Kind.REGISTRY_UNREACHABLE,
        f"ask the schema registry: no answer after all attempts, the last: {last}",
        "see whether it runs and can be reached from here, and whether registry_url is its address, with "
        "http or https; changes wait in the log meanwhile",
        where,
    )


def _failed(error: Exception, where: dict[str, str]) -> TailraceError:
    root: BaseException = error
    while (below := root.__cause__ or root.__context__) is not None:
        root = below
        if isinstance(root, ssl.SSLError) and not isinstance(root, _CUT):
            return TailraceError(
                Kind.REGISTRY_REFUSED,
                "ask the schema registry: TLS failed, or its certificate can't be verified: "
                f"{getattr(root, 'verify_message', root.reason)}",
                "see that registry_ca_file has its issuer's root certificates, that registry_url has the "
                "host name in it (and http:// without TLS), and whether the registry requires a client "
                "certificate: registry_certificate_file, registry_key_file",
                where,
            )
    if isinstance(root, OSError):
        return _unreachable(redact(f"{type(root).__name__}: {root.strerror or root}"), where)
    return _unreachable(redact(f"{type(error).__name__}: {error}")[:300], where)
