"""gRPC's status of a call to vtgate under Tailrace's names.

A status is a code and the words of vtgate, vttablet or MySQL. The code alone says little: a server that was
killed, a purged binlog and a wrong table all come as UNKNOWN. So words are looked for first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact

#: Of vtgate's words so many are shown: they may list every shard.
WORDS_MAX = 500


#: Beside gRPC's codes: the stream sent nothing for too long; the connection to vtgate is gone.
SILENT, DISCONNECTED = "SILENT", "DISCONNECTED"
#: … and Vitess' own: traffic is switched, or a shard gets another primary.
CLUSTER_EVENT = "CLUSTER_EVENT"


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended: gRPC's name of the code, such as `UNAVAILABLE`, and the words that came with it.

    `OK`: the server ended the stream in good order.
    """

    code: str
    words: str = ""


_AGAIN = "it is tried again"
_NO_TABLET = f"no tablet of this type serves the shard; check source.tablet_type. {_AGAIN}"
_REFUSED = (Kind.SOURCE_QUERY_FAILED, "see vtgate's log, correct what it speaks of, then start again")
_TLS = "check source.tls_ca, tls_certificate and tls_key, and that vtgate serves TLS"

#: Words, in the order in which they are looked for.
_WORDS: tuple[tuple[re.Pattern[str], Kind, str], ...] = tuple(
    (re.compile(words, re.IGNORECASE), kind, hint)
    for words, kind, hint in (
        (
            r"trying to send message larger than max",
            Kind.FRAME_TOO_LARGE,
            "start vtgate and the tablets with a larger --grpc-max-message-size",
        ),
        (r"larger than max", Kind.FRAME_TOO_LARGE, "raise source.message_bytes_max"),
        # Dropped since it was listed: no setting has a table asked for by its name.
        (r"unknown table|table \S+ is not present|table \S+ doesn't exist", Kind.SOURCE_UNREACHABLE, _AGAIN),
        (
            r"keyspace \S+ (not found|doesn't exist)|unknown (keyspace|database)|VT05003",
            Kind.SOURCE_MISCONFIGURED,
            "check source.keyspace",
        ),
        (
            r"failed to find an? \w+ tablet|no healthy tablet|is either down or nonexistent",
            Kind.SOURCE_UNREACHABLE,
            _NO_TABLET,
        ),
        (r"certificate|tls:|SSL_|handshake", Kind.SOURCE_UNREACHABLE, _TLS),
    )
)

_CODES: dict[str, tuple[Kind, str]] = {
    "UNAUTHENTICATED": (Kind.SOURCE_AUTH_FAILED, "check source.user and source.password"),
    "PERMISSION_DENIED": (Kind.SOURCE_AUTH_FAILED, "check source.user, and what vtgate lets it do"),
    "UNIMPLEMENTED": (Kind.SOURCE_MISCONFIGURED, "check source.hosts: what answers there is no vtgate"),
    "NOT_FOUND": (Kind.SOURCE_MISCONFIGURED, "check source.keyspace"),
    # These may pass: a process that ends, a tablet that is replaced, a connection that breaks. All others are
    # refusals.
    **dict.fromkeys(
        (
            "OK", SILENT, DISCONNECTED, CLUSTER_EVENT, "CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED",
            "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL", "UNAVAILABLE",
        ),
        (Kind.SOURCE_UNREACHABLE, _AGAIN),
    ),
}  # fmt: skip


def from_status(status: Status, attempted: str, shard: str = "") -> TailraceError:
    """Return the error that a status amounts to.

    :param attempted: what was being done, such as "stream the shard".
    """
    found = ((kind, hint) for words, kind, hint in _WORDS if words.search(status.words))
    kind, hint = next(found, None) or _CODES.get(status.code, _REFUSED)
    said = redact(status.words[:WORDS_MAX]) or "it gave no reason"
    context = {"status": status.code, **({"shard": shard} if shard else {})}
    return TailraceError(kind, f"{attempted}: vtgate ended it: {said}", hint, context)
