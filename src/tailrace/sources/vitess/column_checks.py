"""Checks the columns of captured tables before capture: those that can't be captured, and the settings that
name columns. With a mistyped pattern, a column would not be masked or left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import structlog

from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.sources.findings import Finding, Severity, error, warning
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.metadata import serving_shards, table_columns
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace.sources.vitess.rows.failures import refused
from tailrace.sources.vitess.rows.transcoder import is_internal
from tailrace.sources.vitess.rows.types import Refused, plan_of, roles_of

log = structlog.get_logger(__name__)

#: Maximum number of columns that a finding names.
_NAMED_MAX = 50

Tables = Mapping[str, Sequence[pb.Field]]


def column_findings(source: VitessSource, shard: str, tables: Tables) -> Iterator[Finding]:
    """Yield the columns of captured tables that can't be captured.

    :param tables: the columns of the shard's tables.
    """
    for table, columns in _captured(source, tables):
        name = f"{source.keyspace}.{table}"
        left_out = source.left_out(source.keyspace, table, roles_of(columns))
        for column in columns:
            try:
                if column.name not in left_out:
                    plan_of(column, has_labels=True)
            except Refused as reason:
                found = refused(reason, source.keyspace, shard, table, column.name)
                yield error(found.kind, found.message, found.hint, name)


def _captured(source: VitessSource, tables: Tables) -> Iterator[tuple[str, Sequence[pb.Field]]]:
    for table, columns in tables.items():
        if source.captures(source.keyspace, table) and not is_internal(table):
            yield table, columns


def setting_findings(source: VitessSource, kept: ColumnPolicy, tables: Tables) -> Iterator[Finding]:
    """Yield the settings that do not fit the columns, such as the exclusion of a key, and patterns that match
    no column: it is an error if one names a single column and is new.

    :param kept: the settings with which the log was last used.
    """
    for table, columns in _captured(source, tables):
        for conflict in source.conflicts(source.keyspace, table, roles_of(columns)):
            name = f"{source.keyspace}.{table}"
            yield error(Kind.CONFIG_INVALID, conflict.message, conflict.repair, name)
    names = {
        (source.keyspace, table, column.name)
        for table, columns in _captured(source, tables)
        for column in columns
    }
    for place, pattern, one in source.unmatched_patterns(names, kept):
        if one is None:
            message = f"{place}: no column of a captured table matches {pattern!r}"
            yield warning(Kind.TABLE_MISSING, message, f"correct {place}")
        else:
            there = tables.get(one[1], ()) if one[0] == source.keyspace else ()
            named = ", ".join(column.name for column in there[:_NAMED_MAX])
            listed = f"the columns of {one[0]}.{one[1]} are: {named}; " if named else ""
            yield error(
                Kind.CONFIG_INVALID,
                f"{place}: {pattern!r} names no column of a captured table",
                f"{listed}correct {place}; a pattern with * or a /regular expression/ may name what is not "
                "there yet",
            )


def require_columns(vtgate: Vtgate, source: VitessSource, kept: ColumnPolicy) -> None:
    """Check that the settings fit the columns; warn of patterns without a match that name no single column.

    :param kept: as for `setting_findings`.
    :raises TailraceError: `CONFIG_INVALID`; the last shard's error if none answers.
    """
    if source.discloses_all:
        return
    for found in setting_findings(source, kept, _tables_of_any(vtgate, source)):
        if found.severity is Severity.ERROR:
            of = f" of {found.table}" if found.table else ""
            raise TailraceError(found.kind, f"look at the columns{of}: {found.message}", found.repair)
        log.warning("a pattern matches no column", found=found.message)


def _tables_of_any(vtgate: Vtgate, source: VitessSource) -> Tables:
    """Return the tables of the first shard that answers: all have the same."""
    *others, last = serving_shards(vtgate, source)
    for shard in others:
        try:
            return table_columns(vtgate, source, shard)
        except TailraceError as failure:
            if failure.policy is not Policy.RETRY:
                raise
    return table_columns(vtgate, source, last)
