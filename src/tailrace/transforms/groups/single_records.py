"""Applies a transformation of single records to groups.

Records that are returned unchanged stay in their group and are not decoded; the others are put into
new groups, by topic and by the fields that were replaced.

A value that Python's type, or the column's, can't hold is a text in a record (`records.values`). If the text
is returned in the same field, that field keeps the original value. If it is returned in another field, whose
values have another type, it is NULL there and the text is in `special`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.decode.gather import replaced
from tailrace.errors import TailraceError
from tailrace.records.group import PLAIN, Group
from tailrace.records.record import Record
from tailrace.transforms.chain import close_of
from tailrace.transforms.contract import RecordTransformation
from tailrace.transforms.fields import failure

_SPECIAL = pa.map_(pa.string(), pa.string())
_ROWS = ("key", "before", "after", "value")


class OddTexts:
    """Builds columns of returned values, and restores values that are texts in Python's records."""

    def __init__(self, group: Group, records: Sequence[Record]) -> None:
        self._group = group
        self._records = [Record(group, record.row, {}) for record in records]
        self._known: dict[int, list[Any]] = {}
        kinds = [(name, group.column(name).type) for name in _ROWS]
        self._fields = [(name, field) for name, kind in kinds if pa.types.is_struct(kind) for field in kind]
        #: For each record the texts that were moved to other fields, by their keys in `special`.
        self.moved: dict[int, dict[str, str]] = {}

    def column(self, name: str, values: Sequence[Any]) -> pa.Array:
        """Return the column `name` of these values, one for each record.

        :raises TailraceError: `TRANSFORM_FAILED` if one column can't hold them all.
        """
        original, given = self._group.column(name), list(values)
        kept: dict[str, list[int]] = {}
        for field, texts in self._odd_in(values, original.type).items():
            for place, text in texts.items():
                given[place] = {**given[place], field: None}
                was = getattr(self._records[place], name)
                if isinstance(was, dict) and was.get(field) == text:
                    kept.setdefault(field, []).append(place)
                else:
                    self.moved.setdefault(place, {})[f"{name}.{field}"] = str(text)
        found = column_of(self._group, name, given)
        for field, places in kept.items():
            found = self._restored(found, original, field, places)
        return found

    def noted(self, special: pa.Array) -> pa.MapArray:
        """Return the column `special` with the texts that were moved."""
        held = special.to_pylist()
        entries = [{**dict(each or ()), **self.moved.get(place, {})} for place, each in enumerate(held)]
        return pa.array([list(each.items()) or None for each in entries], _SPECIAL)

    def _odd_in(self, values: Sequence[Any], kind: pa.DataType) -> dict[str, dict[int, Any]]:
        # Returns odd values by field and record, except for fields whose type can have such values.
        known = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
        found: dict[str, dict[int, Any]] = {}
        for place, value in enumerate(values):
            for field, held in value.items() if isinstance(value, Mapping) else ():
                if _is_odd(held, known.get(field)) and held in self._odd_of(place):
                    found.setdefault(field, {})[place] = held
        return {field: texts for field, texts in found.items() if not self._is_text(field, values)}

    def _is_text(self, field: str, values: Sequence[Any]) -> bool:
        # Returns whether a new field has only texts: then all of them stay texts.
        known = any(field == each.name for _, each in self._fields)
        there = (value.get(field) for value in values if isinstance(value, Mapping))
        return not known and all(held is None or isinstance(held, str) for held in there)

    def _odd_of(self, place: int) -> list[Any]:
        # Returns the values of a record that are odd for the types of its columns.
        if place not in self._known:
            record = self._records[place]
            rows = {name: getattr(record, name) for name, _ in self._fields}
            held = [
                (rows[name].get(field.name), field.type)
                for name, field in self._fields
                if isinstance(rows[name], dict)
            ]
            self._known[place] = [value for value, kind in held if _is_odd(value, kind)]
        return self._known[place]

    def _restored(self, column: pa.Array, original: pa.Array, field: str, places: list[int]) -> pa.Array:
        at = column.type.get_field_index(field)
        own = original.field(original.type.get_field_index(field))
        rows = [self._records[place].row for place in places]
        parts = [column.field(each) for each in range(column.type.num_fields)]
        if parts[at].type != own.type:
            parts[at] = self._cast(parts[at], own.type, field)
        parts[at] = replaced(parts[at], np.array(places), own.take(pa.array(rows)))
        names = [each.name for each in column.type]
        return pa.StructArray.from_arrays(parts, names, mask=column.is_null())

    def _cast(self, values: pa.Array, kind: pa.DataType, field: str) -> pa.Array:
        try:
            if _holds(kind, values.type):
                return values.cast(kind)
        except pa.ArrowInvalid:
            pass  # its message may quote a value
        raise failure_of(self._group, f"one column can't hold all of its values for {field!r}")


def _is_odd(value: Any, kind: pa.DataType | None) -> bool:
    """Return whether a value is a text, or a list with a text, although its column's type is another one.

    :param kind: None: the type is not known, and every text is odd.
    """
    if isinstance(value, list):
        kind = kind.value_type if kind is not None and pa.types.is_list(kind) else None
        return any(_is_odd(item, kind) for item in value)
    t = pa.types
    holds_texts = kind is not None and (t.is_string(kind) or t.is_large_string(kind) or t.is_dictionary(kind))
    return isinstance(value, str) and not holds_texts


