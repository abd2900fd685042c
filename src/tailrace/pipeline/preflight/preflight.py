"""Preflight: checks everything that a pipeline needs, before it runs; changes nothing.

Every check is made even if others fail, so all problems are listed at once, each with its repair. Only
checks that depend on a failed one (of a source that can't be reached) are left out.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailrace import config
from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.config import EngineConfig, FolderSink, PipelineConfig, PythonSinkConfig, SinkConfig
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.decode.changes import no_changes
from tailrace.decode.column_policy import TablePolicy
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import Background, as_failure
from tailrace.pipeline.log.root import check_roots, logs_in
from tailrace.pipeline.remote.capture import too_few
from tailrace.sources.contract import SourceCheck
from tailrace.sources.findings import Finding, Severity, error, from_failure, warning
from tailrace.sources.registry import source_type
from tailrace.spark.java import cores_of

__all__ = ["Finding", "Severity", "preflight"]

#: Free space of a disk below which the pipeline should not start, and below which there is a warning.
ROOM_BYTES_MIN = 64 << 20
ROOM_BYTES_WARNED = 1 << 30
#: Longest time for the checks of all sources once they are connected, in seconds.
ANSWER_DEADLINE_S = 60.0


def preflight(file: Path) -> list[Finding]:
    """Return every problem that the pipeline of `file` has. Takes seconds at most."""
    pipeline, problems = config.read(file)
    found = [
        error(Kind.CONFIG_INVALID, str(problem), f"correct {os.fspath(file)}; see docs/configuration.md")
        for problem in problems
    ]
    if pipeline is None:
        return [*found, *_guarded(_java)]
    if pipeline.needs_spark_at_start:
        found += _guarded(_java)
    for check in (
        _settings,
        _captures,
        _rooms,
        _targets,
        _handlers,
        _converters,
        _transformations,
        _roots,
        _offset_storage,
    ):
        found += _guarded(functools.partial(check, pipeline))
    # These checks of the cluster and the registry don't depend on a source.
    found += _guarded(lambda: _kafka(pipeline.pipelines[0]))
    names = [part.source_name for part in pipeline.pipelines]
    answers, lacking = _of_sources(pipeline.pipelines)
    return [*found, *lacking, *_merged(names, answers)]


class _Visit:
    """The checks of one source, in two steps; earlier findings are kept if a step gets no answer."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self.pipeline = pipeline
        self.found: list[Finding] = []
        self.source = source_type(pipeline.source.type)
        self.check = self.source.check(pipeline, _open_log(pipeline, self.found))

    def connect(self) -> None:
        """Connect and check the server, before checks that take more connections."""
        self.found += _guarded(self.check.connect)

    def look(self) -> None:
        """Check everything else."""
        with closing(self.check):
            self.found += _guarded(self.check.findings)
            self.found += _guarded(lambda: _topics(self.check, self.pipeline))
            self.found += _guarded(lambda: _mirrors(self.check, self.pipeline))


def _of_sources(pipelines: Sequence[PipelineConfig]) -> tuple[list[list[Finding]], list[Finding]]:
    """Return the findings of each source, checked in parallel, and those of all sources together."""
    visits = [_Visit(pipeline) for pipeline in pipelines]
    patience_s = max(pipeline.source.connect_timeout_s for pipeline in pipelines) + ANSWER_DEADLINE_S
    deadline = time.monotonic() + patience_s
    there = _side_by_side("connect", visits, _Visit.connect, deadline)
    lacking: list[Finding] = []
    for source in dict.fromkeys(visit.source for visit in there):
        checks = [visit.check for visit in there if visit.source is source]
        lacking += _guarded(functools.partial(source.findings_together, checks))
    answered = _side_by_side("look", there, _Visit.look, deadline)
    found = [
        list(visit.found) if visit in answered else [*visit.found, _no_answer(visit.pipeline, patience_s)]
        for visit in visits
    ]
    return found, lacking


def _side_by_side(
    step: str, visits: Sequence[_Visit], work: Callable[[_Visit], None], deadline: float
) -> list[_Visit]:
    """Run `work` for each of `visits` in parallel; return those that ended by the deadline."""
    asking = [
        Background(f"preflight-{step}-{visit.pipeline.source_name}", functools.partial(work, visit))
        for visit in visits
    ]
    for each in asking:
        each.start()
    return [
        visit
        for visit, each in zip(visits, asking, strict=True)
        if each.join(max(0.0, deadline - time.monotonic()))
    ]


def _no_answer(pipeline: PipelineConfig, waited_s: float) -> Finding:
    return error(
        Kind.SOURCE_UNREACHABLE,
        f"look at {pipeline.source.address}: no answer within {waited_s:.0f} s",
        "look at the server's load and locks, and at the network between",
    )


