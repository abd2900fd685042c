"""Processing where nobody wants the records: a pipeline whose sinks are fed from the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from tailrace.engine.contracts import Committer
from tailrace.records.batch import Batch
from tailrace.records.group import Group


class NullProcessor:
    """Counts what is polled all the same as processed (`contracts.RecordProcessor`)."""

    def initialize(
        self,
        executor: Executor,
        transform: Callable[[Group], Iterable[Group]] | None,
        convert: Callable[[Group], object] | None,
        committer: Committer,
    ) -> None:
        """Take the committer."""
        self._committer = committer

    def process(self, batch: Batch) -> None:
        """Mark the batch."""
        self._committer.mark_processed(batch)
        self._committer.mark_batch_finished(batch)

    def drain(self, timeout_s: float) -> bool:
        """Nothing is ever under way."""
        return True

    def close(self) -> None:
        """Nothing is to be given up."""
