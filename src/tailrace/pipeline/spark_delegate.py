"""Chunks of snapshots read by Spark's executors: each is a job of one task.

The thread of a reader gives a chunk and waits, so as many jobs are under way as there are readers;
Spark deals them out. A job can't be left while it runs, so it has a thread of its own: whoever
waits may stop waiting, and has it cancelled then. A task that Spark runs twice stages two files,
and the job returns one of them.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING

import structlog

from tailrace.capture.delegated import Assignment, Outcome, carry_out
from tailrace.capture.session import Stopped
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.spark_host import SparkHost
from tailrace.secrets import redact
from tailrace.spark.failures import translated

if TYPE_CHECKING:
    from pyspark import SparkContext

log = structlog.get_logger(__name__)

_POLL_S = 0.02

#: A job of which no task runs for so long has no executor to run on.
EXECUTOR_DEADLINE_S = 600.0
_LOOK_S = 5.0


class SparkDelegate:
    """Has assignments carried out by the executors of the engine's Spark. Any thread."""

    def __init__(self, host: SparkHost) -> None:
        self._host = host

    def prepare(self, stopping: threading.Event) -> None:
        """Wait until Spark runs, started now if need be. As `Delegate.prepare`."""
        if self._host.session(stopping) is None:
            raise Stopped

    def carry_out(self, assignment: Assignment, stopping: threading.Event) -> Outcome:
        """As `Delegate.carry_out`."""
        session = self._host.session(stopping)
        if session is None:
            raise Stopped
        job = _Job(session.sparkContext, assignment)
        idle_since = look_at = time.monotonic()
        while not job.ended.wait(_POLL_S):
            if stopping.is_set():
                job.cancel()
                raise Stopped
            now = time.monotonic()
            if now - look_at < _LOOK_S:
                continue
            look_at = now
            if job.is_running():
                idle_since = now
            elif now - idle_since > EXECUTOR_DEADLINE_S:
                job.cancel()
                raise TailraceError(
                    Kind.SPARK_FAILED,
                    f"read a chunk of {assignment.order.table}: no executor took it within "
                    f"{EXECUTOR_DEADLINE_S:g} s",
                    "give Spark executors, or set source.snapshot_read_on: process",
                    {"table": assignment.order.table, "chunk": assignment.order.number},
                )
        return job.outcome()


class _Job:
    """One job of one task, on a thread of its own."""

    def __init__(self, context: SparkContext, assignment: Assignment) -> None:
        from pyspark import InheritableThread

        self._context = context
        self._assignment = assignment
        self._group = f"tailrace-chunk-{secrets.token_hex(8)}"
        self._found: list[Outcome] = []
        self.ended = threading.Event()
        try:
            InheritableThread(target=self._run, name=self._group, daemon=True).start()
        except Exception as error:
            raise _failure(error) from error

    def outcome(self) -> Outcome:
        """Return what the task returned, or why there is nothing; `ended` is set."""
        return self._found[0]

    def is_running(self) -> bool:
        """Tell whether an executor is at work on it."""
        try:
            tracker = self._context.statusTracker()
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
            stages = [
                tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds
            ]
            return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)
        except Exception as error:  # noqa: BLE001 - the job's own thread tells what is wrong
            log.debug("could not ask Spark for its tasks", error=str(error))
            return True

    def cancel(self) -> None:
        """Have Spark give it up; what its task does meanwhile counts for nothing."""
        try:
            self._context.cancelJobGroup(self._group)
        except Exception as error:  # noqa: BLE001 - then it is gone already
            log.debug("could not cancel a job", error=str(error))

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self._group, f"snapshot of {self._assignment.order.table}")
            self._found += self._context.parallelize([self._assignment], 1).map(carry_out).collect()
        except BaseException as error:  # noqa: BLE001 - returned as what became of it
            self._found = [_failure(error)]
        finally:
            self.ended.set()


def _failure(error: BaseException) -> TailraceError:
    found = translated(error)
    return TailraceError(found.kind, redact(found.message), found.hint, found.context)
