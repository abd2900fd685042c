"""Offsets in a compacted topic: which record is a pipeline's, and how the newest one is found.

The key is that of Kafka Connect, a JSON array of who and what: `["<group>-<pipeline>", {"task": "0"}]`.
Where several producers share the task each has an offset of its own: `{"task": "0", "producer": "1"}`.
The value is a JSON object, or null once it was reset. All records of one key are in one partition, which
this module chooses by itself, so that only that one must be read. It is a hash over the topic's count of
partitions: where somebody has added some, the offset is looked for in all of them, and its next record
goes to the new place, together with a null at the old one.
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

#: Up to where a reader sees.
_LEVELS = {
    "read_committed": IsolationLevel.READ_COMMITTED,
    "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
}
#: How often it is looked whether somebody's transaction has ended.
_LOOK_S = 0.1


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
            # An engine of that name has a head, too, which is no task's.
            return str(task) if task.isdecimal() else None
    return None


def value_of(offset: Mapping[str, Any] | None) -> bytes | None:
    """Return what is written for an offset; None, which takes it back, for none."""
    return None if offset is None else json.dumps(dict(offset), separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class History:
    """What was read of some partitions, so that it need not be read again. May be pickled.

    :param upto: by partition, the place before which everything was read.
    :param newest: by partition, the newest records of the owner's keys.
    :param isolation: as it was read; it is of no use to who reads otherwise.
    """

    upto: Mapping[int, int] = field(default_factory=dict)
    newest: Mapping[int, Mapping[bytes, CompactedRead]] = field(default_factory=dict)
    isolation: str = "read_committed"

    def with_read(self, spans: Mapping[int, range], found: ByPartition) -> History:
        """Return it with what these spans hold."""
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
    """The topic, as one owner of offsets sees it.

    :param owner: `<group>-<pipeline>`: of records of others nothing is kept.
    :param consumer: settings of a client that reads it.
    :param timeout_s: longest that a question may take.
    :param history: what another has read of it before.
    :param lenient: whether an offset that can't be trusted is taken for none, for who replaces it.
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
        #: What was read so far.
        self.history = history or History()
        self._beginning_of_keys = json.dumps([owner])[:-1].encode() + b","
        self._clients = AdminClients(admin)
        self._consumer_settings = dict(consumer)
        self._timeout_s = timeout_s
        self._lenient = lenient
        self._partitions = 0
        self._left_behind: dict[bytes, list[int]] = {}

    def require(self, *, create: bool) -> None:
        """Make sure that the topic is there and is compacted.

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
        """As `require`; but what is missing is not made: only whether it could be.

        :returns: what of it should be otherwise.
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
        """Return whether the topic is there.

        :raises TailraceError: `SINK_REFUSED`, `SINK_WRITE_FAILED`.
        """
        require_reachable(self._clients.settings, self._timeout_s)
        return self.is_there()

    def is_there(self) -> bool:
        """As `exists`, at one question: who is not let in learns that less well.

        :raises TailraceError: as `exists`.
        """
        count = self._may(("READ",))
        self._partitions = 0 if count is None else count or self._wait_for_partitions()
        return self._partitions > 0

    def _may(self, operations: Sequence[str]) -> int | None:
        attempted = "look at the offsets topic"
        return require_rights(self._clients, self.name, operations, attempted, self._timeout_s)

    def denial_of(self, topics: Sequence[str], attempted: str) -> TailraceError | None:
        """Return which of some topics may not be written, with the command that allows it; None: none."""
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
        """Return other partitions with an offset under `key`, for a null in each. They are returned once."""
        return self._left_behind.pop(key, ())

    def read(self, key: bytes, isolation: str = "read_committed") -> dict[str, Any] | None:
        """Return the newest value of `key`, as `read_each`."""
        return self.read_each([key], isolation).get(key)

    def settled(self, key: bytes, isolation: str) -> dict[str, Any] | None:
        """Return the newest value of `key` that counts now; nobody's transaction is waited for.

        :raises TailraceError: as `read_each`.
        """
        return self._values([key], lambda numbers: self._read_settled(numbers, isolation)).get(key)

    def awaits_an_end(self, key: bytes, isolation: str) -> bool:
        """Return whether `read` has to wait for the end of a transaction before the newest value of `key`.

        :raises TailraceError: as `read_each`.
        """
        ends = self._ends([self.partition(key)], IsolationLevel.READ_UNCOMMITTED)
        self._read_settled(ends, isolation)
        return bool(self._undecided([key], self._left(ends, ends)))

    def read_each(self, keys: Collection[bytes], isolation: str) -> dict[bytes, dict[str, Any]]:
        """Return the newest value of each key that has one, read up to the very end.

        A commit in progress is waited for where one of these keys is in it, or behind the beginning of it.
        Each record is read once, however often this is asked.
        :raises TailraceError: `OFFSETS_UNREADABLE` if a value is none, or may be an old one;
            `SINK_WRITE_FAILED` if the end was not reached in time.
        """
        return self._values(keys, lambda numbers: self._read_to_end(numbers, keys, isolation))

    def newest(
        self, wanted: Callable[[bytes], bool], isolation: str = "read_committed"
    ) -> dict[bytes, CompactedRead]:
        """Return the newest record of each wanted key of the owner, whatever partition it is in.

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
            # There is none, or it is where it was put when there were fewer partitions.
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
        """Return the record of `key` that counts, of those that were read."""
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
            "the offsets topic has more partitions than when this offset was written: it moves",
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
        """Read on to what is decided now."""
        if self.history.isolation != isolation:
            self.history = History(isolation=isolation)
        spans = self._left(numbers, self._ends(numbers, _LEVELS[isolation]))
        self._take_in(spans, isolation)

    def _read_to_end(self, numbers: Iterable[int], keys: Collection[bytes], isolation: str) -> None:
        """Read on until every record of `keys` that is there now is decided and read."""
        deadline = time.monotonic() + self._timeout_s
        ends = self._ends(numbers, IsolationLevel.READ_UNCOMMITTED)
        self._read_settled(numbers, isolation)
        waiting = self._undecided(keys, self._left(numbers, ends))
        while waiting:
            # A transaction is open there: ours, of an earlier attempt, or one of another pipeline.
            if time.monotonic() >= deadline:
                raise _undecided_still(self.name, min(waiting), self._timeout_s)
            time.sleep(_LOOK_S)
            self._read_settled(waiting, isolation)
            upto = self.history.upto
            waiting = {number: place for number, place in waiting.items() if upto[number] <= place}

    def _undecided(self, keys: Collection[bytes], spans: Mapping[int, range]) -> dict[int, int]:
        """Return by partition the last record of some keys in `spans`, of whomever and committed or not."""
        spans = {number: span for number, span in spans.items() if span}
        found = self._read(spans, frozenset(keys).__contains__, "read_uncommitted") if spans else {}
        return {
            number: max(record.offset for record in records.values())
            for number, records in found.items()
            if records
        }

    def _left(self, numbers: Iterable[int], ends: Mapping[int, int]) -> dict[int, range]:
        """Return what of some partitions was not read before their ends."""
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
                "it was deleted and made again, or a broker has lost its end: see who did that",
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

        return self._asked(ask, "ask where offsets begin and end")

    def _replicas(self) -> list[int]:
        """Return how many replicas each partition has, of those that are known."""

        def ask(admin: AdminClient, timeout_s: float) -> Any:
            return admin.list_topics(self.name, timeout_s).topics

        found = self._asked(ask, "look for the offsets topic").get(self.name)
        if found is None or found.error is not None:
            return []
        return [len(each.replicas) for each in found.partitions.values()]

    def _wait_for_partitions(self) -> int:
        # One that was made a moment ago is not known everywhere yet. Unknown is not empty.
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
        # Some clusters allow no segments so small, or another number of replicas.
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
        """Return what should be otherwise on a cluster of so many brokers.

        :raises TailraceError: `SINK_MISCONFIGURED` if it is not compacted.
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


def _ambiguous(topic: str, partitions: Sequence[int]) -> TailraceError:
    return TailraceError(
        Kind.OFFSETS_UNREADABLE,
        f"read offsets: partitions {', '.join(map(str, sorted(partitions)))} each have an offset of this "
        "pipeline, and which is the newest can't be known",
        "the topic was given more partitions more than once: `tailrace offsets set FILE --to …` from a place "
        "that is known to be written, or `tailrace offsets reset FILE` to write everything again",
        {"topic": topic},
    )


def _undecided_still(topic: str, partition: int, timeout_s: float) -> TailraceError:
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"read offsets: a transaction in partition {partition} that was begun before this pipeline's offset "
        f"has not ended within {timeout_s:.0f} s",
        "it ends within the transaction.timeout.ms of who began it, another pipeline perhaps; a topic of its "
        "own (offsets_topic) keeps a pipeline from waiting for others",
        {"topic": topic},
    )
