"""What a handler gets when there is a converter: keys and values as they go out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.records.batch import Batch
from tailrace.records.group import Places
from tailrace.records.record import Record


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """A group's records converted to events: one each, in the group's order, unless `rows` says so.

    :param keys: an Arrow array or a sequence of objects; None: no event has a key.
    :param values: likewise; a null value is a tombstone.
    :param headers: a struct array of values ready to go out; None: no headers.
    :param rows: for each event the row of the group that it came from, never falling: a record may
        become several events that follow each other (a changed key does), or none.
    """

    keys: pa.Array | Sequence[Any] | None
    values: pa.Array | Sequence[Any]
    headers: pa.StructArray | None = None
    rows: Places | None = None

    def __len__(self) -> int:
        return len(self.values)


class Event(NamedTuple):
    """A record as it goes out, and the record that it was: a commit decodes nothing.

    Events of one record have its place and follow each other; it is processed when the last one is.
    """

    topic: str
    key: Any
    value: Any
    headers: Mapping[str, Any]
    record: Record


@dataclass(frozen=True, eq=False)
class Events(Sequence[Event]):
    """A batch converted; a sequence of `Event` in the source's order.

    Those who can take columns use `keys` and `values`, Arrow arrays in the same order.

    :param converted: for each group of `batch`.
    """

    batch: Batch
    converted: tuple[Converted, ...]

    def __len__(self) -> int:
        return sum(len(found) for found in self.converted)

    @overload
    def __getitem__(self, place: int) -> Event: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Event]: ...
    def __getitem__(self, place: int | slice) -> Event | Sequence[Event]:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        group, entry = self.order[range(len(self))[place]]
        return self._event(int(group), int(entry))

    def __iter__(self) -> Iterator[Event]:
        for group, entry in self.order:
            yield self._event(int(group), int(entry))

    @functools.cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """Pairs (group, entry of its `Converted`) in the source's order: an array of shape (len, 2)."""
        if all(found.rows is None for found in self.converted):
            return self.batch.order
        parts = list(zip(self.batch.groups, self.converted, strict=True))
        places = [group.index if found.rows is None else group.index[found.rows] for group, found in parts]
        of_group = [np.full(len(found), g, np.int64) for g, found in enumerate(self.converted)]
        entries = [np.arange(len(found), dtype=np.int64) for found in self.converted]
        order = np.argsort(np.concatenate(places), kind="stable")
        return np.stack([np.concatenate(of_group)[order], np.concatenate(entries)[order]], axis=1)

    @functools.cached_property
    def topics(self) -> pa.DictionaryArray:
        """The topic of each event."""
        names = pa.array([group.topic for group in self.batch.groups], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(self.order[:, 0].astype("int32")), names)

    @functools.cached_property
    def keys(self) -> pa.Array:
        """The keys as one array; null where there is none."""
        return self._in_order([found.keys for found in self.converted])

    @functools.cached_property
    def values(self) -> pa.Array:
        """The values as one array."""
        return self._in_order([found.values for found in self.converted])

    def _in_order(self, parts: Sequence[pa.Array | Sequence[Any] | None]) -> pa.Array:
        arrays = [
            pa.nulls(len(found)) if part is None else part if isinstance(part, pa.Array) else pa.array(part)
            for part, found in zip(parts, self.converted, strict=True)
        ]
        if len(arrays) == 1:
            return arrays[0]
        kinds = {array.type for array in arrays if not pa.types.is_null(array.type)}
        kind = kinds.pop() if kinds else pa.null()
        whole = pa.concat_arrays([array.cast(kind) for array in arrays]) if arrays else pa.array([], kind)
        starts = [0]
        for array in arrays:
            starts.append(starts[-1] + len(array))
        order = self.order
        return whole.take(pa.array(np.array(starts[:-1], np.int64)[order[:, 0]] + order[:, 1]))

    def _event(self, group: int, entry: int) -> Event:
        found = self.converted[group]
        headers = {} if found.headers is None else found.headers[entry].as_py() or {}
        row = entry if found.rows is None else int(found.rows[entry])
        record = Record(self.batch.groups[group], row, self.batch.partition)
        kept = {name: value for name, value in headers.items() if value is not None}
        return Event(record.topic, _at(found.keys, entry), _at(found.values, entry), kept, record)


def _at(values: pa.Array | Sequence[Any] | None, entry: int) -> Any:
    if values is None:
        return None
    return values[entry].as_py() if isinstance(values, pa.Array) else values[entry]
