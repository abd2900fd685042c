"""Offsets in a compacted topic: their keys and values, and reading the newest one of a key.

The key is that of Kafka Connect, a JSON array of owner and partition: `["<group>-<name>", {"task": "0"}]`.
If several producers share the task, each has an offset of its own: `{"task": "0", "producer": "1"}`.
The value is a JSON object, or null after a reset. All records of a key are in one partition, which this
module computes from the key and the topic's number of partitions, so that only that partition is read.
If partitions were added to the topic, all of them are searched for the offset, and its next record goes to
the new partition, together with a null in the old one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
    OffsetSpec,
)

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.failures import error_of, failure_of, is_unfit
from tailrace.kafka.client.requests import (
    AdminClients,
    answer,
    require_reachable,
    topic_creation,
    topic_settings,
)
from tailrace.kafka.client.rights import TO_KEEP_OFFSETS, TO_WRITE, denied, is_denial, require_rights
from tailrace.kafka.offsets import compaction
from tailrace.kafka.offsets.compacted_read import ByPartition, CompactedRead, newer, newest_of
from tailrace.kafka.producer.partitioner import partition_of
from tailrace.waits import wait_until

log = structlog.get_logger(__name__)

_Found = TypeVar("_Found")

#: The client's isolation levels by their names in settings.
_LEVELS = {
    "read_committed": IsolationLevel.READ_COMMITTED,
    "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
}
#: Interval between checks whether another producer's transaction has ended, in seconds.
_LOOK_S = 0.1


def source_key(owner: str, partition: Mapping[str, Any]) -> bytes:
    """Return the key of the offset of a source's partition; the order of its members does not matter."""
    return json.dumps([owner, dict(sorted(partition.items()))], separators=(",", ":")).encode()


def task_in(key: bytes, group: str, pipeline: str) -> str | None:
    """Return the task whose offset has the key `key`; None: it is not a task of this pipeline."""
    try:
        found = json.loads(key)
    except ValueError:
        return None
    match found:
        case [owner, {"task": str(task), **others}] if owner == f"{group}-{pipeline}" and not others:
            # An engine of that name has a head, too, which does not belong to a pipeline's task.
            return str(task) if task.isdecimal() else None
    return None


