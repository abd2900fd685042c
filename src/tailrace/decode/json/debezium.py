"""Changes as JSON lines in Debezium's payload form, with an additional object, `position`.

Every number comes from the commit or the change, none from a clock, so the same range of the log
always gives the same bytes. `ts_ms`, `ts_us` and `ts_ns` are the commit's time, and `sequence` is
[commit LSN, LSN of the change], which increases from change to change as Debezium's does. `source`
has one field more than Debezium's, `schema_version`, which counts the shapes of the table in the log. For
a source with shards, `source` is that of Debezium's Vitess connector.

Values: integers and floats as numbers (NaN and infinities as text), numeric as text, date as
days and timestamp as microseconds since 1970, timestamptz as ISO 8601 in UTC, bytea as base64,
arrays as arrays, all other types as PostgreSQL's text, unless the relation's modes choose another
form (see `types`). A row of which only the old key was sent has only the key's columns. A value
that was not sent is `__debezium_unavailable_value`, or the placeholder of the modes.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tailrace import __version__
from tailrace.decode import kernel
from tailrace.decode.envelope import image_choices
from tailrace.decode.json import json_kernel
from tailrace.decode.json.documents import ColumnTexts, Plan, write
from tailrace.decode.json.shard_texts import SHARD_TEXT, VGTID_TEXT, coded_texts
from tailrace.decode.json.templates import Part, Slot, Template, Text, template
from tailrace.decode.shards import rows_of
from tailrace.decode.tuples import Tuples
from tailrace.decode.types import column_types
from tailrace.decode.values import forms
from tailrace.model import OWN_FORMS, Op, SourceFingerprint
from tailrace.protocol.frames import Numbers

# Rows of the numbers that a template refers to: positions and times of each change; others may follow.
MS, US, NS, COMMIT_LSN, LSN, XID, ORDINAL, _LOG_OFFSET = range(8)


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """The pipeline's fields of `source`: its name, the database, Tailrace's version, the type of source."""

    name: str
    database: str
    version: str
    connector: str = "postgresql"

    @classmethod
    def of(cls, name: str, source: SourceFingerprint) -> SourceInfo:
        """Return the fields for a log's source, in the pipeline `name`."""
        return cls(name, source.database, __version__, source.type)

    @property
    def has_shards(self) -> bool:
        """Whether `source` is that of Debezium's Vitess connector, not of its PostgreSQL connector."""
        return self.connector == "vitess"


def json_lines(tuples: Tuples, task: str, source: SourceInfo) -> pa.LargeStringArray:
    """Return one JSON document per change, each with a newline at its end.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    relation, columns = tuples.relation, _columns(tuples)
    wanted = np.stack([np.ones(len(columns), np.bool_), tuples.in_key])
    plan = Plan(np.arange(len(tuples), dtype=np.int64), tuples.op, image_choices(tuples), wanted)
    modes = relation.modes if relation else OWN_FORMS
    how = ColumnTexts(
        [json.dumps(name) + ":" for name, _ in columns],
        [style for _, style in columns],
        [json.dumps(modes.unavailable_placeholder)] * len(columns),
        [""] * len(columns),
    )
    if relation is None:
        lines = _lines(task, source, "", "", None, Op.MESSAGE)
    else:
        op = Op.READ if len(tuples) and tuples.op[0] == ord(Op.READ) else None
        lines = _lines(task, source, relation.schema, relation.table, relation.version or None, op)
    coded = coded_texts(rows_of(tuples.shards, tuples.fields[kernel.AT_COMMIT_LSN]), lines)
    return write(tuples.buffer, plan, lines, _numbers(tuples), how, tuples.old, tuples.current, coded)


@functools.lru_cache(maxsize=256)
def _lines(
    task: str, source: SourceInfo, schema: str, table: str, version: int | None, op: Op | None
) -> Template:
    # `op`: MESSAGE for logical messages, READ for a snapshot's rows, None for others.
    before, after = Slot(json_kernel.BEFORE), Slot(json_kernel.AFTER)
    of_source = source_members(source, schema, table, is_snapshot=op is Op.READ)
    for name in ("origin", "origin_lsn"):  # always null
        of_source.pop(name, None)
    document: Part = {
        **({"message": after} if op is Op.MESSAGE else {"before": before, "after": after}),
        "source": {**of_source, "schema_version": version},
        "transaction": None,
        "op": Text((json_kernel.OP_LETTER,)),
        "ts_ms": Slot(MS),
        "ts_us": Slot(US),
        "ts_ns": Slot(NS),
        "position": {
            "task": task,
            "log_offset": Slot(_LOG_OFFSET),
            "commit_lsn": Slot(COMMIT_LSN),
            "ordinal": Slot(ORDINAL),
        },
    }
    return template(document, ensure_ascii=True, ending="\n")


def source_members(source: SourceInfo, schema: str, table: str, *, is_snapshot: bool) -> dict[str, Part]:
    """Return the members of Debezium's `source`, in the order of its schema."""
    first: dict[str, Part] = {
        "version": source.version,
        "connector": source.connector,
        "name": source.name,
        "ts_ms": Slot(MS),
        "snapshot": "true" if is_snapshot else "false",
    }
    times = {"ts_us": Slot(US), "ts_ns": Slot(NS)}
    if source.has_shards:
        # Debezium's Vitess connector has no database: it has the keyspace instead.
        return {
            **first,
            "db": "",
            "sequence": None,
            **times,
            "keyspace": schema,
            "table": table,
            "shard": Text((json_kernel.CODED - SHARD_TEXT,)),
            "vgtid": Text((json_kernel.CODED - VGTID_TEXT,)),
        }
    return {
        **first,
        "db": source.database,
        "sequence": Text(('["', COMMIT_LSN, '","', LSN, '"]')),
        **times,
        "schema": schema,
        "table": table,
        "txId": Slot(XID),
        "lsn": Slot(LSN),
        "xmin": None,
        "origin": None,
        "origin_lsn": None,
    }


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
    """Return times in milliseconds, microseconds and nanoseconds; `kernel.NONE` for a missing time."""
    missing = us == kernel.NONE
    ms, ns = us // 1000, us * 1000
    ms[missing] = ns[missing] = kernel.NONE
    return [ms, us, ns]
