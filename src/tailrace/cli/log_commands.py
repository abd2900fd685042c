"""The commands `tailrace log …` and `tailrace tail`: show and check the content of a change log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli.conversation import DONE, FAILED, speaking
from tailrace.cli.parameters import AsJson, SourceName, TableName, TaskName, group
from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    from tailrace.config import ColumnPolicy
    from tailrace.expressions.computing import Expression
    from tailrace.model import ValueModes
    from tailrace.ranges.positions import LogPoint

log_app = group("Look into a change log.")

LogPath = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="The log's directory, or the pipeline's YAML file.", show_default=False
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="EXPRESSION",
        help="Only changes for which this is true: after.qty > 3 and op = 'u'.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Most changes to show.")]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="As in the log, without the pipeline's masks and with all columns."),
]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON document per change, nothing else.")]


@log_app.command("ls")
@speaking()
def ls(
    path: LogPath,
    *,
    source: SourceName = None,
    as_json: AsJson = False,
) -> None:
    """List a log's tasks, segments and readers; with several sources, those of each log."""
    from tailrace.cli.log_listing import list_logs

    list_logs(_directory(path, source), as_json=as_json)


@log_app.command("show")
@speaking()
def show(
    path: LogPath,
    *,
    table: TableName = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="Only the row with this key: VALUE, or COLUMN=VALUE for each column."),
    ] = None,
    transaction: Annotated[
        int | None, typer.Option("--transaction", metavar="XID", help="Only this transaction.")
    ] = None,
    where: Where = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="POSITION|TIME", help="From this log offset, LSN or time on."),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option("--to", metavar="POSITION|TIME", help="Before this log offset, LSN or time."),
    ] = None,
    limit: Limit = None,
    source: SourceName = None,
    task: TaskName = "0",
    raw: Raw = False,
    as_json: JsonLines = False,
) -> None:
    """Show the changes in a log, decoded, in log order.

    With the pipeline's file, values have the forms of its handling modes.
    """
    from tailrace.cli.log_contents import show_changes
    from tailrace.config import ColumnPolicy
    from tailrace.pipeline.log.inspection import Selection

    log, rules, modes = _log_and_forms(path, source)
    wanted = Selection(
        table=_table(table),
        key=_key(key),
        xid=transaction,
        begin=_point(begin, "--from"),
        end=_point(end, "--to"),
        limit=limit,
        modes=modes,
        where=_condition(where),
    )
    show_changes(log, task, wanted, ColumnPolicy() if raw else rules, as_json=as_json)


@speaking()
def tail(
    path: LogPath,
    *,
    table: TableName = None,
    where: Where = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="POSITION|TIME",
            help="From this log offset, LSN or time on. Default: changes committed from now on.",
        ),
    ] = None,
    limit: Limit = None,
    source: SourceName = None,
    raw: Raw = False,
    as_json: JsonLines = False,
) -> None:
    """Show changes as they are committed, until Ctrl-C or --limit; at the end, print where to continue.

    Reads the log, whether or not the pipeline runs, and does not slow it down. It fails if retention has
    removed changes before they were shown.
    """
    from tailrace.cli.log_contents import tail_changes
    from tailrace.config import ColumnPolicy
    from tailrace.pipeline.log.inspection import Selection

    log, rules, modes = _log_and_forms(path, source)
    wanted = Selection(
        table=_table(table),
        begin=_point(begin, "--from"),
        limit=limit,
        modes=modes,
        where=_condition(where),
    )
    tail_changes(log, wanted, ColumnPolicy() if raw else rules, as_json=as_json)


@log_app.command("forget")
@speaking()
def forget(
    path: LogPath,
    reader: Annotated[
        list[str], typer.Option("--reader", metavar="NAME", help="As `log ls` names it; may be repeated.")
    ],
    *,
    source: SourceName = None,
    as_json: AsJson = False,
) -> None:
    """Remove a reader that will not return, so that retention no longer waits for it.

    A reader that does return is registered again, and fails if retention has removed what it needs. A
    sink `python` and the engine's handler, whose positions are stored there, begin at the log's start.
    """
    from tailrace.cli.log_listing import forget_readers

    forget_readers(_log(path, source), reader, as_json=as_json)