def value_of(offset: Mapping[str, Any] | None) -> bytes | None:
    """Return the record value of an offset; for None, None: a tombstone that deletes it."""
    return None if offset is None else json.dumps(dict(offset), separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class History:
    """The newest records already read from some partitions, so that none is read again. Can be pickled.

    :param upto: by partition, the record offset before which everything was read.
    :param newest: by partition, the newest records of the owner's keys.
    :param isolation: isolation level of the reads; a history can't be used at another level.
    """

    upto: Mapping[int, int] = field(default_factory=dict)
    newest: Mapping[int, Mapping[bytes, CompactedRead]] = field(default_factory=dict)
    isolation: str = "read_committed"

    def with_read(self, spans: Mapping[int, range], found: ByPartition) -> History:
        """Return the history extended by the records found in these spans."""
        newest = {number: dict(records) for number, records in self.newest.items()}
        for number, records in found.items():
            known = newest.setdefault(number, {})
            known |= {key: newer(known.get(key), record) for key, record in records.items()}
        upto = {number: max(span.start, span.stop) for number, span in spans.items()}
        return History({**self.upto, **upto}, newest, self.isolation)

    def places_of(self, key: bytes) -> list[CompactedRead]:
        """Return the newest record of a key in each partition that has one."""
        return [records[key] for records in self.newest.values() if key in records]


class OffsetsTopic:
    """The offsets topic, for one owner of offsets.

    :param owner: `<group>-<pipeline>`; other owners' records are ignored.
    :param consumer: settings of the consumer that reads the topic.
    :param timeout_s: timeout of a request.
    :param history: what another object has already read of the topic.
    :param lenient: whether an unreadable offset counts as missing, for a caller that replaces it.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        admin: Mapping[str, Any],
        consumer: Mapping[str, Any],
        timeout_s: float,
        *,
        history: History | None = None,
        lenient: bool = False,
    ) -> None:
        self.name = name
        #: What has been read so far.
        self.history = history or History()
        self._beginning_of_keys = json.dumps([owner])[:-1].encode() + b","
        self._clients = AdminClients(admin)
        self._consumer_settings = dict(consumer)
        self._timeout_s = timeout_s
        self._lenient = lenient
        self._partitions = 0
        self._left_behind: dict[bytes, list[int]] = {}

    def require(self, *, create: bool) -> None:
        """Make sure that the topic exists and is compacted.

        :param create: whether a missing topic is created.
        :raises TailraceError: `SINK_MISCONFIGURED` if it is not; `SINK_REFUSED`, `SINK_WRITE_FAILED`.
        """
        brokers = require_reachable(self._clients.settings, self._timeout_s)
        is_there = self._may(TO_KEEP_OFFSETS) is not None
        if not is_there:
            if not create:
                raise self._missing()
            self._create(brokers)
        self._partitions = self._wait_for_partitions()
        for concern in self._concerns(brokers):
            log.warning(concern.message, topic=self.name, hint=concern.hint)
        if not is_there:
            self._may(TO_KEEP_OFFSETS)

    def check(self, *, create: bool) -> Sequence[compaction.TopicWarning]:
        """As `require`, but only check whether a missing topic can be created.

        :returns: warnings about the topic's settings.
        :raises TailraceError: as `require`.
        """
        brokers = require_reachable(self._clients.settings, self._timeout_s)
        if self._may(TO_KEEP_OFFSETS) is not None:
            return self._concerns(brokers)
        if not create:
            raise self._missing()
        self._create(brokers, only_check=True)
        return ()

    def _missing(self) -> TailraceError:
        return TailraceError(
            Kind.SINK_MISCONFIGURED,
            f"look for the offsets topic {self.name!r}: it does not exist",
            "create it with cleanup.policy=compact, or set create_topics: true",
            {"topic": self.name},
        )

    def exists(self) -> bool:
        """Return whether the topic exists.

        :raises TailraceError: `SINK_REFUSED`, `SINK_WRITE_FAILED`.
        """
        require_reachable(self._clients.settings, self._timeout_s)
        return self.is_there()

    def is_there(self) -> bool:
        """As `exists`, with a single request; its errors for refused credentials are less clear.

        :raises TailraceError: as `exists`.
        """
        count = self._may(("READ",))
        self._partitions = 0 if count is None else count or self._wait_for_partitions()
        return self._partitions > 0

    def _may(self, operations: Sequence[str]) -> int | None:
        attempted = "look at the offsets topic"
        return require_rights(self._clients, self.name, operations, attempted, self._timeout_s)

    def denial_of(self, topics: Sequence[str], attempted: str) -> TailraceError | None:
        """Return the error of the first topic that may not be written; None: all may be."""
        for topic in topics:
            try:
                require_rights(self._clients, topic, TO_WRITE, attempted, self._timeout_s)
            except TailraceError as error:
                return error
        return None

    def partition(self, key: bytes) -> int:
        """Return the partition of `key`; after `require`, `exists` or `is_there`."""
        return partition_of(key, self._partitions)

    def left_behind(self, key: bytes) -> Sequence[int]:
        """Return the other partitions with an offset of `key`, for a null in each. They are returned once."""
        return self._left_behind.pop(key, ())

    def read(self, key: bytes, isolation: str = "read_committed") -> dict[str, Any] | None:
        """Return the newest value of `key`, as `read_each`."""
        return self.read_each([key], isolation).get(key)

    def settled(self, key: bytes, isolation: str) -> dict[str, Any] | None:
        """Return the newest committed value of `key`, without waiting for open transactions.

        :raises TailraceError: as `read_each`.
        """
        return self._values([key], lambda numbers: self._read_settled(numbers, isolation)).get(key)

    def awaits_an_end(self, key: bytes, isolation: str) -> bool:
        """Return whether `read` would wait for a transaction to end before it has the newest value of `key`.

        :raises TailraceError: as `read_each`.
        """
        ends = self._ends([self.partition(key)], IsolationLevel.READ_UNCOMMITTED)
        self._read_settled(ends, isolation)
        return bool(self._undecided([key], self._left(ends, ends)))

    def read_each(self, keys: Collection[bytes], isolation: str) -> dict[bytes, dict[str, Any]]:
        """Return the newest value of each key that has one, read up to the end of the topic.

        Waits for a transaction in progress if it contains one of these keys, or began before a record of one.
        Each record is read only once, however often this is called.
        :raises TailraceError: `OFFSETS_UNREADABLE` if a value is not an offset, or may be outdated;
            `SINK_WRITE_FAILED` if the end was not reached in time.
        """
        return self._values(keys, lambda numbers: self._read_to_end(numbers, keys, isolation))

    def newest(
        self, wanted: Callable[[bytes], bool], isolation: str = "read_committed"
    ) -> dict[bytes, CompactedRead]:
        """Return the newest record of each wanted key of the owner, in whichever partition.

        :raises TailraceError: as `read_each`.
        """
        every = range(self._partitions)
        self._read_settled(every, isolation)
        keys = {key for records in self.history.newest.values() for key in records if wanted(key)}
        self._read_to_end(every, keys, isolation)
        found = {key: self._counting(key) for key in keys}
        return {key: record for key, record in found.items() if record is not None}

    def _values(
        self, keys: Collection[bytes], read: Callable[[Iterable[int]], None]
    ) -> dict[bytes, dict[str, Any]]:
        read({self.partition(key) for key in keys})
        if self._lenient or not all(self._is_at_home(key) for key in keys):
            # There is no offset, or it is in the partition of a time with fewer partitions.
            read(range(self._partitions))
        found: dict[bytes, dict[str, Any]] = {}
        for key in keys:
            record = self._counting(key)
            value = None if record is None else self._parsed(record.value)
            if value is not None:
                found[key] = value
        return found

    def _is_at_home(self, key: bytes) -> bool:
        found = self.history.newest.get(self.partition(key), {}).get(key)
        return found is not None and found.value is not None

    def _counting(self, key: bytes) -> CompactedRead | None:
        """Return the record of `key` that is valid, among those that were read."""
        home, places = self.partition(key), self.history.places_of(key)
        at_home = next((record for record in places if record.partition == home), None)
        others = [record for record in places if record is not at_home and record.value is not None]
        self._left_behind[key] = [record.partition for record in others]
        if not others or self._is_at_home(key):
            return at_home
        if len(others) > 1 and not self._lenient:
            raise _ambiguous(self.name, [record.partition for record in others])
        counts = max(others, key=lambda record: record.time_us or 0)
        log.warning(
            "the offsets topic has more partitions than when this offset was written: the offset moves",
            topic=self.name,
            partition=counts.partition,
            to=home,
        )
        return counts

    def _parsed(self, value: bytes | None) -> dict[str, Any] | None:
        try:
            return parsed(value, self.name)
        except TailraceError:
            if not self._lenient:
                raise
            return None

    def _read_settled(self, numbers: Iterable[int], isolation: str) -> None:
        """Read up to the first open transaction, or the end (`read_uncommitted`: always to the end)."""
        if self.history.isolation != isolation:
            self.history = History(isolation=isolation)
        spans = self._left(numbers, self._ends(numbers, _LEVELS[isolation]))
        self._take_in(spans, isolation)

    def _read_to_end(self, numbers: Iterable[int], keys: Collection[bytes], isolation: str) -> None:
        """Read until every present record of `keys` is read and its transaction has ended."""
        deadline = time.monotonic() + self._timeout_s
        ends = self._ends(numbers, IsolationLevel.READ_UNCOMMITTED)
        self._read_settled(numbers, isolation)
        waiting = self._undecided(keys, self._left(numbers, ends))
        while waiting:
            # A transaction is open there: that of an earlier attempt, or of another pipeline.
            if time.monotonic() >= deadline:
                raise _undecided_still(self.name, min(waiting), self._timeout_s)
            time.sleep(_LOOK_S)
            self._read_settled(waiting, isolation)
            upto = self.history.upto
            waiting = {number: place for number, place in waiting.items() if upto[number] <= place}

    def _undecided(self, keys: Collection[bytes], spans: Mapping[int, range]) -> dict[int, int]:
        """Return by partition the offset of the last record of `keys` in `spans`, committed or not."""
        spans = {number: span for number, span in spans.items() if span}
        found = self._read(spans, frozenset(keys).__contains__, "read_uncommitted") if spans else {}
        return {
            number: max(record.offset for record in records.values())
            for number, records in found.items()
            if records
        }

    def _left(self, numbers: Iterable[int], ends: Mapping[int, int]) -> dict[int, range]:
        """Return by partition the span before its end that has not been read."""
        upto = dict(self.history.upto)
        unknown = [number for number in numbers if number not in upto]
        if unknown:
            upto |= self._bounds(unknown, OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)  # type: ignore[no-untyped-call]
        return {number: range(upto[number], ends[number]) for number in numbers}

    def _take_in(self, spans: Mapping[int, range], isolation: str) -> None:
        found = self._read(spans, self._is_owned, isolation)
        self.history = self.history.with_read(spans, found)

    def _is_owned(self, key: bytes) -> bool:
        return key.startswith(self._beginning_of_keys)

    def _read(
        self, spans: Mapping[int, range], wanted: Callable[[bytes], bool], isolation: str
    ) -> ByPartition:
        settings = {**self._consumer_settings, "isolation.level": isolation}
        try:
            return newest_of(settings, self.name, spans, wanted, self._timeout_s)
        except KafkaException as error:
            raise failure_of(error_of(error), "read offsets", topic=self.name) from error

    def _ends(self, numbers: Iterable[int], isolation: IsolationLevel) -> dict[int, int]:
        found = self._bounds(list(numbers), OffsetSpec.latest(), isolation)  # type: ignore[no-untyped-call]
        every = isolation == IsolationLevel.READ_UNCOMMITTED
        if every and any(end < self.history.upto.get(number, 0) for number, end in found.items()):
            raise TailraceError(
                Kind.SINK_WRITE_FAILED,
                f"read offsets: the topic {self.name!r} has fewer records than it had",
                "it was deleted and created again, or a broker lost its last records: find out which",
                {"topic": self.name},
            )
        return found

    def _bounds(
        self, partitions: Sequence[int], spec: OffsetSpec, isolation: IsolationLevel
    ) -> dict[int, int]:
        where = {TopicPartition(self.name, number): spec for number in partitions}

        def ask(admin: AdminClient, timeout_s: float) -> dict[int, int]:
            every = admin.list_offsets(where, isolation_level=isolation, request_timeout=timeout_s)
            return {place.partition: int(answer(end, timeout_s).offset) for place, end in every.items()}

        return self._asked(ask, "look up the first and last offsets")

    def _replicas(self) -> list[int]:
        """Return the number of replicas of each partition; empty: the brokers do not know the topic."""

        def ask(admin: AdminClient, timeout_s: float) -> Any:
            return admin.list_topics(self.name, timeout_s).topics

        found = self._asked(ask, "look for the offsets topic").get(self.name)
        if found is None or found.error is not None:
            return []
        return [len(each.replicas) for each in found.partitions.values()]

    def _wait_for_partitions(self) -> int:
        # A topic just created is not known to all brokers yet. Unknown does not mean that it is empty.
        replicas = wait_until(self._replicas, self._timeout_s, 0.05)
        if not replicas:
            raise TailraceError(
                Kind.SINK_WRITE_FAILED,
                f"look at the offsets topic {self.name!r}: its partitions were not known within "
                f"{self._timeout_s:.0f} s",
                "see whether all brokers are up",
                {"topic": self.name},
            )
        return len(replicas)

    def _create(self, brokers: int, *, only_check: bool = False) -> None:
        replicas = compaction.replicas_of(brokers)
        wanted = NewTopic(self.name, compaction.PARTITIONS, replicas, config=compaction.settings_of(replicas))
        # Some clusters refuse such small segments, or this number of replicas.
        simple = NewTopic(self.name, compaction.PARTITIONS, -1, config=compaction.COMPACTED)
        try:
            try:
                self._clients.ask(self._timeout_s, topic_creation(wanted, only_check=only_check))
            except KafkaException as error:
                if not is_unfit(error_of(error)):
                    raise
                self._clients.ask(self._timeout_s, topic_creation(simple, only_check=only_check))
        except KafkaException as error:
            if is_denial(error_of(error)):
                attempted = "create the offsets topic"
                raise denied(self._clients.settings, attempted, "topic", self.name, ["CREATE"]) from None
            if error_of(error).code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise failure_of(error_of(error), "create the offsets topic", topic=self.name) from error

    def _concerns(self, brokers: int) -> list[compaction.TopicWarning]:
        """Return warnings about the topic's settings on a cluster with this number of brokers.

        :raises TailraceError: `SINK_MISCONFIGURED` if the topic is not compacted.
        """
        found = self._asked(topic_settings(self.name), "look at the offsets topic")
        settings = {name: entry.value for name, entry in found.items() if entry.value is not None}
        bootstrap = str(self._clients.settings["bootstrap.servers"])
        if (policy := settings["cleanup.policy"]) != "compact":
            raise TailraceError(
                Kind.SINK_MISCONFIGURED,
                f"look at the offsets topic {self.name!r}: its cleanup.policy is {policy!r}, so that offsets "
                "would be deleted with time",
                compaction.command_for(bootstrap, self.name, compaction.COMPACTED),
                {"topic": self.name},
            )
        replicas = min(self._replicas(), default=brokers)
        return compaction.concerns_of(self.name, bootstrap, settings, replicas, brokers)

    def _asked(self, question: Callable[[AdminClient, float], _Found], attempted: str) -> _Found:
        # A topic just created is not known to all brokers yet.
        try:
            return self._clients.ask(self._timeout_s, question)
        except KafkaException as error:
            raise failure_of(error_of(error), attempted, topic=self.name) from error


def parsed(value: bytes | None, topic: str) -> dict[str, Any] | None:
    """Return the offset in a record's value; None for a tombstone.

    :raises TailraceError: `OFFSETS_UNREADABLE` if it is not a JSON object.
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
            "read offsets: the value of this pipeline's key is not a JSON object",
            "another program writes to the topic: give offsets_topic a name of its own",
            {"topic": topic},
        )
    return found


def _ambiguous(topic: str, partitions: Sequence[int]) -> TailraceError:
    return TailraceError(
        Kind.OFFSETS_UNREADABLE,
        f"read offsets: partitions {', '.join(map(str, sorted(partitions)))} each have an offset of this "
        "pipeline, and the newest can't be determined",
        "partitions were added to the topic more than once: `tailrace offsets set FILE --sink NAME --to …` "
        "from a place that is known to be written, or `tailrace offsets reset FILE --sink NAME` to write "
        "everything again; for an engine's own offset, --engine in place of --sink NAME",
        {"topic": topic},
    )


def _undecided_still(topic: str, partition: int, timeout_s: float) -> TailraceError:
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"read offsets: a transaction in partition {partition} that was begun before this pipeline's offset "
        f"has not ended within {timeout_s:.0f} s",
        "it ends within its producer's transaction.timeout.ms; the producer may belong to another pipeline: "
        "a pipeline with its own topic (offsets_topic) does not wait for others",
        {"topic": topic},
    )
