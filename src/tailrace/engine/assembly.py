"""Assembles an engine's parts from its arguments, without starting any of them.

A configuration and Python objects result in the same parts; objects take precedence over a file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from tailrace import extensions
from tailrace.config import EngineConfig, EngineOptions, load_engine
from tailrace.config.converters import in_bytes
from tailrace.config.fields import Extension, context_for
from tailrace.config.load import from_mapping
from tailrace.config.problems import from_pydantic
from tailrace.converters import factory as converters
from tailrace.converters.contract import Converter
from tailrace.engine.arguments import Arguments, check_called, invalid
from tailrace.engine.commit_policies import BY_NAME
from tailrace.engine.contracts import (
    Clock,
    CommitPolicy,
    KeepsOffsets,
    OffsetStore,
    RecordProcessor,
    RunsElsewhere,
    Settings,
    SourceConnector,
)
from tailrace.engine.failures import backoff_of
from tailrace.engine.offsets import stores
from tailrace.engine.offsets.commits import TaskCommits
from tailrace.engine.offsets.committer import OffsetCommitter
from tailrace.engine.processing import Handler, ProcessingConfig, on_batch, on_record
from tailrace.engine.processing.handlers import Manual, takes
from tailrace.engine.processing.in_flight import TaskCounts
from tailrace.engine.processing.processors import NullProcessor, Runner, runner_of
from tailrace.engine.threads import SystemClock
from tailrace.errors import TailraceError
from tailrace.records.batch import Offset, Partition
from tailrace.records.group import Group
from tailrace.transforms import factory

log = structlog.get_logger(__name__)

#: The connector that reads the sources of a file, whatever their type; it is named after the oldest type.
_OF_FILES = "postgresql"

#: Names of the policies that end Kafka transactions, by `kafka.transaction_boundary`.
_BOUNDARIES = {"poll": "always", "interval": "periodic", "connector": "transaction"}


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of an engine.

    :param new_store: makes the offset store; called once, on the engine's thread.
    :param handler: None: records go to Kafka, or to a processor.
    :param processor: makes a user's processor; None: the engine uses its own.
    :param wanted: whether the engine uses the records; false if only sinks are fed, from the log.
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
    handler: Handler | None
    processor: Callable[[], RecordProcessor] | None
    wanted: bool
    runner: Runner

    def new_commits(
        self,
        store: OffsetStore,
        committed: Callable[[Partition, Offset], None],
        claim: Callable[[Partition], None],
        number: int,
    ) -> TaskCommits:
        """Return the committer of one attempt of a task; parameters as of `OffsetCommitter`."""
        name = f"task {number}"
        if self.options.kafka is not None:
            # Imported here: engines without Kafka need not load its client.
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

    def new_processor(
        self, stopping: threading.Event, name: str, counts: TaskCounts, commits: TaskCommits
    ) -> RecordProcessor:
        """Return the processor of one attempt of a task, not initialised.

        :param stopping: see `ProcessingConfig`, also for `name` and `counts`.
        :param commits: of the attempt; with the option `kafka` also its handler.
        """
        if self.processor is not None:
            return self.processor()
        processing = self.options.record_processing
        terms = ProcessingConfig(
            handler=self.handler or on_batch(commits.send),  # type: ignore[union-attr]
            clock=self.clock,
            stopping=stopping,
            order=processing.order,
            threads=processing.thread_count,
            queue_batches_max=processing.queue_batches_max,
            queue_bytes_max=processing.queue_bytes_max,
            backoff=backoff_of(self.options),
            name=name,
            counts=counts,
        )
        return self.runner.processor_for(terms)

    @property
    def commit_timeout_s(self) -> float:
        """Longest time for a commit, in seconds."""
        return self.options.offset_commit.timeout_ms / 1000


def assemble(given: Arguments) -> Parts:
    """Return the parts of an engine.

    :raises TailraceError: `CONFIG_INVALID`, `ENVIRONMENT_UNFIT`.
    """
    given.check()
    file = _config(given.config)
    if file is None and given.connector is None:
        raise invalid("there is neither a configuration nor a connector", "pass one of them")
    options = _options(given.options, file.engine if file else EngineOptions())
    clock = given.clock or SystemClock()
    connector = connector_of(given.connector if given.connector is not None else _OF_FILES)
    places = connector.places if isinstance(connector, RunsElsewhere) else ()
    if options.tasks_on not in ("threads", *places):
        raise invalid(
            f"tasks_on: {options.tasks_on} is not supported by {type(connector).__name__}",
            f"leave it out, or choose one of threads, {', '.join(places)}"
            if places
            else "leave it out, or pass the engine a file: its `source` can be captured on executors, too",
        )
    own_settings = {} if file is None or given.connector is not None else file.as_settings()
    settings = {**own_settings, **(given.settings or {})}
    converter, handlers = given.converter, (given.on_batch, given.on_record, given.processor)
    if options.kafka is not None:
        _require_kafka_alone(given)
        converter = _in_bytes(converter if converter is not None else options.converter)
    wanted = any(one is not None for one in (*handlers, options.kafka))
    if not wanted and file is not None:
        given, options = replace(given, processor=NullProcessor), options.without_handler()
    tasks = given.tasks_max or (file.tasks_max if file else 1)
    name = given.name or (file.name if file else "engine")
    _warn_of_ignored(options, wanted=wanted, is_for_nothing=file is None or file.is_atomic_for_nothing)
    stages = stages_of(given.transformations, given.predicates or {}, converter, options)
    runner = runner_of(options.record_processing.runs_on, name, file.spark if file else None)
    return Parts(
        name=name,
        connector=connector,
        settings=settings,
        tasks_max=tasks,
        options=options,
        clock=clock,
        stages=stages,
        new_store=_store(given.offsets, connector, name, settings, options, tasks),
        new_policy=given.commit_policy or _policy(options),
        handler=_handler(given, options, runner, stages),
        processor=given.processor,
        wanted=wanted,
        runner=runner,
    )


def _config(config: EngineConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> EngineConfig | None:
    if config is None or isinstance(config, EngineConfig):
        return config
    if isinstance(config, Mapping):
        return from_mapping(config)
    return load_engine(Path(config))


def _options(given: EngineOptions | Mapping[str, Any] | None, of_file: EngineOptions) -> EngineOptions:
    """Return the given options, completed from the file's options.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    if given is None:
        return of_file
    options = {**_chosen(of_file), **(_chosen(given) if isinstance(given, EngineOptions) else given)}
    try:
        return EngineOptions.model_validate(options, context=context_for(Path.cwd()))
    except ValidationError as error:
        lines = "".join(f"\n  {problem}" for problem in from_pydantic(error, EngineOptions, ()))
        raise invalid(f"options:{lines}", "see docs/engine.md") from None


