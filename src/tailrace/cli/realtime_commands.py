"""`tailrace realtime`: switches real time on or off for consumers, and shows its state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tailrace.cli.conversation import print_json, speaking
from tailrace.cli.parameters import AsJson, ConfigFile, SourceName, group
from tailrace.errors import printable

realtime_app = group("Feed handlers and sinks from memory while they keep up; see docs/realtime.md.")

Consumer = Annotated[
    str | None,
    typer.Option("--consumer", metavar="NAME", help="A sink by name, or engine:NAME. Default: all of them."),
]


@realtime_app.command("on")
@speaking()
def on(
    file: ConfigFile,
    *,
    consumer: Consumer = None,
    source: SourceName = None,
    as_json: AsJson = False,
) -> None:
    """Request that consumers are fed from memory, also after a restart, until `off`.

    Returns at once, without a guarantee: a consumer that can't keep up reads from the log. See `status`.
    """
    _switch(file, source, consumer, on=True, as_json=as_json)


@realtime_app.command("off")
@speaking()
def off(
    file: ConfigFile,
    *,
    consumer: Consumer = None,
    source: SourceName = None,
    as_json: AsJson = False,
) -> None:
    """Request that consumers are fed from the log alone, also after a restart, until `on`."""
    _switch(file, source, consumer, on=False, as_json=as_json)


@realtime_app.command("status")
@speaking()
def status(
    file: ConfigFile,
    *,
    consumer: Consumer = None,
    source: SourceName = None,
    as_json: AsJson = False,
) -> None:
    """Show whether memory or the log feeds each consumer, why, and how much waits in memory."""
    from tailrace.config import load_engine
    from tailrace.pipeline import realtime

    found = realtime.status(load_engine(file), source, consumer)
    if as_json:
        print_json({"consumers": found})
    else:
        print("\n".join(line for each in found for line in words(each)))


def words(found: dict[str, Any]) -> list[str]:
    """Return the state of a consumer as lines of text."""
    wanted = "" if found["wanted"] == (found["mode"] == "on") else f", wanted {_word(on=found['wanted'])}"
    because = f" ({printable(found['because'])})" if found["because"] else ""
    lines = [f"{_name(found)}: {found['mode']}{because}{wanted}, at {found['position']:,}"]
    if "buffer_bytes" in found:
        lines.append(
            f"  buffer {found['buffer_bytes']:,} of {found['buffer_capacity_bytes']:,} bytes, "
            f"{found['buffer_blocks']:,} blocks, {found['buffer_rows']:,} rows, "
            f"the oldest for {found['lag_ms']:,.0f} ms"
        )
        lines.append(
            f"  {found['lag_segments']:,} segments behind, {found['switches']:,} switches, "
            f"{found['fall_backs']:,} fall-backs"
        )
    return lines


def _switch(file: Path, source: str | None, consumer: str | None, *, on: bool, as_json: bool) -> None:
    from tailrace.config import load_engine
    from tailrace.pipeline import realtime

    found = realtime.switch(load_engine(file), on=on, source=source, consumer=consumer)
    if as_json:
        print_json({"consumers": found})
        return
    names = ", ".join(map(_name, found))
    print(f"requested real time {_word(on=on)} for {names}; a running engine follows within a second")


def _name(found: dict[str, Any]) -> str:
    name = f"{found['source']} → {found['consumer']}" if found["source"] else found["consumer"]
    return printable(name)


def _word(*, on: bool) -> str:
    return "on" if on else "off"
