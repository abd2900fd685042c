"""A batch of records, from the poll of a task to the handler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from tailrace.records.group import Group, Places, pairs_in_order
from tailrace.records.record import Record

if TYPE_CHECKING:
    from tailrace.records.making import SourceRecord

#: A position in a source: names and JSON values, which only the tasks of that source interpret.
Offset = Mapping[str, Any]

#: Identifies a part of a source: names and texts. One offset is stored for each partition of a task.
Partition = Mapping[str, str]


_numbers = itertools.count()

#: Number of records whose places are converted to Python numbers at a time.
_AT_ONCE = 4096


class Offsets(Protocol):
    """For each record of a batch: where the next attempt continues once this record is processed."""

    def __getitem__(self, place: int, /) -> Offset: ...


@dataclass(frozen=True, eq=False)
class Batch(Sequence[Record]):
    """Records of one source partition, in its order; a sequence of `Record`.

    `len()` counts the records in the batch; `polled` those that the task returned, some of which may
    have been dropped since. A batch without records may still have the offset that the source has
    reached (`end`).

    :param groups: the records by topic and shape, each with its place in `[0, polled)`.
    :param offsets: `offsets[place]` for each place in `[0, polled)`.
    :param end: the offset once the whole batch is processed; None: that of the last record.
    :param transaction_ends: for each place, whether no transaction is open after it; None: after each. In a
        batch without records None means that none is open, and an empty array that nothing has changed.
    :param number: identifies the batch in this process; batches that are derived from it keep the number.
    """

    partition: Partition
    groups: tuple[Group, ...]
    polled: int
    offsets: Offsets
    end: Offset | None = None
    transaction_ends: npt.NDArray[np.bool_] | None = None
    number: int = field(default_factory=lambda: next(_numbers))

    @classmethod
    def of_records(
        cls, records: Iterable[SourceRecord], partition: Partition | None = None, end: Offset | None = None
    ) -> Batch:
        """Return a batch of Python values in the source's order; see `records.making`.

        :param partition: default: that of a source with a single partition.
        :param end: the offset once the whole batch is processed; None: that of the last record.
        :raises TailraceError: `RECORD_INVALID` if the values of a topic have no Arrow type in common.
        """
        from tailrace.records.making import batch_of

        return batch_of(records, partition or {}, end)

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    @overload
    def __getitem__(self, place: int) -> Record: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Record]: ...
    def __getitem__(self, place: int | slice) -> Record | Sequence[Record]:
        """Return records by index in the source's order; indexes are in `[0, len)`."""
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        group, row = self.order[range(len(self))[place]]
        return Record(self.groups[group], int(row), self.partition)

    def __iter__(self) -> Iterator[Record]:
        return itertools.chain.from_iterable(
            self.records(first, min(first + _AT_ONCE, len(self))) for first in range(0, len(self), _AT_ONCE)
        )

    def records(self, first: int, last: int) -> Iterator[Record]:
        """Yield the records `[first, last)` in the source's order. Each is created when it is requested.

        Several threads may use the iterator at once.
        """
        groups, rows = self.rows_of(first, last)
        return map(Record, groups, rows, itertools.repeat(self.partition))

    def rows_of(self, first: int, last: int) -> tuple[Iterable[Group], Sequence[int]]:
        """Return the group, and the row in that group, of each of the records `[first, last)` in the source's
        order. The batch must have these records.
        """
        if len(self.groups) == 1:
            return itertools.repeat(self.groups[0]), range(first, last)
        # Lists of numbers: creating thousands of pairs would trigger full garbage collections.
        of_group, rows = self.order[first:last].T.tolist()
        return map(self.groups.__getitem__, of_group), rows

    @functools.cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """Pairs (group, row in the group) in the source's order: an array of shape (len, 2)."""
        places = [group.index for group in self.groups]
        return pairs_in_order(places, [group.is_second for group in self.groups])

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """For each record in the source's order, its row in the concatenation of the groups."""
        if len(self.groups) == 1:
            return np.arange(len(self))
        starts = np.cumsum([0, *(len(group) for group in self.groups)])
        return starts[self.order[:, 0]] + self.order[:, 1]

    @property
    def places(self) -> Places:
        """The places of the records in the batch, ascending."""
        parts = [group.index for group in self.groups]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    @property
    def size_bytes(self) -> int:
        """The approximate memory of the batch, in bytes."""
        return sum(group.size_bytes for group in self.groups)

    @property
    def end_offset(self) -> Offset | None:
        """The offset once the whole batch is processed; None if the batch has none."""
        if self.end is not None:
            return self.end
        return self.offsets[self.polled - 1] if self.polled else None

    def with_groups(self, groups: Sequence[Group]) -> Batch:
        """Return the batch with its records replaced; places and offsets stay."""
        return replace(self, groups=tuple(groups))