def _chosen(options: EngineOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.model_fields_set}


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
        raise invalid("offset_storage is log, and the connector has no offset store", "choose another type")

    def in_memory() -> OffsetStore:
        log.warning("offsets are kept only in memory: the next engine starts from the beginning", engine=name)
        return stores.MemoryOffsetStore()

    return in_memory


def _policy(options: EngineOptions) -> Callable[[], CommitPolicy]:
    commit, kafka = options.offset_commit, options.kafka
    if kafka is None:
        return lambda: BY_NAME[commit.policy](commit.interval_ms / 1000, commit.records)
    boundary = kafka.transaction_boundary
    interval_s = commit.interval_ms / 1000 if boundary == "interval" else 0.0
    return lambda: BY_NAME[_BOUNDARIES[boundary]](interval_s, commit.records)


def _require_kafka_alone(given: Arguments) -> None:
    """Refuse other destinations of records or offsets in addition to the option `kafka`.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    for name in ("on_batch", "on_record", "processor", "offsets", "commit_policy"):
        if getattr(given, name) is not None:
            raise invalid(
                f"both the option kafka and {name} are given: records and their offsets go to one place",
                f"leave out {name}, or the option",
            )


def _in_bytes(given: Any) -> Any:
    """Return the converter of records that go to Kafka; JSON if `given` is None.

    :raises TailraceError: `CONFIG_INVALID` for a converter that returns objects instead of bytes.
    """
    if given is None:
        return Extension(type="json")
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", given)
    try:
        in_bytes(Extension(type=kind if isinstance(kind, str) else type(given).__name__))
    except ValueError as error:
        raise invalid(f"converter: {error}", "see docs/engine.md") from None
    return given


def _handler(arguments: Arguments, options: EngineOptions, runner: Runner, stages: Stages) -> Handler | None:
    if options.kafka is not None:
        return None
    batch, record, processor = arguments.on_batch, arguments.on_record, arguments.processor
    all_three: dict[str, Any] = {"on_batch": batch, "on_record": record, "processor": processor}
    given = {name: one for name, one in all_three.items() if one is not None}
    if len(given) != 1:
        raise invalid(
            "there must be one of on_batch, on_record and processor",
            "pass one of them" if not given else "leave the others out",
        )
    for name, one in given.items():
        called = one.call if isinstance(one, Manual) else one
        check_called(name, called, may_be_async=one is not processor)
        count = 0 if name == "processor" else 1 + isinstance(one, Manual)
        if not takes(called, count):
            raise invalid(
                f"{name} can't be called with {count} argument{'s' * (count != 1)}",
                "on_batch gets a batch, on_record a record, one of manual(…) a batch and the committer, and "
                "processor gets nothing",
            )
    if isinstance(record, Manual):
        raise invalid("on_record is manual(…), which is for handlers of batches", "pass it as on_batch")
    processing = options.record_processing
    if batch is not None and processing.order != "ordered":
        raise invalid(
            f"order: {processing.order} is for handlers of single records, and there is on_batch",
            "leave order out, or pass on_record",
        )
    if processor is not None:
        if processor is not NullProcessor and processing.runs_on != "threads":
            raise invalid(
                f"runs_on: {processing.runs_on} is for the engine's own processors, and there is another",
                "leave runs_on out, or pass on_batch or on_record",
            )
        return None
    handler: Handler = on_batch(batch) if batch is not None else on_record(record)  # type: ignore[arg-type]
    runner.check(handler, processing.order, stages.transform, stages.convert)
    return handler


def _warn_of_ignored(options: EngineOptions, *, wanted: bool, is_for_nothing: bool) -> None:
    storage = options.offset_storage
    in_kafka = options.offsets_in_kafka is not None
    if options.atomic_source_offset_commit and not in_kafka and (wanted or is_for_nothing):
        log.warning(
            "atomic_source_offset_commit is ignored: the engine's offsets are not kept in Kafka",
            offset_storage="the connector's" if storage is None else storage.type,
        )


#: The methods that a connector must have.
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
        raise invalid(
            f"{type(given).__name__} is not a connector, it has no {', '.join(lacking)}",
            "a connector is a tailrace.engine.contracts.SourceConnector",
        )
    return given


def _made(make: Callable[[], SourceConnector]) -> SourceConnector:
    if not callable(make):
        raise invalid(
            f"{type(make).__name__} is not a connector",
            "pass a name, a class, or a tailrace.engine.contracts.SourceConnector",
        )
    try:
        return make()
    except TailraceError:
        raise
    except Exception as error:
        raise invalid(
            f"creating the connector raised {type(error).__name__}",
            "a connector is created without arguments; start() receives its settings",
        ) from error


@dataclass(frozen=True, slots=True)
class Stages:
    """The functions of the stage, None if there is nothing to do, and what to close after the last call."""

    transform: Callable[[Group], Iterable[Group]] | None
    convert: Callable[[Group], Any] | None
    closers: tuple[Callable[[], None], ...]


def stages_of(
    transformations: Sequence[factory.TransformationLike],
    predicates: Mapping[str, factory.PredicateLike],
    converter: Converter | Extension | Mapping[str, Any] | str | None,
    options: EngineOptions,
) -> Stages:
    """Return the stages: the transformations of the options, then those given in Python.

    A converter passed in Python replaces that of the options.
    :raises TailraceError: `CONFIG_INVALID`, `ENVIRONMENT_UNFIT`.
    """
    converting = _converter(converter if converter is not None else options.converter)
    chain = factory.build(
        [*options.transformations, *transformations],
        {**options.predicates, **predicates},
        splits_updates=converting is not None,
    )
    closers = [chain.close]
    if converting is not None:
        closers.append(converting.close)
    return Stages(
        chain.apply if len(chain) else None,
        None if converting is None else converters.Converting(converting, to_kafka=options.kafka is not None),
        tuple(closers),
    )


def _converter(given: Converter | Extension | Mapping[str, Any] | str | None) -> Converter | None:
    if isinstance(given, str):
        given = Extension(type=given)
    if isinstance(given, Mapping):
        given = _section(given)
    if isinstance(given, Extension):
        given = converters.build(given.type, given.options)
    passed: object = given  # what a program passes has any type
    if isinstance(passed, type):
        name = passed.__name__
        raise invalid(f"the class {name} is not a converter", f"pass an object of it: {name}(…)")
    if given is not None and not isinstance(given, Converter):
        raise invalid(
            f"{type(given).__name__} is not a converter",
            "a converter is a tailrace.converters.contract.Converter",
        )
    return given


def _section(given: Mapping[str, Any]) -> Extension:
    try:
        return Extension.model_validate(dict(given))
    except ValidationError as error:
        lines = "".join(f"\n  {problem}" for problem in from_pydantic(error, Extension, ()))
        raise invalid(f"converter:{lines}", "a converter's section has its type and its options") from None
