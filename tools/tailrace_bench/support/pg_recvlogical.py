"""pg_recvlogical, the reference: PostgreSQL's own client, whose speed is that of the server's sender."""

from __future__ import annotations

import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tailrace.model import format_lsn
from tailrace_bench.support import table
from tailrace_servers.postgres import EmbeddedPostgres


@dataclass(frozen=True, slots=True)
class ReceiverRun:
    """One timed pass over a backlog: wall seconds and CPU seconds of the receiving process."""

    seconds: float
    cpu_seconds: float


def receive(postgres: EmbeddedPostgres, slot: str, end_lsn: int) -> ReceiverRun:
    """Receive everything up to `end_lsn` from `slot` into a file with pg_recvlogical."""
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        command = [
            str(postgres.bin / "pg_recvlogical"), "--dbname", postgres.dsn(), "--slot", slot, "--start",
            "--file", str(Path(directory) / "stream"), "--endpos", format_lsn(end_lsn), "--no-loop",
            "--option", "proto_version=1", "--option", f"publication_names={table.PUBLICATION}",
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        subprocess.run(command, check=True, timeout=600, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ReceiverRun(seconds, cpu)
