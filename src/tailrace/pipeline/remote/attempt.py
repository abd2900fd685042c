"""The executor's side of remote capture: one attempt to capture, in a Python worker of Spark.

It ends when the driver asks for it, when a later attempt has started, when the driver's heartbeat stops, or
when the executor that started the worker is gone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import structlog

from tailrace.config import PipelineConfig
from tailrace.engine.logs import to_logging
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import Background
from tailrace.pipeline.remote.channel import Channel, Report
from tailrace.realtime.handover import Handover
from tailrace.sources.contract import Capture
from tailrace.sources.registry import source_type

log = structlog.get_logger(__name__)

TURN_S = 0.1  #: Interval at which the driver's messages are read, in seconds.
REPORT_S = 0.5  #: Interval between reports to the driver, in seconds.
#: Time without a heartbeat of the driver after which it counts as gone, in seconds.
SILENCE_S = 60.0
#: Longest wait for the log's lock, in seconds: the previous attempt may be about to end.
LOCKED_S = 60.0


@dataclass(frozen=True, slots=True)
class Order:
    """A task's instructions. `pipeline` is JSON of a `PipelineConfig` with references to secrets."""

    pipeline: str
    run_id: str
    round: int


def carry_out(orders: Iterable[Order]) -> Iterator[TailraceError | None]:
    """Capture until the driver asks for the end; the body of a Spark task, with one order.

    Yields None, or the error that ended the capture. An error after which another attempt may succeed is
    raised instead, so that Spark counts this attempt as failed.
    """
    from pyspark import TaskContext

    to_logging()
    context = TaskContext.get()
    assert context is not None
    for order in orders:
        try:
            capture_until_end(order, context.taskAttemptId())
        except TailraceError as error:
            if error.kind is Kind.SPARK_FAILED:
                raise
            yield error
        else:
            yield None


def capture_until_end(order: Order, number: int) -> None:
    """Capture, as Spark's attempt `number`, until the driver asks for the end.

    :raises TailraceError: as `Capture.run`; `LOG_LOCKED` if the log stays locked; `SPARK_FAILED` if it
        ended for another reason.
    """
    pipeline = PipelineConfig.model_validate(json.loads(order.pipeline))
    attempt = Attempt(pipeline, order.run_id, (order.round, number))
    until_s = time.monotonic() + LOCKED_S
    while True:
        try:
            attempt.run()
        except TailraceError as error:
            if attempt.superseded is not None:
                break
            if error.kind is not Kind.LOG_LOCKED or attempt.must_end or time.monotonic() > until_s:
                raise
            time.sleep(REPORT_S)
        else:
            break
    if attempt.superseded is not None:
        raise TailraceError(
            Kind.SPARK_FAILED,
            f"capture on an executor: {attempt.superseded}",
            "no action is needed: another attempt continues from what is in the log",
        )


class Attempt:
    """One attempt. For one thread.

    :param number: round of the job, Spark's number of the attempt.
    """

    def __init__(self, pipeline: PipelineConfig, run_id: str, number: tuple[int, int]) -> None:
        self._pipeline = pipeline
        self._run_id = run_id
        self._number = number
        self._channel = Channel(pipeline.log.path)
        self._process = f"pid {os.getpid()} on {socket.gethostname()}"
        self._parent = os.getppid()
        self._beat_ns = 0
        self._beat_s = time.monotonic()
        self._reported_s = 0.0
        self._position = self._caught_up = 0
        #: Whether this attempt must stop capturing.
        self.must_end = False
        #: Why, unless the driver asked for the end of the whole capture.
        self.superseded: str | None = None
        self._is_latest = True

    def run(self) -> None:
        """Capture; see `carry_out`."""
        source = self._pipeline.source
        task = source_type(source.type).capture(
            source,
            self._pipeline.log.path,
            self._pipeline.log,
            name=self._pipeline.name,
            listener=Handover((), lambda: None, source),
        )
        capture = Background("capture", task.run, Kind.SOURCE_UNREACHABLE)
        capture.start()
        while not capture.join(TURN_S):
            self._listen(task)
            self._report(task, REPORT_S)
            if self.must_end:
                task.stop()
        self._report(task, 0.0)
        if capture.error is not None:
            raise capture.error

    def _listen(self, task: Capture) -> None:
        wanted, now_s = self._channel.wanted(), time.monotonic()
        if wanted is not None:
            if wanted.run_id != self._run_id or wanted.round != self._number[0]:
                self._supersede("the driver has begun another job")
            elif wanted.stop:
                self.must_end = True
            self._position = wanted.position
        if (beat_ns := self._channel.beat_ns) != self._beat_ns:
            self._beat_ns, self._beat_s = beat_ns, now_s
        if now_s - self._beat_s > SILENCE_S:
            self._supersede("the driver was silent for too long")
        if os.getppid() != self._parent:
            self._supersede("the executor is gone")
        if self._position > self._caught_up and task.caught_up(self._position):
            self._caught_up = self._position

    def _report(self, task: Capture, every_s: float) -> None:
        now_s = time.monotonic()
        if not self._is_latest or now_s - self._reported_s < every_s:
            return
        self._reported_s = now_s
        last = self._channel.report()
        if last is not None and last.run_id == self._run_id and last.attempt > self._number:
            self._is_latest = False
            self._supersede("a later attempt has started")
            return
        try:
            self._channel.put_report(
                Report.of(self._run_id, self._number, self._process, self._caught_up, now_s, task.progress())
            )
        except OSError as error:
            log.warning("a capturing task can't write its report", error=error.strerror)

    def _supersede(self, why: str) -> None:
        if self.superseded is None:
            log.warning("the capturing task ends", attempt=self._number, because=why)
            self.superseded = why
        self.must_end = True
