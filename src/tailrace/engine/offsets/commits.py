"""What both committers of a task's offsets have: partitions, a policy, and the task that is notified."""

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
    """What was taken of a task's partitions in one attempt, and how far it is committed. Any thread.

    :param committed: is called with each offset that was committed (`SourceTask.commit`).
    :param claim: is called with each partition before its first batch is taken, or its first offset.
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
        self._failed: BaseException | None = None  # nothing more is committed

    @property
    def policy(self) -> CommitPolicy:
        """What decides when it commits."""
        return self._policy

    @property
    def committed(self) -> int:
        """Records up to the last commit, of all partitions."""
        return self._partitions.committed_records

    @property
    def processed(self) -> int:
        """Records before which everything is processed, dropped ones included, of all partitions."""
        with self._lock:
            return self._partitions.processed

    @property
    def failure(self) -> BaseException | None:
        """Why the last write failed; None if it did not, or has not ended.

        Where `take` and `tick` raise it, nothing more of this attempt is committed, and another one goes on.
        """
        return self._failure

    @property
    def is_writing(self) -> bool:
        """Whether a write of this attempt may still change what is stored, also after its end."""
        return False

    def take(self, batch: Batch) -> None:
        """Take note of a batch as it was polled, in the order of its partition, before it is processed.

        :raises TailraceError: `ENGINE_MISUSED` if far too many batches were not marked.
        :raises BaseException: after which nothing more is committed, as `tick`: another engine has taken
            over (`OFFSETS_PREEMPTED`), or a transaction has ended.
        """
        self._raise_failure()
        self._partitions.take(batch)

    def write(self, partition: Partition, offset: Offset) -> None:
        """Have an offset committed that no record brings, once all that was taken before is processed.

        :raises BaseException: as `take`.
        """
        self._raise_failure()
        self._partitions.write(partition, offset)

    def drop(self) -> None:
        """Take note that a polled batch was not taken: no offset that is written from now on is committed."""
        with self._lock:
            self._partitions.has_dropped = True

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _notify(self, points: Points) -> None:
        """Notify the task of what was committed, until it ends; whatever it raises, the offsets are kept."""
        for kept, point in points:
            if self._partitions.is_closed:
                return
            try:
                self._on_committed(kept.partition, point.offset)
            except BaseException as error:  # noqa: BLE001 - the offset is kept all the same
                log.warning("a task failed to take a commit", task=self._name, error=type(error).__name__)
