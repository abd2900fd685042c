"""The join as a connector of the engine: data topics with the topic of their transactions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from pydantic import ValidationError

from tailrace.config.converters import problems_of
from tailrace.config.kafka_clients import client_settings
from tailrace.engine.contracts import ConnectorContext, Metrics, Settings, SourceTask, TaskContext
from tailrace.errors import Kind, TailraceError
from tailrace.join.avro import DebeziumAvro
from tailrace.join.extraction import DebeziumJson, Extraction, JsonFields
from tailrace.join.flow import FlowProgress, JoinFlow, data_partitions
from tailrace.join.merge import Position
from tailrace.join.messages import ANSWER_S, MessageReader, Place
from tailrace.join.options import JoinedTopics, KafkaJoinOptions
from tailrace.join.partition import offset_of, position_of
from tailrace.kafka.client import settings as client_options
from tailrace.kafka.client.requests import require_reachable
from tailrace.records.batch import Batch, Offset, Partition

log = structlog.get_logger(__name__)

#: Intervals in seconds: of listing new partitions, and of requesting the ends of partitions without messages.
_LOOK_S = 30.0
_PASS_S = 1.0
#: Longest wait of a read for the first message, in seconds, so that a stop is noticed.
_READ_S = 0.1
#: Extractions that use no message times, whose conversion takes a tenth of the time of reading a message.
_WITHOUT_TIMES = frozenset({DebeziumJson, DebeziumAvro, JsonFields})


class KafkaJoin:
    """A connector that joins changes in Kafka with their transactions, without a state store.

    Each partition of the data topics is a partition of the engine; its offset has both sides' positions.
    A record has the key and value of the data message as bytes, and the transaction's values as a header.

    :param extraction: for topics that are not Debezium's JSON. Tasks in this process share it.
    :param options: those of `KafkaJoinOptions`; they override the engine's `settings`.
    """

    def __init__(self, extraction: Extraction | None = None, **options: Any) -> None:
        self._extraction = extraction
        self._given = options
        self._options: KafkaJoinOptions | None = None
        self._partitions: dict[str, int] = {}

    def start(self, context: ConnectorContext) -> None:
        """Check the settings and the topics."""
        self._options = options = options_of({**context.settings, **self._given})
        reader = reader_of(options)
        try:
            self._partitions = data_partitions(options, reader)
        finally:
            reader.close()

    def task_settings(self, tasks_max: int) -> Sequence[Settings]:
        """Return for each task its number and the number of tasks, which determine its partitions."""
        tasks = min(tasks_max, sum(self._partitions.values()))
        return [{"task": task, "tasks": tasks} for task in range(tasks)]

    def create_task(self) -> SourceTask:
        """Return a task, not started."""
        options = self._options
        assert options is not None, "the connector has started"
        return KafkaJoinTask(options, self._extraction or extraction_of(options))

    def stop(self) -> None:
        """Do nothing: only tasks have connections."""


def extraction_of(form: JoinedTopics) -> Extraction:
    """Return the extraction from Debezium's topics, in JSON or Avro, or from other JSON."""
    if form.registry is not None:
        return DebeziumAvro(form.registry)
    if form.fields is not None:
        data, one = form.fields.data, form.fields.transactions
        return JsonFields(data.key, one.key, data.order, one.order, one.count, one.time_ms)
    if form.expressions is not None:
        from tailrace.join.computed import ComputedFields  # loads DuckDB

        return ComputedFields(form.expressions.data.model_dump(), form.expressions.transactions.model_dump())
    return DebeziumJson()


def options_of(given: Mapping[str, Any]) -> KafkaJoinOptions:
    """Return the options.

    :raises TailraceError: `CONFIG_INVALID`, with all that is wrong.
    """
    try:
        return KafkaJoinOptions.model_validate(dict(given))
    except ValidationError as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"join topics of Kafka: {problems_of(error, KafkaJoinOptions)}",
            f"its options are {', '.join(KafkaJoinOptions.model_fields)}",
        ) from None


def reader_of(options: JoinedTopics, extraction: Extraction | None = None) -> MessageReader:
    """Return a reader of the cluster, which answers.

    :param extraction: what looks at the messages, if that is known: they have times unless it needs none.
    :raises TailraceError: `SINK_REFUSED`, `SINK_WRITE_FAILED`, as for every client of Kafka.
    """
    common = client_options.client(
        options.bootstrap_servers, client_settings(options.options), round(ANSWER_S * 1000)
    )
    require_reachable(client_options.admin(common), ANSWER_S)
    return MessageReader(
        client_options.consumer(common, "read_committed"),
        client_options.admin(common),
        with_times=type(extraction) not in _WITHOUT_TIMES,
    )


