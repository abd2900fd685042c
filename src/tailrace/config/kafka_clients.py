"""Settings of a Kafka client, for all sections that name a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tailrace.config.fields import Name, Section, Setting
from tailrace.secrets import REFUSAL, Secret, is_reference, remember, resolved

#: The options that a file may set. Tailrace sets those that its guarantees depend on; others are of no use.
ALLOWED_OPTIONS = re.compile(
    r"security\.protocol|sasl\..*|ssl\..*|enable\.ssl\..*|https\.ca\..*|client\.(id|rack|dns\.lookup)|"
    r"compression\.(type|codec|level)|linger\.ms|batch\.(size|num\.messages)|message\.max\.bytes|"
    r"message\.timeout\.ms|transaction\.timeout\.ms|request\.timeout\.ms|"
    r"socket\..*|reconnect\..*|retry\.backoff\..*|connections\.max\.idle\.ms|"
    r"broker\.address\..*|metadata\.max\.age\.ms|topic\.metadata\.refresh\.interval\.ms|partitioner"
)

#: Options that are secrets themselves, not names of files with secrets.
_SECRET_OPTIONS = re.compile(r".*(password|secret|passphrase|key\.pem)")


def _topic_name(topic: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", topic) or topic in (".", ".."):
        raise ValueError("is not a topic's name: letters, digits, '.', '_' and '-', at most 249 of them")
    return topic


#: The complete name of a topic, not a prefix or pattern.
TopicName = Annotated[str, AfterValidator(_topic_name)]


def _allowed(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if not ALLOWED_OPTIONS.fullmatch(name):
            raise ValueError(
                f"{name} can't be set: possible are options of librdkafka for connections, "
                "security, compression and batching; Tailrace sets those that its guarantees depend on"
            )
        if _SECRET_OPTIONS.fullmatch(name) and not is_reference(str(value)):
            raise ValueError(f"{name} {REFUSAL}")
    return options


#: Options by their own names; secrets among them only as references.
ClientOptions = Annotated[dict[str, Setting], AfterValidator(_allowed)]


class KafkaSection(Section):
    """The settings of a Kafka client, for all sections that name a cluster."""

    group: Name = Field(
        default="tailrace",
        description="Identifies, with the names of pipeline and task, the owner of offsets, and is the start "
        "of the transactional id, `<group>-<pipeline>-<task>`: producers of one id fence each other.",
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
    """Return `options` in librdkafka's form, with references resolved now.

    `redact` removes their secrets from all output from then on.
    :raises TailraceError: `SECRET_MISSING`.
    """
    found = {name: resolved(value) for name, value in options.items()}
    for name in filter(_SECRET_OPTIONS.fullmatch, found):
        remember(found[name])
    return found
