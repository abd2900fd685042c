"""A range of the log written to Kafka by several producers: what the driver does, and what each task does.

Which steps these are, in which order, and why that is right, says `kafka.layout`.

A task decodes the whole range, but writes the values of its share's records alone: their keys tell, and
those are all that is made of the others (`KeysFirst`). Measured on rows of ten columns as JSON, CPU of one
task: 0.4 µs for each row of the range, and for each of its own 1.2 to convert and 0.9 to hand over, beside
what the client's threads and the cluster do. By these figures eight tasks on as many cores are nearly four
times as fast as one, and many more gain little. In return nothing goes through Spark's shuffle, which
Python feeds slowly: a task needs no other's result, and one that is repeated gives the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tailrace import failpoints
from tailrace.converters.contract import Converter
from tailrace.decode.debezium import SourceFacts
from tailrace.decode.disclosed import Disclosed
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.account import Account
from tailrace.kafka.layout import (
    Head,
    OpenMember,
    ReadHead,
    WriteShare,
    sharing,
)
from tailrace.kafka.offsets import OffsetsTopic
from tailrace.kafka.shares import Share
from tailrace.kafka.writer import Writer
from tailrace.model import ValueModes
from tailrace.ranges.plan import Piece
from tailrace.sinks.kafka_records import Records, topics_of
from tailrace.transforms.chain import Chain

if TYPE_CHECKING:
    from tailrace.config.kafka import KafkaSink as KafkaConfig

log = structlog.get_logger(__name__)

#: How long a task whose producer was opened by another attempt waits, each time, for that one to be done,
#: before it opens it again. They grow, so that of two attempts one gets through.
PATIENCE_S = (2.0, 10.0, 60.0, 300.0)

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Form:
    """What the records of a sink are made with. May be pickled.

    :param prefix: begins the names of topics.
    """

    config: KafkaConfig
    converter: Converter
    chain: Chain
    prefix: str
    origin: SourceFacts
    disclosed: Disclosed
    modes: ValueModes

    def records(self, account: Account) -> Records:
        """Return what sends them."""
        topics = topics_of(self.config, account.admin(), self.prefix, account.timeout_s)
        return Records(
            self.config,
            self.converter,
            self.chain,
            topics,
            self.origin,
            self.disclosed,
            self.modes,
            account.options,
        )


@dataclass(frozen=True, slots=True)
class ShareJob:
    """What every task of a range's job is told. Salts of masks are in it: only ever part of a task's closure.

    :param head: as the driver wrote it.
    :param end: of the range.
    """

    log: str
    pieces: tuple[Piece, ...]
    end: int
    account: Account
    form: Form
    head: Head


@dataclass(frozen=True, slots=True)
class Written:
    """What a task wrote: as `Sent` has it, and seconds for sending and for the commit."""

    rows: int = 0
    bytes: int = 0
    dead_letters: int = 0
    send_s: float = 0.0
    commit_s: float = 0.0


def write_share(job: ShareJob, number: int) -> Written:
    """Write the share of producer `number`, or what it lacks of it; when it returns, all of it is written.

    Another attempt at the same share may be under way, or come: the last one to begin writes, and the
    others wait for it.
    :raises TailraceError: `SINK_PREEMPTED` if another engine has taken the task; what writing meets.
    """
    offsets = job.account.offsets()
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
            if error.kind is not Kind.SINK_PREEMPTED or patience_s is None:
                raise
        else:
            if written is None:
                raise _taken_by_another(job, number)
            return written
        log.warning("another attempt at this share has begun; waiting for it", producer=number)
        if _is_done_within(job, number, offsets, patience_s):
            break
    return Written()


class _Attempt:
    """Carries out the steps of `layout.sharing`, once."""

    def __init__(self, job: ShareJob, number: int, offsets: OffsetsTopic) -> None:
        self._job = job
        self._number = number
        self._offsets = offsets
        self._writer: Writer = job.account.member(offsets, number)
        self._written = Written()

    def run(self) -> Written | None:
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
        records = job.form.records(job.account)
        found = records.send(self._writer, Path(job.log), job.pieces, step.start, step.end, share)
        sent = time.perf_counter()
        self._writer.commit(job.head.member_offset(step.end))
        commit_s = time.perf_counter() - sent
        self._written = Written(found.rows, found.bytes, found.dead_letters, sent - started, commit_s)


def _is_done_within(job: ShareJob, number: int, offsets: OffsetsTopic, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    key = job.account.member_key(number)
    while time.monotonic() < deadline:
        if job.head.reached(offsets.read(key)) >= job.end:
            return True
        time.sleep(_LOOK_S)
    return False


def _taken_by_another(job: ShareJob, number: int) -> TailraceError:
    return TailraceError(
        Kind.SINK_PREEMPTED,
        "write a share of a range: another engine has taken the pipeline's place; this one stops",
        "the same pipeline runs somewhere else: stop one of them, or give it another name or `group`",
        {"pipeline": job.account.pipeline, "producer": number},
    )
