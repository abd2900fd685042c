"""Computes the net changes of a range of the log: its final effect on each row of a table.

Arrow tables in, Arrow tables out. An *event* means that at one step a key got a row (`_upsert`)
or lost it. Net events have one event per key, the last one. The net events of successive ranges
can be reduced again to those of the whole, so executors reduce splits in parallel, and the
results are reduced once more.

Events have the table's own columns and

    _upsert      bool: the row exists afterwards
    _log_offset  int64: of the change
    _unchanged   list<string>: columns whose value was not sent, so the old value stays
    _special     map<string,string>: PostgreSQL's text if a column can't represent a value exactly
    _origin      struct of the key columns: the old key of a row that changed its key and has
                 unchanged columns, whose values are those of the target's row with this key
                 before the range; null: the row kept its key

Unchanged values are filled in from earlier events of the same row in the range, also if the row's
key changed in between, once, or in exchange with another row (`UPDATE … SET id = -id`). A value
that no event of the range has is that of the target's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.changes import TableChanges
from tailrace.model import Op
from tailrace.records.values import python_values

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

UPSERT, LOG_OFFSET, UNCHANGED, SPECIAL, ORIGIN = "_upsert", "_log_offset", "_unchanged", "_special", "_origin"
_TEXTS = pa.map_(pa.string(), pa.string())


def events_of(changes: TableChanges, key: Sequence[str]) -> pa.Table:
    """Return the changes as events, in log order; truncates have none.

    An update that changed the key has two at one step: the old key loses its row, the new one gets
    it. A key that PostgreSQL's index considers equal, such as 0 and -0, is not another key.
    """
    rows = changes.rows()
    own = rows.schema.names[: -len(_METADATA)]
    op = changes.op
    count = len(rows)
    columns = {name: rows.column(name) for name in (*own, LOG_OFFSET, UNCHANGED, SPECIAL)}
    columns[UPSERT] = pa.array(op != ord(Op.DELETE))
    old = _changed_keys(columns, changes.old_keys(), key)
    columns[ORIGIN] = pa.nulls(count, origin_type(rows.schema, key))
    if old is not None:
        columns[ORIGIN] = _origins(columns, old, key)
    events = pa.table(columns)
    if old is not None:
        events = pa.concat_tables([events, _leaving(events.schema, old, key)])
        events = events.take(np.argsort(events[LOG_OFFSET].to_numpy(), kind="stable"))
    if (op == ord(Op.TRUNCATE)).any():
        truncates = changes.log_offset[op == ord(Op.TRUNCATE)]
        events = events.filter(~np.isin(events[LOG_OFFSET].to_numpy(), truncates))
    return events


def _changed_keys(
    columns: dict[str, pa.Array], old: pa.RecordBatch | None, key: Sequence[str]
) -> pa.RecordBatch | None:
    """Return those of the old keys that differ from their rows' keys; None if there are none."""
    if old is None:
        return None
    at = np.searchsorted(columns[LOG_OFFSET].to_numpy(), old.column(LOG_OFFSET).to_numpy())
    given = {name: columns[name].take(at) for name in (*key, SPECIAL)}
    both = [_codes(pa.concat_arrays([given[name], old.column(name)])) for name in key] + [
        _codes(pc.map_lookup(pa.concat_arrays([given[SPECIAL], old.column(SPECIAL)]), name, "first"))
        for name in key
    ]
    other = np.zeros(len(old), np.bool_)
    for codes in both:
        other |= codes[: len(old)] != codes[len(old) :]
    return old.filter(pa.array(other)) if other.any() else None


def origin_type(schema: pa.Schema, key: Sequence[str]) -> pa.DataType:
    """Return the type of `_origin` for a table's rows."""
    return pa.struct([*(schema.field(name) for name in key), pa.field(SPECIAL, _TEXTS)])


def net(events: pa.Table, key: Sequence[str], steps: Ids | None = None) -> pa.Table:
    """Return one event for each key of `events`: its last one, with values of earlier ones filled in.

    :param steps: the order of the events; events of one step happened at once, at most one per
        key. Default: the log offset. For net events: the number of their range.
    """
    return net_plan(events, key, steps).made(events)


