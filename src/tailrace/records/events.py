"""Events: records as a converter returns them, with keys and values that are ready to be sent.

A group may be converted in parts, which bounds the size of the output, not only that of the input: as JSON
with schemas, a record of a table with many columns takes hundreds of times its bytes in the log.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.decode.gather import end_to_end
from tailrace.decode.values.texts import texts_of
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch, Partition
from tailrace.records.group import Flags, Group, Places, pairs_in_order, source_order
from tailrace.records.record import Record
from tailrace.records.values import python_values

T = TypeVar("T")

#: Approximate number of a group's events whose values are converted to Python objects together.
_RUN = 1024
_BYTES = pa.large_binary()

#: Headers of the delete (with its tombstone) and of the create into which an update that changes the key is
#: split. Each has the key of the other event.
NEW_KEY, OLD_KEY = "__debezium.newkey", "__debezium.oldkey"


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """The events of a group: one for each record, in the group's order, unless `rows` is set.

    :param keys: an Arrow array or a sequence of objects; None: no event has a key.
    :param values: likewise; a null value is a tombstone.
    :param headers: a struct array of values that are ready to be sent; None: no headers.
    :param rows: for each event the row of its record in the group, never descending: a record may
        become several consecutive events (if its key changed), or none.
    """

    keys: pa.Array | Sequence[Any] | None
    values: pa.Array | Sequence[Any]
    headers: pa.StructArray | None = None
    rows: Places | None = None

    def __len__(self) -> int:
        return len(self.values)

    def is_second_in(self, group: Group) -> Flags | None:
        """Return for each event whether its record is the second at its place (`Group.is_second`)."""
        found = group.is_second
        return found if self.rows is None or found is None else found[self.rows]

    def part(self, first: int, last: int) -> Converted:
        """Return the events `[first, last)`, counted from 0."""
        return Converted(
            None if self.keys is None else self.keys[first:last],
            self.values[first:last],
            None if self.headers is None else self.headers[first:last],
            None if self.rows is None else self.rows[first:last],
        )

    def take(self, entries: Places) -> Converted:
        """Return the events at `entries` (ascending); each keeps its row."""
        chosen = pa.array(entries)

        def taken(found: pa.Array | Sequence[Any]) -> pa.Array | Sequence[Any]:
            return found.take(chosen) if isinstance(found, pa.Array) else [found[k] for k in entries.tolist()]

        return Converted(
            None if self.keys is None else taken(self.keys),
            taken(self.values),
            None if self.headers is None else self.headers.take(chosen),
            entries if self.rows is None else self.rows[entries],
        )


class EventKeys(NamedTuple):
    """The keys of a group's events and their rows, as in `Converted`."""

    keys: pa.Array | Sequence[Any] | None
    rows: Places | None


class Event(NamedTuple):
    """A converted record, together with the record, so that a commit decodes nothing.

    The events of one record have its place and are consecutive; it is processed when the last of them is.
    """

    topic: str
    key: Any
    value: Any
    headers: Mapping[str, Any]
    record: Record


