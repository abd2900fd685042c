"""Shows and changes the committed offsets of a pipeline's sinks and engine.

Offsets of Kafka sinks can be changed, and an engine's own offsets if they are in Kafka. Sinks of files and
tables commit their offset atomically with their data, so a changed offset would be wrong.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tailrace.changelog.directory import TASK, LogDirectory, encode_name
from tailrace.changelog.lock import take_lock
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.config import EngineConfig, PipelineConfig
from tailrace.config.engine_options import OffsetStorage
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.engine.contracts import OffsetReader
from tailrace.engine.offsets.stores import FileOffsetStore, store_for
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.offsets.store import START_S, KafkaOffsetStore
from tailrace.pipeline.background import as_failure
from tailrace.pipeline.log.consumer import partition_of
from tailrace.pipeline.offsets.log_store import LogOffsetStore
from tailrace.pipeline.replay import choose_sink
from tailrace.ranges.batches import LOG, LOG_OFFSET, offset_of
from tailrace.ranges.positions import LogPoint, locate
from tailrace.sinks.kafka import offsets
from tailrace.sinks.kafka.sink import offset_at


def kept(config: EngineConfig, which: str | None = None, source: str | None = None) -> list[dict[str, Any]]:
    """Return the committed offsets, an entry for each task of a sink and each source of the engine.

    :param which: only of this sink.
    :raises TailraceError: `CONFIG_INVALID`. An entry that can't be read has an `error`.
    """
    parts = config.pipelines if source is None else (config.pipeline(source),)
    found: list[dict[str, Any]] = []
    for part in parts:
        sinks = [sink for sink in part.sinks if isinstance(sink, KafkaSinkConfig)]
        for sink in sinks if which is None else [chosen_sink(part, which)]:
            found += _of_sink(sink, part)
    return found if which is not None else [*found, *_of_engine(config, parts)]


def _of_sink(sink: KafkaSinkConfig, pipeline: PipelineConfig) -> Iterator[dict[str, Any]]:
    entry = {
        **_named(pipeline),
        "sink": sink.name,
        "type": sink.type,
        "store": "kafka",
        "topic": sink.offsets_topic,
        "key": f"{sink.group}-{pipeline.name}",
        "task": TASK,
        **_place(pipeline, "", None),
        "partition": None,
        "offset": None,
        "committed_us": None,
        "error": None,
    }
    try:
        found = offsets.committed(sink, pipeline.name)
    except TailraceError as error:
        yield {**entry, "task": None, "error": error.as_json()}
        return
    if not found:
        yield entry
    for each in found:
        yield {
            **entry,
            "task": each.task,
            **_place(pipeline, each.log_id, each.log_offset),
            "partition": each.partition,
            "offset": each.offset,
            "committed_us": each.time_us,
        }


def _of_engine(config: EngineConfig, parts: tuple[PipelineConfig, ...]) -> Iterator[dict[str, Any]]:
    storage = config.engine.offset_storage
    kind = "log" if storage is None else storage.type
    partitions = [partition_of(part) for part in parts]
    try:
        with _opened(storage, config) as store:
            found = {} if store is None else store.read(partitions)
    except Exception as error:  # noqa: BLE001 - the entry's `error` has every error of a store
        failure = as_failure(error).as_json()
        for part in parts:
            yield {
                **_named(part), "engine": config.name, "store": kind, **_place(part, "", None),
                "error": failure,
            }  # fmt: skip
        return
    for number, part in enumerate(parts):
        offset = found.get(number)
        if offset is not None:
            log_id, log_offset = str(offset.get(LOG, "")), offset.get(LOG_OFFSET)
            place = _place(part, log_id, log_offset if isinstance(log_offset, int) else None)
            yield {**_named(part), "engine": config.name, "store": kind, **place, "error": None}


@contextlib.contextmanager
def _opened(storage: OffsetStorage | None, config: EngineConfig) -> Iterator[OffsetReader | None]:
    """Yield a reader of the engine's offsets; None if they are only in memory."""
    if storage is None or storage.type == "log":
        yield LogOffsetStore(config.name, config.pipelines)
        return
    if storage.type == "memory":
        yield None
        return
    store = store_for(storage, config.name, atomic=config.engine.atomic_source_offset_commit)
    try:
        if isinstance(store, FileOffsetStore):
            store.load()  # other stores connect on the first read, and create nothing then
        yield store
    finally:
        store.stop()


