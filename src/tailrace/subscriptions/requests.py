"""Requests of clients: their parameters, authentication, and the documents of errors."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.errors import Kind, TailraceError
from tailrace.secrets import Secret, remember
from tailrace.subscriptions.filters import ChangeFilter, parsed

#: The cookie with the token, for browsers, whose EventSource and WebSocket can't send additional headers.
COOKIE = "tailrace_token"
_NAMES = frozenset({"source", "table", "where", "from", "token"})
_STATUS = {
    Kind.CONFIG_INVALID: 400,
    Kind.LOG_RANGE_INVALID: 400,
    Kind.SUBSCRIPTION_UNAUTHORIZED: 401,
    Kind.SUBSCRIPTION_FORBIDDEN: 403,
    Kind.TABLE_UNKNOWN: 404,
    Kind.LOG_RANGE_GONE: 410,
    Kind.OFFSETS_FOREIGN: 410,
    Kind.LOG_MISSING: 503,
    Kind.SCHEMA_PENDING: 503,
    Kind.SUBSCRIBERS_EXCEEDED: 503,
}


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """A client's request. `begin`: the position that it names; None: the log's current end."""

    source: str
    wanted: ChangeFilter
    begin: str | None


def status_of(error: TailraceError) -> int:
    """Return the HTTP status of an error."""
    return _STATUS.get(error.kind, 500)


def document_of(error: TailraceError) -> dict[str, Any]:
    """Return the document of an error for clients, which is that of the command line's `--json`."""
    return {"error": error.as_json()}


def understood(
    pairs: Sequence[tuple[str, str]], last_event_id: str | None, sources: Sequence[str]
) -> SubscriptionRequest:
    """Return the request of a query.

    :param pairs: the query's parameters and values.
    :param sources: names of the sources; a single source may have an empty name.
    :param last_event_id: sent by a browser that reconnects; takes precedence over `from`.
    :raises TailraceError: `CONFIG_INVALID`.
    """
    for name in sorted({name for name, _ in pairs}):
        if name not in _NAMES:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"subscribe: there is no parameter {name!r}",
                "there are " + ", ".join(sorted(_NAMES)),
            )
        if name != "table" and sum(each == name for each, _ in pairs) > 1:
            raise TailraceError(Kind.CONFIG_INVALID, f"subscribe: {name} is given twice", "give it only once")
    values = dict(pairs)
    wanted = parsed([value for name, value in pairs if name == "table"], values.get("where", ""))
    return SubscriptionRequest(
        _source(values.get("source"), sources), wanted, last_event_id or values.get("from")
    )


def _source(name: str | None, sources: Sequence[str]) -> str:
    if name is None and len(sources) == 1:
        return sources[0]
    if name and name in sources:
        return name
    known = ", ".join(filter(None, sources))
    raise TailraceError(
        Kind.CONFIG_INVALID,
        "subscribe: there are several sources" if name is None else f"subscribe: there is no source {name!r}",
        f"name one with source: {known}" if known else "leave source out: there is one, without a name",
    )


def require_token(token: Secret, headers: Mapping[str, str], query: str | None, cookie: str | None) -> None:
    """Check the token of `Authorization: Bearer`, or else of the query, or else of the cookie.

    :raises TailraceError: `SUBSCRIPTION_UNAUTHORIZED`; `SECRET_MISSING` if the configured one can't be read.
    """
    scheme, _, value = headers.get("authorization", "").partition(" ")
    given = value.strip() if scheme.lower() == "bearer" else query or cookie or ""
    if not hmac.compare_digest(given.encode(), resolved_token(token).encode()):
        raise TailraceError(
            Kind.SUBSCRIPTION_UNAUTHORIZED,
            "subscribe: the token is " + ("wrong" if given else "missing"),
            f"send `Authorization: Bearer TOKEN`; from a browser, the parameter token or the cookie {COOKIE}",
        )


def resolved_token(token: Secret) -> str:
    """Read and return the configured token.

    :raises TailraceError: `SECRET_MISSING`, also if it is empty, or a header can't contain it.
    """
    value = token.resolve()
    if not value or not (value.isascii() and value.isprintable() and value == value.strip()):
        found = "has characters that a header can't: not ASCII, or a space at an end" if value else "is empty"
        raise TailraceError(
            Kind.SECRET_MISSING,
            f"resolve {token}: it {found}",
            "use a long random text: openssl rand -hex 32",
        )
    remember(value)
    return value


def require_origin(origin: str | None, origins: Sequence[str]) -> None:
    """Check the origin of the page that sends the request; only browsers send one.

    :raises TailraceError: `SUBSCRIPTION_FORBIDDEN`.
    """
    if origin is not None and origin not in origins:
        allow = f"allow them: --origin {origin}, or origins: [{origin}] under subscriptions in the file"
        raise TailraceError(
            Kind.SUBSCRIPTION_FORBIDDEN,
            f"subscribe: pages of {origin} are not allowed to",
            "serve the page over HTTP, then allow its site: this one was opened from a file"
            if origin == "null"
            else allow,
            {"origin": origin},
        )
