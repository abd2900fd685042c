"""Simulated power loss: what a process wrote but did not make durable is lost when it dies.

In the pipeline (`record`), each fsync of a segment records how much of that file is durable.
After a SIGKILL, the harness (`lose`) cuts every segment back to that size, or to a random byte
beyond: a disk may have kept a part of the rest.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

#: The file in which the pipeline records durable sizes; this variable has its name.
VARIABLE = "TORTURE_DURABLE_NOTES"


def record(delay_s: float = 0.0) -> None:
    """From now on, record the durable size of each file that this process fsyncs.

    :param delay_s: how long each fsync of a segment takes, as on a slow disk.
    """
    notes = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    fsync: Callable[[int], None] = os.fsync

    def noted(fd: int) -> None:
        facts = os.fstat(fd)
        if delay_s and os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
            time.sleep(delay_s)
        fsync(fd)
        os.write(notes, f"{facts.st_ino} {facts.st_size}\n".encode())

    os.fsync = noted  # type: ignore[assignment]


def lose(log: Path, notes: Path, chance: random.Random) -> int:
    """Cut each segment of `log` back to what was durable; return how many bytes were lost."""
    durable: dict[int, int] = {}
    for line in notes.read_text().splitlines():
        inode, size = line.split()
        durable[int(inode)] = int(size)
    lost = 0
    for segment in sorted(log.rglob("*.seg")):
        facts = segment.stat()
        kept = min(durable.get(facts.st_ino, 0), facts.st_size)
        kept += chance.choice((0, chance.randint(0, facts.st_size - kept)))
        os.truncate(segment, kept)
        lost += facts.st_size - kept
    return lost
