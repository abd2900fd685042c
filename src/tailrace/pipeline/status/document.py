"""The document behind `tailrace status`: the same shape whether or not the pipeline runs.

A running engine writes it to `<log.path>/status.json` every second; whoever asks reads that
file, and the lock there tells whether to believe it. Without an engine the document is put
together from what the logs and the sinks themselves record.

With several sources, each entry of `tasks` has the source's `name`, each of `sinks` its `source`.

The file is a convenience: it is replaced atomically, not fsynced, and nothing is decided by it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config import EngineConfig, PipelineConfig, SinkConfig
from tailrace.errors import Kind, TailraceError
from tailrace.model import format_lsn
from tailrace.pipeline.background import Background, as_failure
from tailrace.pipeline.log.root import is_running
from tailrace.pipeline.sink_worker import TASK
from tailrace.pipeline.status.lifecycle import PipelineState
from tailrace.pipeline.status.snapshot_status import snapshot_concerns, unfinished
from tailrace.pipeline.status.views import CaptureView, PipelineView, SinkView, lag_s
from tailrace.sources.progress import SourceLook
from tailrace.sources.registry import source_type

log = structlog.get_logger(__name__)

FILE_NAME = "status.json"
#: States that an engine does not leave any more.
ENDED = (PipelineState.STOPPED, PipelineState.FAILED, PipelineState.NEEDS_SNAPSHOT)
WRITE_INTERVAL_S = 1.0
#: Older than this, the file tells of an engine that hangs or of one that was killed.
FRESH_S = 10.0
#: How long `status` waits for the source to say how far it is.
ASK_SOURCE_S = 2.0
_ASKED_AT_ONCE = 16


class StatusFile:
    """Writes the document of a running engine, once a second. One thread."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._next_s = 0.0
        self._complained = False

    def turn(self, view: PipelineView) -> None:
        """Write `view` if it is time to."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + WRITE_INTERVAL_S
            self.last(view)

    def last(self, view: PipelineView) -> None:
        """Write `view` now. A file that can't be written is said once and hurts nobody.

        Only for the engine that holds the log.
        """
        path = self._log_path / FILE_NAME
        temporary = path.with_name(f".{FILE_NAME}.{os.getpid()}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(of_engine(view), file)
            temporary.replace(path)
        except OSError as error:
            if not self._complained:
                log.warning("could not write the status file", file=str(path), reason=error.strerror)
            self._complained = True


def of_engine(view: PipelineView) -> dict[str, Any]:
    """Return the document for a running engine."""
    now_us = time.time_ns() // 1000
    return {
        "name": view.name,
        "state": str(view.state),
        "pid": os.getpid(),
        "updated_us": now_us,
        "tasks": [
            _named(source.name, "name", of_task(source.task, now_us), engine_task=source.engine_task)
            for source in view.sources
        ],
        "sinks": [
            _named(source.name, "source", of_sink(sink, source.task.log_end, now_us))
            for source in view.sources
            for sink in source.sinks
        ],
        "error": view.error.as_json() if view.error else None,
    }


def of_task(task: CaptureView, now_us: int) -> dict[str, Any]:
    """Return a source's part of the document."""
    return {
        "task": task.task,
        "state": task.state,
        "source_lag_bytes": task.source_lag_bytes,
        "source_lag_s": task.source_lag_s(now_us),
        "log_end": task.log_end,
        "position": format_lsn(task.position),
        "acknowledged": format_lsn(task.acknowledged),
        "rows": task.rows,
        "bytes": task.bytes,
        "reconnects": task.reconnects,
        "error": task.error.as_json() if task.error else None,
        "slot": task.slot.details if task.slot else None,
        "warnings": [concern.as_json() for concern in task.concerns],
        "snapshot": [table.as_json() for table in task.snapshot],
    }


