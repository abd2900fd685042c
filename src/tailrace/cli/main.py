"""The command `tailrace`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from tailrace import __version__
from tailrace.cli.conversation import DONE, FAILED, UNUSABLE, conversation, note_root_options, speaking
from tailrace.cli.log_commands import LogPath, log_app, tail
from tailrace.cli.offset_commands import offsets_app
from tailrace.cli.parameters import AsJson, ConfigFile, Debug, SourceName, Verbose, group
from tailrace.cli.realtime_commands import realtime_app
from tailrace.errors import Kind, TailraceError

app = group(
    "Change data capture for Python and Spark: every committed change once, in order.",
    name="tailrace",
    add_completion=False,
)
app.add_typer(log_app, name="log")
app.add_typer(offsets_app, name="offsets")
app.add_typer(realtime_app, name="realtime")
app.command("tail")(tail)


def _tool(name: str) -> Any:
    """Import and return the package `name` of tailrace-tools.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"import {name}: it is not installed; demo and benchmarks come with tailrace-tools",
            "install it from a checkout of Tailrace: pip install ./tools",
        ) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tailrace {__version__}")
        raise typer.Exit(DONE)


@app.callback()
def root(
    *,
    verbose: Verbose = False,
    debug: Debug = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Change data capture for Python and Spark: every committed change once, in order."""
    note_root_options(verbose=verbose, debug=debug)


@app.command()
@speaking(chatty=True)
def run(
    file: ConfigFile,
    *,
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up",
            help="End when everything that the source had committed at the start is in every sink.",
        ),
    ] = False,
) -> None:
    """Run the pipeline until Ctrl-C or SIGTERM, or until it has caught up.

    The first signal ends it cleanly within seconds: sinks finish their batch, received changes
    are made durable and acknowledged. A second signal ends it at once, without loss of data.
    """
    from tailrace.cli.run import run_pipeline

    run_pipeline(file, until_caught_up=until_caught_up)


@app.command()
@speaking(chatty=True)
def serve(
    path: LogPath,
    *,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65_535, help="Port on 127.0.0.1; default: 8765.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="REFERENCE",
            help="The token of clients, as a reference: ${env:NAME} or ${file:/path}. Default: "
            "${env:TAILRACE_TOKEN}.",
        ),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            "--origin", metavar="URL", help="A web site whose pages may subscribe; may be repeated."
        ),
    ] = None,
) -> None:
    """Serve changes to other processes as they are committed, over HTTP on this machine, until Ctrl-C.

    Reads the log, whether or not the pipeline runs. Options override the file's section
    `subscriptions`.
    """
    from tailrace.cli.run import serve_changes

    serve_changes(path, port, token, origin or [])


@app.command()
@speaking()
def check(file: ConfigFile, *, as_json: AsJson = False) -> None:
    """Check everything that the pipeline needs, and list every problem with its repair.

    Checks the file, the source, Kafka clusters, schema registries, Java and the disks. Changes
    nothing.
    Exit status 0 if it can run (there may be warnings), 1 if not, 2 if the file itself is wrong.
    """
    from tailrace.cli.check import check_pipeline

    raise typer.Exit(check_pipeline(file, as_json=as_json))


@app.command()
@speaking()
def status(file: ConfigFile, *, as_json: AsJson = False) -> None:
    """Show positions, lag and errors of the pipeline, whether or not it runs."""
    from tailrace.cli.status import show_status

    show_status(file, as_json=as_json)


@app.command()
@speaking(chatty=True)
def replay(
    file: ConfigFile,
    *,
    sink: Annotated[
        str, typer.Option("--sink", help="The sink: its number in the file, from 0, or its name.")
    ],
    source: SourceName = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="POSITION|TIME",
            help="Where an empty sink begins: log offset, LSN or time. Default: the log's start.",
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            "--into", metavar="PATH", help="Write to this new or empty directory instead of the sink's."
        ),
    ] = None,
) -> None:
    """Deliver the log's content to one sink again, and end.

    To rebuild a sink, move its directory away or delete it, then replay: it is written again from
    the log. Tailrace never deletes a target itself. If the target is intact, nothing is written
    twice: only missing changes are added. `--into` builds a second copy in another directory. No
    other process may write the sink meanwhile; the source is not needed.
    """
    from tailrace.cli.run import replay_sink

    replay_sink(file, source, sink, begin, into)


def _condition(text: str | None) -> str | None:
    if text is not None and not text.strip():
        raise typer.BadParameter("it is empty: leave it out to read all rows")
    return text


@app.command()
@speaking()
def snapshot(
    file: ConfigFile,
    *,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            metavar="SCHEMA.TABLE",
            help="A published table, without quotes; may be given more than once.",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="Only rows for which this condition is true.",
            callback=_condition,
        ),
    ] = None,
    lost: Annotated[
        bool,
        typer.Option("--lost", help="Vitess: all tables, for the keys of shards that need a snapshot."),
    ] = False,
    cancel: Annotated[
        bool,
        typer.Option("--cancel", help="End the requested snapshots: those of --table, or all."),
    ] = False,
    pause: Annotated[
        bool,
        typer.Option("--pause", help="Pause snapshots until --resume, also after a restart."),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue paused snapshots.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="Show the snapshots that wait, run or have ended.")
    ] = False,
    source: SourceName = None,
    as_json: AsJson = False,
) -> None:
    """Read tables again, or tables that were added to the publication, while streaming continues.

    The running engine reads the request within a second; without one it waits for the next run.
    Nothing is locked or written at the source. An interrupted snapshot continues where it stopped.
    """
    from tailrace.cli.snapshot_commands import ask_for_snapshots, list_snapshots

    named = tables or []
    chosen = sum((lost, cancel, pause, resume, listed))
    if chosen > 1 or (chosen and where) or (chosen and named and not cancel) or not (named or chosen):
        typer.echo(
            "give --table (with --where), --lost, --cancel (with --table), --pause, --resume or --list",
            err=True,
        )
        raise typer.Exit(UNUSABLE)
    if listed:
        list_snapshots(file, source, as_json=as_json)
    else:
        pauses = pause if pause or resume else None
        ask_for_snapshots(file, source, named, where or "", cancels=cancel, pauses=pauses, as_json=as_json)


@app.command()
def demo(
    *,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory for the demo's files.", show_default="./tailrace-demo"),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Keep the files afterwards.")] = True,
    seconds: Annotated[int, typer.Option(min=1, max=600, help="Seconds that the shop's writers run.")] = 20,
    debug: Debug = False,
) -> None:
    """Run a demonstration with its own PostgreSQL, including a kill in the middle."""
    with conversation(debug=debug):
        demonstration = _tool("tailrace_demo")

        raise typer.Exit(demonstration.run(directory, keep=keep, seconds=seconds))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark.", show_default=False)],
    *,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to measure with.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure on this machine; the error for an unknown name lists the benchmarks."""
    with conversation(debug=debug, as_json=as_json):
        benchmarks = _tool("tailrace_bench")

        if name not in benchmarks.NAMES:
            known = "\n".join(f"  {known}: {what}" for known, what in benchmarks.NAMES.items())
            typer.echo(f"there is no benchmark {name!r}; there are:\n{known}", err=True)
            raise typer.Exit(UNUSABLE)
        raise typer.Exit(DONE if benchmarks.run(name, rows=rows, as_json=as_json) == 0 else FAILED)
