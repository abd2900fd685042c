"""Batches whose records are handed over portion by portion: what of them is left, and what is marked."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

from tailrace.engine.contracts import Committer
from tailrace.engine.processing.in_flight import InFlightLimiter
from tailrace.records.batch import Batch
from tailrace.records.group import Group


class BatchAcknowledgement:
    """A batch on its way. Any thread.

    :param size_bytes: what it holds of the room, which gets it back once all is processed.
    """

    def __init__(self, batch: Batch, size_bytes: int, limiter: InFlightLimiter, committer: Committer) -> None:
        self.batch = batch
        self._size_bytes = size_bytes
        self._limiter = limiter
        self._committer = committer
        self._lock = threading.Lock()
        self._left: dict[int, list[Group]] = {}
        self._delivered = 0
        self._finished = False

    def owe(self, portion: int, groups: Iterable[Group]) -> None:
        """Have these records wait to be processed, under the number of their portion."""
        with self._lock:
            self._left[portion] = list(groups)

    def mark(self, portion: int, left: Iterable[int], delivered: int = 0) -> None:
        """Mark what is processed of a portion: all but the places `left`.

        Within `InFlightLimiter.leave` or `mark`.

        :param delivered: how many records of it were handed over now; the others were dropped.
        """
        wanted = np.fromiter(left, np.int64)
        with self._lock:
            self._delivered += delivered
            rest = [
                group.take(np.flatnonzero(np.isin(group.index, wanted)))
                for group in self._left.pop(portion, [])
            ]
            if kept := [group for group in rest if len(group)]:
                self._left[portion] = kept
            groups = [group for found in self._left.values() for group in found]
            if groups:
                # Whatever is not among the records of a batch counts as processed.
                self._committer.mark_dropped(self.batch.with_groups(groups))
            else:
                self._committer.mark_processed(self.batch)

    def left_of(self, portion: int) -> list[Group]:
        """Return the records of a portion that are not processed."""
        with self._lock:
            return self._left.get(portion, [])

    def finish(self) -> None:
        """End the batch if all of it is processed; called once what a portion owed is marked."""
        with self._lock:
            if self._left or self._finished:
                return
            self._finished = True
        self._committer.mark_batch_finished(self.batch)
        self._limiter.give_back(self._size_bytes, delivered=self._delivered, polled=self.batch.polled)
