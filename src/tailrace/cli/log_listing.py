"""`log ls`, `log forget` and `log verify`: list, change and check a log's segments and readers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.format import segment_name
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.prune import segment_facts
from tailrace.changelog.retention.readers import Readers
from tailrace.changelog.verify import VerifyReport, verify
from tailrace.cli.conversation import print_json
from tailrace.errors import Kind, TailraceError, printable
from tailrace.model import format_lsn
from tailrace.pipeline.log.inspection import unreadable
from tailrace.pipeline.log.root import log_folders, logs_in


def list_logs(path: Path, *, as_json: bool) -> None:
    """Print the parts of the log at `path`, or of each of the logs of several sources there.

    :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`.
    """
    logs = logs_in(path)
    found = {log.path.name: listing(log) for log in logs}
    if not logs:
        found = {"": listing(LogDirectory.open(path))}
    if as_json:
        several = {"path": str(path), "logs": [{"name": name, **log} for name, log in found.items()]}
        print_json(several if logs else found[""])
        return
    for name, log in found.items():
        if name:
            print(f"source {name}:")
        _print_listing(log)


def _print_listing(found: dict[str, Any]) -> None:
    source = found["source"]
    print(
        f"log {found['log_id']} of {source['type']} system {source['system_identifier']}, "
        f"database {printable(source['database'])}, slot {source['slot']}"
    )
    for task in found["tasks"]:
        print(
            f"task {task['task']}: {task['start']:,} to {task['end']:,}, position {task['position']}, "
            f"newest commit {task['newest_commit'] or 'none'}"
        )
        for segment in task["segments"]:
            print(f"  {segment['file']}  {segment['start']:>15,} {segment['size_bytes']:>15,} bytes")
    for reader in found["readers"]:
        dropped = " (dropped: retention removed what it had not read)" if reader["dropped"] else ""
        places = ", ".join(f"{task}: {offset:,}" for task, offset in reader["offsets"].items())
        print(f"reader {printable(reader['name'])}: {places}{dropped}")


def listing(directory: LogDirectory) -> dict[str, Any]:
    """Return the document that `log ls --json` prints."""
    identity = directory.identity
    return {
        "path": str(directory.path),
        "log_id": identity.log_id,
        "format_version": identity.format_version,
        "created": _time(identity.created_us),
        "source": asdict(identity.source),
        "tasks": [_task(directory, task) for task in directory.tasks()],
        "readers": [
            {"name": reader.name, "offsets": dict(reader.offsets), "dropped": reader.dropped}
            for reader in Readers(directory).all()
        ],
    }


def _task(directory: LogDirectory, task: str) -> dict[str, Any]:
    with LogReader.open(directory, task) as reader:
        start, end = reader.start, reader.end()
    return {
        "task": task,
        "start": start,
        "end": end.offset,
        "position": format_lsn(end.position),
        "newest_commit": _time(end.position_time_us),
        "segments": [
            {
                "file": segment_name(facts.first_offset),
                "start": facts.first_offset,
                "size_bytes": facts.size_bytes,
            }
            for facts in segment_facts(directory, task)
        ],
    }


def forget_readers(path: Path, names: list[str], *, as_json: bool) -> None:
    """Remove the readers with these names from the log's list; all or none.

    :raises TailraceError: `LOG_MISSING`; `LOG_RANGE_INVALID` if one is not in the list.
    """
    readers = Readers(LogDirectory.open(path))
    known = {reader.name for reader in readers.all()}
    if unknown := sorted(set(names) - known):
        raise TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"forget reader {', '.join(map(repr, unknown))}: the log has no such reader",
            f"its readers are: {', '.join(map(repr, sorted(known))) or 'none'}",
            {"path": str(path)},
        )
    for name in dict.fromkeys(names):
        readers.remove(name)
    if as_json:
        print_json({"forgotten": list(dict.fromkeys(names)), "readers": sorted(known - set(names))})
        return
    for name in dict.fromkeys(names):
        print(f"forgot reader {printable(name)}")


def verify_logs(path: Path, *, as_json: bool) -> bool:
    """Print the damage of the log at `path`, or of the logs of several sources there.

    Returns whether there is none.

    :raises TailraceError: `LOG_MISSING`.
    """
    folders = log_folders(path)
    reports = {folder.name: _verified(folder) for folder in folders} if folders else {"": _verified(path)}
    sound = all(report.sound for report in reports.values())
    if as_json:
        logs = [{"name": name, "ok": report.sound, **asdict(report)} for name, report in reports.items()]
        print_json({"ok": sound, "logs": logs} if folders else {"ok": sound, **asdict(reports[""])})
        return sound
    for name, report in reports.items():
        if name:
            print(f"source {name}:")
        _print_report(report)
    return sound


def _verified(path: Path) -> VerifyReport:
    report = verify(path)
    if report.sound:
        report.problems += unreadable(LogDirectory.open(path))
    return report


def _print_report(report: VerifyReport) -> None:
    for problem in report.problems:
        print(f"damaged: {problem.file} at byte {problem.byte}: {problem.what}")
    for note in report.notes:
        print(f"note: {note}")
    print(
        f"{'sound' if report.sound else 'DAMAGED'}: {report.tasks} task(s), {report.segments} segment(s), "
        f"{report.blocks:,} blocks, {report.units:,} transactions, {report.rows:,} rows, "
        f"{report.size_bytes:,} bytes"
    )


def _time(time_us: int) -> str | None:
    if not time_us:
        return None
    return f"{np.datetime64(time_us // 1_000_000, 's')}Z"  # of any year: a source of a user's gives it
