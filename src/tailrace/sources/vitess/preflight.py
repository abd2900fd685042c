"""Preflight of one Vitess source: whether vtgate answers, and whether its shards can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import kept_disclosure
from tailrace.config.patterns import matches
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import Relation
from tailrace.sources.findings import Finding, error, from_failure, warning
from tailrace.sources.vitess.column_checks import column_findings, setting_findings
from tailrace.sources.vitess.connection.metadata import (
    binlog_settings,
    serving_shards,
    table_columns,
    table_names,
    tablets,
    unlogged_cascades,
)
from tailrace.sources.vitess.connection.vtgate import Vtgate


class VitessCheck:
    """The checks of one Vitess source: see `tailrace.sources.contract.SourceCheck`."""

    def __init__(self, source: VitessSource, log: LogDirectory | None = None) -> None:
        self._source = source
        self._log = log
        self._vtgate: Vtgate | None = None
        self._shards: tuple[str, ...] = ()

    def connect(self) -> Iterator[Finding]:
        self._vtgate = Vtgate.connect(self._source)
        try:
            self._shards = serving_shards(self._vtgate, self._source)
        except TailraceError as failure:
            yield from_failure(failure)

    def findings(self) -> Iterator[Finding]:
        if self._vtgate is None or not self._shards:
            return
        yield from self._tablet_findings(self._vtgate)
        if self._source.tasks_max > len(self._shards):
            yield warning(
                Kind.SOURCE_MISCONFIGURED,
                f"source.tasks_max is {self._source.tasks_max}, and the keyspace has {len(self._shards)} "
                "shards: the other tasks have nothing to read before a reshard makes more",
                "lower source.tasks_max, or keep it for a later reshard",
            )
        for shard in self._shards:
            try:
                yield from self._shard_findings(self._vtgate, shard)
                if shard == self._shards[0]:  # all shards have the same tables
                    yield from self._cascade_findings(self._vtgate, shard)
                    yield from self._column_findings(self._vtgate, shard)
            except TailraceError as failure:
                yield from_failure(failure)
        names = self.tables()
        lacking = [each for each in self._source.tables if not any(matches(each, *name) for name in names)]
        for found in [f"matches {pattern!r}" for pattern in lacking] if names else ["is captured"]:
            yield warning(
                Kind.TABLE_MISSING,
                f"source.tables: no table of the keyspace {self._source.keyspace!r} {found}",
                "check source.tables; a table that is created later is captured from then on",
            )

    def _tablet_findings(self, vtgate: Vtgate) -> Iterator[Finding]:
        wanted = self._source.tablet_type.upper()
        served = {
            tablet.shard
            for tablet in tablets(vtgate, self._source)
            if tablet.type == wanted and tablet.state == "SERVING"
        }
        for shard in self._shards:
            if shard not in served:
                yield error(
                    Kind.SOURCE_MISCONFIGURED,
                    f"the shard {shard} has no tablet of the type {self._source.tablet_type} that serves",
                    "set source.tablet_type to one that each shard has, or add such tablets",
                )

    def _shard_findings(self, vtgate: Vtgate, shard: str) -> Iterator[Finding]:
        image, row_format, gtid_mode = binlog_settings(vtgate, self._source, shard)
        if row_format.upper() != "ROW" or gtid_mode.upper() != "ON":
            yield error(
                Kind.SOURCE_MISCONFIGURED,
                f"the shard {shard} has binlog_format={row_format} and gtid_mode={gtid_mode}",
                "have its MySQL servers run with binlog_format=ROW and gtid_mode=ON",
            )
        if image.upper() == "MINIMAL":
            yield error(
                Kind.SOURCE_MISCONFIGURED,
                f"the shard {shard} has binlog_row_image=MINIMAL, which Vitess does not stream",
                "SET PERSIST binlog_row_image = FULL; on its MySQL servers",
            )
        elif image.upper() != "FULL":
            yield warning(
                Kind.SOURCE_MISCONFIGURED,
                f"the shard {shard} has binlog_row_image={image}: columns that an update leaves as they are "
                "are not sent, and count as unchanged",
                "SET PERSIST binlog_row_image = FULL; on its MySQL servers, to have whole rows",
            )

    def _cascade_findings(self, vtgate: Vtgate, shard: str) -> Iterator[Finding]:
        for table, key in unlogged_cascades(vtgate, self._source, shard):
            if self._source.captures(self._source.keyspace, table):
                name = f"{self._source.keyspace}.{table}"
                yield warning(
                    Kind.SOURCE_MISCONFIGURED,
                    f"the foreign key {key} of {name} changes rows by CASCADE or SET NULL: MySQL does not "
                    "write these changes to its binlog, so they are not captured",
                    'set "foreignKeyMode": "managed" in the keyspace\'s vschema, so that vtgate makes these '
                    "changes; or declare the key without these actions",
                    name,
                )

    def _column_findings(self, vtgate: Vtgate, shard: str) -> Iterator[Finding]:
        columns = table_columns(vtgate, self._source, shard)
        yield from column_findings(self._source, shard, columns)
        kept = ColumnPolicy() if self._log is None else kept_disclosure(self._log, TASK)
        yield from setting_findings(self._source, kept, columns)

    def tables(self) -> Sequence[tuple[str, str]]:
        if self._vtgate is None:
            return []
        names = table_names(self._vtgate)
        found = ((self._source.keyspace, name) for name in names)
        return [table for table in found if self._source.captures(*table)]

    def relations(self, wants: Callable[[str, str], bool]) -> Sequence[Relation]:
        return []

    def close(self) -> None:
        if self._vtgate is not None:
            self._vtgate.close()
            self._vtgate = None
