"""`offsets show`, `set` and `reset`: in words or as JSON, and never without being sure."""

from __future__ import annotations

import datetime as dt
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from tailrace import config
from tailrace.cli.conversation import print_json, printable
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.log.positions import parse_point
from tailrace.pipeline.offsets.changes import (
    Change,
    Effect,
    OffsetHolder,
    carry_out,
    chosen_holder,
    held_still,
    planned_reset,
    planned_set,
)
from tailrace.pipeline.offsets.committed import kept


@dataclass(frozen=True, slots=True)
class Whose:
    """Whose offset is meant, as it was given.

    :param sink: name or number of a sink; None: it was not said.
    :param engine: the engine's own.
    """

    sink: str | None
    engine: bool
    source: str | None


def show_offsets(file: Path, sink: str | None, source: str | None, *, as_json: bool) -> None:
    """Print what is committed.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    loaded = config.load_engine(file)
    found = kept(loaded, sink, source)
    if as_json:
        print_json({"name": loaded.name, "offsets": found})
        return
    for entry in found:
        print("\n".join(_words(entry)))
    if not found:
        print("no offsets: the pipeline has no sink of Kafka, and no engine has committed any")


def set_offset(file: Path, whose: Whose, to: str, *, skip_changes: bool, yes: bool, as_json: bool) -> None:
    """Set an offset; print what that meant.

    :raises TailraceError: `CONFIG_INVALID` for a place that is none, or changes that would be skipped
        without being agreed to; `LOG_LOCKED`; as `planned_set` and `carry_out`.
    """
    pipeline, holder = _chosen(file, whose)
    try:
        point = parse_point(to)
    except ValueError as error:
        raise TailraceError(Kind.CONFIG_INVALID, f"read --to: {error}") from None
    with held_still(pipeline):
        change = planned_set(pipeline, holder, point)
        if change.effect in (Effect.SKIPS, Effect.UNKNOWN) and not skip_changes:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"set the offset of {holder.role} {holder.name!r} to {change.after}: {_meaning(change)}",
                "if that is wanted, say so with --skip-changes",
                {holder.role: holder.name},
            )
        _make(change, yes=yes, as_json=as_json)


def reset_offset(file: Path, whose: Whose, *, yes: bool, as_json: bool) -> None:
    """Take an offset back; print what that meant.

    :raises TailraceError: as `set_offset`.
    """
    pipeline, holder = _chosen(file, whose)
    with held_still(pipeline):
        _make(planned_reset(pipeline, holder), yes=yes, as_json=as_json)


def _chosen(file: Path, whose: Whose) -> tuple[config.PipelineConfig, OffsetHolder]:
    loaded = config.load_engine(file)
    pipeline = loaded.pipeline(whose.source)
    return pipeline, chosen_holder(loaded, pipeline, whose.sink, whose.engine)


def _make(change: Change, *, yes: bool, as_json: bool) -> None:
    if not as_json:
        print(f"{change.holder.role} {change.holder.name}: {_meaning(change)}")
        if change.note:
            print(change.note)
    if not yes:
        _confirm(as_json=as_json)
    carry_out(change)
    if as_json:
        print_json(_document(change))
    else:
        print("reset" if change.after is None else f"set to {change.after:,}")


def _confirm(*, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise TailraceError(
            Kind.CONFIG_INVALID,
            "ask whether to go on: nobody is there to answer",
            "give --yes where no person can be asked",
        )
    typer.confirm("Go on?", abort=True)


def _meaning(change: Change) -> str:
    before = "nothing is committed" if change.before is None else f"it is at {change.before:,}"
    for_sink = change.holder.role == "sink"
    rows = "changes" if change.rows is None else f"about {change.rows:,} changes"
    if change.effect is Effect.UNKNOWN:
        return (
            "what is committed is of another log, or there is no log to compare it with: which changes come "
            "again and which never come can't be known"
        )
    if change.effect is Effect.SKIPS:
        end = "be written to the topics" if for_sink else "come to the handler"
        return f"{before}; {rows} from there to {change.after:,} would never {end}"
    if change.effect is Effect.REPEATS:
        begin = "the log's start" if change.after is None else f"{change.after:,}"
        again = "come again, the topics then have them twice" if for_sink else "come to the handler again"
        return f"{before}; {rows} from {begin} on {again}"
    return f"{before}; no change is skipped, none comes again"


def _document(change: Change) -> dict[str, Any]:
    return {
        change.holder.role: change.holder.name,
        "tasks": list(change.tasks),
        "log_id": change.log_id or None,
        "before": change.before,
        "after": change.after,
        "effect": str(change.effect),
        "changes": change.rows,
        "note": change.note or None,
    }


def _words(entry: dict[str, Any]) -> list[str]:
    owner = f"sink {entry['sink']}" if "sink" in entry else f"engine {entry['engine']}"
    source = f"{entry['source']} → " if "source" in entry else ""
    task = f", task {entry['task']}" if entry.get("task") else ""
    where = f"topic {entry['topic']}" if "topic" in entry else str(entry["store"])
    head = f"{source}{owner}{task} ({printable(where)}): "
    if entry["error"]:
        error = entry["error"]
        lines = [f"{head}can't be read", f"  error: {error['kind']}: {printable(str(error['message']))}"]
        return [*lines, f"  hint:  {printable(str(error['hint']))}"] if error.get("hint") else lines
    if entry["log_offset"] is None:
        return [f"{head}nothing committed"]
    words = [f"at {entry['log_offset']:,}"]
    if entry["lag_bytes"] is not None:
        words.append(f"{entry['lag_bytes']:,} bytes behind the log")
    if entry["is_of_this_log"] is False:
        words.append(f"of another log, {entry['log_id'] or 'unnamed'}")
    if entry.get("committed_us"):
        time = dt.datetime.fromtimestamp(entry["committed_us"] / 1e6, dt.UTC)
        words.append(f"committed {time.isoformat(timespec='seconds').removesuffix('+00:00')}Z")
    return [head + ", ".join(words)]