def _named(pipeline: PipelineConfig) -> dict[str, str]:
    return {"source": pipeline.source_name} if pipeline.source_name else {}


def _place(pipeline: PipelineConfig, log_id: str, log_offset: int | None) -> dict[str, Any]:
    """Return an offset's fields for its place in the pipeline's log; None where it is not of that log."""
    found: dict[str, Any] = {
        "log_id": log_id or None,
        "log_offset": log_offset,
        "is_of_this_log": None,
        "lag_bytes": None,
    }
    try:
        directory = LogDirectory.open(pipeline.log.path)
        found["is_of_this_log"] = None if log_offset is None else directory.identity.log_id == log_id
        with LogReader.open(directory, TASK) as reader:
            if found["is_of_this_log"] or log_offset is None:
                found["lag_bytes"] = max(0, reader.end().offset - (log_offset or 0))
    except TailraceError:
        return found  # there is no log to compare with
    return found


class Effect(enum.StrEnum):
    """The effect of a change of an offset on the records that are delivered."""

    NOTHING = "nothing"
    REPEATS = "repeats"  # changes are delivered again
    SKIPS = "skips"  # changes are never delivered
    UNKNOWN = "unknown"  # the replaced offset is of another log: either is possible


@dataclass(frozen=True, slots=True)
class CommittedPlace:
    """A committed offset: everything before `log_offset` of that log; -1: it is not a log offset."""

    task: str
    log_id: str
    log_offset: int


@dataclass(frozen=True, slots=True)
class SinkOffsets:
    """The offset of a sink `kafka`."""

    sink: KafkaSinkConfig
    pipeline: PipelineConfig
    role: str = "sink"

    @property
    def name(self) -> str:
        """The sink's name in the file."""
        return self.sink.name

    def places(self) -> Sequence[CommittedPlace]:
        """Return what is committed now, without fencing a producer."""
        found = offsets.committed(self.sink, self.pipeline.name, lenient=True)
        return [CommittedPlace(each.task, each.log_id, each.log_offset) for each in found]

    def put(self, tasks: Sequence[str], log_id: str, log_offset: int | None) -> None:
        """Commit `log_offset` for these tasks and fence their earlier producers; None deletes the offset."""
        offset: Mapping[str, Any] | None = None
        if log_offset is not None:
            offset = offset_at(log_id, log_offset)
        # At its start the sink compares both offsets, and would refuse an earlier one in Kafka.
        with contextlib.suppress(TailraceError):  # there may be no log yet
            Readers.open(self.pipeline.log.path).remove(self.sink.name)
        offsets.commit_from_outside(self.sink, self.pipeline.name, tasks, offset)


@dataclass(frozen=True, slots=True)
class EngineOffsets:
    """The offset that an engine has committed for its handler and one source."""

    storage: OffsetStorage
    name: str
    pipeline: PipelineConfig
    atomic: bool
    role: str = "engine"

    def places(self) -> Sequence[CommittedPlace]:
        """Return what is committed now, as `SinkOffsets.places`."""
        store = self._store()
        try:
            found = store.read([partition_of(self.pipeline)]).get(0)
        finally:
            store.stop()
        if found is None:
            return []
        at = found.get(LOG_OFFSET)
        return [CommittedPlace(TASK, str(found.get(LOG, "")), at if isinstance(at, int) else -1)]

    def put(self, tasks: Sequence[str], log_id: str, log_offset: int | None) -> None:
        """Commit `log_offset`, as `SinkOffsets.put`."""
        partition, store = partition_of(self.pipeline), self._store()
        try:
            store.start()
            if log_offset is None:
                store.take_back([partition], START_S)
            else:
                store.write([(partition, offset_of(log_id, log_offset))], START_S)
        finally:
            store.stop()

    def _store(self) -> KafkaOffsetStore:
        return KafkaOffsetStore(self.storage, self.name, atomic=self.atomic)


