"""The section `engine`: tasks, record processing and commits.

Names are Debezium's where it has such an option, with underscores; docs/engine.md has a table of both.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tailrace.config.converters import ConverterSection, in_bytes
from tailrace.config.fields import MIB, ByteCount, LocalPath, Name, Section
from tailrace.config.kafka_clients import ClientOptions, KafkaSection, TopicName
from tailrace.config.transformations.predicates import WithTransformations

#: Most threads: more of them would only use memory.
THREADS_MAX = 256

#: Most successive restarts of a task under `on_task_failure: restart`; then as `stop`.
TASK_RESTARTS_MAX = 10

#: Largest number of records in a batch.
BATCH_RECORDS_MAX = 65_536

Milliseconds = Annotated[int, Field(ge=0, le=86_400_000)]


class RecordProcessing(Section):
    """How records are transformed, converted and passed to handlers."""

    runs_on: Literal["threads", "spark"] = Field(
        default="threads",
        description="Where records are transformed and converted: on `threads` of this process, or on the "
        "executors of `spark`, which also call handlers of single records under `order: unordered`.",
    )
    threads: Annotated[int, Field(ge=1, le=THREADS_MAX)] | None = Field(
        default=None,
        description="Threads of each task that transform and convert; and as many that call handlers of "
        "single records, unless `order` is `ordered`. On Spark, threads that wait for its jobs. "
        "Default: the number of cores.",
    )
    order: Literal["ordered", "unordered", "key"] = Field(
        default="ordered",
        description="How a handler of single records is called: `ordered`, in the source's order; "
        "`unordered`, as records are ready, on several threads at once; `key`, likewise, but in order for "
        "each key. A handler of batches always gets them in order.",
    )
    shutdown_timeout_ms: Milliseconds = Field(
        default=1000,
        description="Longest wait for records in progress when the engine stops; then they are abandoned, "
        "and delivered again after the next start. 0: at once.",
    )
    batch_records_max: Annotated[int, Field(ge=1, le=BATCH_RECORDS_MAX)] = Field(
        default=BATCH_RECORDS_MAX,
        description="Most records of a batch: a handler of batches gets one at a time, and the same again "
        "if it fails.",
    )
    queue_batches_max: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=8, description="Most batches of a task in progress at a time, without those being committed."
    )
    queue_bytes_max: Annotated[ByteCount, Field(ge=1)] = Field(
        default=256 * MIB, description="Most bytes of them, but never less than one batch."
    )

    @property
    def thread_count(self) -> int:
        """`threads`, or the number of cores that this process may use."""
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.threads or min(THREADS_MAX, usable)


class OffsetCommit(Section):
    """When offsets are committed."""

    policy: Literal["periodic", "always", "count", "transaction"] = Field(
        default="periodic",
        description="`always`: after each batch, and while one is processed; `periodic`: every "
        "`interval_ms`; `count`: after `records` records; `transaction`: between transactions of the "
        "source, at most every `interval_ms`.",
    )
    interval_ms: Milliseconds = Field(default=60_000, description="Least milliseconds from commit to commit.")
    records: Annotated[int, Field(ge=1)] = Field(
        default=10_000, description="Records from commit to commit, under `count`."
    )
    timeout_ms: Annotated[int, Field(ge=1, le=86_400_000)] = Field(
        default=5000, description="Longest time for a commit; then it is tried again at a later batch."
    )


class OffsetStorage(KafkaSection):
    """The store of offsets."""

    type: Literal["log", "file", "memory", "kafka"] = Field(
        description="`log`: in the change log; `file`: at `path`; `kafka`: in a compacted topic; "
        "`memory`: not stored, each start begins at the log's start."
    )
    path: LocalPath | None = Field(default=None, description="The file, for `file`.")
    bootstrap_servers: str | None = Field(
        default=None, min_length=1, description="`host:port`, several separated by commas, for `kafka`."
    )
    topic: TopicName = Field(
        default="tailrace-offsets",
        description="Compacted topic, for `kafka`. Engines and sinks may share it.",
    )
    create_topic: bool = Field(default=True, description="Whether it is created if it is missing.")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "file" and self.path is None:
            raise ValueError("file needs a path")
        if self.type == "kafka" and self.bootstrap_servers is None:
            raise ValueError("kafka needs bootstrap_servers")
        return self


class KafkaDelivery(Section):
    """Topics of a Kafka cluster for the engine's records, together with their offsets."""

    bootstrap_servers: str = Field(min_length=1, description="`host:port`, several separated by commas.")
    group: Name = Field(
        default="tailrace",
        description="Start of the transactional ids, `<group>-<engine>-offsets` and, for each task, "
        "`<group>-<engine>-offsets:<task>`; with the engine's name it identifies the owner of offsets.",
    )
    offsets_topic: TopicName = Field(
        default="tailrace-offsets",
        description="Compacted topic of the offsets; created if missing. Engines and sinks may share it.",
    )
    create_topics: bool = Field(default=True, description="Whether missing topics are created.")
    transaction_boundary: Literal["poll", "interval", "connector"] = Field(
        default="poll",
        description="Where a Kafka transaction ends (or, without transactions, offsets are written): `poll`, "
        "after each batch that a task polled; `interval`, every `offset_commit.interval_ms`; `connector`, "
        "between transactions of the source. Under the first two also once it has 16 MiB of values, or a "
        "quarter of `transaction.timeout.ms` has passed.",
    )
    options: ClientOptions = Field(default={}, description="Options of librdkafka, as for the sink.")

    @property
    def storage(self) -> OffsetStorage:
        """The store of the offsets."""
        return OffsetStorage(
            type="kafka",
            bootstrap_servers=self.bootstrap_servers,
            topic=self.offsets_topic,
            create_topic=self.create_topics,
            group=self.group,
            options=self.options,
        )


