"""What a handler gets when there is a converter: keys and values as they go out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa

from tailrace.records.batch import Batch
from tailrace.records.record import Record


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """A group's records converted: as many entries as the group has, in its order.

    :param keys: an Arrow array or a sequence of objects; None: no record has a key.
    :param values: likewise; a null value is a tombstone.
    :param headers: a struct array of values ready to go out; None: no headers.
    """

    keys: pa.Array | Sequence[Any] | None
    values: pa.Array | Sequence[Any]
    headers: pa.StructArray | None = None


class Event(NamedTuple):
    """A record as it goes out, and the record that it was: a commit decodes nothing."""

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
        return len(self.batch)

    @overload
    def __getitem__(self, place: int) -> Event: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Event]: ...
    def __getitem__(self, place: int | slice) -> Event | Sequence[Event]:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        group, row = self.batch.order[range(len(self))[place]]
        return self._event(int(group), int(row))

    def __iter__(self) -> Iterator[Event]:
        for group, row in self.batch.order:
            yield self._event(int(group), int(row))

    @functools.cached_property
    def topics(self) -> pa.DictionaryArray:
        """The topic of each event."""
        names = pa.array([group.topic for group in self.batch.groups], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(self.batch.order[:, 0].astype("int32")), names)

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
            pa.nulls(len(group)) if part is None else part if isinstance(part, pa.Array) else pa.array(part)
            for part, group in zip(parts, self.batch.groups, strict=True)
        ]
        if len(arrays) == 1:
            return arrays[0]
        kinds = {array.type for array in arrays if not pa.types.is_null(array.type)}
        kind = kinds.pop() if kinds else pa.null()
        whole = pa.concat_arrays([array.cast(kind) for array in arrays]) if arrays else pa.array([], kind)
        starts = [0]
        for array in arrays:
            starts.append(starts[-1] + len(array))
        order = self.batch.order
        return whole.take(pa.array(np.array(starts[:-1], np.int64)[order[:, 0]] + order[:, 1]))

    def _event(self, group: int, row: int) -> Event:
        found = self.converted[group]
        headers = {} if found.headers is None else found.headers[row].as_py() or {}
        record = Record(self.batch.groups[group], row, self.batch.partition)
        kept = {name: value for name, value in headers.items() if value is not None}
        return Event(record.topic, _at(found.keys, row), _at(found.values, row), kept, record)


def _at(values: pa.Array | Sequence[Any] | None, row: int) -> Any:
    if values is None:
        return None
    return values[row].as_py() if isinstance(values, pa.Array) else values[row]
