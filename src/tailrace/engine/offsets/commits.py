"""The common part of a task's two committers: tracked partitions, the policy, notifying the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import structlog

from tailrace.engine.contracts import Clock, CommitPolicy
from tailrace.engine.offsets.partitions import Points, TrackedPartitions
from tailrace.records.batch import Batch, Offset, Partition

if TYPE_CHECKING:
    from tailrace.engine.offsets.committer import OffsetCommitter
    from tailrace.engine.offsets.transactions import TransactionCommits

log = structlog.get_logger(__name__)

#: The committer of one attempt of a task.
TaskCommits: TypeAlias = "OffsetCommitter | TransactionCommits"


class Commits:
    """The batches of a task's partitions in one attempt, and how far they are committed. Any thread.

    :param committed: called with each offset that was committed (`SourceTask.commit`).
    :param claim: called with each partition before its first batch is taken or its first offset is written.
    """

    def __init__(
        self,
        policy: CommitPolicy,
        clock: Clock,
        *,
        committed: Callable[[Partition, Offset], None],
        name: str,
        claim: Callable[[Partition], None],
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._on_committed = committed
        self._name = name
        self._partitions = TrackedPartitions(claim)
        self._lock = self._partitions.lock
        self._last_s = clock.monotonic()  # of the last commit
        self._failure: BaseException | None = None  # of the last write
        self._failed: BaseException | None = None  # after which nothing more is committed

    @property
    def policy(self) -> CommitPolicy:
        """The policy that decides when offsets are committed."""
        return self._policy

    @property
    def committed(self) -> int:
        """Number of records up to the last commit, in all partitions."""
        return self._partitions.committed_records

    @property
    def processed(self) -> int:
        """Number of records up to which everything is processed, dropped ones included, in all partitions."""
        with self._lock:
            return self._partitions.processed

    @property
    def failure(self) -> BaseException | None:
        """The error of the last write; None if it succeeded or has not ended.

        If `take` and `tick` raise it, this attempt commits nothing more; the next attempt continues.
        """
        return self._failure

    @property
    def is_writing(self) -> bool:
        """Whether a write of this attempt may still change the stored offsets, even after its end."""
        return False

    def take(self, batch: Batch) -> None:
        """Track a polled batch, in the order of its partition, before it is processed.

        :raises TailraceError: `ENGINE_MISUSED` if far too many batches are not marked.
        :raises BaseException: the error after which nothing more is committed, as `tick` does: another engine
            has taken over (`OFFSETS_PREEMPTED`), or a transaction failed.
        """
        self._raise_failure()
        self._partitions.take(batch)

    def write(self, partition: Partition, offset: Offset) -> None:
        """Commit an offset that belongs to no record, once all batches taken before it are processed.

        :raises BaseException: as `take`.
        """
        self._raise_failure()
        self._partitions.write(partition, offset)

    def drop(self) -> None:
        """Note that a polled batch was not taken: offsets passed to `write` from now on are not committed."""
        with self._lock:
            self._partitions.has_dropped = True

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _notify(self, points: Points) -> None:
        """Notify the task of committed offsets, until it ends; they stay committed whatever it raises."""
        for kept, point in points:
            if self._partitions.is_closed:
                return
            try:
                self._on_committed(kept.partition, point.offset)
            except BaseException as error:  # noqa: BLE001 - the offset is committed all the same
                log.warning("a task's commit() failed", task=self._name, error=type(error).__name__)
