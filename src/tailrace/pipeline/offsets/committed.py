"""What sinks and engines have committed, of one pipeline, as it is now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config import EngineConfig, PipelineConfig
from tailrace.config.engine_options import OffsetStorage
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.engine.contracts import OffsetReader
from tailrace.engine.offsets.stores import store_for
from tailrace.errors import TailraceError
from tailrace.pipeline.background import as_failure
from tailrace.pipeline.log.consumer import partition_of
from tailrace.pipeline.offsets.changes import chosen_sink
from tailrace.pipeline.offsets.log_store import LogOffsetStore
from tailrace.pipeline.sink_worker import TASK
from tailrace.ranges.batches import LOG, LOG_OFFSET
from tailrace.sinks.kafka import offsets as kafka_offsets


def kept(config: EngineConfig, which: str | None = None, source: str | None = None) -> list[dict[str, Any]]:
    """Return what is kept, an entry for each task of a sink and each source of the engine's.

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
    }
    try:
        found = kafka_offsets.committed(sink, pipeline.name)
    except TailraceError as error:
        yield {**entry, "task": None, **_place(pipeline, "", None), "error": error.as_json()}
        return
    if not found:
        yield {**entry, "task": TASK, **_place(pipeline, "", None), "error": None}
    for each in found:
        yield {
            **entry,
            "task": each.task,
            **_place(pipeline, each.log_id, each.log_offset),
            "partition": each.partition,
            "offset": each.offset,
            "committed_us": each.time_us,
            "error": None,
        }


def _of_engine(config: EngineConfig, parts: tuple[PipelineConfig, ...]) -> Iterator[dict[str, Any]]:
    storage = config.engine.offset_storage
    kind = "log" if storage is None else storage.type
    partitions = [partition_of(part) for part in parts]
    try:
        with _opened(storage, config) as store:
            offsets = {} if store is None else store.read(partitions)
    except Exception as error:  # noqa: BLE001 - the entry's `error` has it, whatever a store meets
        yield {"engine": config.name, "store": kind, "error": as_failure(error).as_json()}
        return
    for number, part in enumerate(parts):
        offset = offsets.get(number)
        if offset is not None:
            log_id, log_offset = str(offset.get(LOG, "")), offset.get(LOG_OFFSET)
            place = _place(part, log_id, log_offset if isinstance(log_offset, int) else None)
            yield {**_named(part), "engine": config.name, "store": kind, **place, "error": None}


@contextlib.contextmanager
def _opened(storage: OffsetStorage | None, config: EngineConfig) -> Iterator[OffsetReader | None]:
    """Yield what reads the engine's offsets; None: nothing is kept."""
    if storage is None or storage.type == "log":
        yield LogOffsetStore(config.name, config.pipelines)
        return
    if storage.type == "memory" or (storage.path is not None and not storage.path.exists()):
        yield None
        return
    store = store_for(storage, config.name, atomic=config.engine.atomic_source_offset_commit)
    try:
        if storage.type == "file":
            store.start()  # the others connect when they are asked, and make nothing then
        yield store
    finally:
        store.stop()


def _named(pipeline: PipelineConfig) -> dict[str, str]:
    return {"source": pipeline.source_name} if pipeline.source_name else {}


def _place(pipeline: PipelineConfig, log_id: str, log_offset: int | None) -> dict[str, Any]:
    """Return where an offset is in the pipeline's log, as far as there is one and it is of that one."""
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
        return found  # without a log there is nothing to compare with
    return found
