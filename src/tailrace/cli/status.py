"""`status`: prints the status document, as JSON or text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tailrace import config
from tailrace.cli.conversation import error_lines, print_json
from tailrace.errors import printable

#: Most tables of an unfinished snapshot that are shown; `--json` has all.
_TABLES_SHOWN = 10


def show_status(file: Path, *, as_json: bool) -> None:
    """Print the status of the pipeline of `file`.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    from tailrace.pipeline.status.document import document

    found = document(config.load_engine(file))
    if as_json:
        print_json(found)
    else:
        print("\n".join(words(found)))


def words(found: dict[str, Any]) -> list[str]:
    """Return the document as lines of text."""
    lines = [f"{found['name']}: {found['state']}"]
    for task in found["tasks"]:
        end = "no log yet" if task["log_end"] is None else f"log end {task['log_end']:,}"
        behind = _lag(task["source_lag_bytes"], task["source_lag_s"])
        name = task.get("name", "source")
        lines.append(f"  {name:<15} {task['state']:<10} {end}, {behind} behind the source")
        if task.get("name") and task.get("error"):
            lines += error_lines(task["error"], "    ")
        lines += _snapshot(task)
        lines += _source_health(task)
    for sink in found["sinks"]:
        place = "nothing yet" if sink["position"] is None else f"at {sink['position']:,}"
        behind = _lag(sink["lag_bytes"], sink["lag_s"])
        name = f"{sink['source']} → {sink['name']}" if "source" in sink else sink["name"]
        lines.append(f"  {name:<15} {sink['state']:<10} {place}, {behind} behind the log")
        if sink.get("dead_letters"):
            lines.append(f"    {sink['dead_letters']:,} records were too large and are dead letters")
        if "realtime" in sink:
            lines.append(f"    {_realtime(sink['realtime'])}")
        if sink["error"]:
            lines += error_lines(sink["error"], "    ")
    if found["error"]:
        lines += error_lines(found["error"], "  ")
    return lines


def _realtime(found: dict[str, Any]) -> str:
    because = f" ({printable(found['because'])})" if found["because"] else ""
    held = f", {found['buffer_bytes']:,} of {found['buffer_capacity_bytes']:,} bytes held"
    return f"real time {found['mode']}{because}{held if found['mode'] != 'off' else ''}"


def _snapshot(task: dict[str, Any]) -> list[str]:
    lines = []
    tables = task.get("snapshot") or []
    for table in tables[:_TABLES_SHOWN]:
        words = [f"{table['rows']:,} of about {table['rows_estimated']:,} rows"]
        if table["chunks"]:
            words.append(f"{table['chunks_done']} of {table['chunks']} chunks done")
        if table["eta_s"] is not None:
            words.append(f"about {table['eta_s']:,.0f} s left")
        lines.append(f"    snapshot of {printable(table['name'])}: {', '.join(words)}")
    if len(tables) > _TABLES_SHOWN:
        lines.append(f"    … and of {len(tables) - _TABLES_SHOWN} more tables")
    return lines


def _source_health(task: dict[str, Any]) -> list[str]:
    lines = []
    slot = task.get("slot") or {}
    if "wal_status" in slot:  # PostgreSQL's
        held, safe = slot["retained_bytes"], slot["safe_wal_size_bytes"]
        words = [slot["wal_status"] or "unknown"]
        words += [] if held is None else [f"{held:,} bytes of WAL held"]
        words += [] if safe is None else [f"{max(0, safe):,} more are safe"]
        lines.append(f"  slot            {', '.join(words)}")
    if shards := slot.get("shards"):  # Vitess'; without a state while no pipeline runs
        modes = Counter(shard.get("state", "serving") for shard in shards.values())
        words = [f"{count:,} {mode}" for mode, count in sorted(modes.items())]
        lines.append(f"  shards          {', '.join(words)}")
    for warning in task.get("warnings") or ():
        lines.append(f"    warning: {printable(warning['message'])}")
        if warning["repair"]:
            lines.append(f"    repair:  {printable(warning['repair'])}")
    return lines


def _lag(size: int | None, seconds: float | None) -> str:
    if size is None:
        return "unknown"
    return f"{size:,} bytes" + ("" if seconds is None else f" ({seconds:,.1f} s)")
