"""Maps gRPC's status of a call to vtgate to Tailrace's errors.

A status has a code and a message of vtgate, vttablet or MySQL. The code alone is not specific: a killed
server, a purged binlog and a wrong table all have UNKNOWN. So the message is matched first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact

#: Limit of the characters of vtgate's message that are shown: it may list every shard.
WORDS_MAX = 500


#: Codes of ours: the stream sent nothing for too long; the connection to vtgate is lost.
SILENT, DISCONNECTED = "SILENT", "DISCONNECTED"
#: A code of Vitess: traffic is switched, or a shard gets another primary.
CLUSTER_EVENT = "CLUSTER_EVENT"


@dataclass(frozen=True, slots=True)
class Status:
    """The status with which a call ended: gRPC's name of the code, such as `UNAVAILABLE`, and the message.

    `OK`: the server ended the stream normally.
    """

    code: str
    words: str = ""


_AGAIN = "it is retried"
_NO_TABLET = f"no tablet of this type serves the shard; check source.tablet_type. {_AGAIN}"
_REFUSED = (Kind.SOURCE_QUERY_FAILED, "see vtgate's log, correct the cause, then start again")
_TLS = "check source.tls_ca, tls_certificate and tls_key, and that vtgate serves TLS"

#: Patterns in messages, in the order in which they are tried, each with its error kind and hint.
_WORDS: tuple[tuple[re.Pattern[str], Kind, str], ...] = tuple(
    (re.compile(words, re.IGNORECASE), kind, hint)
    for words, kind, hint in (
        (
            r"trying to send message larger than max",
            Kind.FRAME_TOO_LARGE,
            "start vtgate and the tablets with a larger --grpc-max-message-size",
        ),
        (r"larger than max", Kind.FRAME_TOO_LARGE, "raise source.message_bytes_max"),
        # The table was dropped after it was listed: no setting requests a table by its name.
        (r"unknown table|table \S+ is not present|table \S+ doesn't exist", Kind.SOURCE_UNREACHABLE, _AGAIN),
        # After a failover, until the shard's record in the topology server names the new primary.
        (r"wrong tablet type", Kind.SOURCE_UNREACHABLE, _AGAIN),
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
    "PERMISSION_DENIED": (Kind.SOURCE_AUTH_FAILED, "check source.user, and its permissions in vtgate"),
    "UNIMPLEMENTED": (Kind.SOURCE_MISCONFIGURED, "check source.hosts: the server there is not a vtgate"),
    "NOT_FOUND": (Kind.SOURCE_MISCONFIGURED, "check source.keyspace"),
    # Retried: a process ended, a tablet was replaced, a connection was lost. All other codes are refusals.
    **dict.fromkeys(
        (
            "OK", SILENT, DISCONNECTED, CLUSTER_EVENT, "CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED",
            "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL", "UNAVAILABLE",
        ),
        (Kind.SOURCE_UNREACHABLE, _AGAIN),
    ),
}  # fmt: skip


def from_status(status: Status, attempted: str, shard: str = "") -> TailraceError:
    """Return the error for a status.

    :param attempted: the attempted operation, such as "stream the shard".
    """
    found = ((kind, hint) for words, kind, hint in _WORDS if words.search(status.words))
    kind, hint = next(found, None) or _CODES.get(status.code, _REFUSED)
    said = redact(status.words[:WORDS_MAX]) or "it gave no reason"
    context = {"status": status.code, **({"shard": shard} if shard else {})}
    return TailraceError(kind, f"{attempted}: vtgate ended it: {said}", hint, context)
