"""Confluent's clients of a schema registry, one for each address: how they are made, and what they raise in
our terms.

What only a person can change (a certificate, a password, a file) is told at once; what may pass is left to
who asks, who may ask again or elsewhere. The clients' package is loaded when the first one is made: it takes
a third of a second.
"""

from __future__ import annotations

import os
import ssl
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError

T = TypeVar("T")

#: Statuses that may pass.
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
#: Of TLS, but no refusal: the connection was cut.
_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


@dataclass(frozen=True, slots=True)
class Access:
    """Where registries are, and how one is let in. It holds resolved secrets, and shows none.

    :param urls: of one registry or of several that serve the same; the next is asked where one fails.
    :param logical_cluster: of Confluent's cloud, with a token; and `identity_pool`.
    :param timeout_s: longest that one request may take.
    :param deadline_s: longest that a question may take with all its attempts.
    """

    urls: tuple[str, ...]
    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    logical_cluster: str = ""
    identity_pool: str = ""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = field(default="", repr=False)
    timeout_s: float = 10.0
    deadline_s: float = 30.0


class RefusedError(Exception):
    """A registry's answer that is none to the question.

    :param status: of HTTP.
    :param code: the registry's own, or the status.
    :param words: what it said, shortened, without what this process knows to be a secret.
    """

    def __init__(self, status: int, code: int, words: str) -> None:
        super().__init__(status, code, words)
        self.status = status
        self.code = code
        self.words = words


class PassingError(Exception):
    """No answer of a registry; it may pass, or be otherwise at another address."""


