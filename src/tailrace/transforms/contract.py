"""Protocols of transformations and predicates, which third parties can implement.

They are found by name through the entry points `tailrace.transformations` and `tailrace.predicates`.
The same objects run in process, on several threads at once, and on Spark's executors: so they are
constructed from their options, can be pickled, and keep no state between calls. A transformation that holds
a resource, such as a connection, also has a method `close`, which is called once, after the last call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tailrace.records.group import Group
from tailrace.records.record import Record


@runtime_checkable
class Transformation(Protocol):
    """Transforms the records of a group. Vectorised: no loop over rows."""

    def apply(self, group: Group) -> Iterable[Group]:
        """Return the transformed records; an empty result drops them all.

        Called on any thread, for several groups at once. Each record that is returned keeps its
        `index`; a record may be dropped or get another topic, and must not become two.
        :raises TailraceError: stops the task; nothing of the group, or after it, is committed.
        :raises RetriableError: the group is transformed again later.
        :raises StopEngine: stops the engine; no record of the batch counts as processed.
        """
        ...


@runtime_checkable
class RecordTransformation(Protocol):
    """Transforms single records. Slower than `Transformation`: each record becomes an object.

    A record's `partition` is not known here: it is empty.
    """

    def apply_record(self, record: Record) -> Record | None:
        """Return the record, a changed one (`Record.replace`), or None to drop it.

        Errors have the same meaning as in `Transformation.apply`.
        """
        ...


@runtime_checkable
class Predicate(Protocol):
    """Chooses records."""

    def matches(self, group: Group) -> npt.NDArray[np.bool_]:
        """Return for each record of the group whether it is chosen.

        Errors have the same meaning as in `Transformation.apply`.
        """
        ...
