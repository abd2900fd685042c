"""Changes as JSON lines in Debezium's payload form, with one more object, `position`.

Every number is the commit's or the change's own: no clock is read, so that the same range of the
log gives the same bytes for ever. `ts_ms` and its like are the commit's time, and `sequence` is
[commit LSN, LSN of the change], which rises from change to change as Debezium's does. What
`source` has beyond Debezium's is `schema_version`: it counts the shapes of the table in the log. Of a source
with shards, `source` is that of Debezium's Vitess connector.

Values: integers and floats as numbers (NaN and infinities as text), numeric as text, date as
days and timestamp as microseconds since 1970, timestamptz as ISO 8601 in UTC, bytea as base64,
arrays as arrays, all else as PostgreSQL's text; otherwise where the relation's modes say so
(`types` decides). A row that was sent in part (the old key) holds only those columns. A value
that was not sent is `__debezium_unavailable_value`, or what the modes put in its place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tailrace import __version__
from tailrace.decode import kernel
from tailrace.decode.envelope import image_choices
from tailrace.decode.json import json_kernel
from tailrace.decode.json.documents import ColumnTexts, Plan, Template, write
from tailrace.decode.json.shard_texts import SHARD_TEXT, VGTID_TEXT, coded_texts
from tailrace.decode.shards import rows_of
from tailrace.decode.tuples import Tuples
from tailrace.decode.types import column_types
from tailrace.decode.values import forms
from tailrace.model import OWN_FORMS, Op, SourceFingerprint
from tailrace.protocol.frames import Numbers

# Rows of the numbers that a template may name: positions and times of each change; others come after them.
MS, US, NS, COMMIT_LSN, LSN, XID, ORDINAL, _LOG_OFFSET = range(8)

_Members = dict[str, str | int | None]


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What `source` says of the pipeline: its name, the database, Tailrace's version, the type of source."""

    name: str
    database: str
    version: str
    connector: str = "postgresql"

    @classmethod
    def of(cls, name: str, source: SourceFingerprint) -> SourceInfo:
        """Return what the source of a log is to be called."""
        return cls(name, source.database, __version__, source.type)

    @property
    def has_shards(self) -> bool:
        """Whether `source` is that of Debezium's Vitess connector, and not of that for PostgreSQL."""
        return self.connector == "vitess"


def json_lines(tuples: Tuples, task: str, source: SourceInfo) -> pa.LargeStringArray:
    """Return one JSON document a change, each with a newline at its end.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    count, columns = len(tuples), _columns(tuples)
    if tuples.relation is None:
        wanted = np.ones((1, 2), np.bool_)
        choice = np.stack([np.zeros(count, np.uint8), np.ones(count, np.uint8)])
    else:
        wanted = np.stack([np.ones(len(columns), np.bool_), tuples.in_key])
        choice = np.stack(image_choices(tuples))
    plan = Plan(np.arange(count, dtype=np.int64), tuples.op, choice, wanted)
    modes = tuples.relation.modes if tuples.relation else OWN_FORMS
    how = ColumnTexts(
        [json.dumps(name) + ":" for name, _ in columns],
        [style for _, style in columns],
        [json.dumps(modes.unavailable_placeholder)] * len(columns),
        [""] * len(columns),
    )
    template = _template(tuples, task, source)
    coded = coded_texts(rows_of(tuples.shards, tuples.fields[kernel.AT_COMMIT_LSN]), template)
    return write(tuples.buffer, plan, template, _numbers(tuples), how, tuples.old, tuples.current, coded)


def _template(tuples: Tuples, task: str, source: SourceInfo) -> Template:
    relation = tuples.relation
    schema, table = (relation.schema, relation.table) if relation else ("", "")
    snapshot = len(tuples) > 0 and bool(tuples.op[0] == ord(Op.READ))
    before, after = json_kernel.BEFORE, json_kernel.AFTER
    images = [('{"message":', after)] if relation is None else [('{"before":', before), (',"after":', after)]
    version = relation.version if relation is not None and relation.version else None
    last = _members({"schema_version": version})
    # What follows `lsn`.
    last = last if source.has_shards else f'"xmin":null,{last}'
    return [
        *images,
        *source_parts(',"source":', source, schema, table, is_snapshot=snapshot),
        (f',{last}}},"transaction":null,"op":"', json_kernel.OP_LETTER),
        ('","ts_ms":', MS),
        (',"ts_us":', US),
        (',"ts_ns":', NS),
        (f',"position":{{{_members({"task": task})},"log_offset":', _LOG_OFFSET),
        (',"commit_lsn":', COMMIT_LSN),
        (',"ordinal":', ORDINAL),
        ("}}\n", json_kernel.NOTHING),
    ]


def source_parts(
    before: str, source: SourceInfo, schema: str, table: str, *, is_snapshot: bool, ensure_ascii: bool = True
) -> Template:
    """Return the template of `source` up to its member `lsn`, or `vgtid`.

    :param before: what comes before it.
    :param ensure_ascii: whether letters beyond ASCII are escaped.
    """

    def members(**values: str) -> str:
        return json.dumps(values, separators=(",", ":"), ensure_ascii=ensure_ascii)[1:-1]

    first = members(version=source.version, connector=source.connector, name=source.name)
    # Debezium's Vitess connector has no database: the keyspace stands in its place.
    database = "" if source.has_shards else source.database
    second = members(snapshot="true" if is_snapshot else "false", db=database)
    if source.has_shards:
        return [
            (f'{before}{{{first},"ts_ms":', MS),
            (f',{second},"sequence":null,"ts_us":', US),
            (',"ts_ns":', NS),
            (f',{members(keyspace=schema, table=table)},"shard":"', json_kernel.CODED - SHARD_TEXT),
            ('","vgtid":"', json_kernel.CODED - VGTID_TEXT),
            ('"', json_kernel.NOTHING),
        ]
    return [
        (f'{before}{{{first},"ts_ms":', MS),
        (f',{second},"sequence":"[\\"', COMMIT_LSN),
        ('\\",\\"', LSN),
        ('\\"]","ts_us":', US),
        (',"ts_ns":', NS),
        (f',{members(schema=schema, table=table)},"txId":', XID),
        (',"lsn":', LSN),
    ]


def _members(values: _Members) -> str:
    return json.dumps(values, separators=(",", ":"))[1:-1]


def _columns(tuples: Tuples) -> list[tuple[str, int]]:
    relation = tuples.relation
    if relation is None:
        return [("prefix", forms.QUOTED), ("content", forms.BASE64)]
    names = (column.name for column in relation.columns)
    return [(name, kind.json) for name, kind in zip(names, column_types(relation), strict=True)]


def _numbers(tuples: Tuples) -> Numbers:
    fields = tuples.fields
    named = (kernel.AT_COMMIT_LSN, kernel.LSN, kernel.AT_XID, kernel.AT_ORDINAL, kernel.LOG_OFFSET)
    return np.stack([*times_of(fields[kernel.AT_COMMIT_TIME]), *(fields[row] for row in named)])


def times_of(us: Numbers) -> list[Numbers]:
    """Return times in milliseconds, microseconds and nanoseconds; `kernel.NONE` where there is none."""
    missing = us == kernel.NONE
    ms, ns = us // 1000, us * 1000
    ms[missing] = ns[missing] = kernel.NONE
    return [ms, us, ns]