class EngineOptions(WithTransformations):
    """Settings of the engine."""

    errors_retries_max: Annotated[int, Field(ge=-1)] = Field(
        default=-1,
        description="Most successive retries after a transient error; -1: no limit. A success resets the "
        "count. Without a handler the default is 0: capture and sinks retry by themselves.",
    )
    errors_retry_delay_initial_ms: Annotated[int, Field(ge=1, le=3_600_000)] = Field(
        default=300, description="Wait before the first retry; doubled for each further one."
    )
    errors_retry_delay_max_ms: Annotated[int, Field(ge=1, le=3_600_000)] = Field(
        default=10_000, description="Longest wait before a retry."
    )
    on_task_failure: Literal["stop", "restart", "isolate"] = Field(
        default="stop",
        description="When a task fails permanently: `stop` stops all others in order, and the engine fails "
        "with its error; `restart` starts only that task again, up to 10 times without a record "
        "processed between; `isolate` lets the others continue, and the "
        "engine fails with its error at its end. Without a handler the default is `isolate`.",
    )
    task_management_timeout_ms: Annotated[int, Field(ge=1, le=86_400_000)] = Field(
        default=180_000, description="Longest time for the start of all tasks, and for their stop."
    )
    tasks_on: Literal["threads", "spark"] = Field(
        default="threads",
        description="Where the sources are captured: on `threads` of this process, or each by a long-running "
        "task of a `spark` job on an executor, which writes the log in a shared directory: "
        "see [Tasks on Spark](engine.md#tasks-on-spark).",
    )
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = Field(
        default=None,
        description="Port on which the engine serves its metrics to Prometheus, at `/metrics`, while it "
        "runs; 0: any free port; it is logged. Default: none.",
    )
    metrics_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address of this machine for `metrics_port`. Every client that reaches it can read the "
        "metrics.",
    )
    record_processing: RecordProcessing = Field(
        default=RecordProcessing(), description="How records are transformed, converted and handled."
    )
    offset_commit: OffsetCommit = Field(default=OffsetCommit(), description="When offsets are committed.")
    atomic_source_offset_commit: bool = Field(
        default=False,
        description="Default for Kafka sinks: whether records and their offset are written in one "
        "transaction. For `offset_storage` in Kafka: whether the offsets of a commit are, so that an "
        "older engine of the same name can't write any more. Ignored, with a warning, if no offsets are "
        "kept in Kafka.",
    )
    offset_storage: OffsetStorage | None = Field(
        default=None,
        description="Where offsets are stored. Default: in the connector's log; in memory if it has none.",
    )
    kafka: KafkaDelivery | None = Field(
        default=None,
        description="Topics to write records to instead of calling a handler, with their offsets in the same "
        "transaction under `atomic_source_offset_commit`: see "
        "[Records into Kafka](engine.md#records-into-kafka).",
    )
    converter: ConverterSection | None = Field(
        default=None,
        description="Format in which handlers get records. Default: not converted; for `kafka`, `json`.",
    )

    def without_handler(self) -> Self:
        """Return the options for a run without a handler: options that the file sets keep their values.

        Sinks have their own positions, so a source that fails need not stop the others; and capture retries
        by itself, up to its own limit, before it fails.
        """
        usual = {"on_task_failure": "isolate", "errors_retries_max": 0}
        left = {name: value for name, value in usual.items() if name not in self.model_fields_set}
        return self.model_copy(update=left)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.errors_retry_delay_initial_ms > self.errors_retry_delay_max_ms:
            raise ValueError("errors_retry_delay_initial_ms is larger than errors_retry_delay_max_ms")
        if self.kafka is not None:
            self._require_fit_for(self.kafka)
            object.__setattr__(self, "offset_storage", self.kafka.storage)
        return self

    @property
    def offsets_in_kafka(self) -> OffsetStorage | None:
        """The store of offsets if it is a topic, including that of `kafka`; otherwise None."""
        storage = self.offset_storage
        return storage if storage is not None and storage.type == "kafka" else None

    def _require_fit_for(self, kafka: KafkaDelivery) -> None:
        if self.offset_storage not in (None, kafka.storage):
            raise ValueError(
                "offset_storage: kafka stores the offsets in its offsets_topic: leave one of them out"
            )
        processing, commit = self.record_processing, self.offset_commit
        if processing.order != "ordered":
            raise ValueError(
                f"record_processing.order: kafka writes records in order, not {processing.order}"
            )
        if processing.runs_on != "threads":
            raise ValueError("record_processing.runs_on: this process runs kafka's producers: leave it out")
        if {"policy", "records"} & commit.model_fields_set:
            raise ValueError(
                "offset_commit: offsets are committed with their records, as kafka.transaction_boundary says"
            )
        if self.converter is not None:
            in_bytes(self.converter)