def of_sink(view: SinkView, log_end: int | None, now_us: int) -> dict[str, Any]:
    """Return a sink's part of the document."""
    lag_bytes = None
    if view.position is not None and log_end is not None:
        lag_bytes = max(0, log_end - view.position)
    return {
        "name": view.name,
        "type": view.type,
        "state": str(view.state),
        "position": view.position,
        "lag_bytes": lag_bytes,
        "lag_s": lag_s(lag_bytes, view.pending_since_us, now_us),
        "rows": view.rows,
        "dead_letters": view.dead_letters,
        "error": view.error.as_json() if view.error else None,
    }


def document(config: EngineConfig) -> dict[str, Any]:
    """Return the document as of now, from the running engine or from what it left.

    Never raises for a pipeline that is broken: what is wrong is in the document's `error`.
    """
    written = _read(config.log.path / FILE_NAME)
    if is_running(config):
        fresh = written is not None and time.time() - written.get("updated_us", 0) / 1e6 < FRESH_S
        if written is not None and fresh and written.get("state") not in ENDED:
            return written
        return _at_rest(config, None, PipelineState.STARTING)
    return _at_rest(config, written, PipelineState.STOPPED)


def _at_rest(config: EngineConfig, written: dict[str, Any] | None, state: PipelineState) -> dict[str, Any]:
    left = (
        PipelineState(written["state"])
        if written and written.get("state") in ENDED
        else PipelineState.STOPPED
    )
    error = written.get("error") if written and left is not PipelineState.STOPPED else None
    failures = _Failures.left_in(written, left)
    with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(config.pipelines)), "status") as pool:
        parts = list(pool.map(lambda part: _source_at_rest(part, failures, state), config.pipelines))
    error = next((part.damage for part in parts if part.damage), error)
    if error:
        state = left if left is not PipelineState.STOPPED else PipelineState.FAILED
    lost = next((part.lost for part in parts if part.lost), None)
    if state is not PipelineState.STARTING and lost:
        state, error = PipelineState.NEEDS_SNAPSHOT, error or lost
    return {
        "name": config.name,
        "state": str(state),
        "tasks": [part.task for part in parts],
        "sinks": [sink for part in parts for sink in part.sinks],
        "error": error,
    }


@dataclass(frozen=True, slots=True)
class _Failures:
    """What an engine that ended said of sources (by name) and sinks (by source and name) that failed."""

    tasks: Mapping[str, dict[str, Any]]
    sinks: Mapping[tuple[str, str], Any]

    @classmethod
    def left_in(cls, written: dict[str, Any] | None, left: PipelineState) -> _Failures:
        if written is None:
            return cls({}, {})
        tasks = (
            written.get("tasks") or () if left in (PipelineState.FAILED, PipelineState.NEEDS_SNAPSHOT) else ()
        )
        return cls(
            {
                task.get("name", ""): {"state": task["state"], "error": task.get("error")}
                for task in tasks
                if task.get("state") in (PipelineState.FAILED, PipelineState.NEEDS_SNAPSHOT)
            },
            {
                (sink.get("source", ""), sink.get("name", "")): sink.get("error")
                for sink in written["sinks"]
                if sink.get("state") == "failed"
            },
        )


@dataclass(frozen=True, slots=True)
class _AtRest:
    """A source's parts of the document; `damage` is its log's, `lost` what its slot has lost."""

    task: dict[str, Any]
    sinks: list[dict[str, Any]]
    damage: dict[str, Any] | None = None
    lost: dict[str, Any] | None = None


