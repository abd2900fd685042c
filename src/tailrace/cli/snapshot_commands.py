"""`snapshot`: requests, cancels, pauses, resumes and lists snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace import config
from tailrace.cli.conversation import error_lines, print_json
from tailrace.errors import Kind, TailraceError, printable

if TYPE_CHECKING:
    from tailrace.sources.contract import Snapshots


def ask_for_snapshots(
    file: Path,
    source: str | None,
    tables: list[str],
    where: str,
    *,
    cancels: bool,
    pauses: bool | None,
    as_json: bool,
) -> None:
    """Store a request: for a snapshot of `tables` (if empty: of lost shards), for the end of requested
    snapshots (of `tables`, or all), or to pause or resume all snapshots. Print the request.

    :raises TailraceError: `CONFIG_INVALID`, `LOG_MISSING`, `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    snapshots = _snapshots(file, source)
    named = ", ".join(printable(table) for table in tables)
    if pauses is not None:
        asked, words = snapshots.pause(pauses=pauses), f"that snapshots {'pause' if pauses else 'resume'}"
    elif cancels:
        asked, words = snapshots.cancel(tables), "for the end of the snapshots "
        words += f"of {named}" if tables else "that were requested"
    else:
        asked = snapshots.request(tables, where)
        words = f"for snapshot {asked['id']} of {named or 'what is lost'}"
    if as_json:
        print_json(asked)
        return
    print(f"asked {words}")
    print(_when(asked))


def list_snapshots(file: Path, source: str | None, *, as_json: bool) -> None:
    """Print the snapshots that wait, run or have ended.

    :raises TailraceError: `CONFIG_INVALID`, `LOG_MISSING`, `LOG_CORRUPT`.
    """
    found = _snapshots(file, source).known()
    if as_json:
        print_json({"snapshots": found})
        return
    for snapshot in found:
        print("\n".join(_words(snapshot)))
    if not found:
        print("no snapshots")


def _snapshots(file: Path, source: str | None) -> Snapshots:
    from tailrace.sources.registry import source_type

    pipeline = config.load(file, source)
    found = source_type(pipeline.source.type).snapshots(pipeline.log.path)
    if found is None:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"request a snapshot: sources of the type {pipeline.source.type} read tables only at the start",
            "give the pipeline a new log to read all tables again",
        )
    return found


def _when(asked: dict[str, Any]) -> str:
    if asked["engine_runs"]:
        return "the running engine follows within a second; see --list"
    return "no engine runs: it waits for the next `tailrace run`"


def _words(snapshot: dict[str, Any]) -> list[str]:
    where = f" where {printable(snapshot['where'])}" if snapshot["where"] else ""
    lines = [f"{snapshot['id']}  {snapshot['origin']}, {snapshot['state']}{where}"]
    for table in snapshot["tables"]:
        chunks = f", {table['chunks_done']} of {table['chunks']} chunks" if table["chunks"] else ""
        # Not every source counts them.
        counted = "" if table["rows"] is None else f": {table['rows']:,} rows{chunks}"
        lines.append(f"    {printable(table['name'])}{counted}")
    return lines + (error_lines(snapshot["error"], "    ") if snapshot["error"] else [])
