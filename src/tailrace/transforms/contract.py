"""What transformations and predicates are. Third parties implement these protocols.

They are found by name through the entry points `tailrace.transformations` and `tailrace.predicates`.
The same objects run in process, on several threads at once, and on Spark's executors: so they are
made of their options, pickle, and keep nothing from call to call. A transformation that holds something, such
as a connection, has a method `close` as well, which is called once, after its last call.
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
    """Makes of a group of records what they are to be. Vectorised: no loop over rows."""

    def apply(self, group: Group) -> Iterable[Group]:
        """Return what becomes of the records; nothing at all drops them.

        Called on any thread, for several groups at once. Each record that is returned keeps its
        `index`; a record may be dropped, may go to another topic, and may not become two.
        :raises TailraceError: stops the task; nothing is committed beyond the group.
        :raises RetriableError: the group is transformed again after a while.
        :raises StopEngine: ends the engine; nothing of the batch counts as processed.
        """
        ...


@runtime_checkable
class RecordTransformation(Protocol):
    """The same for those who think in single records. Slower: each record is made an object.

    A record's `partition` is not known here: it is empty.
    """

    def apply_record(self, record: Record) -> Record | None:
        """Return the record as it is to be (`Record.replace`), or None to drop it.

        What it raises is taken as from `Transformation.apply`.
        """
        ...


@runtime_checkable
class Predicate(Protocol):
    """Chooses records."""

    def matches(self, group: Group) -> npt.NDArray[np.bool_]:
        """Return for each record of the group whether it is chosen.

        What it raises is taken as from `Transformation.apply`.
        """
        ...
