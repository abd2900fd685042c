"""`log show`: changes as JSON Lines, or a line each for a person."""

from __future__ import annotations

import datetime as dt
import json
import sys
from pathlib import Path
from typing import Any

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.disclosure import kept_disclosure
from tailrace.cli.conversation import printable
from tailrace.config import ColumnPolicy
from tailrace.model import format_lsn
from tailrace.pipeline.log.inspection import Selection, json_lines
from tailrace.sources.postgres.decode.column_policy import TablePolicy

_WORDS = {"r": "snapshot", "c": "insert", "u": "update", "d": "delete", "t": "truncate", "m": "message"}


def show_changes(
    path: Path, task: str, wanted: Selection, rules: ColumnPolicy | None, *, as_json: bool
) -> None:
    """Print the wanted changes of the log at `path`.

    :param rules: what of the tables is let out; None: as it is kept beside the log.
    :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`, `LOG_RANGE_GONE`, `DECODE_FAILED`;
        `SECRET_MISSING` if the salt of a mask can't be had.
    """
    directory = LogDirectory.open(path)
    table_policy = TablePolicy.of(kept_disclosure(directory, task) if rules is None else rules)
    for line in json_lines(directory, task, wanted, table_policy):
        sys.stdout.write(line if as_json else words(json.loads(line)) + "\n")
    sys.stdout.flush()


def words(change: dict[str, Any]) -> str:
    """Return a change as one line: where, when, what, and the values."""
    source, position = change["source"], change["position"]
    time = dt.datetime.fromtimestamp(source["ts_ms"] / 1000, dt.UTC).isoformat(timespec="milliseconds")
    head = (
        f"{position['log_offset']:>12} {format_lsn(position['commit_lsn'])} {time.removesuffix('+00:00')}Z "
        f"xid={source.get('txId') or '-'} #{position['ordinal']} {_WORDS.get(change['op'], change['op'])} "
        f"{printable(source['schema'])}.{printable(source['table'])}"
    )
    before, after = change.get("before"), change.get("after")
    if before is not None and after is not None:
        return f"{head} {_values(before)} → {_values(after)}"
    shown = after if after is not None else before
    return head if shown is None else f"{head} {_values(shown)}"


def _values(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=True, separators=(", ", "="))
