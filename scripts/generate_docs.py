"""Generates the reference parts of the documents from the code.

Each part is between two markers, `<!-- generated: NAME -->` and `<!-- end -->`; all other text is
written by hand and not changed. With `--check` nothing is written, and the exit status is 1 if a
page is out of date.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import typer.main
import types_table
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tailrace.cli.main import app
from tailrace.config.converters import AvroOptions, CloudEventsOptions, JsonOptions
from tailrace.config.engine import EngineConfig
from tailrace.config.engine_options import (
    EngineOptions,
    KafkaDelivery,
    OffsetCommit,
    OffsetStorage,
    RecordProcessing,
)
from tailrace.config.fields import MIB, Section
from tailrace.config.kafka import KafkaSinkConfig, TopicRoute, TopicRule
from tailrace.config.sections import (
    DeltaSinkConfig,
    FolderSink,
    JsonlSink,
    LogConfig,
    ParquetSink,
    PythonSinkConfig,
    RetentionConfig,
    SparkConfig,
    SubscriptionsConfig,
)
from tailrace.config.source.column_policy import ColumnMask, ColumnPolicy
from tailrace.config.source.libpq import LibpqOptions
from tailrace.config.source.postgres import HeartbeatConfig, NamedSource, PostgresSource, SlotWatchConfig
from tailrace.config.source.vitess import VitessSource
from tailrace.config.transformations import options as transformations
from tailrace.config.transformations import predicates, steps
from tailrace.config.values import ValueHandling
from tailrace.secrets import Secret
from tailrace.sources.vitess.resharding.transitions import TRANSITIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "docs/configuration.md",
    "docs/cli.md",
    "docs/postgresql.md",
    "docs/snapshots.md",
    "docs/types.md",
    "docs/subscriptions.md",
    "docs/transformations.md",
    "docs/converters.md",
    "docs/resharding.md",
    "docs/vitess.md",
)
PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fields(model: type[BaseModel], *without: type[BaseModel], begin: str = "") -> str:
    """Return a table of a section's settings with prefix `begin`, its own first, except `without`'s."""
    rows = ["| Setting | Values | Default | Meaning |", "|---|---|---|---|"]
    own = inspect.get_annotations(model)
    for name, field in sorted(model.model_fields.items(), key=lambda found: found[0] not in own):
        if not name.startswith(begin) or any(name in other.model_fields for other in without):
            continue
        default = "" if field.default is PydanticUndefined else shown(field.default)
        required = " (required)" if field.is_required() else ""
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}`{required} | {values(field.annotation)} | {default} | {meaning} |")
    return "\n".join(rows) + "\n" if len(rows) > 2 else "It has no settings of its own.\n"


def shown(default: object) -> str:
    """Return a default as in a pipeline's file; empty if the description has it."""
    if default is None or default == "" or isinstance(default, Section) or default in ((), {}):
        return ""
    if isinstance(default, tuple):
        return "`[" + ", ".join(f'"{item}"' for item in default) + "]`"
    if isinstance(default, int) and default >= MIB and default % MIB == 0:
        return f"`{default // MIB} MiB`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def values(annotation: object) -> str:
    """Return a setting's possible values, in words."""
    if annotation is type(None):
        return ""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return values(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        plain = [argument for argument in arguments if argument is not Secret or len(arguments) == 1]
        named = dict.fromkeys(values(argument) for argument in plain or arguments)
        return " or ".join(filter(None, named)) or "reference"
    if origin is tuple:
        item = values(arguments[0])
        sections = item == "section" or re.search("Sink|Source", str(arguments[0]))
        return "list of sections" if sections else f"list of {item}"
    if origin is dict:
        return "mapping"
    known = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        Path: "path",
        Secret: "reference",
    }
    if annotation in known:
        return known[annotation]  # type: ignore[index]
    return "section"


def commands() -> str:
    """Return every command with its usage, description and options."""
    return "\n".join(text for name, command in walk() for text in described(name, command))


def walk() -> Iterator[tuple[str, typing.Any]]:
    """Yield every command with its full name, in the order of the help."""
    root = typer.main.get_command(app)
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            for inner, sub in command.commands.items():
                yield f"{name} {inner}", sub
        else:
            yield name, command


