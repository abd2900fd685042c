"""What the address of a Spark master tells: whether executors are threads of this process, and how many."""

from __future__ import annotations

import os
import re

_IN_PROCESS = re.compile(r"local(?:\[(?P<cores>\*|\d+)(?:,\s*\d+)?\])?")


def cores_of(master: str) -> int | None:
    """Return how many tasks run at a time under a master in this process; None for a cluster.

    `local-cluster[…]` is a cluster: its executors are processes of their own.
    """
    found = _IN_PROCESS.fullmatch(master.strip())
    if found is None:
        return None
    if found["cores"] == "*":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(found["cores"] or 1)
