"""`tailrace offsets`: what is committed, and what a person changes of it."""

from __future__ import annotations

from typing import Annotated

import typer

from tailrace.cli.conversation import speaking
from tailrace.cli.parameters import AsJson, ConfigFile, SourceName, group

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
    from tailrace.cli.offsets import show_offsets

    show_offsets(file, sink, source, as_json=as_json)


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
    from tailrace.cli.offsets import Whose, set_offset

    set_offset(file, Whose(sink, engine, source), to, skip_changes=skip_changes, yes=yes, as_json=as_json)


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
    from tailrace.cli.offsets import Whose, reset_offset

    reset_offset(file, Whose(sink, engine, source), yes=yes, as_json=as_json)
