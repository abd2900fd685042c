"""Offsets in a compacted topic: which record is a pipeline's, and how the newest one is found.

The key is that of Kafka Connect, a JSON array of who and what: `["<group>-<pipeline>", {"task": "0"}]`.
Where several producers share the task each has an offset of its own: `{"task": "0", "producer": "1"}`.
The value is a JSON object, or null once it was reset. All records of one key are in one partition,
which this module chooses by itself, so that only that one must be read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.failures import error_of, failure_of
from tailrace.kafka.newest import Newest, newest_of
from tailrace.kafka.partitioning import partition_of
from tailrace.kafka.questions import Clients, answer
from tailrace.kafka.reach import require_reachable
from tailrace.kafka.rights import TO_KEEP_OFFSETS, denied, is_denial, require_rights

_Found = TypeVar("_Found")

#: A topic that is made here; one that exists may have more or fewer partitions.
PARTITIONS = 25


def key_of(group: str, pipeline: str, task: str) -> bytes:
    """Return the key of a task's offset."""
    return source_key(f"{group}-{pipeline}", {"task": task})


def source_key(owner: str, partition: Mapping[str, Any]) -> bytes:
    """Return the key of the offset of a source's partition; the order of its members does not matter."""
    return json.dumps([owner, dict(sorted(partition.items()))], separators=(",", ":")).encode()


def task_in(key: bytes, group: str, pipeline: str) -> str | None:
    """Return the task whose offset is kept under `key`; None: it is not one of this pipeline's."""
    try:
        found = json.loads(key)
    except ValueError:
        return None
    match found:
        case [owner, {"task": str(task), **others}] if owner == f"{group}-{pipeline}" and not others:
            return str(task)
    return None


def value_of(offset: Mapping[str, Any] | None) -> bytes | None:
    """Return what is written for an offset; None, which takes it back, for none."""
    return None if offset is None else json.dumps(dict(offset), separators=(",", ":")).encode()


def member_key_of(group: str, pipeline: str, task: str, number: int) -> bytes:
    """Return the key of the offset of one of several producers that share a task."""
    return source_key(f"{group}-{pipeline}", {"task": task, "producer": str(number)})