def _merged(names: Sequence[str], answers: Sequence[list[Finding]]) -> Iterator[Finding]:
    """Yield the findings of all sources; one with `everywhere` only if all have it, and once."""
    for name, answer in zip(names, answers, strict=True):
        for finding in answer:
            if not finding.everywhere:
                yield replace(finding, source=name)
            elif answer is answers[0] and all(finding in other for other in answers):
                yield finding


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    # A check that fails is itself a finding; its earlier findings are kept.
    found: list[Finding] = []
    try:
        found.extend(check())
    except TailraceError as failure:
        found.append(from_failure(failure))
    except Exception as failure:  # noqa: BLE001 - no check may hide the others
        found.append(from_failure(as_failure(failure)))
    return found


def _java() -> Iterator[Finding]:
    from tailrace.spark.java import require_java, require_same_spark

    require_java()
    require_same_spark()
    yield from ()


def _settings(pipeline: EngineConfig) -> Iterator[Finding]:
    pipeline.spark.settings()
    pipeline.require_no_delivery()
    if pipeline.is_atomic_for_nothing:
        yield warning(
            Kind.CONFIG_INVALID,
            "engine.atomic_source_offset_commit is ignored: no offsets are kept in Kafka",
            "leave it out, or keep offsets there: a sink of the type kafka, or engine.offset_storage",
        )
    for sink in pipeline.sinks:
        if not isinstance(sink, KafkaSinkConfig):
            continue
        for name, wanted in sink.without_effect.items():
            yield warning(
                Kind.CONFIG_INVALID,
                f"sink {sink.name!r}: {name} has no effect without {wanted}",
                f"set {wanted}, or leave {name} out",
            )
        if sink.topic_prefix and pipeline.has_several:
            yield warning(
                Kind.CONFIG_INVALID,
                f"sink {sink.name!r}: with topic_prefix, tables of the same name in several sources share a "
                "topic, whose rows consumers take for those of one table; so do the sources' transactions",
                "leave topic_prefix out: each source then has topics of its own; or have no table name in "
                "several sources, and no provide_transaction_metadata",
            )


def _captures(pipeline: EngineConfig) -> Iterator[Finding]:
    if pipeline.engine.tasks_on != "spark":
        return
    spark = pipeline.spark
    cores = cores_of(spark.settings().get("spark.master", spark.master))
    if cores is not None and (failure := too_few(cores, len(pipeline.pipelines))) is not None:
        yield from_failure(failure)


def _open_log(pipeline: PipelineConfig, found: list[Finding]) -> LogDirectory | None:
    try:
        return LogDirectory.open(pipeline.log.path)
    except TailraceError as failure:
        if failure.kind is not Kind.LOG_MISSING:
            found.append(from_failure(failure))
        return None


def _offset_storage(pipeline: EngineConfig) -> Iterator[Finding]:
    if (storage := pipeline.engine.offsets_in_kafka) is not None:
        # Only now: pipelines without Kafka need not load its client.
        from tailrace.pipeline.preflight.kafka import storage_findings

        yield from storage_findings(storage, pipeline.name)


def _kafka(pipeline: PipelineConfig) -> Iterator[Finding]:
    for sink in pipeline.sinks:
        if isinstance(sink, KafkaSinkConfig):
            from tailrace.pipeline.preflight.kafka import cluster_findings

            yield from cluster_findings(sink, pipeline)
            yield from converter_findings(sink.converter.type, sink.converter_options())


def _topics(check: SourceCheck, pipeline: PipelineConfig) -> Iterator[Finding]:
    for sink in pipeline.sinks:
        if isinstance(sink, KafkaSinkConfig):
            from tailrace.pipeline.preflight.kafka import schema_findings, topic_findings

            yield from topic_findings(sink, pipeline, check.tables())
            yield from schema_findings(sink, pipeline, check)


def _mirrors(check: SourceCheck, pipeline: PipelineConfig) -> Iterator[Finding]:
    """Yield transformations that mirrors can't apply to existing tables, such as dropping a key column."""
    from tailrace.sinks.build import chain_of

    for sink in pipeline.sinks:
        if not isinstance(sink, FolderSink) or not sink.transformations:
            continue
        try:
            chain = chain_of(sink)
        except TailraceError:
            continue  # `_transformations` reports it
        for relation in check.relations(sink.wants) if chain.keeps_keys else ():
            shape = no_changes(relation, TablePolicy.of(pipeline.source.disclosure)).relation
            assert shape is not None, "no messages were asked for"
            try:
                chain.of_table(shape)
            except TailraceError as failure:
                yield replace(from_failure(failure), table=relation.qualified_name)


