"""Reads and changes the offsets of a Kafka sink from outside its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tailrace.errors import TailraceError
from tailrace.kafka.offsets.topic import parsed, task_in
from tailrace.kafka.producer.layout import Head
from tailrace.sinks.kafka.sink import ASK_TIMEOUT_S, account_of, furthest_whole

if TYPE_CHECKING:
    from tailrace.config.kafka import KafkaSinkConfig as KafkaConfig


@dataclass(frozen=True, slots=True)
class Committed:
    """The offset that a task has committed; if several producers share the task, the lowest one.

    :param log_id: of the log that `log_offset` belongs to; empty if the record does not name it.
    :param partition: partition of the record in the offsets topic; `offset` is its offset there.
    :param time_us: of the commit, since 1970.
    """

    task: str
    log_id: str
    log_offset: int
    partition: int
    offset: int
    time_us: int | None


def committed(config: KafkaConfig, pipeline: str, *, lenient: bool = False) -> list[Committed]:
    """Return the committed offset of each task of a pipeline, sorted by task, without fencing a producer.

    :param lenient: as in `OffsetsTopic`.
    :raises TailraceError: `OFFSETS_UNREADABLE`, `SINK_REFUSED`, `SINK_WRITE_FAILED`.
    """
    account = account_of(config, pipeline)
    offsets = account.offsets(min(account.timeout_s, ASK_TIMEOUT_S), lenient=lenient)
    if not offsets.exists():
        return []

    def is_ours(key: bytes) -> bool:
        return task_in(key, config.group, pipeline) is not None

    found = []
    for key, newest in offsets.newest(is_ours, account.isolation).items():
        task = task_in(key, config.group, pipeline)
        if task is None or newest.value is None:
            continue
        try:
            value = parsed(newest.value, config.offsets_topic) or {}
        except TailraceError:
            if not lenient:
                raise
            value = {}
        try:
            reached = furthest_whole(replace(account, task=task), offsets, Head.of(value))
        except TailraceError:
            reached = -1  # the offset is still listed, and can be set again
        found.append(
            Committed(
                task,
                str(value.get("log_id", "")),
                reached,
                newest.partition,
                newest.offset,
                newest.time_us,
            )
        )
    return sorted(found, key=lambda each: (len(each.task), each.task))


def commit_from_outside(
    config: KafkaConfig, pipeline: str, tasks: Sequence[str], offset: Mapping[str, Any] | None
) -> None:
    """Commit `offset` for some tasks in place of their current producers; None deletes their offsets.

    With transactions each task's current producer is fenced first: a process that still uses it can commit
    nothing more, and stops. The same applies to producers that share the task.
    :raises TailraceError: `SINK_PREEMPTED`, `SINK_REFUSED`, `SINK_MISCONFIGURED`, `OFFSETS_UNREADABLE`,
        `SINK_WRITE_FAILED`.
    """
    account = account_of(config, pipeline)
    offsets = account.offsets(lenient=True)
    offsets.require(create=config.create_topics)
    writers = [replace(account, task=task).writer(offsets) for task in tasks]
    try:
        for task in tasks:
            replace(account, task=task).end_members(offsets)
        # All are fenced before any offset is written: no process can continue with only some of them changed.
        before = [writer.open() for writer in writers]
        for writer in writers:
            writer.commit(offset)
        # Only now: an executor that opens a member later finds another lease (`kafka.producer.layout`).
        for task, found in zip(tasks, before, strict=True):
            replace(account, task=task).fence_members(offsets, found)
    finally:
        for writer in writers:
            writer.close()
