"""The driver's side of remote capture: a `Capture` whose work is done by one long task of a Spark job."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from tailrace.changelog.durable import write_failure
from tailrace.changelog.writer import Tail
from tailrace.config import PipelineConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import Background
from tailrace.pipeline.remote.attempt import Order, carry_out
from tailrace.pipeline.remote.channel import Channel, DesiredState, Report
from tailrace.pipeline.spark_host import SparkHost
from tailrace.sources.progress import CaptureProgress
from tailrace.sources.reconnection import Reconnection
from tailrace.spark.java import cores_of
from tailrace.spark.jobs import JobGroup, collect

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

log = structlog.get_logger(__name__)

_LOOK_S = 0.1
_BEAT_S = 1.0
#: Longest wait for the executors of a cluster, in seconds.
CORES_S = 60.0
#: Longest wait for the end of a task after `stop`, in seconds; then its job is cancelled.
STOP_S = 8.0

_NOTHING = CaptureProgress(
    phase="connecting",
    rows=0,
    bytes=0,
    appended=Tail(0, 0, 0),
    durable=Tail(0, 0, 0),
    source_end=0,
    acknowledged=0,
    snapshot={},
    reconnects=0,
    error=None,
)


class RemoteCapture:
    """Captures one source into one log on an executor (`sources.contract.Capture`).

    A task that dies is started again, by Spark up to `spark.task.maxFailures` times, then by a new job; each
    continues from what is in the log. `run` once; the rest from any thread.

    :param tasks: the number of such tasks of all sources: each takes a core of the executors.
    """

    def __init__(self, pipeline: PipelineConfig, spark: SparkHost, tasks: int) -> None:
        self._pipeline = pipeline
        self._spark = spark
        self._tasks = tasks
        self._channel = Channel(pipeline.log.path)
        self._run_id = str(uuid.uuid4())
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._wanted = DesiredState(run_id=self._run_id, round=0)
        self._report: Report | None = None
        self._read_s = 0.0
        self._jobs = Reconnection(
            pipeline.source,
            self._stopping,
            name=pipeline.name,
            position=lambda: 0 if self._report is None else self._report.capture["durable"]["position"],
            is_heard=lambda: True,
        )
        self._failure: TailraceError | None = None
        self._ended = False

    def run(self) -> None:
        """Run the capture until `stop`, or until the end of the snapshot if only that is configured.

        :raises TailraceError: as `CaptureTask.run`; `CONFIG_INVALID` if executors have too few cores;
            `SPARK_FAILED` if jobs fail for longer than `source.reconnect_s_max`.
        """
        try:
            self._channel.prepare()
            self._jobs.run(self._run_one)
        finally:
            self._ended = True
        if self._failure is not None and not self._stopping.is_set():
            raise self._failure

    def stop(self) -> None:
        """Ask the task to end: it makes durable and acknowledges what was received."""
        self._stopping.set()
        self._ask(stop=True)

    def caught_up(self, lsn: int) -> bool:
        """Return whether the task has reported that everything committed before `lsn` is in the log."""
        if self._wanted.position < lsn:
            self._ask(position=lsn)
        report = self._last_report()
        return report is not None and report.caught_up >= lsn

    def progress(self) -> CaptureProgress:
        """Return the task's progress as last reported."""
        report, now_s = self._last_report(), time.monotonic()
        found = _NOTHING if report is None else report.progress(now_s)
        died, again = self._jobs.error, found.reconnects + self._jobs.count
        phase = "stopped" if self._ended else "connecting" if died is not None else found.phase
        return replace(found, phase=phase, error=died or found.error, reconnects=again)

    def _run_one(self) -> None:
        """Run one job to its end; raise an error that another job may overcome, keep others in `_failure`."""
        self._begin_round()
        try:
            error = self._run_job()
        except TailraceError as failure:
            self._failure = failure
            return
        if error is not None and error.kind is Kind.SPARK_FAILED:
            raise error
        self._failure = error

    def _run_job(self) -> TailraceError | None:
        """Run one job to its end; return why it failed, if it did.

        :raises TailraceError: the task's error; Spark does not start.
        """
        session = self._spark.session(self._stopping)
        if session is None:
            return None
        self._require_cores(session)
        self._spark.require_shared({"log.path": self._pipeline.log.path})
        order = Order(self._pipeline.model_dump_json(exclude_unset=True), self._run_id, self._wanted.round)
        group = JobGroup(f"tailrace-{self._run_id}-{order.round}", f"{self._pipeline.name}: capture")
        job = Background("capture-job", lambda: _capture(session, order, group))
        job.start()
        beat_s, stop_by_s = 0.0, None
        while not job.join(_LOOK_S):
            now_s = time.monotonic()
            if now_s - beat_s >= _BEAT_S:
                beat_s = now_s
                self._beat()
            if (report := self._last_report()) is not None and report.attempt[0] == order.round:
                self._jobs.error = None
            if self._stopping.is_set():
                stop_by_s = stop_by_s or now_s + STOP_S
                if now_s > stop_by_s:
                    log.warning("the capturing task does not end: its job is cancelled", group=group.name)
                    group.cancel(session)
                    return None
        return job.error

    def _require_cores(self, session: SparkSession) -> None:
        context = session.sparkContext
        until_s = time.monotonic() + (CORES_S if cores_of(context.master or "") is None else 0.0)
        while (error := too_few(context.defaultParallelism, self._tasks)) is not None:
            if _may_grow(context) or self._stopping.wait(_LOOK_S):
                return
            if time.monotonic() > until_s:
                raise error

    def _begin_round(self) -> None:
        # A task that does not read its own round in the desired state takes itself for one of an earlier job.
        with self._lock:
            self._wanted = self._wanted.model_copy(update={"round": self._wanted.round + 1})
            try:
                self._channel.ask(self._wanted)
            except OSError as error:
                path = self._pipeline.log.path
                raise write_failure(error, "start the capture on an executor", path) from error

    def _beat(self) -> None:
        try:
            self._channel.beat()
        except OSError as error:
            log.warning("the heartbeat for the capturing task can't be written", error=error.strerror)

    def _ask(self, **changes: object) -> None:
        with self._lock:
            self._wanted = self._wanted.model_copy(update=changes)
            try:
                self._channel.ask(self._wanted)
            except OSError as error:
                log.warning("the desired state can't be written for the capturing task", error=error.strerror)

    def _last_report(self) -> Report | None:
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._read_s >= _LOOK_S:
                self._read_s = now_s
                found = self._channel.report()
                if found is not None and found.run_id == self._run_id:
                    self._report = found
            return self._report


def _may_grow(context: SparkContext) -> bool:
    """Return whether Spark adds executors by itself when tasks wait for them."""
    return context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true"


def too_few(cores: int, tasks: int) -> TailraceError | None:
    """Return an error if `tasks` captures would take all of `cores`; None otherwise."""
    if cores > tasks:
        return None
    return TailraceError(
        Kind.CONFIG_INVALID,
        f"capture on executors: {tasks} tasks would take all {cores} cores that they have",
        "each source takes one core for as long as it is captured, and Spark needs others for its other "
        f"jobs: give more executors, or, locally, spark.master: local[{tasks + 2}]",
    )


def _capture(session: SparkSession, order: Order, group: JobGroup) -> None:
    [error] = collect(session, carry_out, [order], 1, group)
    if error is not None:
        raise error
