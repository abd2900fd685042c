"""`tailrace offsets`: shows and changes committed offsets."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.conversation import error_lines, print_json, speaking
from tailrace.cli.parameters import AsJson, ConfigFile, SourceName, group
from tailrace.errors import Kind, TailraceError, printable

if TYPE_CHECKING:
    from tailrace.config import EngineConfig, PipelineConfig
    from tailrace.pipeline.offsets.commands import Change, OffsetHolder

offsets_app = group("Show and change the offsets that Kafka sinks have committed.")

SinkName = Annotated[
    str | None,
    typer.Option("--sink", metavar="NAME", help="The sink, by name or number. Default: the only Kafka sink."),
]
Engine = Annotated[
    bool,
    typer.Option("--engine", help="The engine's own offset, which is kept in Kafka (engine.offset_storage)."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


@offsets_app.command("show")
@speaking()
def show(
    file: ConfigFile,
    *,
    sink: Annotated[
        str | None, typer.Option("--sink", metavar="NAME", help="Only this sink, by name or number.")
    ] = None,
    source: SourceName = None,
    as_json: AsJson = False,
) -> None:
    """Show the committed offset of each Kafka sink, and the engine's for its handler.

    Reads the current offsets, whether or not the pipeline runs, and does not disturb it.
    """
    from tailrace.config import load_engine
    from tailrace.pipeline.offsets.commands import kept

    loaded = load_engine(file)
    found = kept(loaded, sink, source)
    if as_json:
        print_json({"name": loaded.name, "offsets": found})
        return
    for entry in found:
        print("\n".join(_words(entry)))
    if not found:
        print("no offsets: the pipeline has no Kafka sink, and no engine has committed any")


@offsets_app.command("set")
@speaking()
def set_(
    file: ConfigFile,
    *,
    to: Annotated[
        str,
        typer.Option("--to", metavar="POSITION|TIME", help="Where to continue: log offset, LSN or time."),
    ],
    sink: SinkName = None,
    engine: Engine = False,
    source: SourceName = None,
    skip_changes: Annotated[
        bool,
        typer.Option("--skip-changes", help="Accept that the changes between are never delivered."),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Set the log offset from which a Kafka sink or the engine's handler continues.

    It must not be inside a transaction. With an earlier offset, changes after it are delivered again.
    With a later one, those between are never delivered, which requires --skip-changes. Refused while the
    pipeline runs on this log. With transactions, a process elsewhere that still writes is fenced: it can't
    commit any more.
    """
    from tailrace.pipeline.offsets.commands import Effect, held_still, planned_set
    from tailrace.ranges.positions import parse_point

    loaded, pipeline, holder = _chosen(file, source, sink, engine=engine)
    try:
        point = parse_point(to)
    except ValueError as error:
        raise TailraceError(Kind.CONFIG_INVALID, f"read --to: {error}") from None
    with held_still(loaded, pipeline):
        change = planned_set(pipeline, holder, point)
        if change.effect in (Effect.SKIPS, Effect.UNKNOWN) and not skip_changes:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"set the offset of {holder.role} {holder.name!r} to {change.after}: {_meaning(change)}",
                "to do this, add --skip-changes",
                {holder.role: holder.name},
            )
        _make(change, yes=yes, as_json=as_json)


@offsets_app.command("reset")
@speaking()
def reset(
    file: ConfigFile,
    *,
    sink: SinkName = None,
    engine: Engine = False,
    source: SourceName = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete the offset of a Kafka sink, or the engine's own: all changes in the log are delivered again.

    Refused while the pipeline runs on this log; fences as `set` does. Records in the topics are kept.
    """
    from tailrace.pipeline.offsets.commands import held_still, planned_reset

    loaded, pipeline, holder = _chosen(file, source, sink, engine=engine)
    with held_still(loaded, pipeline):
        _make(planned_reset(pipeline, holder), yes=yes, as_json=as_json)


def _chosen(
    file: Path, source: str | None, sink: str | None, *, engine: bool
) -> tuple[EngineConfig, PipelineConfig, OffsetHolder]:
    from tailrace.config import load_engine
    from tailrace.pipeline.offsets.commands import chosen_holder

    loaded = load_engine(file)
    pipeline = loaded.pipeline(source)
    return loaded, pipeline, chosen_holder(loaded, pipeline, sink, engine)


def _make(change: Change, *, yes: bool, as_json: bool) -> None:
    from tailrace.pipeline.offsets.commands import carry_out

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
            "ask for confirmation: standard input is not a terminal",
            "give --yes to skip the question",
        )
    typer.confirm("Continue?", abort=True)


def _meaning(change: Change) -> str:
    from tailrace.pipeline.offsets.commands import Effect

    before = "nothing is committed" if change.before is None else f"it is at {change.before:,}"
    for_sink = change.holder.role == "sink"
    rows = "changes" if change.rows is None else f"about {change.rows:,} changes"
    if change.effect is Effect.UNKNOWN:
        return (
            "the committed offset is of another log, or there is no log to compare it with: changes may be "
            "delivered again, or never"
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
        return [f"{head}can't be read", *error_lines(entry["error"], "  ")]
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