@dataclass(frozen=True, slots=True, eq=False)
class NetPlan:
    """The numbers of the net events, and those of the events that their values come from.

    :param winners: the net events, ascending.
    :param sources: for each column that some event leaves unchanged, the event with its value.
    :param unchanged: `_unchanged` of the net events, and `origin` their `_origin`.
    """

    winners: Ids
    sources: dict[str, Ids]
    unchanged: pa.Array
    origin: pa.Array

    def part(self, first: int, last: int) -> NetPlan:
        """Return the plan for the net events `[first, last)`, counted from 0."""
        return NetPlan(
            self.winners[first:last],
            {name: source[first:last] for name, source in self.sources.items()},
            self.unchanged[first:last],
            self.origin[first:last],
        )

    def needed(self) -> Ids:
        """Return the numbers of the events that `made` needs, ascending."""
        needed: Ids = np.unique(np.concatenate([self.winners, *self.sources.values()]))
        return needed

    def made(self, events: pa.Table, numbers: Ids | None = None) -> pa.Table:
        """Return the net events.

        :param events: complete; those with these `numbers`, ascending; None: all.
        """

        def at(wanted: Ids) -> Ids:
            return wanted if numbers is None else np.searchsorted(numbers, wanted)

        winners = at(self.winners)
        result = picked(events, winners)
        if not self.sources:
            return result
        sources = {name: at(source) for name, source in self.sources.items()}
        for name, source in sources.items():
            if name in result.column_names:
                result = replaced(result, name, events[name].take(source))
        result = replaced(result, SPECIAL, _specials(events, winners, sources))
        result = replaced(result, UNCHANGED, self.unchanged)
        return replaced(result, ORIGIN, self.origin)


def net_plan(events: pa.Table, key: Sequence[str], steps: Ids | None = None) -> NetPlan:
    """Return how `net` makes its result.

    :param events: as for `net`; of the table's own columns, only the key is needed.
    """
    if steps is None:
        steps = events[LOG_OFFSET].to_numpy()
    count = len(events)
    moved = np.flatnonzero(events[ORIGIN].is_valid().to_numpy())
    ids = _key_ids(events, key, moved)
    own_ids, origin_ids = ids[:count], ids[count:]
    order = np.lexsort((steps, own_ids))
    last = np.append(own_ids[order][1:] != own_ids[order][:-1], True)[: count or 0]
    winners = np.sort(order[last])
    open_columns = open_columns_of(events[UNCHANGED].combine_chunks())
    if not open_columns:
        return NetPlan(winners, {}, _nothing(events, UNCHANGED), _nothing(events, ORIGIN))
    labels = _Lineages(own_ids, steps, order).follow(moved, origin_ids)
    return _filled(events, key, winners, labels, own_ids, steps, open_columns)


def _nothing(events: pa.Table, name: str) -> pa.Array:
    return pa.nulls(0, events.schema.field(name).type)


_METADATA = ("_op", "_commit_lsn", "_ordinal", "_xid", "_commit_ts", "_log_offset", "_unchanged", "_special")


def _origins(columns: dict[str, pa.Array], old: pa.RecordBatch, key: Sequence[str]) -> pa.Array:
    """Return `_origin` of each row: the old key if the row has unchanged columns, otherwise null."""
    at = np.searchsorted(columns[LOG_OFFSET].to_numpy(), old.column(LOG_OFFSET).to_numpy())
    lengths = columns[UNCHANGED].value_lengths().fill_null(0).to_numpy()
    which = np.full(len(lengths), -1, np.int64)
    which[at] = np.where(lengths[at] > 0, np.arange(len(at)), -1)
    structs = pa.StructArray.from_arrays(
        [*(old.column(name) for name in key), old.column(SPECIAL)],
        fields=[*(old.schema.field(name) for name in key), pa.field(SPECIAL, _TEXTS)],
    )
    return structs.take(pa.array(which, mask=which < 0))


def _leaving(schema: pa.Schema, old: pa.RecordBatch, key: Sequence[str]) -> pa.Table:
    """Return the events by which rows leave their old keys."""
    given = {name: old.column(name) for name in (*key, LOG_OFFSET, SPECIAL)}
    given[UPSERT] = pa.array(np.zeros(len(old), np.bool_))
    given[UNCHANGED] = pa.ListArray.from_arrays(np.zeros(len(old) + 1, np.int32), pa.array([], pa.string()))
    return pa.table(
        {field.name: given.get(field.name, pa.nulls(len(old), field.type)) for field in schema}, schema
    )


# ---------------------------------------------------------------------- which key


