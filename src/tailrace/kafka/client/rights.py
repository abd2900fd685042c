"""The operations that a principal must be allowed, the check for them, and the command that allows them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.failures import error_of, failure_of
from tailrace.kafka.client.requests import AdminClients, answer

#: Operations on a table's topic; also `CREATE` if it is to be created. Each of these implies DESCRIBE.
TO_WRITE = ("WRITE",)
#: Operations on the offsets topic.
TO_KEEP_OFFSETS = ("READ", "WRITE", "DESCRIBE_CONFIGS")

_DENIED = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_WORDS = {
    "READ": "Read",
    "WRITE": "Write",
    "CREATE": "Create",
    "DESCRIBE": "Describe",
    "DESCRIBE_CONFIGS": "DescribeConfigs",
}


def is_denial(error: KafkaError) -> bool:
    """Return whether an error says that the principal may not do something with a topic."""
    return error.code() in _DENIED


def denied(
    settings: Mapping[str, Any], attempted: str, resource: str, name: str, operations: Sequence[str]
) -> TailraceError:
    """Return the error of operations that are not allowed, with the command that allows them.

    :param settings: of the client that was refused; they name the cluster and, with SASL, the principal.
    :param resource: `topic` or `transactional-id`, as the command spells it.
    """
    principal = settings.get("sasl.username", "")
    words = [
        "kafka-acls.sh",
        *("--bootstrap-server", str(settings.get("bootstrap.servers", "HOST:PORT"))),
        *("--add", "--allow-principal", f"User:{principal or 'NAME'}"),
        *(word for operation in operations for word in ("--operation", _WORDS[operation])),
        *(f"--{resource}", name),
    ]
    found = f"{attempted}: the principal may not {' or '.join(operations)} on the {resource} {name!r}"
    context = {"resource": f"{resource}:{name}", "operations": ", ".join(operations)}
    return TailraceError(Kind.SINK_REFUSED, found, shlex.join(words), context)


def require_rights(
    clients: AdminClients, topic: str, operations: Sequence[str], attempted: str, timeout_s: float
) -> int | None:
    """Check that these operations on a topic are allowed; return its number of partitions, None: no topic.

    Creates no topic, even if the broker creates topics automatically.
    :raises TailraceError: `SINK_REFUSED`, with all missing operations; `SINK_WRITE_FAILED`.
    """

    def ask(admin: AdminClient, left_s: float) -> Any:
        asked = admin.describe_topics(
            TopicCollection([topic]), include_authorized_operations=True, request_timeout=left_s
        )
        try:
            return answer(asked[topic], left_s)
        except KafkaException as error:
            if error_of(error).code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise

    try:
        found = clients.ask(timeout_s, ask)
    except KafkaException as error:
        if is_denial(error_of(error)):
            raise denied(clients.settings, attempted, "topic", topic, operations) from None
        raise failure_of(error_of(error), attempted, topic=topic) from error
    if found is None:
        return None
    allowed = {operation.name for operation in found.authorized_operations or ()}
    # Some clusters do not report rights: then the attempt itself shows whether it is allowed.
    missing = [operation for operation in operations if operation not in allowed] if allowed else []
    if missing:
        raise denied(clients.settings, attempted, "topic", topic, missing)
    return len(found.partitions)