class KafkaJoinTask:
    """A task that reads its share of the data partitions, and the transaction topic once for all of them."""

    def __init__(self, options: KafkaJoinOptions, extraction: Extraction) -> None:
        self._options, self._extraction = options, extraction
        self._opened: MessageReader | None = None
        self._ready: list[Batch] = []
        self._turn = 0
        self._moved: set[Place] = set()  # partitions with joined records since transactions were last passed
        self._looked_s = self._passed_s = 0.0

    def start(self, context: TaskContext) -> None:
        """Connect, and continue at the positions of each partition."""
        self._context = context
        self._task, self._tasks = int(context.settings["task"]), int(context.settings["tasks"])
        self._opened = reader_of(self._options, self._extraction)
        self._flow = JoinFlow(self._options, self._extraction, self._reader)
        mine = self._share()
        self._flow.begin(self._committed(mine))
        self._numbers = _Numbers(context.metrics)
        self._numbers.show(FlowProgress())
        self._looked_s = self._passed_s = time.monotonic()

    def poll(self, timeout_s: float) -> Batch | None:
        """Return the next joined records of one partition."""
        until_s = time.monotonic() + timeout_s
        while not self._ready:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self._context.stopping.is_set():
                return None
            self._look()
            self._flow.read(min(left_s, _READ_S))
            self._join()
        return self._ready.pop(0)

    @property
    def errors(self) -> Sequence[TailraceError]:
        """The client's errors while it can't read; it reconnects by itself."""
        return [
            TailraceError(Kind.SOURCE_UNREACHABLE, f"read from Kafka: {said}")
            for said in (self._opened.errors if self._opened is not None else ())
        ]

    def commit(self, partition: Partition, offset: Offset) -> None:
        """Do nothing: offsets are not committed to the cluster."""

    def stop(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            self._opened.close()

    @property
    def _reader(self) -> MessageReader:
        assert self._opened is not None, "the task has started"
        return self._opened

    def _share(self) -> list[Place]:
        # Returns the partitions of this task, which stay the same when topics get more partitions.
        first = {topic: place for place, topic in enumerate(self._options.data)}
        return [
            place for place in self._flow.places() if (first[place[0]] + place[1]) % self._tasks == self._task
        ]

    def _committed(self, places: Sequence[Place]) -> dict[Place, Position | None]:
        names = [{"topic": topic, "partition": str(number)} for topic, number in places]
        found = self._context.offsets.read(names)
        return {
            place: position_of(found[number]) if number in found else None
            for number, place in enumerate(places)
        }

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        new = self._flow.look_for_partitions(self._share, lambda place: self._committed([place])[place])
        if new:
            log.info("partitions were added", topics=sorted({topic for topic, _ in new}), count=len(new))

    def _join(self) -> None:
        flow, window = self._flow, self._flow.window
        if window is None:
            return
        places = list(flow.partitions)
        for step in range(len(places)):
            place = places[(self._turn + step) % len(places)]
            if taken := flow.partitions[place].take(window, self._context.batch_records_max):
                self._ready += taken
                self._moved.add(place)
            flow.hold_or_read_on(place)
        self._turn += 1
        now_s = time.monotonic()
        if now_s >= self._passed_s + _PASS_S or flow.is_held:
            self._passed_s = now_s
            self._numbers.show(flow.progress())
            # Brokers are asked about partitions without records: others pass transactions with their records.
            # These may have no transaction, as in a snapshot: all are asked about once that topic is paused.
            asked = [place for place in places if flow.is_held or place not in self._moved]
            self._moved.clear()
            # A batch without records says, as a written offset does not, that no transaction is open.
            for place in flow.pass_transactions(asked):
                partition = flow.partitions[place]
                end = offset_of(partition.merge.position)
                self._ready.append(Batch(partition.name, (), 0, (), end))
        flow.forget()


class _Numbers:
    # The flow's numbers as metrics of the engine.
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counted = 0

    def show(self, found: FlowProgress) -> None:
        """Update the metrics."""
        for number in found.numbers():
            if number.rises:
                self._metrics.counter(number.name, number.description).inc(number.value - self._counted)
                self._counted = number.value
            else:
                self._metrics.gauge(number.name, number.description).set(number.value)
