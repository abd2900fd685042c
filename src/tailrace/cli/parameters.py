"""Parameters that commands share, and groups of commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

ConfigFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="The pipeline's YAML file.", show_default=False)
]
SourceName = Annotated[
    str | None, typer.Option("--source", metavar="NAME", help="The source, if there are several.")
]
TableName = Annotated[
    str | None, typer.Option("--table", help="Only this table: schema.table; * for any run of characters.")
]
TaskName = Annotated[str, typer.Option("--task", help="The task to read.")]

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log in detail, to standard error.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def group(purpose: str, **more: Any) -> typer.Typer:
    """Return a group of commands that prints its help if no command is named."""
    return typer.Typer(
        help=purpose,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **more,
    )