def _key_ids(events: pa.Table, key: Sequence[str], moved: Ids) -> Ids:
    """Return numbers of the keys: that of each event, then that of the origin of each of `moved`.

    NULL equals NULL, NaN equals NaN and 0.0 equals -0.0, as in PostgreSQL's indexes. A value
    that its column can't represent exactly is identified by PostgreSQL's text.
    """
    origins = events[ORIGIN].combine_chunks().take(moved) if len(moved) else None
    special = _column(events, SPECIAL, origins)
    ids = np.zeros(len(special), np.int64)
    for name in key:
        values = _column(events, name, origins)
        ids = _paired(ids, _codes(values))
        if special.null_count < len(special):
            ids = _paired(ids, _codes(pc.map_lookup(special, name, "first")))
    return ids


def _column(events: pa.Table, name: str, origins: pa.StructArray | None) -> pa.Array:
    own = events[name].combine_chunks()
    return own if origins is None else pa.concat_arrays([own, origins.field(name)])


def _codes(values: pa.Array) -> Ids:
    if pa.types.is_floating(values.type):
        nan = pa.scalar(float("nan"), values.type)
        values = pc.if_else(pc.is_nan(values), nan, pc.add(values, pa.scalar(0.0, values.type)))
    elif pa.types.is_nested(values.type):
        # An array in a key is rare, so a loop in Python is fast enough.
        values = pa.array(
            [None if value is None else repr(_with_one_zero(value)) for value in python_values(values)],
            pa.string(),
        )
    codes: Ids = values.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
    return codes


def _with_one_zero(value: Any) -> Any:
    """Return a list with 0.0 in place of -0.0, and any other value as it is."""
    if not isinstance(value, list):
        return value
    return [0.0 + item if isinstance(item, float) else item for item in value]


def _paired(first: Ids, second: Ids) -> Ids:
    if not len(first) or not first.any():
        return second
    both = first * (int(second.max()) + 1) + second
    ids: Ids = np.unique(both, return_inverse=True)[1].astype(np.int64)
    return ids


# ---------------------------------------------------------------------- which row


class _Lineages:
    """Finds the events of each row, also if its key changes.

    A label identifies a row. At first each key has its own label; a row whose key changes keeps its
    label, and later events of the old key belong to another row, with a new label.
    """

    def __init__(self, ids: Ids, steps: Ids, order: Ids) -> None:
        self._steps = steps[order]
        self._order = order
        self._labels = ids[order].copy()  # in the order of (key, step)
        self._unused = int(ids.max(initial=-1)) + 1
        self._first = np.searchsorted(ids[order], np.arange(self._unused + 1))
        self._ids = ids
        self._step_of = steps

    def follow(self, moved: Ids, origin_ids: Ids) -> Ids:
        """Return each event's label. A label that is the number of a key identifies the row that had
        this key before all events.
        """
        self._unused = max(self._unused, int(origin_ids.max(initial=-1)) + 1)
        by_step = np.argsort(self._step_of[moved], kind="stable")
        at = 0
        while at < len(by_step):
            step = self._step_of[moved[by_step[at]]]
            upto = at
            while upto < len(by_step) and self._step_of[moved[by_step[upto]]] == step:
                upto += 1
            self._move([(int(moved[k]), int(origin_ids[k])) for k in by_step[at:upto]], int(step))
            at = upto
        labels = np.empty_like(self._labels)
        labels[self._order] = self._labels
        return labels

    def _move(self, moves: list[tuple[int, int]], step: int) -> None:
        # All moves of one step happen at once, so all labels are read before any is changed.
        taken = [self._label(origin, step) for _, origin in moves]
        for _, origin in moves:
            self._relabel(origin, step, self._unused)
            self._unused += 1
        for (event, _), label in zip(moves, taken, strict=True):
            self._relabel(int(self._ids[event]), step, label)

    def _span(self, key: int) -> tuple[int, int]:
        if key + 1 >= len(self._first):
            return 0, 0
        return int(self._first[key]), int(self._first[key + 1])

    def _label(self, key: int, step: int) -> int:
        first, end = self._span(key)
        before = first + int(np.searchsorted(self._steps[first:end], step))
        return key if before == first else int(self._labels[before - 1])

    def _relabel(self, key: int, step: int, label: int) -> None:
        first, end = self._span(key)
        since = first + int(np.searchsorted(self._steps[first:end], step))
        self._labels[since:end] = label