#: The owner of an offset that is changed.
OffsetHolder: TypeAlias = SinkOffsets | EngineOffsets


@dataclass(frozen=True, slots=True)
class Change:
    """A change of an offset, not yet made.

    :param tasks: the tasks whose offsets are changed.
    :param before: the lowest log offset that was committed; None: none, or one of another log.
    :param after: the log offset that is set; None: the offset is deleted.
    :param rows: about how many changes are repeated or skipped; None: not known.
    :param note: what else the user should know before; empty: nothing.
    """

    holder: OffsetHolder
    tasks: tuple[str, ...]
    log_id: str
    before: int | None
    after: int | None
    effect: Effect
    rows: int | None
    note: str = ""


def chosen_holder(
    config: EngineConfig, pipeline: PipelineConfig, sink: str | None, engine: bool
) -> OffsetHolder:
    """Return the owner of the offset that the options name.

    :param sink: by name or number; None: the only Kafka sink, or the engine if there is none.
    :param engine: the engine's own offset.
    :raises TailraceError: `CONFIG_INVALID` if there is none, there are several, or it is not in Kafka.
    """
    storage = config.engine.offsets_in_kafka
    has_sinks = any(isinstance(each, KafkaSinkConfig) for each in pipeline.sinks)
    if not engine and (sink is not None or has_sinks or storage is None):
        return SinkOffsets(chosen_sink(pipeline, sink), pipeline)
    if sink is not None:
        raise TailraceError(Kind.CONFIG_INVALID, "choose an offset: --sink and --engine name two", "give one")
    if storage is None:
        elsewhere = config.engine.offset_storage
        kind = "log" if elsewhere is None else elsewhere.type
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"choose the engine's own offset: it is not kept in Kafka (engine.offset_storage: {kind})",
            "`tailrace offsets show` shows it; an engine of another name begins without one",
        )
    return EngineOffsets(storage, config.name, pipeline, config.engine.atomic_source_offset_commit)


