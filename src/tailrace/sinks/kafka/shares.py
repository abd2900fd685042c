"""A range of the log written to Kafka by several producers: what the driver does, and what each task does.

Which steps these are, in which order, and why that is right, says `kafka.producer.layout`.

A task decodes the whole range, but writes the values of its share's records alone: their keys decide, and
only keys are computed of the others (`KeysFirst`). Measured on rows of ten columns as JSON, CPU of one
task: 0.4 µs for each row of the range, and for each of its own 1.2 to convert and 0.9 to hand over, beside
what the client's threads and the cluster do. By these figures eight tasks on as many cores are nearly four
times as fast as one, and many more gain little. In return nothing goes through Spark's shuffle, which
Python feeds slowly: a task needs no other's result, and one that is repeated gives the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from tailrace import failpoints
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.failures import LIMIT_S
from tailrace.kafka.offsets.topic import History, OffsetsTopic
from tailrace.kafka.producer.account import Account, is_taken, raise_out_of_time
from tailrace.kafka.producer.layout import (
    Head,
    OpenMember,
    ReadHead,
    WriteShare,
    sharing,
)
from tailrace.kafka.producer.partitioner import Share
from tailrace.kafka.producer.writer import Writer
from tailrace.ranges.plan import InputSplit
from tailrace.sinks.kafka.records import Form, Records
from tailrace.waits import wait_until

log = structlog.get_logger(__name__)

#: How long a task whose producer was opened by another attempt waits, each time, for that one to be done,
#: before it opens it again. They grow, so that of two attempts one gets through.
PATIENCE_S = (2.0, 10.0, 60.0, 300.0)

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class ShareJob:
    """What every task of a range's job is given. It has salts of masks: only ever part of a closure.

    :param head: as the driver wrote it.
    :param end: of the range.
    :param history: what the driver has read of the offsets topic.
    :param counted: how many partitions topics had when this engine first wrote to them.
    """

    log: str
    splits: tuple[InputSplit, ...]
    end: int
    account: Account
    form: Form
    head: Head
    history: History
    counted: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ShareWritten:
    """What a task wrote: as `Sent` has it, seconds for sending and for the commit, and `Records.counted`."""

    rows: int = 0
    bytes: int = 0
    dead_letters: int = 0
    send_s: float = 0.0
    commit_s: float = 0.0
    counted: Mapping[str, int] = field(default_factory=dict)


def write_share(job: ShareJob, number: int) -> ShareWritten:
    """Write the share of producer `number`, or what it lacks of it; when it returns, all of it is written.

    Another attempt at the same share may be under way, or come: the last one to begin writes, and the
    others wait for it.
    :raises TailraceError: `SINK_PREEMPTED` if another engine has taken the task; what writing meets.
    """
    offsets = job.account.offsets(history=job.history)
    if not offsets.is_there():
        raise TailraceError(
            Kind.SINK_MISCONFIGURED,
            f"look for the offsets topic {offsets.name!r}: it does not exist any more",
            "it holds how far the sink is: see who deleted it, and restore it",
            {"topic": offsets.name},
        )
    for patience_s in (*PATIENCE_S, None):
        try:
            written = _Attempt(job, number, offsets).run()
        except TailraceError as error:
            if error.kind is not Kind.SINK_PREEMPTED or patience_s is None or LIMIT_S in error.context:
                raise
        else:
            if written is None:
                raise _taken_by_another(job, number)
            return written
        log.warning("another attempt at this share has begun; waiting for it", producer=number)
        if _is_done_within(job, number, offsets, patience_s):
            break
    return ShareWritten()


class _Attempt:
    """Carries out the steps of `layout.sharing`, once."""

    def __init__(self, job: ShareJob, number: int, offsets: OffsetsTopic) -> None:
        self._job = job
        self._number = number
        self._offsets = offsets
        self._writer: Writer = job.account.member(offsets, number)
        self._written = ShareWritten()

    def run(self) -> ShareWritten | None:
        """Return what was written; None: another engine has taken the task.

        :raises TailraceError: `SINK_PREEMPTED` if another attempt opened the producer; what writing meets.
        """
        steps = sharing(self._job.head, self._number, self._job.end)
        result: Any = None
        self._writer.connect()  # while the head is read
        try:
            while True:
                result = self._perform(steps.send(result))
        except StopIteration as end:
            return None if end.value is None else self._written
        finally:
            self._writer.close()

    def _perform(self, step: ReadHead | OpenMember | WriteShare) -> Any:
        if isinstance(step, ReadHead):
            found = self._offsets.read(self._job.account.key)
            return None if found is None else Head.of(found)
        if isinstance(step, OpenMember):
            return self._writer.open()
        self._write(step)
        return None

    def _write(self, step: WriteShare) -> None:
        job = self._job
        share = Share(step.number, job.head.producers)
        started = time.perf_counter()
        failpoints.hit("kafka.in_share")
        records = Records(job.form, job.account, job.counted)
        try:
            found = records.send(self._writer, Path(job.log), job.splits, step.start, step.end, share)
            sent = time.perf_counter()
            self._writer.commit(job.head.member_offset(step.end))
        except TailraceError as error:
            if error.kind is Kind.SINK_PREEMPTED and not self._is_time_out():
                raise
            raise_out_of_time(error, self._writer)
        commit_s = time.perf_counter() - sent
        send_s = sent - started
        self._written = ShareWritten(
            found.rows, found.bytes, found.dead_letters, send_s, commit_s, records.counted
        )

    def _is_time_out(self) -> bool:
        """Return whether the cluster may have ended the transaction, and no other engine or attempt.

        :raises TailraceError: as `is_taken`.
        """
        if self._writer.progress.seconds < self._writer.limit_s:
            return False
        return not is_taken(self._offsets, self._job.account, {self._job.head.lease})


def _is_done_within(job: ShareJob, number: int, offsets: OffsetsTopic, patience_s: float) -> bool:
    key = job.account.member_key(number)
    return wait_until(lambda: job.head.reached(offsets.read(key)) >= job.end, patience_s, _LOOK_S)


def _taken_by_another(job: ShareJob, number: int) -> TailraceError:
    return TailraceError(
        Kind.SINK_PREEMPTED,
        "write a share of a range: another engine has taken the pipeline's place; this one stops",
        "the same pipeline runs somewhere else: stop one of them, or give it another name or `group`",
        {"pipeline": job.account.pipeline, "producer": number},
    )