def _source_at_rest(pipeline: PipelineConfig, failures: _Failures, state: PipelineState) -> _AtRest:
    name = pipeline.source_name
    now_us = time.time_ns() // 1000
    try:
        directory = LogDirectory.open(pipeline.log.path)
        reader = LogReader.open(directory, TASK)
        end = reader.end()
    except TailraceError as error:
        damage = None if error.kind is Kind.LOG_MISSING else error.as_json()
        task = _task(state, None, None, None) | failures.tasks.get(name, {})
        if damage:
            task |= {"state": str(PipelineState.FAILED), "error": damage}
        return _AtRest(
            _named(name, "name", task),
            [_named(name, "source", _unknown(sink)) for sink in pipeline.sinks],
            damage,
        )
    look = _look(pipeline, directory)
    source_lag = None if look.end is None else max(0, look.end - end.position)
    task = _task(state, end.offset, source_lag, lag_s(source_lag, end.position_time_us, now_us))
    task["position"] = format_lsn(end.position)
    task["slot"] = None if look.health is None else look.health.details
    task["warnings"] = [warning.as_json() for warning in look.warnings]
    task["warnings"] += [concern.as_json() for concern in snapshot_concerns(directory, TASK)]
    task["snapshot"] = [table.as_json() for table in unfinished(directory, TASK)]
    lost = None
    if look.lost is not None:
        lost = source_type(pipeline.source.type).with_recovery(look.lost, pipeline).as_json()
    if state is not PipelineState.STARTING:
        task |= {"state": str(PipelineState.NEEDS_SNAPSHOT), "error": lost} if lost else {}
        task |= failures.tasks.get(name, {})
    sinks = [_sink(sink, pipeline.name, directory, reader, failures, name) for sink in pipeline.sinks]
    return _AtRest(_named(name, "name", task), [_named(name, "source", sink) for sink in sinks], lost=lost)


def _named(source: str, key: str, part: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return `part` with the source's name, which the only one has not."""
    return {key: source, **part, **more} if source else part


def _look(pipeline: PipelineConfig, directory: LogDirectory) -> SourceLook:
    """Ask the source how it is; nothing is known of one that does not answer in time.

    The look-up of its name counts, too. Never raises.
    """
    found: list[SourceLook] = []
    stop = threading.Event()
    source = source_type(pipeline.source.type)
    asking = Background(
        "ask-source", lambda: found.append(source.look(pipeline, directory, ASK_SOURCE_S, stop))
    )
    asking.start()
    asking.join(ASK_SOURCE_S)
    stop.set()
    return next(iter(found), SourceLook(None))


def _sink(
    config: SinkConfig,
    pipeline: str,
    directory: LogDirectory,
    reader: LogReader,
    failures: _Failures,
    source: str,
) -> dict[str, Any]:
    from tailrace.sinks.build import recorded_position

    found = _unknown(config)
    if (source, config.name) in failures.sinks:
        found["state"], found["error"] = "failed", failures.sinks[source, config.name]
    try:
        position = recorded_position(config, pipeline, directory, TASK)
    except (TailraceError, OSError) as error:
        return {**found, "state": "failed", "error": as_failure(error).as_json()}
    end = reader.end().offset
    found["position"] = position
    found["lag_bytes"] = max(0, end - (position or 0))
    pending = _pending_since(reader, position or 0, end)
    found["lag_s"] = lag_s(found["lag_bytes"], pending, time.time_ns() // 1000)
    return found


def _pending_since(reader: LogReader, position: int, end: int) -> int | None:
    """Return the commit time at the end of the first block that holds something after `position`."""
    try:
        blocks = reader.blocks(max(position, reader.start), end)
    except TailraceError:
        return None
    return blocks[0].header.position_time_us or None if blocks else None


def _unknown(config: SinkConfig) -> dict[str, Any]:
    return {
        "name": config.name,
        "type": str(getattr(config, "type", "")),
        "state": "stopped",
        "position": None,
        "lag_bytes": None,
        "lag_s": None,
        "error": None,
    }


def _task(
    state: PipelineState, log_end: int | None, lag_bytes: int | None, lag: float | None
) -> dict[str, Any]:
    return {
        "task": TASK,
        "state": str(state),
        "source_lag_bytes": lag_bytes,
        "source_lag_s": lag,
        "log_end": log_end,
        "error": None,
    }


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("sinks"), list) else None
