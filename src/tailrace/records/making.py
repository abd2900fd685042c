"""Makes batches from Python values, for tasks without Arrow columns: grouped by topic, types inferred."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.records.group import Group

_CHANGE = ("op", "key", "before", "after", "source", "headers")
_PLAIN = ("key", "value", "source", "headers")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """A record that a task creates: a change if it has an `op`, else a key and a value.

    Mappings become structs with the fields of all records of the topic.

    :param offset: where the next attempt continues once this record is processed.
    :param op: the operation of a change, `r`, `c`, `u`, `d`, `t`: `before` and `after` are used, not `value`.
    :param ends_transaction: whether no transaction of the source is open after the record.
    """

    topic: str
    offset: Offset
    key: Any = None
    value: Any = None
    op: str | None = None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    source: Mapping[str, Any] | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    ends_transaction: bool = True


def batch_of(records: Iterable[SourceRecord], partition: Partition, end: Offset | None = None) -> Batch:
    """Return a batch of records in the source's order.

    :param end: the offset once the whole batch is processed; None: that of the last record.
    :raises TailraceError: `RECORD_INVALID` if the values of a topic have no Arrow type in common.
    """
    listed = list(records)
    places: dict[tuple[str, bool], list[int]] = {}
    for place, record in enumerate(listed):
        places.setdefault((record.topic, record.op is not None), []).append(place)
    groups = [
        _group(topic, [listed[place] for place in here], here, _CHANGE if is_change else _PLAIN)
        for (topic, is_change), here in places.items()
    ]
    return Batch(
        partition,
        tuple(groups),
        len(listed),
        [record.offset for record in listed],
        end,
        np.array([record.ends_transaction for record in listed], np.bool_),
    )


def _group(topic: str, records: Sequence[SourceRecord], places: list[int], names: Sequence[str]) -> Group:
    columns: dict[str, pa.Array] = {}
    for name in names:
        values = [getattr(record, name) for record in records]
        columns[name] = _column(
            [value or None for value in values] if name == "headers" else values, topic, name
        )
    if "before" in columns:
        row = max(
            (columns["before"].type, columns["after"].type), key=lambda kind: not pa.types.is_null(kind)
        )
        for name in ("before", "after"):
            if pa.types.is_null(columns[name].type):
                columns[name] = pa.nulls(len(records), row)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    return Group.of_columns(topic, np.array(places, np.int64), batch)


def _column(values: list[Any], topic: str, name: str) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        # Arrow's message may quote the values.
        raise TailraceError(
            Kind.RECORD_INVALID,
            f"make a batch: {_what_differs(values, name)}",
            "all values of a field in a topic must have the same type, and one that Arrow supports; "
            "use another topic, or convert them in the task",
            {"topic": topic},
        ) from None


def _what_differs(values: Sequence[Any], name: str) -> str:
    there = [(n, value) for n, value in enumerate(values) if value is not None]
    kinds = {type(value) for _, value in there}
    if len(kinds) > 1:
        first = type(there[0][1])
        n, other = next((n, type(value)) for n, value in there if type(value) is not first)
        return f"`{name}` is {first.__name__} first, and {other.__name__} in record {n} of the topic"
    if kinds and issubclass(next(iter(kinds)), Mapping):
        for part in {part: None for _, value in there for part in value}:
            column = [None if value is None else value.get(part) for value in values]
            try:
                pa.array([{part: each} for each in column])
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                return _what_differs(column, f"{name}.{part}")
    kind = next(iter(kinds)).__name__ if kinds else "None"
    return f"no Arrow type holds all values of `{name}`, which are of type {kind}"
