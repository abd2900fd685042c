"""`log schemas`: the versions of each table's schema, and where in the log they begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.disclosure import kept_disclosure
from tailrace.cli.conversation import print_json, printable
from tailrace.config import ColumnPolicy
from tailrace.model import format_lsn
from tailrace.pipeline.log.schemas import SchemaVersion, versions


def show_schemas(
    path: Path, task: str, table: str | None, rules: ColumnPolicy | None, *, as_json: bool
) -> None:
    """Print the versions of the tables' schemas in the log at `path`.

    :param rules: what of the tables is let out; None: as it is kept beside the log.
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
    pending = ", pending: what its transaction altered is not known yet" if relation.pending else ""
    return (
        f"{printable(relation.qualified_name)} version {relation.version or 'unknown'} {place}{lsn}, "
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