def column_of(group: Group, name: str, values: Sequence[Any]) -> pa.Array:
    """Return values as a column, of the types that the column `name` had if they fit.

    :raises TailraceError: `TRANSFORM_FAILED` if one column can't hold them all.
    """
    known = group.columns.schema
    before = known.field(name).type if name in known.names else pa.null()
    try:
        return pa.array(values, _merged(pa.infer_type(values), before))
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError):
        pass
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError):
        # Arrow's message may quote a value.
        raise failure_of(group, f"one column can't hold all of its values for {name!r}") from None


def _merged(inferred: pa.DataType, before: pa.DataType) -> pa.DataType:
    """Return the type of the new values: the former type of the field if it holds them exactly."""
    t = pa.types
    if t.is_null(before):
        return inferred
    if t.is_list(inferred) and t.is_list(before):
        items = _merged(inferred.value_type, before.value_type)
        return before if items == before.value_type else pa.list_(items)
    if not (t.is_struct(inferred) and t.is_struct(before)):
        return before if _holds(before, inferred) else inferred
    types: Mapping[str, pa.DataType] = {field.name: field.type for field in before}
    return pa.struct(
        [pa.field(field.name, _merged(field.type, types.get(field.name, pa.null()))) for field in inferred]
    )


def _holds(before: pa.DataType, inferred: pa.DataType) -> bool:
    # Arrow truncates values that don't fit an integer or a date, and reads any number as a point in time.
    t = pa.types
    if t.is_null(inferred):
        return True
    if t.is_integer(before):
        return bool(t.is_integer(inferred))
    return before.id == inferred.id if t.is_temporal(before) else True


def failure_of(group: Group, found: str) -> TailraceError:
    """Return the error of returned records that are not valid."""
    return failure(group, f"transform records one by one: {found}", "Record.replace describes valid values")


class OneByOne:
    """Calls a record transformation for each record of a group, in its order."""

    def __init__(self, transformation: RecordTransformation) -> None:
        self._transformation = transformation

    def __repr__(self) -> str:
        return f"OneByOne({self._transformation!r})"

    def apply(self, group: Group) -> list[Group]:
        """Return the records that the transformation returns.

        :raises TailraceError: `TRANSFORM_FAILED` if it returns something other than the group's record,
            or values that one column can't hold.
        """
        same: list[int] = []
        changed: dict[tuple[str, tuple[str, ...]], list[Record]] = {}
        for row in range(len(group)):
            found: Any = self._transformation.apply_record(Record(group, row, {}))
            if found is None:
                continue
            if not isinstance(found, Record) or found.group is not group or found.row != row:
                raise failure_of(group, "it returned neither the record, nor Record.replace of it, nor None")
            if not found.replaced:
                same.append(row)
            else:
                _require_fit(group, found.replaced)
                changed.setdefault((found.topic, tuple(sorted(found.replaced))), []).append(found)
        groups = [group.take(np.array(same, np.int64))] if same else []
        return [*groups, *(_regrouped(group, topic, found) for (topic, _), found in changed.items())]

    def close(self) -> None:
        """Close the transformation."""
        close_of(self._transformation)()


def _require_fit(group: Group, replaced: Mapping[str, Any]) -> None:
    topic = replaced.get("topic", group.topic)
    if not isinstance(topic, str) or not topic.strip():
        raise failure_of(group, "it returned a topic that is empty or not a text")
    for name in ("before", "after", "headers"):
        given = replaced.get(name, {})
        if not (isinstance(given, Mapping) or (given is None and name != "headers")):
            raise failure_of(group, f"its {name!r} is not a mapping")


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
    if "value" in names and part.is_change:
        kept = [name for name in part.columns.schema.names if name in PLAIN]
        part = part.with_columns(part.columns.select(kept))
    texts = OddTexts(group, records)
    for name in names:
        column = texts.column(name, [record.replaced[name] for record in records])
        part = part.with_column(name, column)
    part = _with_notes(part, names, records)
    return part.with_column("special", texts.noted(part.column("special"))) if texts.moved else part


def _with_notes(group: Group, names: Sequence[str], records: Sequence[Record]) -> Group:
    # Removes notes about values that were replaced: that they were not sent, or that their column can't hold.
    for name in ("special", "unchanged"):
        noted = group.column(name)
        entries = noted.to_pylist() if len(noted) > noted.null_count else []
        if not any(entries):
            continue
        kept: list[Any] = []
        for found, record in zip(entries, records, strict=True):
            left = [entry for entry in found or () if _still_holds(entry, record, names, name == "special")]
            kept.append(left if left or name == "unchanged" else None)
        group = group.with_column(name, pa.array(kept, noted.type))
    return group


def _still_holds(entry: Any, record: Record, names: Sequence[str], is_special: bool) -> bool:
    place, _, column = entry[0].partition(".") if is_special else ("after", "", entry)
    if place not in names:
        return True
    now, was = record.replaced[place], getattr(Record(record.group, record.row, {}), place)
    both = isinstance(now, Mapping) and isinstance(was, Mapping)
    return bool(both and column in now and now[column] == was.get(column))