@dataclass(frozen=True, eq=False)
class Events(Sequence[Event]):
    """A converted batch; a sequence of `Event` in the source's order.

    Handlers of columns use `keys` and `values`, Arrow arrays in the same order.

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
        number = range(len(self))[place]
        return self.maker(number, number + 1)(number)

    def __iter__(self) -> Iterator[Event]:
        size, count = _RUN * max(1, len(self.converted)), len(self)
        runs = (self._parts(first, min(first + size, count)) for first in range(0, count, size))
        return itertools.chain.from_iterable(map(_event, *run) for run in runs)

    def maker(self, first: int, last: int) -> Callable[[int], Event]:
        """Return a function that creates one of the events `[first, last)`, by its number in the source's
        order. Any thread.

        Their keys and values are converted to Python objects here, together. The events themselves are
        created on demand: thousands of waiting ones would slow down each garbage collection.
        """
        parts, places = self._parts(first, last)
        return lambda number: _event(parts[number - first], places[number - first])

    def _parts(self, first: int, last: int) -> tuple[Sequence[_Part], Sequence[int]]:
        # Returns for each event its part, and its place in the part.
        of_event, entries = self.order[first:last].T
        parts: dict[int, _Part] = {}
        places = entries.copy()
        for number in np.unique(of_event).tolist():
            is_own = of_event == number
            begin, end = int(entries[is_own].min()), int(entries[is_own].max()) + 1
            parts[number] = _Part.of(self.batch, number, self.converted[number].part(begin, end), begin)
            places[is_own] -= begin
        return [parts[number] for number in of_event.tolist()], places.tolist()

    @property
    def places(self) -> Places:
        """For each event the place of its record in the batch that was polled; never descending."""
        if all(found.rows is None for found in self.converted):
            return self.batch.places
        return np.sort(np.concatenate(self._places()))

    @functools.cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """Pairs (group, entry of its `Converted`) in the source's order: an array of shape (len, 2)."""
        if all(found.rows is None for found in self.converted):
            return self.batch.order
        return pairs_in_order(self._places(), self._are_second())

    def by_topic(self, first: int, last: int) -> Iterator[tuple[str, Converted]]:
        """Yield the events of the places `[first, last)` by topic; those of a topic in the source's order."""
        found: dict[str, list[tuple[Places, Flags | None, Converted]]] = {}
        parts = zip(self.batch.groups, self.converted, self._places(), self._are_second(), strict=True)
        for group, converted, places, flags in parts:
            begin, end = bisect.bisect_left(places, first), bisect.bisect_left(places, last)
            if begin < end:
                of_part = None if flags is None else flags[begin:end]
                part = places[begin:end], of_part, converted.part(begin, end)
                found.setdefault(group.topic, []).append(part)
        for topic, chosen in found.items():
            order = source_order([places for places, _, _ in chosen], [flags for _, flags, _ in chosen])
            yield topic, interleaved([converted for _, _, converted in chosen], order)

    def parts(self) -> Iterator[tuple[Places, Converted]]:
        """Yield each group's events, with their places in the batch that was polled."""
        return zip(self._places(), self.converted, strict=True)

    def _places(self) -> list[Places]:
        parts = zip(self.batch.groups, self.converted, strict=True)
        return [group.index if found.rows is None else group.index[found.rows] for group, found in parts]

    def _are_second(self) -> list[Flags | None]:
        parts = zip(self.batch.groups, self.converted, strict=True)
        return [found.is_second_in(group) for group, found in parts]

    @functools.cached_property
    def topics(self) -> pa.DictionaryArray:
        """The topic of each event."""
        names = pa.array([group.topic for group in self.batch.groups], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(self.order[:, 0].astype("int32")), names)

    @functools.cached_property
    def keys(self) -> pa.Array:
        """The keys as one array; null for an event without a key. Structs have the fields of all topics.

        :raises TailraceError: `CONVERSION_FAILED` if no Arrow type can hold them all.
        """
        return self._in_order([found.keys for found in self.converted])

    @functools.cached_property
    def values(self) -> pa.Array:
        """The values as one array; as `keys`."""
        return self._in_order([found.values for found in self.converted])

    def _in_order(self, parts: Sequence[pa.Array | Sequence[Any] | None]) -> pa.Array:
        if not parts:
            return pa.nulls(0)
        try:
            arrays = [_array(part, len(made)) for part, made in zip(parts, self.converted, strict=True)]
            whole = end_to_end(arrays)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            # Arrow's message may quote a value.
            raise TailraceError(
                Kind.CONVERSION_FAILED,
                "put keys or values of events into one array: no Arrow type can hold them all",
                "read the events one by one",
                {"topics": ", ".join(sorted({group.topic for group in self.batch.groups}))},
            ) from None
        if len(arrays) == 1:
            return whole
        starts = np.cumsum([0, *map(len, arrays)])
        return whole.take(pa.array(starts[self.order[:, 0]] + self.order[:, 1]))


def interleaved(parts: Sequence[Converted], order: Places) -> Converted:
    """Return events of several groups merged as those of one group, without `rows`.

    :param parts: ready to be sent: keys and values are texts or bytes, and no header is nested.
    :param order: indexes into the concatenation of the parts.
    """
    if len(parts) == 1:
        return parts[0]
    counts, at = [len(part) for part in parts], pa.array(order)
    keys = [part.keys for part in parts]
    headers = [_by_name(part.headers) for part in parts]
    names = list(dict.fromkeys(name for found in headers for name in found))
    columns = [_end_to_end([found.get(name) for found in headers], counts).take(at) for name in names]
    return Converted(
        None if all(found is None for found in keys) else _end_to_end(keys, counts).take(at),
        _end_to_end([part.values for part in parts], counts).take(at),
        pa.StructArray.from_arrays(columns, names) if names else None,
    )