class OffsetsTopic:
    """The topic, as one task sees it.

    :param consumer: settings of a client that reads it.
    :param timeout_s: longest that a question may take.
    """

    def __init__(
        self, name: str, admin: Mapping[str, Any], consumer: Mapping[str, Any], timeout_s: float
    ) -> None:
        self.name = name
        self._clients = Clients(admin)
        self._consumer_settings = dict(consumer)
        self._timeout_s = timeout_s
        self._partitions = 0

    def require(self, *, create: bool) -> None:
        """Make sure that the topic is there and is compacted.

        :raises TailraceError: `SINK_MISCONFIGURED` if it is not; `SINK_REFUSED`, `SINK_WRITE_FAILED`.
        """
        require_reachable(self._clients.settings, self._timeout_s)
        is_there = self._may(TO_KEEP_OFFSETS) is not None
        if not is_there:
            if not create:
                raise self._missing()
            self._create()
        self._partitions = self._wait_for_partitions()
        self._require_compaction()
        if not is_there:
            self._may(TO_KEEP_OFFSETS)

    def check(self, *, create: bool) -> None:
        """As `require`; but what is missing is not made: only whether it could be.

        :raises TailraceError: as `require`.
        """
        require_reachable(self._clients.settings, self._timeout_s)
        if self._may(TO_KEEP_OFFSETS) is not None:
            self._require_compaction()
        elif not create:
            raise self._missing()
        else:
            self._create(only_check=True)

    def _missing(self) -> TailraceError:
        return TailraceError(
            Kind.SINK_MISCONFIGURED,
            f"look for the offsets topic {self.name!r}: it does not exist",
            "create it with cleanup.policy=compact, or set create_topics: true",
            {"topic": self.name},
        )

    def exists(self) -> bool:
        """Tell whether the topic is there.

        :raises TailraceError: `SINK_REFUSED`, `SINK_WRITE_FAILED`.
        """
        require_reachable(self._clients.settings, self._timeout_s)
        return self.is_there()

    def is_there(self) -> bool:
        """As `exists`, at one question: who is not let in learns that less well.

        :raises TailraceError: as `exists`.
        """
        told = self._may(("READ",))
        self._partitions = 0 if told is None else told or self._wait_for_partitions()
        return self._partitions > 0

    def _may(self, operations: Sequence[str]) -> int | None:
        attempted = "look at the offsets topic"
        return require_rights(self._clients, self.name, operations, attempted, self._timeout_s)

    def partition(self, key: bytes) -> int:
        """Return the partition of `key`; after `require`, `exists` or `is_there`."""
        return partition_of(key, self._partitions)

    def read(self, key: bytes, isolation: str = "read_committed") -> dict[str, Any] | None:
        """Return the newest value of `key`, read up to the very end of its partition.

        A commit in progress there is waited for: the end is that of all records, not only of those
        that a reader of committed ones can see now.
        :raises TailraceError: `OFFSETS_UNREADABLE` if the end was not reached in time, or a value is none.
        """
        found = self._newest([self.partition(key)], key.__eq__, isolation).get(key)
        return None if found is None else parsed(found.value, self.name)

    def settled(self, key: bytes) -> dict[str, Any] | None:
        """Return the newest value of `key` that is committed now; nobody's transaction is waited for.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        spans = self._spans([self.partition(key)], IsolationLevel.READ_COMMITTED)
        found = self._read(spans, key.__eq__, "read_committed").get(key)
        return None if found is None else parsed(found.value, self.name)

    def read_each(self, keys: Collection[bytes], isolation: str) -> dict[bytes, dict[str, Any]]:
        """Return the newest value of each key that has one; as `read`.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        partitions = sorted({self.partition(key) for key in keys})
        newest = self._newest(partitions, frozenset(keys).__contains__, isolation)
        values = {key: parsed(found.value, self.name) for key, found in newest.items()}
        return {key: value for key, value in values.items() if value is not None}

    def newest(
        self, wanted: Callable[[bytes], bool], isolation: str = "read_committed"
    ) -> dict[bytes, Newest]:
        """Return the newest record of each wanted key, whatever partition it is in; as `read`.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        return self._newest(range(self._partitions), wanted, isolation)

    def _newest(
        self, partitions: Sequence[int], wanted: Callable[[bytes], bool], isolation: str
    ) -> dict[bytes, Newest]:
        return self._read(self._spans(partitions, IsolationLevel.READ_UNCOMMITTED), wanted, isolation)

    def _read(
        self, spans: Mapping[int, range], wanted: Callable[[bytes], bool], isolation: str
    ) -> dict[bytes, Newest]:
        settings = {**self._consumer_settings, "isolation.level": isolation}
        try:
            return newest_of(settings, self.name, spans, wanted, self._timeout_s)
        except KafkaException as error:
            raise failure_of(error_of(error), "read offsets", topic=self.name) from error

    def _spans(self, partitions: Sequence[int], isolation: IsolationLevel) -> dict[int, range]:
        # The ends last: what is there when this is called is before them.
        starts = self._bounds(partitions, OffsetSpec.earliest(), isolation)  # type: ignore[no-untyped-call]
        ends = self._bounds(partitions, OffsetSpec.latest(), isolation)  # type: ignore[no-untyped-call]
        return {number: range(start, ends[number]) for number, start in starts.items()}

    def _bounds(
        self, partitions: Sequence[int], spec: OffsetSpec, isolation: IsolationLevel
    ) -> dict[int, int]:
        where = {TopicPartition(self.name, number): spec for number in partitions}

        def ask(admin: AdminClient, timeout_s: float) -> dict[int, int]:
            every = admin.list_offsets(where, isolation_level=isolation, request_timeout=timeout_s)
            return {place.partition: int(answer(end, timeout_s).offset) for place, end in every.items()}

        return self._asked(ask, "ask where offsets begin and end")

    def _count(self) -> int:
        def ask(admin: AdminClient, timeout_s: float) -> Any:
            return admin.list_topics(self.name, timeout_s).topics

        found = self._asked(ask, "look for the offsets topic").get(self.name)
        return 0 if found is None or found.error is not None else len(found.partitions)

    def _wait_for_partitions(self) -> int:
        # One that was made a moment ago is not known everywhere yet. Unknown is not empty.
        deadline = time.monotonic() + self._timeout_s
        while not (count := self._count()):
            if time.monotonic() >= deadline:
                raise TailraceError(
                    Kind.SINK_WRITE_FAILED,
                    f"look at the offsets topic {self.name!r}: its partitions were not told within "
                    f"{self._timeout_s:.0f} s",
                    "see whether all brokers are up",
                    {"topic": self.name},
                )
            time.sleep(0.05)
        return count

    def _create(self, *, only_check: bool = False) -> None:
        topic = NewTopic(self.name, PARTITIONS, config={"cleanup.policy": "compact"})

        def ask(admin: AdminClient, timeout_s: float) -> None:
            asked = admin.create_topics([topic], validate_only=only_check, request_timeout=timeout_s)
            answer(asked[self.name], timeout_s)

        try:
            self._clients.ask(self._timeout_s, ask)
        except KafkaException as error:
            if is_denial(error_of(error)):
                attempted = "create the offsets topic"
                raise denied(self._clients.settings, attempted, "topic", self.name, ["CREATE"]) from None
            if error_of(error).code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise failure_of(error_of(error), "create the offsets topic", topic=self.name) from error

    def _require_compaction(self) -> None:
        resource = ConfigResource(ResourceType.TOPIC, self.name)

        def ask(admin: AdminClient, timeout_s: float) -> Any:
            asked = admin.describe_configs([resource], request_timeout=timeout_s)
            return answer(asked[resource], timeout_s)

        settings = self._asked(ask, "look at the offsets topic")
        policy = settings["cleanup.policy"].value
        if policy != "compact":
            raise TailraceError(
                Kind.SINK_MISCONFIGURED,
                f"look at the offsets topic {self.name!r}: its cleanup.policy is {policy!r}, so that offsets "
                "would be deleted with time",
                f"kafka-configs.sh --alter --entity-type topics --entity-name {self.name} "
                "--add-config cleanup.policy=compact",
                {"topic": self.name},
            )

    def _asked(self, question: Callable[[AdminClient, float], _Found], attempted: str) -> _Found:
        # A topic that was made a moment ago is not known everywhere yet.
        try:
            return self._clients.ask(self._timeout_s, question)
        except KafkaException as error:
            raise failure_of(error_of(error), attempted, topic=self.name) from error


def parsed(value: bytes | None, topic: str) -> dict[str, Any] | None:
    """Return the offset that a value says; None for one that was taken back.

    :raises TailraceError: `OFFSETS_UNREADABLE` if it is no JSON object.
    """
    if value is None:
        return None
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TailraceError(
            Kind.OFFSETS_UNREADABLE,
            "read offsets: what was written under this pipeline's key is no JSON object",
            "another program writes to the topic: give offsets_topic a name of its own",
            {"topic": topic},
        )
    return found
