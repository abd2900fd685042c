"""Logs that a process left without closing them."""

from __future__ import annotations

import os
from pathlib import Path

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.writer import LogWriter


def content(log: LogDirectory) -> bytes:
    with LogReader.open(log, "0") as reader:
        return b"".join(bytes(reader.read(ref)) for ref in reader.blocks(0, reader.end().offset))


def segment_files(log: LogDirectory) -> list[Path]:
    return sorted(log.task_path("0").glob("*.seg"))


def abandon(writer: LogWriter) -> None:
    """Leave the log as a killed process does: nothing is sealed or synced."""
    writer._close_segment()
    writer._mark.close()
    os.close(writer._lock_fd)
    writer._lock_fd = -1
