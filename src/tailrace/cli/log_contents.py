"""`log show`, `log schemas` and `tail`: print the content of a log, as JSON or text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import kept_disclosure
from tailrace.cli.conversation import print_json
from tailrace.config import ColumnPolicy
from tailrace.decode.column_policy import TablePolicy
from tailrace.errors import printable
from tailrace.model import format_lsn
from tailrace.pipeline.log.inspection import Selection, follow, json_lines
from tailrace.pipeline.log.schemas import SchemaVersion, versions

_WORDS = {"r": "snapshot", "c": "insert", "u": "update", "d": "delete", "t": "truncate", "m": "message"}


def show_changes(
    path: Path, task: str, wanted: Selection, rules: ColumnPolicy | None, *, as_json: bool
) -> None:
    """Print the wanted changes of the log at `path`.

    :param rules: which columns are shown, and how; None: the rules that capture stored with the log.
    :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`, `LOG_RANGE_GONE`, `DECODE_FAILED`;
        `SECRET_MISSING` if the salt of a mask can't be read.
    """
    directory = LogDirectory.open(path)
    for line in json_lines(directory, task, wanted, _policy(directory, task, rules)):
        sys.stdout.write(line if as_json else words(json.loads(line)) + "\n")
    sys.stdout.flush()


def tail_changes(path: Path, wanted: Selection, rules: ColumnPolicy | None, *, as_json: bool) -> None:
    """Print the wanted changes of the log at `path` as they become durable; at the end, where to continue.

    :raises TailraceError: as `show_changes`.
    """
    directory = LogDirectory.open(path)
    end = None
    try:
        for found in follow(directory, TASK, wanted, _policy(directory, TASK, rules), Event()):
            for line in found.lines:
                sys.stdout.write(line if as_json else words(json.loads(line)) + "\n")
            if found.lines:
                sys.stdout.flush()
            end = found.end
    finally:
        if end is not None:
            sys.stderr.write(f"continue with --from {end}\n")


def _policy(directory: LogDirectory, task: str, rules: ColumnPolicy | None) -> TablePolicy:
    return TablePolicy.of(kept_disclosure(directory, task) if rules is None else rules)


def words(change: dict[str, Any]) -> str:
    """Return a change as one line: position, time, operation, table and values."""
    source, position = change["source"], change["position"]
    time = "-"  # for a message outside of a transaction
    if source["ts_ms"] is not None:
        time = f"{np.datetime64(source['ts_ms'], 'ms')}Z"  # of any year: a source of a user's gives it
    if "shard" in source:
        schema, of = source["keyspace"], f"shard={printable(source['shard'])}"
    else:
        schema, of = source["schema"], f"xid={source.get('txId') or '-'}"
    head = (
        f"{position['log_offset']:>12} {format_lsn(position['commit_lsn'])} {time} "
        f"{of} #{position['ordinal']} {_WORDS.get(change['op'], change['op'])} "
        f"{'.'.join(printable(name) for name in (schema, source['table']) if name)}"
    ).rstrip()
    before, after = change.get("before"), change.get("after", change.get("message"))
    if before is not None and after is not None:
        return f"{head} {_values(before)} → {_values(after)}"
    shown = after if after is not None else before
    return head if shown is None else f"{head} {_values(shown)}"


def _values(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=True, separators=(", ", "="))


def show_schemas(
    path: Path, task: str, table: str | None, rules: ColumnPolicy | None, *, as_json: bool
) -> None:
    """Print the versions of the tables' schemas in the log at `path`.

    :param rules: which columns are shown, and how; None: the rules that capture stored with the log.
    :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`.
    """
    directory = LogDirectory.open(path)
    found = versions(directory, task, table, kept_disclosure(directory, task) if rules is None else rules)
    if as_json:
        print_json({"path": str(path), "task": task, "schemas": [_document(each) for each in found]})
        return
    for each in found:
        print(_head(each))
        for change in each.changes:
            print(f"  * {printable(change)}")
        key = set(each.relation.key)
        for column in each.columns:
            marks = (" not null" if column.not_null else "") + (" key" if column.name in key else "")
            print(f"    {printable(column.name)} {printable(column.type) or column.type_oid}{marks}")


def _head(version: SchemaVersion) -> str:
    relation = version.relation
    place = "from the log's start" if version.log_offset is None else f"at {version.log_offset:,}"
    lsn = f", commit {format_lsn(version.commit_lsn)}" if version.commit_lsn else ""
    pending = ", pending: its catalogue facts are not known yet" if relation.pending else ""
    names = (f'"{name}"' if "." in name else name for name in (relation.schema, relation.table))
    return (
        f"{printable('.'.join(names))} version {relation.version or 'unknown'} {place}{lsn}, "
        f"replica identity {relation.identity.name.lower()}{pending}"
    )


def _document(version: SchemaVersion) -> dict[str, Any]:
    relation = version.relation
    return {
        "schema": relation.schema,
        "table": relation.table,
        "version": relation.version or None,
        "pending": relation.pending,
        "relation": relation.oid,
        "log_offset": version.log_offset,
        "commit_lsn": version.commit_lsn or None,
        "replica_identity": relation.identity.name.lower(),
        "key": list(relation.key),
        "primary_key": list(relation.primary_key),
        "changes": list(version.changes),
        "columns": [
            {
                "name": column.name,
                "number": column.number or None,
                "type": column.type or None,
                "type_oid": column.type_oid,
                "type_modifier": column.type_modifier,
                "not_null": column.not_null,
            }
            for column in version.columns
        ],
    }
