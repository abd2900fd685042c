"""`tailrace realtime`: switches real time on or off for consumers of a file's logs, and shows its state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.retention.readers import Readers
from tailrace.config import EngineConfig, PipelineConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.log.consumer import reader_name
from tailrace.pipeline.status.document import document
from tailrace.realtime import control
from tailrace.realtime.switching import RealtimeMode


def switch(
    config: EngineConfig, *, on: bool, source: str | None = None, consumer: str | None = None
) -> list[dict[str, Any]]:
    """Request that consumers are fed from memory, or no longer; return which. Returns at once.

    A running engine reads the request within a second; `status` shows its outcome.

    :param source: only consumers of this source; None: of all sources.
    :param consumer: only this consumer: a sink's name, or `engine:NAME`; None: all of them.
    :raises TailraceError: `CONFIG_INVALID`, `LOG_MISSING`, `LOG_CORRUPT`, `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    found = list(_consumers(config, source, consumer))
    for _, directory, name in found:
        control.give_command(directory, name, on=on)
    return [{"source": pipeline.source_name, "consumer": name, "wanted": on} for pipeline, _, name in found]


def status(
    config: EngineConfig, source: str | None = None, consumer: str | None = None
) -> list[dict[str, Any]]:
    """Return the state of real time for each consumer; the stored state if no engine runs.

    :raises TailraceError: as `switch`.
    """
    sinks = {(sink.get("source", ""), sink["name"]): sink for sink in document(config)["sinks"]}
    found = []
    for pipeline, directory, name in _consumers(config, source, consumer):
        sink = sinks.get((pipeline.source_name, name), {})
        state = sink.get("realtime") or _at_rest(config, directory, name, sink.get("position"))
        found.append({"source": pipeline.source_name, "consumer": name, **state})
    return found


def _at_rest(
    config: EngineConfig, directory: LogDirectory, consumer: str, recorded: int | None
) -> dict[str, Any]:
    # `recorded`: the log offset that the consumer's target has recorded; None: it has none.
    kept, command = control.kept(directory, consumer), control.command(directory, consumer)
    if recorded is None and (reader := Readers(directory).get(consumer)) is not None:
        recorded = reader.offsets.get(TASK)
    wanted = config.realtime.enabled if command is None else command.on
    because = "no engine runs"
    if kept.waits_for_command(command) and not config.realtime.return_automatically:
        because += "; it fell back before, and waits for a command"
    return {
        "mode": str(RealtimeMode.OFF),
        "wanted": wanted,
        "because": because,
        "position": kept.position if recorded is None else recorded,
    }


def _consumers(
    config: EngineConfig, source: str | None, consumer: str | None
) -> Iterator[tuple[PipelineConfig, LogDirectory, str]]:
    pipelines = config.pipelines if source is None else (config.pipeline(source),)
    known: list[str] = []
    found = False
    for pipeline in pipelines:
        directory = LogDirectory.open(pipeline.log.path)
        engines = {reader.name for reader in Readers(directory).all() if reader.name.startswith("engine:")}
        sinks = [sink.name for sink in pipeline.sinks]
        names = [*sorted(engines), *sinks] or [reader_name(config.name)]
        known += names
        for name in names:
            if consumer in (None, name):
                found = True
                yield pipeline, directory, name
    if not found:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"choose the consumer {consumer!r}: there is none with that name",
            f"name one of them with --consumer: {', '.join(sorted(set(known)))}",
        )
