"""A transformation of single records, made one of groups.

Records that come back as they were stay in their group, as they are on the wire; the others are put
into new groups, by topic and by what they have become.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.records.group import PLAIN, Group
from tailrace.records.record import Record
from tailrace.transforms.contract import RecordTransformation
from tailrace.transforms.groups.odd_texts import OddTexts, column_of, failure_of


class OneByOne:
    """Calls a record transformation for each record of a group, in its order."""

    def __init__(self, transformation: RecordTransformation) -> None:
        self._transformation = transformation

    def __repr__(self) -> str:
        return f"OneByOne({self._transformation!r})"

    def apply(self, group: Group) -> list[Group]:
        """Return the records as the transformation wants them.

        :raises TailraceError: `TRANSFORM_FAILED` if it returns what is no record of the group, or
            values of kinds that can't stand in one column.
        """
        same: list[int] = []
        changed: dict[tuple[str, tuple[str, ...]], list[Record]] = {}
        for row in range(len(group)):
            found: Any = self._transformation.apply_record(Record(group, row, {}))
            if found is None:
                continue
            if not isinstance(found, Record) or found.group is not group or found.row != row:
                raise failure_of(
                    group, "it returned something else than the record, Record.replace of it or None"
                )
            if not found.replaced:
                same.append(row)
            else:
                changed.setdefault((found.topic, tuple(sorted(found.replaced))), []).append(found)
        groups = [group.take(np.array(same, np.int64))] if same else []
        return [*groups, *(_regrouped(group, topic, found) for (topic, _), found in changed.items())]

    def close(self) -> None:
        """Close the transformation."""
        self._transformation.close()


def _regrouped(group: Group, topic: str, records: Sequence[Record]) -> Group:
    rows = np.array([record.row for record in records], np.int64)
    part = group.take(rows).with_topic(topic)
    names = [name for name in records[0].replaced if name != "topic"]
    if "headers" in names:
        values = [dict(record.replaced["headers"]) for record in records]
        part = part.with_headers(column_of(group, "headers", values))
        names.remove("headers")
    if not names:
        return part
    columns = part.columns
    if "value" in names and part.is_change:
        columns = columns.select([name for name in columns.schema.names if name in PLAIN])
    texts = OddTexts(group, records)
    for name in names:
        column = texts.column(name, [record.replaced[name] for record in records])
        columns = _with(columns, name, column)
    if {"before", "after"} & set(names) and part.is_change and "value" not in names:
        columns = _with_notes(columns, names, records)
    if texts.moved:
        columns = _with(columns, "special", texts.noted(columns))
    return part.with_columns(columns)


def _with(columns: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    at = columns.schema.get_field_index(name)
    return columns.append_column(name, column) if at < 0 else columns.set_column(at, name, column)


def _with_notes(columns: pa.RecordBatch, names: Sequence[str], records: Sequence[Record]) -> pa.RecordBatch:
    # What is noted of a value that was not sent, or that its column can't hold, goes with the value.
    for name in ("special", "unchanged"):
        at = columns.schema.get_field_index(name)
        noted = columns.column(at) if at >= 0 else pa.nulls(0)
        entries = noted.to_pylist() if len(noted) > noted.null_count else []
        if not any(entries):
            continue
        kept: list[Any] = []
        for found, record in zip(entries, records, strict=True):
            left = [entry for entry in found or () if _still_holds(entry, record, names, name == "special")]
            kept.append(left if left or name == "unchanged" else None)
        columns = columns.set_column(at, name, pa.array(kept, noted.type))
    return columns


def _still_holds(entry: Any, record: Record, names: Sequence[str], is_special: bool) -> bool:
    place, _, column = entry[0].partition(".") if is_special else ("after", "", entry)
    if place not in names:
        return True
    now: Mapping[str, Any] = record.replaced[place] or {}
    was: Mapping[str, Any] = getattr(Record(record.group, record.row, {}), place) or {}
    return column in now and now[column] == was.get(column)