@log_app.command("schemas")
@speaking()
def schemas(
    path: LogPath,
    *,
    table: TableName = None,
    source: SourceName = None,
    task: TaskName = "0",
    raw: Annotated[
        bool, typer.Option("--raw", help="With the columns that the pipeline leaves out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every version of each table's schema in a log, and where it begins."""
    from tailrace.cli.log_contents import show_schemas
    from tailrace.config import ColumnPolicy

    log, rules, _ = _log_and_forms(path, source)
    show_schemas(log, task, _table(table), ColumnPolicy() if raw else rules, as_json=as_json)


@log_app.command("verify")
@speaking()
def verify(
    path: LogPath,
    *,
    source: SourceName = None,
    as_json: AsJson = False,
) -> None:
    """Read everything in a log and report all damage, and changes that can't be decoded; with several
    sources, in each log.

    Exit status 1 if there is any.
    """
    from tailrace.cli.log_listing import verify_logs

    raise typer.Exit(DONE if verify_logs(_directory(path, source), as_json=as_json) else FAILED)


def _directory(path: Path, source: str | None) -> Path:
    """Return the directory of a log, or of the logs of several sources."""
    if path.is_file():
        from tailrace import config

        loaded = config.load_engine(path)
        return loaded.log.path if source is None else loaded.pipeline(source).log.path
    return path if source is None else path / source


def _log(path: Path, source: str | None) -> Path:
    """Return the directory of one log.

    :raises TailraceError: `CONFIG_INVALID` if there are several.
    """
    from tailrace.pipeline.log.root import logs_in

    directory = _directory(path, source)
    logs = logs_in(directory)
    if not logs:
        return directory
    raise TailraceError(
        Kind.CONFIG_INVALID,
        f"choose the log in {directory}: there is one for each of several sources",
        "name one with --source: " + ", ".join(log.path.name for log in logs),
    )


def _log_and_forms(path: Path, source: str | None) -> tuple[Path, ColumnPolicy | None, ValueModes]:
    """Return the path of one log, the column policy if `path` is a pipeline's file, the form of values."""
    log = _log(path, source)
    if path.is_file():
        from tailrace import config

        chosen = config.load_engine(path).pipeline(source).source
        return log, chosen.disclosure, chosen.value_modes
    from tailrace.model import OWN_FORMS

    return log, None, OWN_FORMS


def _table(pattern: str | None) -> str | None:
    """Return `pattern` if it can match a table: `orders` without a schema, for example, never does."""
    from tailrace.config.patterns import check_pattern

    try:
        return None if pattern is None else check_pattern(pattern)
    except ValueError as error:
        raise typer.BadParameter(f"{pattern!r} {error}", param_hint="--table") from None


def _key(parts: list[str] | None) -> dict[str, str] | None:
    if not parts:
        return None
    if len(parts) == 1 and "=" not in parts[0]:
        return {"": parts[0]}
    if any("=" not in part for part in parts):
        raise typer.BadParameter("with several --key, each must be COLUMN=VALUE", param_hint="--key")
    return dict(part.split("=", 1) for part in parts)


def _condition(text: str | None) -> Expression | None:
    if text is None:
        return None
    from tailrace.config.transformations.steps import ROOTS
    from tailrace.expressions.computing import Expression
    from tailrace.expressions.language import ExpressionError

    try:
        return Expression(text, ROOTS)
    except ExpressionError as error:
        raise typer.BadParameter(str(error), param_hint="--where") from None


def _point(text: str | None, option: str) -> LogPoint | None:
    from tailrace.ranges.positions import parse_point

    try:
        return None if text is None else parse_point(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