def chosen_sink(pipeline: PipelineConfig, which: str | None) -> KafkaSinkConfig:
    """Return the Kafka sink with the name or number `which`; None: the only Kafka sink.

    :raises TailraceError: `CONFIG_INVALID` if there is none, there are several, or it keeps its offset in
        its target.
    """
    if which is not None:
        sink = choose_sink(pipeline, which)
        if isinstance(sink, KafkaSinkConfig):
            return sink
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"choose sink {sink.name!r}: its offset is in its target, committed together with its data",
            "`tailrace status FILE` shows it, and `tailrace replay` builds a target again",
        )
    found = [sink for sink in pipeline.sinks if isinstance(sink, KafkaSinkConfig)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(sink.name for sink in found)
    raise TailraceError(
        Kind.CONFIG_INVALID,
        f"choose a sink: the configuration has {f'several of Kafka: {known}' if found else 'none of Kafka'}",
        "name one of them with --sink" if found else "other sinks keep their offsets in their targets",
    )


@contextlib.contextmanager
def held_still(config: EngineConfig, pipeline: PipelineConfig) -> Iterator[None]:
    """Return a context in which no engine can run this configuration or write this pipeline's log.

    :raises TailraceError: `LOG_LOCKED` if one runs.
    """
    with contextlib.ExitStack() as held:
        for path in (config.log.path, pipeline.log.path / "tasks" / encode_name(TASK)):
            if path.is_dir():
                held.callback(os.close, _taken(path))
        yield


def _taken(path: Path) -> int:
    try:
        return take_lock(path)
    except TailraceError as error:
        if error.kind is not Kind.LOG_LOCKED:
            raise
        raise error.changed(
            message="change an offset: the pipeline is running, and would overwrite it",
            hint="stop it first, then repeat the command; `tailrace status FILE` shows it",
        ) from None


def planned_set(pipeline: PipelineConfig, holder: OffsetHolder, point: LogPoint) -> Change:
    """Return the change that sets an offset to a place of the log.

    :raises TailraceError: `LOG_RANGE_GONE`, `LOG_RANGE_INVALID` if the place is not in the log, or inside
        a transaction; `LOG_MISSING`; errors of the cluster.
    """
    directory = LogDirectory.open(pipeline.log.path)
    log_id = directory.identity.log_id
    with LogReader.open(directory, TASK) as reader:
        after = locate(reader, point)
        if (boundary := reader.boundary_up_to(after)) != after:
            raise TailraceError(
                Kind.LOG_RANGE_INVALID,
                f"set the offset of {holder.role} {holder.name!r} to {after}: it is inside a transaction",
                f"the transaction begins at {boundary}: set it to that",
                {holder.role: holder.name},
            )
        tasks, before, is_foreign = _now(holder, log_id)
        effect = Effect.UNKNOWN if is_foreign else _effect(before or 0, after)
        low, high = sorted((before or 0, after))
        rows = None if is_foreign else _rows(reader, low, high)
    note = ""
    if after == 0 and point.kind != "offset":
        note = f"the log has nothing before this point: the {holder.role} continues at the log's start"
    return Change(holder, tasks, log_id, before, after, effect, rows, note)


def planned_reset(pipeline: PipelineConfig, holder: OffsetHolder) -> Change:
    """Return the change that deletes an offset: its owner then begins at the log's start.

    :raises TailraceError: errors of the cluster.
    """
    try:
        directory = LogDirectory.open(pipeline.log.path)
    except TailraceError as error:
        if error.kind is not Kind.LOG_MISSING:
            raise
        tasks, _, _ = _now(holder, "")
        return Change(holder, tasks, "", None, None, Effect.UNKNOWN, None, "there is no log yet")
    log_id = directory.identity.log_id
    tasks, before, is_foreign = _now(holder, log_id)
    with LogReader.open(directory, TASK) as reader:
        start = reader.start
        effect = Effect.UNKNOWN if is_foreign else Effect.REPEATS if before else Effect.NOTHING
        rows = None if is_foreign else _rows(reader, start, before or 0)
    note = ""
    if start > 0:
        whose = f"--sink {holder.name}" if holder.role == "sink" else "--engine"
        whose += f" --source {pipeline.source_name}" if pipeline.source_name else ""
        note = (
            f"the log begins at {start}, what was before it is removed: without an offset the {holder.role} "
            f"will not start (log_range_gone); `tailrace offsets set FILE {whose} --to {start} "
            "--skip-changes` lets it begin there"
        )
    return Change(holder, tasks, log_id, before, None, effect, rows, note)


def carry_out(change: Change) -> None:
    """Make the change and fence producers of the owner's transactional ids.

    :raises TailraceError: as `offsets.commit_from_outside`, or as `KafkaOffsetStore.start` and `write`.
    """
    change.holder.put(change.tasks, change.log_id, change.after)


def _now(holder: OffsetHolder, log_id: str) -> tuple[tuple[str, ...], int | None, bool]:
    """Return the tasks that have an offset, the lowest offset, and whether one is of another log."""
    found = holder.places()
    if not found:
        return (TASK,), None, False
    tasks = tuple(each.task for each in found)
    if any(each.log_id != log_id for each in found):
        return tasks, None, True
    return tasks, min(each.log_offset for each in found), False


def _effect(before: int, after: int) -> Effect:
    if after == before:
        return Effect.NOTHING
    return Effect.SKIPS if after > before else Effect.REPEATS


def _rows(reader: LogReader, start: int, end: int) -> int | None:
    """Return about how many changes are in `[start, end)`; None if the log does not have all of it."""
    if start >= end:
        return 0
    try:
        begin, upto = reader.boundary_up_to(start), reader.boundary_up_to(end)
        return sum(block.header.rows for block in reader.blocks(begin, upto))
    except TailraceError:
        return None
