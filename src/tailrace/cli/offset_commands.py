"""`tailrace offsets`: what is committed, and what a person changes of it."""

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

offsets_app = group("Show and change the offsets that sinks of Kafka have committed.")

SinkName = Annotated[
    str | None,
    typer.Option(
        "--sink", metavar="NAME", help="The sink, by name or number. Default: the only one of Kafka."
    ),
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
    """Show what each sink of Kafka has committed, and what the engine has for its handler.

    Read as it is now, whether or not the pipeline runs; nobody is disturbed.
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
        print("no offsets: the pipeline has no sink of Kafka, and no engine has committed any")


@offsets_app.command("set")
@speaking()
def set_(
    file: ConfigFile,
    *,
    to: Annotated[
        str,
        typer.Option("--to", metavar="POSITION|TIME", help="Where it is to go on: log offset, LSN or time."),
    ],
    sink: SinkName = None,
    engine: Engine = False,
    source: SourceName = None,
    skip_changes: Annotated[
        bool,
        typer.Option("--skip-changes", help="Agree that changes in between never come there."),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Have a sink of Kafka, or the engine's handler, go on from another place, where no transaction is open.

    An earlier place: changes since then come again. A later one: those in between never come, which
    --skip-changes must agree to. Refused while the pipeline runs on this log. With transactions, a
    process elsewhere that still writes is fenced: it can commit nothing more.
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
                "if that is wanted, say so with --skip-changes",
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
    """Take the offset of a sink of Kafka back, or the engine's own: all changes in the log come again.

    Refused while the pipeline runs on this log; fences as `set` does. What is in the topics stays.
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
            "give --yes where no person can be asked",
        )
    typer.confirm("Go on?", abort=True)


def _meaning(change: Change) -> str:
    from tailrace.pipeline.offsets.commands import Effect

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
