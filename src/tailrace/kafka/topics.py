"""Topics of tables: their names, and that they are there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.failures import error_of, failure_of

NAME_CHARACTERS_MAX = 249
_ILLEGAL = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Making:
    """How a topic is made."""

    partitions: int = 1
    replication_factor: int | None = None  # None: the cluster's
    settings: Mapping[str, str] = field(default_factory=dict)


class Topics:
    """The topics of one sink.

    :param prefix: begins each name: `<prefix>.<schema>.<table>`.
    :param making: how the topic of a table is made.
    :param create: whether missing ones are.
    """

    def __init__(
        self,
        admin: Mapping[str, Any],
        prefix: str,
        making: Callable[[str, str], Making],
        *,
        create: bool,
        timeout_s: float,
    ) -> None:
        self._admin_settings = dict(admin)
        self._prefix = prefix
        self._making = making
        self._create_missing = create
        self._timeout_s = timeout_s
        self._owners: dict[str, str] = {}

    def of_table(self, schema: str, table: str) -> str:
        """Return the topic of a table, which is there when this returns.

        What Kafka's names can't hold becomes `_`, as Debezium does it.
        :raises TailraceError: `SINK_MISCONFIGURED` if two tables would share a topic, or one has a name
            that is too long; `SINK_REFUSED`, `SINK_WRITE_FAILED`.
        """
        return self._topic(f"{schema}.{table}", self._making(schema, table))

    def of_messages(self) -> str:
        """Return the topic of logical messages, likewise."""
        return self._topic("message", Making())

    def _topic(self, owner: str, making: Making) -> str:
        name = _ILLEGAL.sub("_", f"{self._prefix}.{owner}")
        known = self._owners.get(name)
        if known == owner:
            return name
        if known is not None or len(name) > NAME_CHARACTERS_MAX:
            raise TailraceError(
                Kind.SINK_MISCONFIGURED,
                f"name a topic: {name!r} is that of {known!r} too"
                if known
                else f"name a topic: {name[:60]!r}… has more than {NAME_CHARACTERS_MAX} characters",
                "leave one of the tables out, with `tables`",
                {"table": owner},
            )
        if self._create_missing:
            self._create(name, making)
        self._owners[name] = owner
        return name

    def _create(self, name: str, making: Making) -> None:
        admin = AdminClient(self._admin_settings)
        topic = NewTopic(
            name, making.partitions, making.replication_factor or -1, config=dict(making.settings)
        )
        try:
            admin.create_topics([topic])[name].result(self._timeout_s)
        except KafkaException as error:
            if error_of(error).code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise failure_of(error_of(error), "create a topic", topic=name) from error
