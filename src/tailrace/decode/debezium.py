"""Changes as JSON lines in Debezium's payload form, with one more object, `position`.

Every number is the commit's or the change's own: no clock is read, so that the same range of the
log gives the same bytes for ever. `ts_ms` and its like are the commit's time, and `sequence` is
[commit LSN, LSN of the change], which rises from change to change as Debezium's does. What
`source` has beyond Debezium's is `schema_version`: it counts the shapes of the table in the log.

Values: integers and floats as numbers (NaN and infinities as text), numeric as text, date as
days and timestamp as microseconds since 1970, timestamptz as ISO 8601 in UTC, bytea as base64,
arrays as arrays, all else as PostgreSQL's text; otherwise where the relation's modes say so
(`types` decides). A row that was sent in part (the old key) holds only those columns. A value
that was not sent is `__debezium_unavailable_value`, or what the modes put in its place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.decode import forms, jsontext, kernel
from tailrace.decode.envelope import image_choices
from tailrace.decode.gather import require_utf8
from tailrace.decode.tuples import Tuples
from tailrace.decode.types import column_types
from tailrace.model import OWN_FORMS, Op
from tailrace.protocol.frames import Bytes, Numbers

#: The least that is set aside for lines at once.
_CHUNK_BYTES_MIN = 1 << 16

# Rows of the numbers that a template may name.
_MS, _US, _NS, _COMMIT_LSN, _LSN, _XID, _ORDINAL, _LOG_OFFSET = range(8)

_Template = list[tuple[str, int]]
_Members = dict[str, str | int | None]


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What `source` says of the pipeline: its name, the database, Tailrace's version."""

    name: str
    database: str
    version: str


def json_lines(tuples: Tuples, task: str, source: SourceFacts) -> pa.LargeStringArray:
    """Return one JSON document a change, each with a newline at its end.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    template = _template(tuples, task, source)
    columns = _columns(tuples)
    if tuples.relation is None:
        whole = np.ones((1, 2), np.bool_)
        choice = np.ones((1, len(tuples)), np.uint8)
    else:
        whole = np.stack([np.ones(len(columns), np.bool_), tuples.in_key])
        choice = np.stack(image_choices(tuples))
    names, name_at = _joined([json.dumps(name) + ":" for name, _ in columns])
    texts, text_at = _joined([text for text, _ in template])
    old, current = tuples.old, tuples.current
    longest = max(current.length.max(initial=0), old.length.max(initial=0))
    arguments = (
        tuples.op, _numbers(tuples), texts, text_at, np.array([slot for _, slot in template], np.int64),
        len(choice), choice, whole, names, name_at, np.array([style for _, style in columns], np.int64),
        _unavailable(tuples), old.start, old.length, old.kind, current.start, current.length, current.kind,
        np.empty(int(longest) + 1, np.uint8),
    )  # fmt: skip
    ends = np.empty(len(tuples), np.int64)
    size = (len(texts) + 160 + 2 * len(names)) * len(tuples)
    size += int(current.length.sum(dtype=np.int64) + old.length.sum(dtype=np.int64)) * 5 // 4
    text = _written(tuples.buffer, arguments, ends, size)
    offsets = np.concatenate((np.zeros(1, np.int64), ends))
    lines = pa.LargeStringArray.from_buffers(len(tuples), pa.py_buffer(offsets), pa.py_buffer(text))
    if text.max(initial=0) >= 0x80:
        require_utf8(lines)
    return lines


def _written(buffer: Bytes, arguments: tuple[Any, ...], ends: Numbers, size: int) -> Bytes:
    # The writer stops before a line for which there may be no room; another chunk takes it.
    write: Any = jsontext.write_lines
    chunks: list[Bytes] = []
    first, done, need = 0, 0, 0
    while first < len(ends):
        out = np.empty(max(size, need, _CHUNK_BYTES_MIN), np.uint8)
        after, used, need = write(buffer, first, *arguments, out, ends)
        ends[first:after] += done
        chunks.append(out[:used])
        first, done, size = after, done + used, max(size - used, 0)
    return chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])


def _template(tuples: Tuples, task: str, source: SourceFacts) -> _Template:
    relation = tuples.relation
    schema, table = (relation.schema, relation.table) if relation else ("", "")
    snapshot = len(tuples) > 0 and tuples.op[0] == ord(Op.READ)
    none = jsontext.NO_NUMBER
    images = [('{"message":', none)] if relation is None else [('{"before":', none), (',"after":', none)]
    first: _Members = {"version": source.version, "connector": "postgresql", "name": source.name}
    second: _Members = {"snapshot": "true" if snapshot else "false", "db": source.database}
    third: _Members = {"schema": schema, "table": table}
    version = relation.version if relation is not None and relation.version else None
    last = _members({"schema_version": version})
    return [
        *images,
        (f',"source":{{{_members(first)},"ts_ms":', _MS),
        (f',{_members(second)},"sequence":"[\\"', _COMMIT_LSN),
        ('\\",\\"', _LSN),
        ('\\"]","ts_us":', _US),
        (',"ts_ns":', _NS),
        (f',{_members(third)},"txId":', _XID),
        (',"lsn":', _LSN),
        (f',"xmin":null,{last}}},"transaction":null,"op":"', jsontext.OP_LETTER),
        ('","ts_ms":', _MS),
        (',"ts_us":', _US),
        (',"ts_ns":', _NS),
        (f',"position":{{{_members({"task": task})},"log_offset":', _LOG_OFFSET),
        (',"commit_lsn":', _COMMIT_LSN),
        (',"ordinal":', _ORDINAL),
        ("}}\n", none),
    ]


def _members(values: _Members) -> str:
    return json.dumps(values, separators=(",", ":"))[1:-1]


def _columns(tuples: Tuples) -> list[tuple[str, int]]:
    relation = tuples.relation
    if relation is None:
        return [("prefix", forms.QUOTED), ("content", forms.BASE64)]
    names = (column.name for column in relation.columns)
    return [(name, kind.json) for name, kind in zip(names, column_types(relation), strict=True)]


def _unavailable(tuples: Tuples) -> Bytes:
    modes = tuples.relation.modes if tuples.relation else OWN_FORMS
    return np.frombuffer(json.dumps(modes.unavailable_placeholder).encode(), np.uint8)


def _numbers(tuples: Tuples) -> Numbers:
    fields = tuples.fields
    us = fields[kernel.AT_COMMIT_TIME]
    missing = us == kernel.NONE
    ms, ns = us // 1000, us * 1000
    ms[missing] = ns[missing] = kernel.NONE
    rows = [ms, us, ns]
    rows += [
        fields[row]
        for row in (
            kernel.AT_COMMIT_LSN, kernel.LSN, kernel.AT_XID, kernel.AT_ORDINAL, kernel.LOG_OFFSET,
        )
    ]  # fmt: skip
    return np.stack(rows)


def _joined(texts: list[str]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), ends
