"""A group: changes of one shape and one topic, as Arrow columns.

A group from a log is decoded only when its columns are read: a converter that supports the source's
format (`Group.wire`) writes its output directly from it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.decode import images
from tailrace.decode.changes import TableChanges
from tailrace.decode.json.debezium import SourceInfo
from tailrace.model import Relation
from tailrace.protocol.frames import Numbers
from tailrace.records.values import python_values, with_specials

#: Places of records: 64-bit, ascending.
Places = npt.NDArray[np.int64]

Flags = npt.NDArray[np.bool_]

_Rows = Places | slice

#: The columns of a group of changes: those of `decode.images`, and headers. `key`, `before` and
#: `after` are structs or null, `source` is a struct of the change's metadata, whose fields depend on the
#: source (`decode.images.SOURCE`: PostgreSQL's). `headers` is a struct; a null member means that the
#: record does not have the header.
ENVELOPE = (*images.NAMES, "headers")

#: The columns of a group whose records are no longer changes (flattened rows, outbox events).
PLAIN = ("op", "key", "value", "source", "headers")

#: Columns that can be decoded without the others.
_DECODED_APART = frozenset(images.NAMES) - {"special"}

#: Columns whose values may be in `special`.
_ROWS = frozenset({"key", "before", "after", "value"})

#: Rows whose values are converted to Python objects together (a run): one by one costs ten times as much.
_RUN = 1024
#: Largest number of runs that a group keeps; then the oldest is removed.
_RUNS_MAX = 64

#: Placeholder in `Group.made` for a value that is not converted yet.
NOT_MADE: Any = object()


@dataclass(frozen=True, eq=False)
class Group:
    """Changes of one shape, for one topic, in the order of the batch that they belong to.

    Immutable: methods that change a group return a new one. Columns that a group lacks are null.

    :param topic: the topic of its records: initially `<schema>.<table>`; its meaning is up to the sink.
    :param index: each record's place in the batch that was polled, ascending except for `is_second`. Filters
        keep it, so that dropped records can be counted as processed.
    :param relation: the table, with the columns that are delivered; None for records without a table.
    :param origin: the names of the source, as far as they are known; converters write them.
    :param orders: each record's number among the changes of its table in its transaction, from 1; None: they
        follow from the records of the group.
    :param is_second: whether each record is the second of two at its place: for an update that changed the
        key, the create after the delete (`transforms.changed_keys`). None: each has a place of its own.
    :param relation_of_keys: the table with the columns that keys have; None: as `relation`. They differ if a
        transformation changed rows alone or keys alone.
    :param made: by column, each row's value as a Python object, or `NOT_MADE`; `value_at` fills it.
    """

    topic: str
    index: Places
    relation: Relation | None = None
    _changes: TableChanges | None = None
    _columns: pa.RecordBatch | None = None
    #: Named columns in addition to those of `_changes`: only headers so far.
    _beside: dict[str, pa.Array] = field(default_factory=dict)
    # By column and run: whether the whole run was converted, or only single rows of it. Changed under the
    # lock, as is `made`.
    made: dict[str, list[Any]] = field(default_factory=dict, init=False, repr=False)
    _runs: dict[tuple[str, int], bool] = field(default_factory=dict, init=False, repr=False)
    # By name: the columns that were decoded separately, with their `special`.
    _images: dict[str, tuple[pa.Array, pa.Array | None]] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    origin: SourceInfo | None = None
    orders: Numbers | None = None
    is_second: Flags | None = None
    relation_of_keys: Relation | None = None

    @classmethod
    def of_changes(
        cls,
        topic: str,
        index: Places,
        changes: TableChanges,
        origin: SourceInfo | None = None,
        orders: Numbers | None = None,
    ) -> Group:
        """Create a group of changes from a log; nothing is decoded."""
        return cls(topic, index, changes.relation, changes, origin=origin, orders=orders)

    @classmethod
    def of_columns(
        cls,
        topic: str,
        index: Places,
        columns: pa.RecordBatch,
        relation: Relation | None = None,
        origin: SourceInfo | None = None,
    ) -> Group:
        """Create a group of columns with names of `ENVELOPE` or `PLAIN`, with one row for each of `index`."""
        if columns.num_rows != len(index):
            raise ValueError(f"{columns.num_rows} rows for {len(index)} places")
        return cls(topic, index, relation, None, columns, origin=origin)

    def __len__(self) -> int:
        return len(self.index)

    def __reduce__(self) -> tuple[Callable[..., Group], tuple[object, ...]]:
        # Decoded columns are not sent, but decoded again by the receiver: the source's bytes are fewer.
        beside = pa.RecordBatch.from_pydict(self._beside) if self._beside else None
        others = {name: getattr(self, name) for name in _SENT_AS_THEY_ARE}
        return _restored, (_sent(self._columns), _sent(beside), others)

    @property
    def wire(self) -> TableChanges | None:
        """The changes as the source sent them, as long as they represent the records; else None."""
        return self._changes

    @functools.cached_property
    def columns(self) -> pa.RecordBatch:
        """The records as columns, decoded at the first access.

        :raises TailraceError: `DECODE_FAILED`.
        """
        found = self._columns
        if found is None:
            assert self._changes is not None
            found = self._changes.images()
        for name, column in self._beside.items():
            found = found.append_column(name, column)
        return found

    @property
    def is_change(self) -> bool:
        """Whether the records are changes (`ENVELOPE`), and not values of their own (`PLAIN`)."""
        return self._columns is None or "value" not in self._columns.schema.names

    def relation_of(self, image: str) -> Relation | None:
        """Return the table with the columns that `image` has: `key`, `before`, `after` or `value`."""
        return (self.relation_of_keys or self.relation) if image == "key" else self.relation

    def column(self, name: str) -> pa.Array:
        """Return a column; nulls if the group has none of that name."""
        if name in self.columns.schema.names:
            return self.columns.column(name)
        return pa.nulls(len(self))

    @property
    def keys(self) -> pa.Array:
        """The column `key`; nulls if there is none. Decodes nothing else."""
        return self._image("key")[0]

    def member(self, column: str, name: str) -> pa.Array | None:
        """Return a field of `key`, `before` or `after` without decoding other fields.

        None: the group is decoded already, or there is no such field; use `column` then.
        :raises TailraceError: `DECODE_FAILED`.
        """
        if not self._is_on_the_wire or column not in ("key", "before", "after"):
            return None
        assert self._changes is not None
        return self._changes.image_column(column, name)

    @property
    def headers(self) -> pa.Array:
        """The column `headers`; nulls if there are none. Decodes nothing."""
        if self._changes is not None:
            return self._beside.get("headers", pa.nulls(len(self)))
        return self.column("headers")

    def value_at(self, name: str, row: int) -> Any:
        """Return a value of a column as a Python object; None if there is no such column. Any thread.

        A value that Python's type, or the column's, can't hold is PostgreSQL's text.

        If rows are read in sequence, whole runs of rows are converted together.
        """
        values = self.made.get(name)
        if values is None or (value := values[row]) is NOT_MADE:
            return self._made(name, row)
        return value

    def _made(self, name: str, row: int) -> Any:
        run = row // _RUN
        # Delivering threads read the same run at about the same time: one of them converts it.
        with self._lock:
            values = self.made.get(name)
            if values is None:
                values = self.made[name] = [NOT_MADE] * len(self)
            if values[row] is not NOT_MADE:
                return values[row]
            if len(self._runs) >= _RUNS_MAX and (name, run) not in self._runs:
                self._forget(*next(iter(self._runs)))
            # A run is converted whole from row 0, at its second read, or after one that was converted whole.
            if row and (name, run) not in self._runs and not self._runs.get((name, run - 1)):
                self._runs[name, run] = False
                values[row] = self._python(name, row, 1)[0]
            else:
                self._runs[name, run] = True
                first, last = run * _RUN, min(run * _RUN + _RUN, len(self))
                values[first:last] = self._python(name, first, last - first)
            return values[row]

    def _forget(self, name: str, run: int) -> None:
        del self._runs[name, run]
        values, first = self.made[name], run * _RUN
        values[first : first + _RUN] = [NOT_MADE] * len(values[first : first + _RUN])

    def _python(self, name: str, first: int, count: int) -> list[Any]:
        if name == "headers":
            return python_values(self.headers.slice(first, count))
        column, special = self._image(name)
        values = python_values(column.slice(first, count))
        if special is None:
            return values
        return with_specials(values, name, special.slice(first, count))

    def _image(self, name: str) -> tuple[pa.Array, pa.Array | None]:
        # Returns a column, and its `special`; None if the column has none.
        if self._is_on_the_wire and name in _DECODED_APART:
            assert self._changes is not None
            found = self._images.get(name)
            if found is None:
                found = self._images[name] = self._changes.image(name)
        else:
            found = self.column(name), self.column("special") if name in _ROWS else None
        return found

    @property
    def _is_on_the_wire(self) -> bool:
        return self._changes is not None and "columns" not in self.__dict__

    def take(self, rows: Places) -> Group:
        """Return the records at `rows` (counted within the group, ascending)."""
        if len(rows) == len(self):
            return self
        arrow = pa.array(rows)
        changes = None if self._changes is None else self._changes.take(rows)
        return self._part(rows, changes, lambda column: column.take(arrow))

    def slice(self, first: int, last: int) -> Group:
        """Return the records in rows `[first, last)`; nothing is copied."""
        if first == 0 and last >= len(self):
            return self
        changes = None if self._changes is None else self._changes.part(first, last)
        return self._part(np.s_[first:last], changes, lambda column: column.slice(first, last - first))

    def _part(self, rows: _Rows, changes: TableChanges | None, of: Callable[[Any], Any]) -> Group:
        # Returns the records of `rows`; `of` selects their rows from a column, or from a batch of columns.
        return replace(
            self,
            index=self.index[rows],
            _changes=changes,
            _columns=None if self._columns is None else of(self._columns),
            _beside={name: of(column) for name, column in self._beside.items()},
            orders=None if self.orders is None else self.orders[rows],
            is_second=None if self.is_second is None else self.is_second[rows],
        )

    def with_wire(self, changes: TableChanges) -> Group:
        """Return the same records with changed cells, which are not decoded: see `TableChanges.reshaped`."""
        return replace(self, relation=changes.relation, _changes=changes)

    def with_topic(self, topic: str) -> Group:
        """Return the same records for another topic."""
        return replace(self, topic=topic)

    def with_headers(self, headers: pa.Array) -> Group:
        """Return the same records with only these headers; `wire` stays valid."""
        if self._changes is not None:
            return replace(self, _beside={**self._beside, "headers": headers})
        return self.with_column("headers", headers)

    def with_column(self, name: str, column: pa.Array) -> Group:
        """Return the records with a column added, or replaced if there is one of that name."""
        columns = self.columns
        at = columns.schema.get_field_index(name)
        changed = columns.append_column(name, column) if at < 0 else columns.set_column(at, name, column)
        return self.with_columns(changed)

    def with_columns(self, columns: pa.RecordBatch) -> Group:
        """Return records with other columns of the same length; they no longer have a `wire`."""
        made = Group.of_columns(self.topic, self.index, columns, self.relation, self.origin)
        of_keys = self.relation_of_keys
        return replace(made, orders=self.orders, is_second=self.is_second, relation_of_keys=of_keys)

    def repeated(self, rows: Places, is_second: Flags, columns: pa.RecordBatch) -> Group:
        """Return new records made from those of the group, of which some share a place.

        :param rows: for each new record, the row of the record that it was made from; never descending.
        :param columns: the columns of the new records.
        """
        orders = None if self.orders is None else self.orders[rows]
        made = Group.of_columns(self.topic, self.index[rows], columns, self.relation, self.origin)
        return replace(made, orders=orders, is_second=is_second, relation_of_keys=self.relation_of_keys)

    @property
    def size_bytes(self) -> int:
        """The approximate memory of the records, in bytes."""
        return self.columns.nbytes if self._changes is None else self._changes.size_bytes


def source_order(places: Sequence[Places], is_second: Sequence[Flags | None]) -> Places:
    """Return the indexes that sort the concatenated records or events by place, a second one after the first.

    :param places: for each group, the places; or other numbers that rise with the place.
    :param is_second: for each group, as `Group.is_second`.
    """
    found = np.concatenate(places)
    if all(each is None for each in is_second):
        return np.argsort(found, kind="stable")
    pairs = zip(is_second, places, strict=True)
    known = [np.zeros(len(at), np.bool_) if flags is None else flags for flags, at in pairs]
    return np.lexsort((np.concatenate(known), found))


def pairs_in_order(places: Sequence[Places], is_second: Sequence[Flags | None]) -> npt.NDArray[np.int64]:
    """Return `source_order` as pairs (group, entry of the group): an array of shape (len, 2)."""
    if not places:
        return np.empty((0, 2), np.int64)
    of_group = np.repeat(np.arange(len(places)), [len(at) for at in places])
    entries = np.concatenate([np.arange(len(at)) for at in places])
    if len(places) > 1:  # a single group is in order
        order = source_order(places, is_second)
        of_group, entries = of_group[order], entries[order]
    return np.stack([of_group, entries], axis=1)


def _sent(columns: pa.RecordBatch | None) -> bytes | None:
    # As an Arrow stream: a pickled slice would include the whole batch that it is a slice of.
    if columns is None:
        return None
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, columns.schema) as stream:
        stream.write_batch(columns)
    found: bytes = out.getvalue().to_pybytes()
    return found


def _received(sent: bytes | None) -> pa.RecordBatch | None:
    return None if sent is None else pa.ipc.open_stream(sent).read_next_batch()


_SENT_AS_THEY_ARE = (
    "topic", "index", "relation", "_changes", "origin", "orders", "is_second", "relation_of_keys"
)  # fmt: skip


def _restored(columns: bytes | None, beside: bytes | None, others: Mapping[str, Any]) -> Group:
    found = _received(beside)
    headers = {} if found is None else dict(zip(found.schema.names, found.columns, strict=True))
    return Group(_columns=_received(columns), _beside=headers, **others)
