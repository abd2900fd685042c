"""One request to a schema registry: HTTP or TLS, who one is, and what keeps the registry from answering.

What only a person can change (a certificate, a password, a file) is told at once; what may pass is left to
who asks, who may ask again or elsewhere.
"""

from __future__ import annotations

import http.client
import json
import ssl
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact

_CONTENT = "application/vnd.schemaregistry.v1+json"
#: A reply that is longer is none of a registry.
_REPLY_BYTES_MAX = 16 << 20
#: Of TLS, but no refusal: the connection was cut.
_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


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
        found = self.member("error_code")
        return found if isinstance(found, int) else self.status

    @property
    def words(self) -> str:
        """What it said, shortened, without what this process knows to be a secret."""
        return redact(str(self.member("message") or ""))[:2000]

    def member(self, name: str) -> Any:
        """Return a member of the document; None if it has none."""
        return self.document.get(name) if isinstance(self.document, dict) else None


def request(access: Access, url: str, method: str, path: str, body: Mapping[str, str] | None) -> Reply:
    """Ask the registry at `url` once.

    :raises OSError, http.client.HTTPException: what may pass, or be otherwise at another address.
    :raises TailraceError: `REGISTRY_REFUSED` if it or we refuse the other's certificate, and for 401 and
        403; `CONFIG_INVALID` for files and tokens that can't be used.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    connection = (
        http.client.HTTPSConnection(host, port, timeout=access.timeout_s, context=_tls(access))
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=access.timeout_s)
    )
    data = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, parts.path.rstrip("/") + path, data, _headers(access))
        response = connection.getresponse()
        content = response.read(_REPLY_BYTES_MAX)
    except _CUT:
        raise
    except ssl.SSLError as error:
        raise _not_trusted(url, error) from None
    finally:
        connection.close()
    try:
        reply = Reply(response.status, json.loads(content))
    except ValueError:
        # A proxy's page, or a place that is no registry.
        reply = Reply(response.status if response.status != 200 else 502, None)
    if reply.status in (401, 403):
        raise _denied(url, reply)
    return reply


def _headers(access: Access) -> dict[str, str]:
    headers = {"Accept": _CONTENT, "Content-Type": _CONTENT, "User-Agent": "tailrace"}
    if access.token:
        if not (access.token.isascii() and access.token.isprintable()):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                "ask the schema registry: registry_token holds what no header can: a line's end, or no ASCII",
                "see that the variable or file has the token and nothing else",
            )
        headers["Authorization"] = f"Bearer {access.token}"
    elif access.username:
        both = f"{access.username}:{access.password}".encode()
        headers["Authorization"] = f"Basic {b64encode(both).decode()}"
    return headers


def _tls(access: Access) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=access.ca_file or None)
    except OSError as error:
        raise _unusable("registry_ca_file", access.ca_file, error) from None
    if access.certificate_file:
        try:
            # Without a password for the key the library would ask at the terminal.
            context.load_cert_chain(access.certificate_file, access.key_file or None, password="")
        except OSError as error:
            name = "registry_certificate_file, or registry_key_file"
            raise _unusable(name, access.certificate_file, error) from None
    return context


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
