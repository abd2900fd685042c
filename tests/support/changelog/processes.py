"""Functions that tests run in other processes, forked from one that has imported everything."""

from __future__ import annotations

import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

from tailrace import failpoints
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.changelog.writer import LogOptions, LogWriter
from tailrace.errors import TailraceError
from tests.support.changelog.frames_of import Source, append, new_log


def write_until_killed(path: Path, told: Path, armed: str) -> None:
    """Use every operation of a writer; write each acknowledged position to `told`."""
    failpoints.arm(armed)
    with told.open("w", buffering=1) as acknowledged:
        log = new_log(path)
        writer = LogWriter.open(log, "0", options=LogOptions(segment_bytes=900))
        source = Source()
        for number in range(24):
            append(writer, source.transaction(1 + number % 3))
            if number % 4 == 3:
                append(writer, source.begin(), source.insert())
                for _ in range(number % 8):
                    append(writer, source.insert(note="x" * 200))
                source.lsn -= 1000
                writer.discard_open_unit()
            print(writer.sync().position, file=acknowledged)
        apply(log, "0", RetentionRules(size_bytes=2000))


def open_at_once(path: Path, barrier: Barrier, told: Path) -> None:
    """Open the log for writing at the same time as others; the first keeps it open until all have tried."""
    log = new_log(path)
    barrier.wait(60)
    try:
        writer = LogWriter.open(log, "0")
        (told / str(os.getpid())).write_text("writer")
        barrier.wait(60)
        writer.close()
    except TailraceError as error:
        (told / str(os.getpid())).write_text(f"{error.kind} {error.message}")
        barrier.wait(60)
