"""Topics of tables: their names, creation, numbers of partitions and size limits."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from tailrace.config.kafka import KafkaSinkConfig, TopicRule
from tailrace.config.patterns import matches_any
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.failures import error_of, failure_of
from tailrace.kafka.client.requests import AdminClients, topic_creation, topic_settings
from tailrace.kafka.client.rights import TO_WRITE, denied, is_denial, require_rights
from tailrace.waits import wait_until

log = structlog.get_logger(__name__)

NAME_CHARACTERS_MAX = 249
_ILLEGAL = re.compile(r"[^A-Za-z0-9._-]")
_POLL_S = 0.05
_ASK_S = 5.0
#: Interval between checks whether a topic's number of partitions has changed, in seconds.
_LOOK_AGAIN_S = 60.0


#: Settings of new topics that no rule matches.
_BY_DEFAULT = TopicRule(tables=("*.*",))


class Topics:
    """The topics of one sink.

    :param admin: settings of an admin client.
    :param prefix: first part of each name: `<prefix>.<schema>.<table>`.
    :param counted: numbers of partitions that are already known, by topic.
    """

    def __init__(
        self,
        config: KafkaSinkConfig,
        admin: Mapping[str, Any],
        prefix: str,
        timeout_s: float,
        counted: Mapping[str, int] | None = None,
    ) -> None:
        self._config = config
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._owners: dict[str, tuple[str, str]] = {}
        self._there: set[str] = set()
        self._partitions = dict(counted or {})
        self._looked_s: dict[str, float] = {}
        self._failed_s = -_LOOK_AGAIN_S
        self._largest: dict[str, int | None] = {}
        self._clients = AdminClients(admin)

    def of_table(self, schema: str, table: str) -> str:
        """Return the name of a table's topic, which need not exist yet.

        Characters that Kafka does not allow become `_`, as in Debezium. Tables share a topic only if a
        route says so.
        :raises TailraceError: `SINK_MISCONFIGURED` if two tables would share a topic without a route, or the
            name is too long.
        """
        owner = f"{schema}.{table}"
        for route in self._config.routes:
            if matches_any(route.tables, schema, table):
                return legal(route.topic_of(self._prefix, schema, table), owner)
        name = legal(f"{self._prefix}.{owner}", owner)
        # Not by `owner`: names may have dots.
        if (other := self._owners.setdefault(name, (schema, table))) != (schema, table):
            raise TailraceError(
                Kind.SINK_MISCONFIGURED,
                f"name a topic: {name!r} is that of {other[1]!r} in schema {other[0]!r} too",
                "leave one of the tables out, with `tables`, or give one a topic of its own, with `routes`",
                {"table": owner},
            )
        return name

    def beside(self, ending: str) -> str:
        """Return the name of a topic that belongs to no table: `<prefix>.<ending>`.

        :raises TailraceError: `SINK_MISCONFIGURED` if it is too long.
        """
        return legal(f"{self._prefix}.{ending}", ending)

    def require(self, name: str, schema: str = "", table: str = "") -> None:
        """Make sure that a topic exists and may be written; create it with `create_topics`.

        :param table: whose changes are written to it; empty: the records are not those of a table.
        :raises TailraceError: `SINK_REFUSED`; `SINK_MISCONFIGURED` if it is missing and is not to be created,
            or can't be created with its settings; `SINK_WRITE_FAILED`.
        """
        self._require_no_letters(name, schema, table)
        if name in self._there:
            return
        self.require_data(name)
        if not self._may_write(name):
            if self._config.create_topics:
                self._create(name, self._rule(schema, table))
                self._may_write(name)
            elif not self._appears(name):
                raise _missing(name)
        self._there.add(name)

    def check(self, name: str, schema: str, table: str) -> None:
        """As `require`, but only check whether a missing topic can be created.

        :raises TailraceError: `SINK_REFUSED`; `SINK_MISCONFIGURED` if it is missing and is not to be created;
            `SINK_WRITE_FAILED`.
        """
        self._require_no_letters(name, schema, table)
        self.require_data(name)
        if self._may_write(name):
            return
        if not self._config.create_topics:
            raise _missing(name)
        self._create(name, self._rule(schema, table), only_check=True)

    def require_data(self, name: str) -> None:
        """Check that a topic is not an offsets topic.

        :raises TailraceError: `SINK_MISCONFIGURED`.
        """
        if name in self._config.topics_refused:
            raise TailraceError(
                Kind.SINK_MISCONFIGURED,
                f"write records to the topic {name!r}: it holds offsets, and a record there may pass for one",
                "correct the topic in the file: in `routes`, a transformation, or the option that names it; "
                "where a row's content names it, add a `route` or `filter` behind that transformation",
                {"topic": name},
            )

    def _require_no_letters(self, name: str, schema: str, table: str) -> None:
        # A dead letter has the record's key and no value, as a tombstone has.
        if table and name == legal(self._config.dead_letter_topic, ""):
            raise TailraceError(
                Kind.SINK_MISCONFIGURED,
                f"write changes of {schema}.{table} to the topic {name!r}: it is the dead_letter_topic, and "
                "a dead letter there would pass for the delete of a row",
                "give dead_letter_topic another name, or the table another topic, with `routes`",
                {"topic": name},
            )

    def partitions(self, name: str) -> int:
        """Return a topic's number of partitions; added ones are logged, and used from the next start on.

        :raises TailraceError: `SINK_WRITE_FAILED` if it does not exist, `SINK_REFUSED`.
        """
        if name not in self._partitions:
            self._partitions[name] = self._count(name)
            self._looked_s[name] = time.monotonic()
        elif self._is_look_due(name):
            self._look_again(name)
        return self._partitions[name]

    def _is_look_due(self, name: str) -> bool:
        looked_s = max(self._looked_s.get(name, -_LOOK_AGAIN_S), self._failed_s)
        return time.monotonic() - looked_s >= _LOOK_AGAIN_S

    def _look_again(self, name: str) -> None:
        """Log if partitions were added. If the cluster does not answer, the check is given up soon."""
        self._looked_s[name] = time.monotonic()
        try:
            found = self._clients.ask(_ASK_S, lambda admin, left_s: admin.list_topics(name, left_s))
        except KafkaException:
            self._failed_s = time.monotonic()
            return
        topic, known = found.topics.get(name), self._partitions[name]
        if topic is not None and topic.partitions and len(topic.partitions) != known:
            log.warning(
                "a topic has other partitions than when it was first written to: its keys stay where they "
                "are until the sink is started again, and most move then",
                topic=name,
                partitions=known,
                now=len(topic.partitions),
            )

    @property
    def counted(self) -> dict[str, int]:
        """The numbers of partitions that are known, by topic."""
        return dict(self._partitions)

    def largest(self, name: str, *, again: bool = False) -> int | None:
        """Return a topic's maximum batch size in bytes; None if the principal may not read it.

        :param again: ask the cluster even if the size is known: it may have been changed.
        """
        if again or name not in self._largest:
            self._largest[name] = self._limit(name)
        return self._largest[name]

    def _may_write(self, name: str) -> bool:
        return require_rights(self._clients, name, TO_WRITE, "write to a topic", self._timeout_s) is not None

    def _appears(self, name: str) -> bool:
        """Return whether a missing topic now exists: brokers may create topics that a producer requests."""
        return self._described(name, "look for a topic", _ASK_S) is not None

    def _count(self, name: str) -> int:
        # A topic just created may not be known to all brokers yet.
        patience_s = self._timeout_s if self._config.create_topics else 0.0
        found = self._described(name, "ask for a topic's partitions", patience_s)
        if found is None:
            unknown = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
            raise failure_of(unknown, "ask for a topic's partitions", topic=name)
        return len(found.partitions)

    def _described(self, name: str, attempted: str, patience_s: float) -> Any:
        """Return a topic's metadata; None if brokers do not know it within `patience_s`."""

        def look() -> Any:
            known = self._clients.ask(self._timeout_s, lambda admin, left_s: admin.list_topics(name, left_s))
            found = known.topics.get(name)
            return found if found is not None and found.error is None and found.partitions else None

        try:
            return wait_until(look, patience_s, _POLL_S)
        except KafkaException as error:
            raise failure_of(error_of(error), attempted, topic=name) from error

    def _limit(self, name: str) -> int | None:
        try:
            # A topic just created may not be known to all brokers yet.
            patience_s = self._timeout_s if self._config.create_topics else _ASK_S
            return int(self._clients.ask(patience_s, topic_settings(name))["max.message.bytes"].value)
        except KafkaException as error:
            # This needs DESCRIBE_CONFIGS, which writing does not: then the broker refuses large batches.
            log.info("size limit of a topic is unknown", topic=name, why=error_of(error).name())
            return None

    def _rule(self, schema: str, table: str) -> TopicRule:
        if not table:
            return _BY_DEFAULT
        matching = (rule for rule in self._config.topics if matches_any(rule.tables, schema, table))
        return next(matching, _BY_DEFAULT)

    def _create(self, name: str, rule: TopicRule, *, only_check: bool = False) -> None:
        topic = NewTopic(name, rule.partitions, rule.replication_factor or -1, config=dict(rule.settings))
        try:
            self._clients.ask(self._timeout_s, topic_creation(topic, only_check=only_check))
        except KafkaException as error:
            if is_denial(error_of(error)):
                # Another process may have created it in the meantime.
                if not self._may_write(name):
                    raise denied(
                        self._clients.settings, "create a topic", "topic", name, ["CREATE"]
                    ) from None
            elif error_of(error).code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise failure_of(error_of(error), "create a topic", topic=name) from error


def _missing(name: str) -> TailraceError:
    return TailraceError(
        Kind.SINK_MISCONFIGURED,
        f"look for the topic {name!r}: it does not exist",
        "create it, or set create_topics: true",
        {"topic": name},
    )


def legal(name: str, owner: str) -> str:
    """Return a name with `_` for each character that Kafka does not allow.

    :param owner: the topic's table, for the error.
    :raises TailraceError: `SINK_MISCONFIGURED` if it is too long.
    """
    found = _ILLEGAL.sub("_", name)
    if len(found) > NAME_CHARACTERS_MAX:
        raise TailraceError(
            Kind.SINK_MISCONFIGURED,
            f"name a topic: {found[:60]!r}… has more than {NAME_CHARACTERS_MAX} characters",
            "leave the table out, with `tables`, or give it another topic, with `routes`",
            {"table": owner},
        )
    return found
