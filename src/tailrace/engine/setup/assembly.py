"""From what an engine is made of, however it is said, to its parts. Nothing is started here.

A configuration and Python objects lead to the same parts; objects come before what a file says.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from tailrace import extensions
from tailrace.backoff import Backoff
from tailrace.config import EngineConfig, EngineOptions, load_engine
from tailrace.config.converters import in_bytes
from tailrace.config.fields import Extension, context_for
from tailrace.config.load import from_mapping
from tailrace.config.problems import from_pydantic
from tailrace.engine.clock import SystemClock
from tailrace.engine.commit_policies import BY_NAME
from tailrace.engine.contracts import (
    BatchHandler,
    Clock,
    CommitPolicy,
    KeepsOffsets,
    OffsetStore,
    RecordHandler,
    RecordProcessor,
    RunsElsewhere,
    Settings,
    SourceConnector,
    TaskCommits,
)
from tailrace.engine.offsets import stores
from tailrace.engine.offsets.committer import OffsetCommitter
from tailrace.engine.processing import Handler, ProcessingConfig, on_batch, on_record
from tailrace.engine.processing.handlers import Manual
from tailrace.engine.processing.in_flight import TaskCounts
from tailrace.engine.processing.processors import NullProcessor, Runner, runner_of
from tailrace.engine.setup.arguments import check_called, invalid
from tailrace.engine.stages import Stages, stages_of
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Offset, Partition

log = structlog.get_logger(__name__)

#: Makes the processor of one life of a task: given what is set when it is to end, its name, its tally and
#: its committer.
NewProcessor = Callable[[threading.Event, str, TaskCounts, TaskCommits], RecordProcessor]

#: Policies that end transactions of Kafka, by `kafka.transaction_boundary`.
#: The connector that reads the sources of a file, of whatever type; it has the name of the oldest.
_OF_FILES = "postgresql"
_BOUNDARIES = {"poll": "always", "interval": "periodic", "connector": "transaction"}


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What an engine is made of.

    :param new_store: makes the offset store; called once, on the engine's thread.
    :param wanted: whether anybody gets the records; not, where only sinks are fed, from the log.
    """

    name: str
    connector: SourceConnector
    settings: Settings
    tasks_max: int
    options: EngineOptions
    clock: Clock
    stages: Stages
    new_store: Callable[[], OffsetStore]
    new_policy: Callable[[], CommitPolicy]
    new_processor: NewProcessor
    wanted: bool
    runner: Runner

    def new_commits(
        self,
        store: OffsetStore,
        committed: Callable[[Partition, Offset], None],
        claim: Callable[[Partition], None],
        number: int,
    ) -> TaskCommits:
        """Return the committer of one life of a task; parameters as `OffsetCommitter` has them."""
        name = f"task {number}"
        if self.options.kafka is not None:
            # Only now: engines without Kafka need not load its client.
            from tailrace.engine.offsets.transactions import TransactionCommits
            from tailrace.kafka.offsets.store import KafkaOffsetStore

            assert isinstance(store, KafkaOffsetStore)  # by `_store`
            return TransactionCommits(
                store.task_producer(number),
                self.new_policy(),
                self.clock,
                splits=self.options.kafka.transaction_boundary != "connector",
                committed=committed,
                name=name,
                claim=claim,
            )
        return OffsetCommitter(
            store,
            self.new_policy(),
            self.clock,
            committed=committed,
            timeout_s=self.commit_timeout_s,
            name=name,
            claim=claim,
        )

    @property
    def commit_timeout_s(self) -> float:
        """Longest that a commit may take."""
        return self.options.offset_commit.timeout_ms / 1000


