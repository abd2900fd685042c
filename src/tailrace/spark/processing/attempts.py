"""How often records were tried that are handed over together: for each of its own, and for their job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tailrace.backoff import Backoff
from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing.handlers import where
from tailrace.records.batch import Batch
from tailrace.spark.processing.task_function import ChunkOutcome


@dataclass(frozen=True, slots=True)
class AttemptCounts:
    """Attempts so far.

    :param job: of staging, and of Spark's job; counted anew after each that ended well.
    :param records: by place, of those that failed.
    """

    job: Backoff
    records: Mapping[int, Backoff] = field(default_factory=dict)

    def after(self, error: BaseException) -> tuple[AttemptCounts, float]:
        """Return the attempts after a job that failed, and the seconds to wait.

        :raises BaseException: `error`, which is final.
        """
        job, wait_s = self.job.after(error)
        if wait_s is None:
            raise error
        return replace(self, job=job), wait_s

    def after_outcome(self, outcome: ChunkOutcome, batch: Batch) -> tuple[AttemptCounts, float]:
        """Return likewise what a job that ended well leaves to be tried.

        :raises BaseException: an error of a record that is final, noted with the record; `StopEngine`.
        """
        fresh = self.job.after_success()
        tried: dict[int, Backoff] = {}
        longest_s = 0.0
        final = outcome.final
        for place, error in outcome.again.items():
            backoff, wait_s = self.records.get(place, fresh).after(error)
            if wait_s is None:
                final = final or (place, error)
            else:
                tried[place] = backoff
                longest_s = max(longest_s, wait_s)
        if final is not None:
            where(final[1], batch, final[0])
            raise final[1]
        if outcome.wants_end:
            raise StopEngine
        return AttemptCounts(fresh, tried), longest_s