def _by_name(headers: pa.StructArray | None) -> dict[str, pa.Array]:
    return {} if headers is None else dict(zip(headers.type.names, headers.flatten(), strict=True))


def _end_to_end(parts: Sequence[pa.Array | Sequence[Any] | None], counts: Sequence[int]) -> pa.Array:
    arrays = [_array(part, count, _BYTES) for part, count in zip(parts, counts, strict=True)]
    kinds = {array.type for array in arrays if not pa.types.is_null(array.type)}
    return end_to_end(arrays if len(kinds) == 1 else [_in_bytes(array) for array in arrays])


def _array(part: pa.Array | Sequence[Any] | None, count: int, kind: pa.DataType | None = None) -> pa.Array:
    if part is None:
        return pa.nulls(count)
    return part if isinstance(part, pa.Array) else pa.array(part, kind)


def _in_bytes(values: pa.Array) -> pa.Array:
    # Numbers, booleans and times are sent as texts.
    kind = values.type
    is_fixed = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    return (texts_of(values) if is_fixed else values).cast(_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    # Consecutive events of a group, as Python objects.
    group: Group
    partition: Partition
    rows: Sequence[int]
    keys: Sequence[Any]
    values: Sequence[Any]
    headers: Sequence[Mapping[str, Any] | None] | None

    @classmethod
    def of(cls, batch: Batch, group: int, found: Converted, first: int) -> _Part:
        # `found` has the events of the group from entry `first` on.
        return cls(
            batch.groups[group],
            batch.partition,
            range(first, first + len(found)) if found.rows is None else found.rows.tolist(),
            [None] * len(found) if found.keys is None else _python(found.keys),
            _python(found.values),
            None if found.headers is None else _python(found.headers),
        )


def _event(part: _Part, place: int) -> Event:
    group = part.group
    kept = {}
    if part.headers is not None and (headers := part.headers[place]):
        kept = {name: value for name, value in headers.items() if value is not None}
    record = Record(group, part.rows[place], part.partition)
    return Event(group.topic, part.keys[place], part.values[place], kept, record)


def _python(values: pa.Array | Sequence[Any]) -> Sequence[Any]:
    return python_values(values) if isinstance(values, pa.Array) else values


#: Approximate size of the keys and values that are converted at once, in bytes.
CONVERTED_BYTES = 16 << 20

#: Estimated size of a column in a record, schema included, in bytes. Determines the size of the first part.
_COLUMN_BYTES = 512
#: Largest ratio of the records in a part to those in the part before, because sizes of records differ.
_GROWTH = 8


def made_in_parts(make: Callable[[int, int], tuple[T, int]], records: int, columns: int) -> Iterator[T]:
    """Yield the results of `make` for `records` records, in parts in their order.

    A part has about `CONVERTED_BYTES`; more only if its records are much larger than those before, or if it
    is a single record.

    :param make: called with the bounds of a part, counted from 0, the second exclusive; returns the result
        and its size in bytes.
    :param columns: the largest number of columns of a record.
    """
    at, size = 0, max(1, CONVERTED_BYTES // (_COLUMN_BYTES * columns))
    while at < records:
        upto = min(at + size, records)
        made, made_bytes = make(at, upto)
        yield made
        fitting = CONVERTED_BYTES * (upto - at) // max(1, made_bytes)
        at, size = upto, max(1, min(fitting, _GROWTH * size))


def bytes_of(converted: Converted) -> int:
    """Return the approximate size of keys, values and headers in bytes; objects other than bytes and text
    count 0.
    """
    found = 0
    for made in (converted.keys, converted.values, converted.headers):
        if isinstance(made, pa.Array):
            found += made.nbytes
        elif made is not None:
            found += sum(len(one) for one in made if isinstance(one, str | bytes))
    return found


def width(group: Group) -> int:
    """Return the number of columns of a group's records, at least 1."""
    if group.wire is not None:
        return max(1, len(group.relation.columns)) if group.relation is not None else 1
    return max(1, *(int(column.type.num_fields) for column in group.columns.schema))