def _rooms(pipeline: EngineConfig) -> Iterator[Finding]:
    yield from _room("log.path", pipeline.log.path, Kind.LOG_FULL, Kind.LOG_WRITE_FAILED)
    sinks: Sequence[SinkConfig] = pipeline.sinks
    for number, sink in enumerate(sinks):
        if isinstance(sink, FolderSink):
            place = f"sinks[{number}].path"
            yield from _room(place, sink.path, Kind.SINK_WRITE_FAILED, Kind.SINK_WRITE_FAILED)


def _targets(pipeline: EngineConfig) -> Iterator[Finding]:
    """Yield errors of sinks that would refuse their directories: those of another log or pipeline."""
    from tailrace.sinks.build import check_target

    for part in pipeline.pipelines:
        log = _open_log(part, [])  # `_Visit` reports the log's own problems
        for sink in part.folders:
            try:
                check_target(sink, part.name, log, TASK)
            except TailraceError as failure:
                found = replace(from_failure(failure), source=part.source_name)
                yield replace(found, message=f"sink {sink.name!r}: {found.message}")
            except OSError:
                continue  # `_rooms` reports it


def _handlers(pipeline: EngineConfig) -> Iterator[Finding]:
    for sink in pipeline.sinks:
        if isinstance(sink, PythonSinkConfig):
            from tailrace.sinks.python import handler_of

            try:
                handler_of(sink)
            except TailraceError as failure:
                yield from_failure(failure)


def _converters(pipeline: EngineConfig) -> Iterator[Finding]:
    sinks = [sink.converter for sink in pipeline.sinks if isinstance(sink, PythonSinkConfig)]
    for converter in (pipeline.engine.converter, *sinks):
        if converter is not None:
            yield from converter_findings(converter.type, converter.options)


def converter_findings(name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the error of a converter if it refuses its options, or can't use its registry."""
    from tailrace.converters.contract import ChecksAhead
    from tailrace.converters.factory import build

    try:
        with closing(build(name, options)) as converter:
            if isinstance(converter, ChecksAhead):
                converter.check()
    except TailraceError as failure:
        yield from_failure(failure)


def _transformations(pipeline: EngineConfig) -> Iterator[Finding]:
    options = pipeline.engine
    from tailrace.sinks.build import chain_of
    from tailrace.transforms import build

    if options.transformations and pipeline.sinks:
        yield warning(
            Kind.CONFIG_INVALID,
            "engine.transformations concern the handlers of tailrace.Engine alone, not the file's sinks",
            "for sinks, set `transformations` of the file, for all of them, or of a sink; or leave the "
            "transformations out",
        )
    if options.transformations or options.predicates:
        build(options.transformations, options.predicates)
    # Each sink has the file's transformations before its own; they are the same for each source.
    for sink in pipeline.pipelines[0].sinks:
        try:
            if isinstance(sink, FolderSink):
                chain_of(sink)
            elif sink.transformations:
                build(sink.transformations, sink.predicates).close()
        except TailraceError as failure:
            yield from_failure(failure)


def _roots(pipeline: EngineConfig) -> Iterator[Finding]:
    check_roots(pipeline)
    if not pipeline.has_several:
        return
    named = {part.log.path for part in pipeline.pipelines}
    logs = logs_in(pipeline.log.path)
    used = {log.identity.source.slot for log in logs if log.path in named}
    for log in logs:
        if log.path not in named:
            source = log.identity.source
            # An older log of one of the sources, which was moved aside, has that source's slot.
            repair = "" if source.slot in used else source_type(source.type).leftover_repair(source)
            yield warning(
                Kind.LOG_FOREIGN,
                f"log.path holds the log of the source {log.path.name!r}, which the file does not name"
                + (
                    f"; its slot {source.slot!r} may still hold back WAL in database {source.database!r} of "
                    f"system {source.system_identifier}"
                    if repair
                    else ""
                ),
                "name it in sources again; or"
                + (f", there: {repair} then" if repair else "")
                + f" remove {log.path}",
            )


def _room(place: str, path: Path, full: Kind, unwritable: Kind) -> Iterator[Finding]:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        yield error(
            unwritable, f"{place}: {existing} is not a directory", f"correct {place}, or move the file away"
        )
        return
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        yield error(
            unwritable,
            f"{place}: the file system of {existing} is mounted read-only",
            f"mount it for writing, or choose another {place}",
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield error(
            unwritable,
            f"{place}: this user may not write in {existing}",
            f"chown {_user()} {existing}, or choose another {place}",
        )
    free = shutil.disk_usage(existing).free
    if free < ROOM_BYTES_MIN:
        yield error(
            full,
            f"{place}: only {free >> 20} MiB are free at {existing}",
            f"make room, or choose another {place}",
        )
    elif free < ROOM_BYTES_WARNED:
        yield warning(full, f"{place}: only {free >> 20} MiB are free at {existing}", "make room soon")


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