def described(name: str, command: typing.Any) -> Iterator[str]:
    """Yield the lines that describe one command."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(argument.metavar or (argument.name or "").upper() for argument in arguments)
    yield f"### `{' '.join(filter(None, ('tailrace', name, usage)))}`\n"
    yield "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n")) + "\n"
    yield "| Option | Meaning |\n|---|---|"
    for option in options:
        names = ", ".join(f"`{spelling}`" for spelling in option.opts)
        metavar = "" if option.is_flag else f" {option.metavar or (option.name or '').upper()}"
        yield f"| {names}{metavar.replace('|', chr(92) + '|')} | {option.help or ''} |"
    yield ""


PARTS: dict[str, Callable[[], str]] = {
    "pipeline": lambda: fields(EngineConfig),
    "source": lambda: fields(PostgresSource, LibpqOptions, ColumnPolicy, ValueHandling),
    "snapshot": lambda: fields(PostgresSource, begin="snapshot"),
    "heartbeat": lambda: fields(HeartbeatConfig),
    "slot_watch": lambda: fields(SlotWatchConfig),
    "named": lambda: fields(NamedSource, PostgresSource),
    "disclosure": lambda: fields(ColumnPolicy),
    "mask": lambda: fields(ColumnMask),
    "values": lambda: fields(ValueHandling),
    "connection": lambda: fields(LibpqOptions),
    "vitess": lambda: fields(VitessSource, ColumnPolicy, ValueHandling),
    "log": lambda: fields(LogConfig),
    "retention": lambda: fields(RetentionConfig),
    "sink": lambda: fields(FolderSink),
    "delta": lambda: fields(DeltaSinkConfig, FolderSink),
    "parquet": lambda: fields(ParquetSink, FolderSink),
    "jsonl": lambda: fields(JsonlSink, FolderSink),
    "kafka": lambda: fields(KafkaSinkConfig),
    "topic_rule": lambda: fields(TopicRule),
    "topic_route": lambda: fields(TopicRoute),
    "python": lambda: fields(PythonSinkConfig),
    "spark": lambda: fields(SparkConfig),
    "subscriptions": lambda: fields(SubscriptionsConfig),
    "engine": lambda: fields(EngineOptions),
    "record_processing": lambda: fields(RecordProcessing),
    "offset_commit": lambda: fields(OffsetCommit),
    "offset_storage": lambda: fields(OffsetStorage),
    "kafka_delivery": lambda: fields(KafkaDelivery),
    "transformation": lambda: fields(steps.TransformationConfig),
    "json-converter": lambda: fields(JsonOptions),
    "avro-converter": lambda: fields(AvroOptions),
    "cloudevents-converter": lambda: fields(CloudEventsOptions),
    "commands": commands,
    "types": types_table.types,
    "edges": types_table.edges,
} | {name: functools.partial(types_table.modes, name) for name in types_table.OPTIONS}
PARTS |= {
    f"{kind}-{name}": functools.partial(fields, model, steps.TransformationConfig)
    for kind, models in (
        ("transformation", transformations.TRANSFORMATIONS),
        ("predicate", predicates.PREDICATES),
    )
    for name, model in models.items()
}


def contract(name: str) -> dict[str, typing.Any]:
    """Return the import-linter contract whose name starts with `name`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    return next(each for each in settings["contracts"] if each["name"].startswith(name))


def layers() -> str:
    """Return the layers of packages that import-linter checks, the topmost first."""
    return "\n".join(["```", *contract("Layers")["layers"], "```", ""])


def pure_modules() -> str:
    """Return the modules that import-linter checks for purity, by package."""
    found: dict[str, list[str]] = {}
    for module in contract("Pure modules")["source_modules"]:
        package, _, name = module.removeprefix("tailrace.").partition(".")
        found.setdefault(package, []).append(f"`{name}`" if name else "")
    rows = [
        f"| `{package}` | {', '.join(filter(None, names)) or 'all'} |" for package, names in found.items()
    ]
    return "\n".join(["| Package | Pure modules |", "|---|---|", *sorted(rows), ""])


def shard_modes() -> str:
    """Return the modes of a Vitess shard as a diagram, and as a table the events that change no mode."""
    moves: dict[tuple[str, str], list[str]] = {}
    for (mode, event), (target, _) in TRANSITIONS.items():
        moves.setdefault((mode.name, target.name), []).append(event.value)
    arrows = [
        f"    {mode} --> {target}: {' / '.join(events)}"
        for (mode, target), events in moves.items()
        if mode != target
    ]
    rows = [
        f"| `{mode}` | {', '.join(events)} |" for (mode, target), events in moves.items() if mode == target
    ]
    table = ["| Mode | What leaves it as it is |", "|---|---|", *rows, ""]
    return "\n".join(["```mermaid", "stateDiagram-v2", *arrows, "```", "", *table])


PARTS |= {"layers": layers, "pure": pure_modules, "shard-modes": shard_modes}


def generated(page: str) -> str:
    """Return `page` with every part generated again."""
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part['name']]()}\n{part[3]}", page)


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them with `--check`; return the exit status."""
    stale = []
    for page in (ROOT / name for name in PAGES):
        before = page.read_text("utf-8")
        after = generated(before)
        if after != before:
            stale.append(page.name)
            if "--check" not in arguments:
                page.write_text(after, "utf-8")
    outcome = "is out of date: run scripts/generate_docs.py" if "--check" in arguments else "written"
    for name in stale:
        print(f"{name}: {outcome}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
