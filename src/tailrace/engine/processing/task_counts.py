"""What a task has handed over, over all its lives, for those who look at it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TaskCounts:
    """Counts for each batch, never for each record. Written by the room of the present life, under its lock.

    :param delivered: records of batches that were handed over whole.
    :param dropped: records of them that transformations dropped.
    :param retries: times that a transformation, a converter or a handler failed and was tried again.
    :param handling_s: seconds for which threads of this process called handlers, waits before retries among
        them.
    :param calls: handlers that run now. Those of a life that has ended may still run: the next one begins
        when they have returned.
    :param batches: under way now.
    :param size_bytes: of them.
    """

    delivered: int = 0
    dropped: int = 0
    retries: int = 0
    handling_s: float = 0.0
    calls: int = 0
    batches: int = 0
    size_bytes: int = 0
