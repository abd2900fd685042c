"""Transformations of captured changes, each alone and some in a chain, on one core."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.records.group import Group
from tailrace.records.record import Record
from tailrace.transforms.chain import Chain
from tailrace.transforms.factory import build
from tailrace_bench.decode import Blocks, captured, timed, use_one_core
from tailrace_bench.support.report import Result, machine, median

ROWS = 500_000
TURNS = 3

#: Divisor of the number of rows for the reference, which runs Python for each row.
_REFERENCE_SHARE = 20

#: A typical chain: filters some rows, changes the topic, masks a column.
_CHAIN: tuple[dict[str, Any], ...] = (
    {"type": "filter", "where": "after.qty > 0 and op <> 'd'"},
    {"type": "route", "regex": r"public\.(.*)", "replacement": "shop.$1"},
    {"type": "mask", "fields": ["note"], "value": "****"},
)

_EACH: dict[str, dict[str, Any]] = {
    "filter_by_op": {"type": "filter", "where": "op = 'c'"},
    "filter_by_column": {"type": "filter", "where": "after.qty > 0"},
    "filter_by_many": {
        "type": "filter",
        "where": "after.qty between 1 and 5 and (after.note like '%7%' or after.price * 2 > 100)",
    },
    "route_by_name": _CHAIN[1],
    "route_by_content": {"type": "route", "topic": "case when after.qty > 3 then 'large' end"},
    "rename": {"type": "rename", "fields": {"note": "remark"}},
    "drop_fields": {"type": "drop_fields", "fields": ["note", "lat"]},
    "mask_fixed": _CHAIN[2],
    "add_fields": {
        "type": "add_fields",
        "metadata": {"op": "op", "at": "ts_ms"},
        "computed": {"total": "after.qty * after.price"},
    },
    "cast": {"type": "cast", "fields": {"price": "double precision", "qty": "bigint"}},
    "flatten": {"type": "flatten", "deletes": "rewrite", "add_fields": ["op", "table", "lsn"]},
    "timestamps": {"type": "timestamps", "fields": ["placed"], "to": "unix_ms"},
    "set_headers": {
        "type": "set_headers",
        "headers": {"table": "source.table", "customer": "after.customer"},
    },
    "value_to_key": {"type": "value_to_key", "fields": ["customer", "id"]},
}


def measure(rows: int | None = None) -> Result:
    """Apply each transformation to `rows` captured rows three times, after one pass that is not counted.

    The time is from the log's blocks to the end of the transformation: a change that it does not need to
    decode is not decoded. The reference does the chain's work record by record, for a part of the rows.
    """
    rows = rows or ROWS
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        log = Path(directory) / "log"
        captured(log, rows)
        use_one_core()
        blocks = Blocks(log, rows)
        nothing = _rate(build([]), blocks, rows)
        chain = _rate(build(_CHAIN), blocks, rows)
        each = {name: round(_rate(build([given]), blocks, rows)) for name, given in _EACH.items()}
        share = next(_groups(blocks)).take(np.arange(max(1, len(next(_groups(blocks))) // _REFERENCE_SHARE)))
        single = build([_OneByOne()])
        reference = median([timed(lambda: single.apply(_fresh(share))) for _ in range(TURNS)])
    return Result(
        name="transforms",
        value=chain,
        unit="rows/s",
        ratio=chain / (len(share) / reference),
        reference="the same filter, route and mask on one record at a time, in Python",
        limit="one core; for what changes rows most of it is decoding them",
        setup=machine() | {"rows": rows, "columns": 10, "cores_used": 1, "turns": TURNS},
        details={"nothing_rows_s": round(nothing), **{f"{name}_rows_s": rate for name, rate in each.items()}},
    )


def _rate(chain: Chain, blocks: Blocks, rows: int) -> float:
    def apply() -> None:
        for group in _groups(blocks):
            chain.apply(group)

    apply()
    return rows / median([timed(apply) for _ in range(TURNS)])


def _groups(blocks: Blocks) -> Iterator[Group]:
    for changes in blocks.changes():
        yield Group.of_changes("public.orders", np.arange(len(changes), dtype=np.int64), changes)


def _fresh(group: Group) -> Group:
    # Returns the same records, with nothing decoded yet.
    return group.with_topic(group.topic)


class _OneByOne:
    """The chain's work as a transformation of single records."""

    def apply_record(self, record: Record) -> Record | None:
        after = record.after
        if record.op == "d" or after is None or not (after["qty"] or 0) > 0:
            return None
        topic = record.topic.replace("public.", "shop.", 1)
        return record.replace(topic=topic, after={**after, "note": "****"})

    def close(self) -> None:
        """Do nothing: there are no resources."""
