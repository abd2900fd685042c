"""Settings of a Kafka client, wherever a file names a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tailrace.config.fields import Name, Section, Setting
from tailrace.secrets import REFUSAL, Secret, is_reference, remember, resolved

#: By name or by beginning. Others are either our own affair (what guarantees rest on) or make no sense here.
ALLOWED_OPTIONS = re.compile(
    r"security\.protocol|sasl\..*|ssl\..*|enable\.ssl\..*|https\.ca\..*|client\.(id|rack|dns\.lookup)|"
    r"compression\.(type|codec|level)|linger\.ms|batch\.(size|num\.messages)|message\.max\.bytes|"
    r"message\.timeout\.ms|transaction\.timeout\.ms|request\.timeout\.ms|"
    r"socket\..*|reconnect\..*|retry\.backoff\..*|connections\.max\.idle\.ms|"
    r"broker\.address\..*|metadata\.max\.age\.ms|topic\.metadata\.refresh\.interval\.ms|partitioner"
)

#: Options that are secrets themselves, not names of files that hold them.
_SECRET_OPTIONS = re.compile(r".*(password|secret|passphrase|key\.pem)")


def _as_kafka_has_it(topic: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", topic) or topic in (".", ".."):
        raise ValueError("is no name of a topic: letters, digits, '.', '_' and '-', at most 249 of them")
    return topic


#: The name of a topic as it is, not one that it is made of.
TopicName = Annotated[str, AfterValidator(_as_kafka_has_it)]


def _allowed(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if not ALLOWED_OPTIONS.fullmatch(name):
            raise ValueError(
                f"{name} can't be set: possible are options of librdkafka for connections, "
                "security, compression and batching; what exactly-once rests on is the sink's own"
            )
        if _SECRET_OPTIONS.fullmatch(name) and not is_reference(str(value)):
            raise ValueError(f"{name} {REFUSAL}")
    return options


#: Options by their own names; secrets among them only as references.
ClientOptions = Annotated[dict[str, Setting], AfterValidator(_allowed)]


class KafkaSection(Section):
    """What a client of Kafka is set to, wherever a file names a cluster."""

    group: Name = Field(
        default="tailrace",
        description="With the names of pipeline and task the owner of offsets, and the transactional id, "
        "`<group>-<pipeline>-<task>`: who shares it on one cluster fences each other.",
    )
    consumer_isolation_level: Literal["read_committed", "read_uncommitted"] = Field(
        default="read_committed",
        description="How offsets are read. With `read_uncommitted`, offsets of a transaction that was never "
        "committed count: changes may be lost.",
    )
    options: ClientOptions = Field(
        default={},
        description="Options of librdkafka under their own names: security, compression, batching. Values "
        "may be references; passwords and keys must be.",
    )


def client_settings(options: Mapping[str, str | Secret]) -> dict[str, str]:
    """Return `options` as librdkafka takes them, references resolved now.

    What is secret is cut out of everything that is shown from then on.
    :raises TailraceError: `SECRET_MISSING`.
    """
    found = {name: resolved(value) for name, value in options.items()}
    for name in filter(_SECRET_OPTIONS.fullmatch, found):
        remember(found[name])
    return found