# ---------------------------------------------------------------------- which value


def open_columns_of(lists: pa.ListArray) -> dict[str, Mask]:
    """Return, for each column in any list of `_unchanged`, a mask of the rows whose list has it."""
    if len(lists.flatten()) == 0:
        return {}
    rows, names = pc.list_parent_indices(lists).to_numpy(), lists.flatten()
    found: dict[str, Mask] = {}
    for name in pc.unique(names).to_pylist():
        mask = np.zeros(len(lists), np.bool_)
        mask[rows[pc.equal(names, name).to_numpy(zero_copy_only=False)]] = True
        found[name] = mask
    return found


def _filled(
    events: pa.Table,
    key: Sequence[str],
    winners: Ids,
    labels: Ids,
    ids: Ids,
    steps: Ids,
    open_columns: dict[str, Mask],
) -> NetPlan:
    order = np.lexsort((steps, labels))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    begins = np.append(True, labels[order][1:] != labels[order][:-1])
    group_start = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    upsert = events[UPSERT].to_numpy()
    sources: dict[str, Ids] = {}
    still_open: dict[str, Mask] = {}
    for name, mask in open_columns.items():
        sent = (upsert & ~mask)[order]
        latest = np.maximum.accumulate(np.where(sent, np.arange(len(order)), -1))
        found = latest[place[winners]]
        unknown = mask[winners] & (found < group_start[place[winners]])
        sources[name] = np.where(mask[winners] & ~unknown, order[np.maximum(found, 0)], winners)
        still_open[name] = unknown & upsert[winners]
    origin = _origin(events, key, winners, labels, ids, still_open)
    return NetPlan(winners, sources, _unchanged(still_open, len(winners)), origin)


def picked(events: pa.Table, winners: Ids) -> pa.Table:
    """Return the winners, by a filter: `take` would make one chunk of them, which may be too large."""
    mask = np.zeros(len(events), np.bool_)
    mask[winners] = True
    return events.filter(pa.array(mask))


def replaced(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the table with `values` in the column `name`."""
    at = table.column_names.index(name)
    return table.set_column(at, table.schema.field(at), values)


def _specials(events: pa.Table, winners: Ids, sources: dict[str, Ids]) -> pa.Array:
    """Return `_special` of the winners, with the texts of filled-in values."""
    special = events[SPECIAL].combine_chunks()
    own = special.take(winners)
    if special.null_count == len(special):
        return own
    touched = np.zeros(len(winners), np.bool_)
    for source in sources.values():
        touched |= (source != winners) & special.take(source).is_valid().to_numpy(zero_copy_only=False)
    if not touched.any():
        return own
    texts = own.to_pylist()
    for row in np.flatnonzero(touched):
        held = dict(texts[row] or ())
        for name, source in sources.items():
            if source[row] != winners[row]:
                held.update((k, text) for k, text in special[int(source[row])].as_py() or () if k == name)
        texts[row] = list(held.items()) or None
    return pa.array(texts, _TEXTS)


def _unchanged(still_open: dict[str, Mask], count: int) -> pa.Array:
    names = list(still_open)
    missing = np.array([still_open[name] for name in names]).reshape(len(names), count).T
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(missing.sum(axis=1), out=offsets[1:])
    values = pa.array(names, pa.string()).take(pa.array(np.nonzero(missing)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _origin(
    events: pa.Table, key: Sequence[str], winners: Ids, labels: Ids, ids: Ids, still_open: dict[str, Mask]
) -> pa.Array:
    """Return the keys before all events of rows that need values from the target's row of another key."""
    kind = events.schema.field(ORIGIN).type
    needed = np.zeros(len(winners), np.bool_)
    for mask in still_open.values():
        needed |= mask
    needed &= labels[winners] != ids[winners]
    if not needed.any():
        return pa.nulls(len(winners), kind)
    # A row's label is the number of a key, if an origin has that key.
    origins = events[ORIGIN].combine_chunks()
    moved = np.flatnonzero(origins.is_valid().to_numpy(zero_copy_only=False))
    numbers = _key_ids(events, key, moved)[len(events) :]
    rising = np.argsort(numbers, kind="stable")
    at = np.searchsorted(numbers[rising], labels[winners])
    at = np.minimum(at, len(rising) - 1)
    needed &= numbers[rising[at]] == labels[winners]
    return origins.take(pa.array(moved[rising[at]], mask=~needed))