class RegistryClients:
    """Makes clients, and keeps them with their connections until it is closed; then it begins anew."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._made: dict[str, SchemaRegistryClient] = {}
        # Nobody closes what was pickled to Spark's executors.
        weakref.finalize(self, _close, self._made)

    def ask(self, url: str, question: Callable[[SchemaRegistryClient], T]) -> T:
        """Ask the registry at `url` once. Any thread.

        :param question: raises `ValueError` and the like if the answer is none of a registry, as the client.
        :raises PassingError, RefusedError: as they say.
        :raises TailraceError: `REGISTRY_REFUSED` if it or we refuse the other's certificate, and for 401 and
            403; `CONFIG_INVALID` for addresses, files and tokens that can't be used.
        """
        import httpx2
        from confluent_kafka.schema_registry import SchemaRegistryError

        client = self._at(url)
        try:
            return question(client)
        except SchemaRegistryError as error:
            raise _refusal(url, error) from None
        except httpx2.InvalidURL as error:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"ask the schema registry: registry_url can't be used: {error}",
                "see its host and port",
                {"registry": url},
            ) from None
        except httpx2.RequestError as error:
            raise _failed(url, error) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # A proxy's page, or a place that is no registry; an id that is none would be kept.
            client.clear_caches()  # type: ignore[no-untyped-call]
            raise PassingError(f"an answer that is none of a registry ({type(error).__name__})") from None

    def close(self) -> None:
        """Let go of connections."""
        with self._lock:
            _close(self._made)

    def _at(self, url: str) -> SchemaRegistryClient:
        with self._lock:
            if url not in self._made:
                self._made[url] = _client(self._access, url)
            return self._made[url]


def _close(made: dict[str, SchemaRegistryClient]) -> None:
    while made:
        made.popitem()[1].close()


def _client(access: Access, url: str) -> SchemaRegistryClient:
    import httpx2
    from confluent_kafka.schema_registry import SchemaRegistryClient

    # One attempt: those who ask know until when they may.
    settings = {"url": url, "timeout": access.timeout_s, "max.retries": 0, **_let_in(access)}
    is_tls = url.startswith("https:")
    roots = (access.ca_file if is_tls else "") or _system_roots()
    if roots:
        settings["ssl.ca.location"] = roots
    certificate = _certificate(access) if is_tls else {}
    try:
        return SchemaRegistryClient({**settings, **certificate})
    except OSError as error:
        if certificate:
            # Which of the files it was shows without the certificate.
            try:
                SchemaRegistryClient(settings).close()
            except OSError:
                pass
            else:
                name = "registry_certificate_file, or registry_key_file"
                raise _unusable(name, access.certificate_file, error) from None
        name = "registry_ca_file" if is_tls and access.ca_file else "SSL_CERT_FILE, or the system's roots,"
        raise _unusable(name, roots or os.environ.get("SSL_CERT_FILE", ""), error) from None
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        # Not its words: there may be a password in a proxy's address.
        raise TailraceError(
            Kind.CONFIG_INVALID,
            "ask the schema registry: the proxy that the environment names can't be used "
            f"({type(error).__name__})",
            "see HTTPS_PROXY, HTTP_PROXY and ALL_PROXY (http:// and https:// can be used), or set NO_PROXY",
            {"registry": url},
        ) from None


def _let_in(access: Access) -> dict[str, Any]:
    if access.token:
        for name in ("token", "logical_cluster", "identity_pool"):
            _require_header(f"registry_{name}", getattr(access, name))
        # It wants the cluster's name, if only an empty one; that of the pool, only if there is one.
        pool = {"bearer.auth.identity.pool.id": access.identity_pool} if access.identity_pool else {}
        return {
            "bearer.auth.credentials.source": "STATIC_TOKEN",
            "bearer.auth.token": access.token,
            "bearer.auth.logical.cluster": access.logical_cluster,
            **pool,
        }
    return {"basic.auth.user.info": f"{access.username}:{access.password}"} if access.username else {}


def _require_header(setting: str, value: str) -> None:
    if not (value.isascii() and value.isprintable() and value == value.strip()):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"ask the schema registry: {setting} holds what no header can: a line's end, a space around it, "
            "or no ASCII",
            "see that the variable or file has the value and nothing else",
        )


def _system_roots() -> str:
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return ""  # the client goes by these
    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath or ""


def _certificate(access: Access) -> dict[str, str]:
    if not access.certificate_file:
        return {}
    # Without a password for the key OpenSSL would ask at the terminal.
    found = {"ssl.certificate.location": access.certificate_file, "ssl.key.password": ""}
    return {**found, "ssl.key.location": access.key_file} if access.key_file else found


def _refusal(url: str, error: SchemaRegistryError) -> Exception:
    status = error.http_status_code
    code: Any = error.error_code  # None where the answer has none, whatever the client says of it
    is_own = isinstance(code, int) and code > 0
    # -1: the client found nothing of a registry in the answer, and would show all of it.
    words = "" if code == -1 else redact(str(error.error_message or ""))[:2000]
    if status in (401, 403):
        return _denied(url, status, words)
    if status in _PASSING:
        return PassingError(f"status {status} {words}".rstrip())
    return RefusedError(status, code if is_own else status, words)


def _failed(url: str, error: Exception) -> Exception:
    root: BaseException = error
    while (below := root.__cause__ or root.__context__) is not None:
        root = below
        if isinstance(root, ssl.SSLError) and not isinstance(root, _CUT):
            return _not_trusted(url, root)
    if isinstance(root, OSError):
        return PassingError(redact(f"{type(root).__name__}: {root.strerror or root}"))
    return PassingError(redact(f"{type(error).__name__}: {error}")[:300])


def _unusable(setting: str, file: str, error: OSError) -> TailraceError:
    why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return TailraceError(
        Kind.CONFIG_INVALID,
        f"ask the schema registry: {setting} can't be used: {why or type(error).__name__}",
        "name a file in PEM that this user may read; a key without a password",
        {"file": file},
    )


def _not_trusted(url: str, error: ssl.SSLError) -> TailraceError:
    if isinstance(error, ssl.SSLCertVerificationError):
        found = f"its certificate can't be verified: {error.verify_message}"
        hint = (
            "see that registry_ca_file has the roots of who signed it, and that registry_url has the name "
            "that it is for"
        )
    else:
        found = f"TLS failed: {error.reason}"
        hint = (
            "see that registry_url is of TLS (else it begins with http://), and whether the registry wants a "
            "certificate: registry_certificate_file, registry_key_file"
        )
    return TailraceError(Kind.REGISTRY_REFUSED, f"ask the schema registry: {found}", hint, {"registry": url})


def _denied(url: str, status: int, words: str) -> TailraceError:
    hint = (
        "check registry_username and registry_password, or registry_token"
        if status == 401
        else "the user needs to read and write the subject (and, to explain refusals, its configuration)"
    )
    return TailraceError(
        Kind.REGISTRY_REFUSED,
        f"ask the schema registry: it answered {status} {words}".rstrip(),
        hint,
        {"registry": url},
    )
