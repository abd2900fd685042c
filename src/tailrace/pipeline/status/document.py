"""The document that `tailrace status` prints: in the same form whether or not the pipeline runs.

A running pipeline writes it to `<log.path>/status.json` every second; `status` reads that file if the lock
there shows that the pipeline runs. At rest it is made from the logs, the positions that sinks recorded, the
source's slot, and the file of the last run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config import EngineConfig, PipelineConfig, SinkConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import Background, as_failure
from tailrace.pipeline.log.root import is_running
from tailrace.pipeline.status.views import (
    ENDED,
    CaptureView,
    PipelineState,
    PipelineView,
    SinkState,
    SinkView,
    SourceView,
    state_at_end,
    tables_left,
)
from tailrace.sources.progress import SourceLook
from tailrace.sources.registry import source_type

FILE_NAME = "status.json"
#: Age beyond which the file is that of a process that hangs or was killed, in seconds.
FRESH_S = 10.0
#: Longest wait for the source's answer, in seconds.
ASK_SOURCE_S = 2.0
_ASKED_AT_ONCE = 16


def document(config: EngineConfig) -> dict[str, Any]:
    """Return the present document, from the running engine or from the files that it left.

    Never raises for a broken pipeline: the document's `error` has the failure.
    """
    written = last_written(config.log.path)
    if not is_running(config):
        return view_at_rest(config, written, PipelineState.STOPPED).as_json()
    fresh = written is not None and time.time() - written.get("updated_us", 0) / 1e6 < FRESH_S
    if written is not None and fresh and written.get("state") not in ENDED:
        return written
    return view_at_rest(config, None, PipelineState.STARTING).as_json()


def last_written(root: Path) -> dict[str, Any] | None:
    """Return the document that the last engine on the directory `log.path` wrote; None if it wrote none."""
    try:
        content = json.loads((root / FILE_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("sinks"), list) else None


def view_at_rest(
    config: EngineConfig, written: Mapping[str, Any] | None, state: PipelineState
) -> PipelineView:
    """Return the present status. Never raises for a broken pipeline: its `error` has the failure.

    :param written: the document of the last engine; None to ignore it.
    :param state: STOPPED; or STARTING, if an engine has started and has not written a document yet.
    """
    last = _LastRun.of(written)
    with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(config.pipelines)), "status") as pool:
        found = list(pool.map(lambda pipeline: _source(pipeline, last, state), config.pipelines))
    errors = [each.damage for each in found] + [last.error]
    if state is not PipelineState.STARTING:
        errors += [*last.captures.values(), *(each.lost for each in found)]
    error = next(filter(None, errors), None)
    if error is not None:
        state = state_at_end(errors)
    return PipelineView(config.name, state, tuple(each.view for each in found), error)


@dataclass(frozen=True, slots=True)
class _LastRun:
    """The failures of the last run, of its captures by source, and of its sinks by source and name."""

    error: TailraceError | None
    captures: Mapping[str, TailraceError]
    sinks: Mapping[tuple[str, str], TailraceError | None]

    @classmethod
    def of(cls, written: Mapping[str, Any] | None) -> _LastRun:
        written = written or {}
        failed = (PipelineState.FAILED, PipelineState.NEEDS_SNAPSHOT)
        tasks = [task for task in written.get("tasks") or () if task.get("state") in failed]
        # Failures of captures in an engine that was killed are ignored: the next engine retries them.
        ended = written.get("state") in failed
        return cls(
            _error_of(written) if ended else None,
            {task.get("name", ""): error for task in tasks if ended and (error := _error_of(task))},
            {
                (sink.get("source", ""), sink.get("name", "")): _error_of(sink)
                for sink in written.get("sinks") or ()
                if sink.get("state") == SinkState.FAILED
            },
        )


def _error_of(part: Mapping[str, Any]) -> TailraceError | None:
    found = part.get("error")
    if not isinstance(found, dict):
        return None
    kind = str(found.get("kind"))
    known = Kind(kind) if kind in set(Kind) else Kind.INTERNAL  # a kind of a later version
    return TailraceError(known, found.get("message", ""), found.get("hint", ""), found.get("context"))


@dataclass(frozen=True, slots=True)
class _Found:
    """A source's view; `damage` is the error of its log, `lost` that of changes which its slot has lost."""

    view: SourceView
    damage: TailraceError | None = None
    lost: TailraceError | None = None


def _source(pipeline: PipelineConfig, last: _LastRun, state: PipelineState) -> _Found:
    name = pipeline.source_name
    before = last.captures.get(name)
    sinks = tuple(_sink_of(sink, last, name) for sink in pipeline.sinks)
    try:
        directory = LogDirectory.open(pipeline.log.path)
        reader = LogReader.open(directory, TASK)
        end = reader.end()
    except TailraceError as error:
        damage = None if error.kind is Kind.LOG_MISSING else error
        task = _failed(CaptureView.at_rest(TASK, None), state, damage or before)
        return _Found(SourceView(name, None, task, sinks), damage)
    look = _look(pipeline, directory)
    snapshots = source_type(pipeline.source.type).snapshots(pipeline.log.path)
    lost = look.lost and source_type(pipeline.source.type).with_recovery(look.lost, pipeline).of_source(name)
    task = replace(
        CaptureView.at_rest(TASK, end),
        source_end=look.end or 0,
        slot=look.health,
        concerns=(*look.warnings, *(snapshots.warnings if snapshots else ())),
        snapshot=tables_left(snapshots.unfinished, 0.0) if snapshots else (),
    )
    task = _failed(task, state, None if state is PipelineState.STARTING else before or lost)
    sinks = tuple(
        _sink(view, sink, pipeline.name, directory, reader, end.offset)
        for view, sink in zip(sinks, pipeline.sinks, strict=True)
    )
    return _Found(SourceView(name, None, task, sinks), lost=lost)


def _failed(task: CaptureView, state: PipelineState, error: TailraceError | None) -> CaptureView:
    return replace(task, state=str(state if error is None else state_at_end([error])), error=error)


def _look(pipeline: PipelineConfig, directory: LogDirectory) -> SourceLook:
    """Query the source's progress; an empty result if it does not answer within `ASK_SOURCE_S`.

    That time includes the look-up of its host name. Never raises.
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


def _sink_of(config: SinkConfig, last: _LastRun, source: str) -> SinkView:
    key = (source, config.name)
    state = SinkState.FAILED if key in last.sinks else SinkState.STOPPED
    return SinkView(config.name, str(getattr(config, "type", "")), state, error=last.sinks.get(key))


def _sink(
    view: SinkView, config: SinkConfig, pipeline: str, directory: LogDirectory, reader: LogReader, end: int
) -> SinkView:
    from tailrace.sinks.build import recorded_position

    try:
        position = recorded_position(config, pipeline, directory, TASK)
    except (TailraceError, OSError) as error:
        return replace(view, state=SinkState.FAILED, error=as_failure(error))
    pending_since_us = _pending_since(reader, position or 0, end)
    return replace(view, position=position, pending_since_us=pending_since_us, is_empty=position is None)


def _pending_since(reader: LogReader, position: int, end: int) -> int | None:
    """Return the commit time at the end of the first block with changes after `position`."""
    try:
        blocks = reader.blocks(max(position, reader.start), end)
    except TailraceError:
        return None
    return blocks[0].header.position_time_us or None if blocks else None