def assemble(
    config: EngineConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    *,
    connector: SourceConnector | Callable[[], SourceConnector] | str | None,
    settings: Settings | None,
    name: str | None,
    tasks_max: int | None,
    on_batch: BatchHandler | None,
    on_record: RecordHandler | None,
    processor: Callable[[], RecordProcessor] | None,
    converter: Any,
    transformations: Sequence[Any],
    predicates: Mapping[str, Any],
    offsets: OffsetStore | None,
    commit_policy: Callable[[], CommitPolicy] | None,
    clock: Clock | None,
    options: EngineOptions | Mapping[str, Any] | None,
) -> Parts:
    """Return the parts of an engine; the parameters are those of `Engine`.

    :raises TailraceError: `CONFIG_INVALID`, `ENVIRONMENT_UNFIT`.
    """
    file = _config(config)
    if file is None and connector is None:
        raise invalid("there is neither a configuration nor a connector", "give one of them")
    chosen = _options(options) if options is not None else file.engine if file else EngineOptions()
    own_clock = clock or SystemClock()
    found = connector_of(connector if connector is not None else _OF_FILES)
    places = found.places if isinstance(found, RunsElsewhere) else ()
    if chosen.tasks_on not in ("threads", *places):
        raise invalid(
            f"tasks_on: {chosen.tasks_on} is nothing that tasks of {type(found).__name__} can do",
            f"leave it out, or choose one of threads, {', '.join(places)}" if places else "leave it out",
        )
    own_settings = {} if file is None or connector is not None else file.as_settings()
    all_settings = {**own_settings, **(settings or {})}
    if chosen.kafka is not None:
        _require_kafka_alone(
            on_batch=on_batch, on_record=on_record, processor=processor, offsets=offsets,
            commit_policy=commit_policy,
        )  # fmt: skip
        converter = _in_bytes(converter if converter is not None else chosen.converter)
    wanted = any(one is not None for one in (on_batch, on_record, processor, chosen.kafka))
    if not wanted and file is not None:
        processor, chosen = NullProcessor, _unheard(chosen)
    tasks = tasks_max or (file.tasks_max if file else 1)
    called = name or (file.name if file else "engine")
    _warn_of_ignored(chosen, wanted=wanted, is_for_nothing=file is None or file.is_atomic_for_nothing)
    stages = stages_of(transformations, predicates, converter, chosen)
    runner = runner_of(chosen.record_processing.runs_on, called, file.spark if file else None)
    return Parts(
        name=called,
        connector=found,
        settings=all_settings,
        tasks_max=tasks,
        options=chosen,
        clock=own_clock,
        stages=stages,
        new_store=_store(offsets, found, called, all_settings, chosen, tasks),
        new_policy=commit_policy or _policy(chosen),
        new_processor=_processor(on_batch, on_record, processor, chosen, own_clock, runner, stages),
        wanted=wanted,
        runner=runner,
    )


