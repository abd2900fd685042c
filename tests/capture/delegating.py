"""Somebody else who reads chunks, without Spark: what he is told and what he returns goes by pickle.

He does some chunks twice, as Spark may; and, if he is told to, each fault befalls some chunks once.
"""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

from tailrace.capture.delegated import Assignment, Outcome, carry_out
from tailrace.capture.staged import StagedFile
from tailrace.errors import Kind, TailraceError

LOST = TailraceError(Kind.SPARK_FAILED, "run a Spark job: the executor was lost")
FULL = TailraceError(Kind.LOG_FULL, "stage a chunk: no space left on device")


class Elsewhere:
    """Carries assignments out in this process.

    :param faulty: chunks are lost, their files cut, changed or removed, or there is no room: each once.
    :param lost: so many of the first assignments are lost.
    """

    def __init__(self, *, faulty: bool = False, lost: int = 0) -> None:
        self._faulty = faulty
        self._lost = lost
        self._seen: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self.prepared = 0
        self.assignments = 0
        self.faults = 0

    def prepare(self, stopping: threading.Event) -> None:
        self.prepared += 1

    def carry_out(self, assignment: Assignment, stopping: threading.Event) -> Outcome:
        order = assignment.order
        with self._lock:
            self.assignments += 1
            number = self.assignments
            new = (order.table, order.command) not in self._seen
            self._seen.add((order.table, order.command))
        if number <= self._lost:
            raise LOST
        told: Assignment = pickle.loads(pickle.dumps(assignment))  # noqa: S301 - our own
        if number % 3 == 0:
            carry_out(told)
        outcome: Outcome = pickle.loads(pickle.dumps(carry_out(told)))  # noqa: S301 - our own
        if self._faulty and new and isinstance(outcome, StagedFile):
            return self._spoilt(outcome)
        return outcome

    def _spoilt(self, staged: StagedFile) -> Outcome:
        with self._lock:
            self.faults += 1
            number = self.faults
        match number % 5:
            case 0:
                os.truncate(staged.path, staged.size // 2 or 1)  # an empty table's is empty: longer
            case 1:
                Path(staged.path).unlink()
            case 2:
                content = bytearray(Path(staged.path).read_bytes() or b"?")  # an empty table's is empty
                content[len(content) // 2] ^= 1
                Path(staged.path).write_bytes(content)
            case 3:
                raise LOST
            case _:
                return FULL
        return staged
