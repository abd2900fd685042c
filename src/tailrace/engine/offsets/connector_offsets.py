"""Offsets that a connector writes itself: straight to the store, as long as no task answers for them."""

from __future__ import annotations

import threading
from collections import Counter

from tailrace.engine.contracts import OffsetStore
from tailrace.engine.offsets.stores import Key, key_of
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Offset, Partition


class ConnectorOffsets:
    """Writes to the store of an engine (`contracts.OffsetWriter`). Any thread.

    :param timeout_s: longest that a write may take.
    """

    def __init__(self, store: OffsetStore, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._writing: Counter[Key] = Counter()
        self._of_tasks: set[Key] = set()
        self._closed = False

    def write(self, partition: Partition, offset: Offset) -> None:
        """Keep an offset; durable when it returns, if the store is.

        :raises TailraceError: `ENGINE_MISUSED` for a partition of which a task has given something, and once
            the engine stops; what the store raises.
        """
        key = key_of(partition)
        with self._changed:
            if self._closed:
                raise _refused("the engine stops", "write before the connector is stopped")
            if key in self._of_tasks:
                raise _refused(
                    f"partition {dict(partition)} is a task's",
                    "its offset is that of what is processed; the task may write it, or before there are "
                    "tasks the connector",
                )
            self._writing[key] += 1
        try:
            self._store.write([(partition, dict(offset))], self._timeout_s)
        finally:
            with self._changed:
                self._writing -= Counter([key])
                self._changed.notify_all()

    def claim(self, partition: Partition) -> None:
        """Hear that a task answers for the offset of a partition from now on.

        Waits for a write of that partition, which must not come to rest on what the task commits.

        :raises TailraceError: `OFFSETS_UNWRITABLE` if the write hangs.
        """
        key = key_of(partition)
        with self._changed:
            self._of_tasks.add(key)
            if not self._changed.wait_for(lambda: not self._writing[key], self._timeout_s):
                raise TailraceError(
                    Kind.OFFSETS_UNWRITABLE,
                    "begin with a partition: the connector's own write of its offset hangs",
                    "look at where offsets are kept; write offsets of tasks before there are tasks",
                    dict(partition),
                )

    def close(self) -> None:
        """Write nothing more."""
        self._closed = True


def _refused(found: str, hint: str) -> TailraceError:
    return TailraceError(Kind.ENGINE_MISUSED, f"write an offset of the connector: {found}", hint)