def _config(config: EngineConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> EngineConfig | None:
    if config is None or isinstance(config, EngineConfig):
        return config
    if isinstance(config, Mapping):
        return from_mapping(config)
    return load_engine(Path(config))


def _options(options: EngineOptions | Mapping[str, Any]) -> EngineOptions:
    if isinstance(options, EngineOptions):
        return options
    try:
        return EngineOptions.model_validate(dict(options), context=context_for(Path.cwd()))
    except ValidationError as error:
        lines = "".join(f"\n  {problem}" for problem in from_pydantic(error, EngineOptions, ()))
        raise invalid(f"options:{lines}", "see docs/engine.md") from None


def _unheard(options: EngineOptions) -> EngineOptions:
    """Return the options where nobody gets the records; what was chosen stays.

    Sinks then have their own positions, and a source that fails holds nobody up; and capture has tried
    again by itself, up to its own bound, before it fails.
    """
    usual = {"on_task_failure": "isolate", "errors_retries_max": 0}
    left = {name: value for name, value in usual.items() if name not in options.model_fields_set}
    return options.model_copy(update=left)


def _store(
    offsets: OffsetStore | None,
    connector: SourceConnector,
    name: str,
    settings: Settings,
    options: EngineOptions,
    tasks: int,
) -> Callable[[], OffsetStore]:
    storage = options.offset_storage
    producers = 0 if options.kafka is None else tasks
    if offsets is not None:
        return lambda: offsets
    if storage is not None and storage.type != "log":
        atomic = options.atomic_source_offset_commit
        return lambda: stores.store_for(storage, name, atomic=atomic, tasks=producers)
    if isinstance(connector, KeepsOffsets):
        return lambda: connector.offset_store(name, settings)
    if storage is not None:
        raise invalid(
            "offset_storage is log, and the connector keeps no offsets of its own", "choose another type"
        )

    def in_memory() -> OffsetStore:
        log.warning(
            "offsets are kept in memory alone: the next engine starts from the beginning", engine=name
        )
        return stores.MemoryOffsetStore()

    return in_memory


def _policy(options: EngineOptions) -> Callable[[], CommitPolicy]:
    commit, kafka = options.offset_commit, options.kafka
    if kafka is None:
        return lambda: BY_NAME[commit.policy](commit.interval_ms / 1000, commit.records)
    boundary = kafka.transaction_boundary
    interval_s = commit.interval_ms / 1000 if boundary == "interval" else 0.0
    return lambda: BY_NAME[_BOUNDARIES[boundary]](interval_s, commit.records)


def _require_kafka_alone(**given: Any) -> None:
    """Refuse what takes records or offsets beside the option `kafka`.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    for name, one in given.items():
        if one is not None:
            raise invalid(
                f"there are the option kafka and {name}: records and their offsets go to one place",
                f"leave {name} out, or the option",
            )


def _in_bytes(given: Any) -> Any:
    """Return the converter of records that go to Kafka; None was given: JSON.

    :raises TailraceError: `CONFIG_INVALID` for one that gives objects.
    """
    if given is None:
        return Extension(type="json")
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", given)
    try:
        in_bytes(Extension(type=kind if isinstance(kind, str) else type(given).__name__))
    except ValueError as error:
        raise invalid(f"converter: {error}", "see docs/engine.md") from None
    return given


def _processor(
    batch: BatchHandler | None,
    record: RecordHandler | None,
    processor: Callable[[], RecordProcessor] | None,
    options: EngineOptions,
    clock: Clock,
    runner: Runner,
    stages: Stages,
) -> NewProcessor:
    if options.kafka is not None:
        return lambda stopping, name, counts, commits: runner.processor_for(
            _terms(on_batch(commits.send), options, clock, stopping, name, counts)  # type: ignore[attr-defined]
        )
    all_three: dict[str, Any] = {"on_batch": batch, "on_record": record, "processor": processor}
    given = {name: one for name, one in all_three.items() if one is not None}
    if len(given) != 1:
        raise invalid(
            "there must be one of on_batch, on_record and processor",
            "give one of them" if not given else "leave the others out",
        )
    for name, one in given.items():
        called = one.call if isinstance(one, Manual) else one
        check_called(name, called, may_be_async=one is not processor)
    processing = options.record_processing
    if batch is not None and processing.order != "ordered":
        raise invalid(
            f"order: {processing.order} is for handlers of single records, and there is on_batch",
            "leave order out, or give on_record",
        )
    if processor is not None:
        if processor is not NullProcessor and processing.runs_on != "threads":
            raise invalid(
                f"runs_on: {processing.runs_on} is for the engine's own processors, and there is another",
                "leave runs_on out, or give on_batch or on_record",
            )
        return lambda _stopping, _name, _counts_of_task, _commits: processor()
    handler: Handler = on_batch(batch) if batch is not None else on_record(record)  # type: ignore[arg-type]
    runner.check(handler, processing.order, stages.transform, stages.convert)
    return lambda stopping, name, counts_of_task, _: runner.processor_for(
        _terms(handler, options, clock, stopping, name, counts_of_task)
    )


def _terms(
    handler: Handler,
    options: EngineOptions,
    clock: Clock,
    stopping: threading.Event,
    name: str,
    counts_of_task: TaskCounts,
) -> ProcessingConfig:
    processing = options.record_processing
    return ProcessingConfig(
        handler=handler,
        clock=clock,
        stopping=stopping,
        order=processing.order,
        threads=processing.thread_count,
        queue_batches_max=processing.queue_batches_max,
        queue_bytes_max=processing.queue_bytes_max,
        backoff=Backoff(
            options.errors_retries_max,
            options.errors_retry_delay_initial_ms / 1000,
            options.errors_retry_delay_max_ms / 1000,
        ),
        name=name,
        counts_of_task=counts_of_task,
    )


def _warn_of_ignored(options: EngineOptions, *, wanted: bool, is_for_nothing: bool) -> None:
    storage = options.offset_storage
    in_kafka = options.kafka is not None or (storage is not None and storage.type == "kafka")
    if options.atomic_source_offset_commit and not in_kafka and (wanted or is_for_nothing):
        log.warning(
            "atomic_source_offset_commit is ignored: the engine's offsets are not kept in Kafka",
            offset_storage="the connector's" if storage is None else storage.type,
        )


#: What a connector must be able to do.
METHODS = ("start", "task_settings", "create_task", "stop")


def connector_of(given: SourceConnector | Callable[[], SourceConnector] | str) -> SourceConnector:
    """Return the connector; a name is one of the entry points `tailrace.connectors`.

    :raises TailraceError: `CONFIG_INVALID`, `ENVIRONMENT_UNFIT`.
    """
    if isinstance(given, str):
        given = extensions.factory(extensions.CONNECTORS, given, METHODS)
    if isinstance(given, type) or not isinstance(given, SourceConnector):
        given = _made(given)
    lacking = [method for method in METHODS if not callable(getattr(given, method, None))]
    if lacking:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: {type(given).__name__} is no connector, it has no {', '.join(lacking)}",
            "a connector is a tailrace.engine.contracts.SourceConnector",
        )
    return given


def _made(make: Callable[[], SourceConnector]) -> SourceConnector:
    if not callable(make):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: {type(make).__name__} is no connector",
            "give a name, a class, or a tailrace.engine.contracts.SourceConnector",
        )
    try:
        return make()
    except TailraceError:
        raise
    except Exception as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: making the connector raised {type(error).__name__}",
            "a connector is made without arguments; what it needs comes with start",
        ) from error
