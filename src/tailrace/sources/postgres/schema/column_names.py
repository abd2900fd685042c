"""Stores the former names of columns, to which the settings of columns also apply."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import keep_renames, kept_renames
from tailrace.changelog.reader import LogReader
from tailrace.changelog.writer import LogWriter
from tailrace.config.patterns import matches_column
from tailrace.config.source.postgres import PostgresSource
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import Bytes, control_json
from tailrace.protocol.metadata_frames import schema_frames
from tailrace.protocol.renames import ColumnName, Renames
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.source_tables import matching_tables
from tailrace.sources.postgres.schema.table_facts import KnownFacts

# Also of partitions, whose rows may have their own tables' names.
_NAMES = """
WITH RECURSIVE meant AS (
  SELECT unnest('{{{oids}}}'::oid[]) AS oid
   UNION SELECT i.inhrelid FROM pg_inherits i JOIN meant m ON m.oid = i.inhparent)
SELECT a.attrelid::bigint AS relation, a.attnum AS number, n.nspname AS schema, c.relname AS table,
       a.attname AS column
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE a.attrelid IN (SELECT oid FROM meant) AND a.attnum > 0 AND NOT a.attisdropped
"""


class ColumnNames:
    """Stores the names that columns have had. Used only by the thread that appends.

    :raises TailraceError: as `Session.run`; `LOG_CORRUPT`, `LOG_FULL`, `LOG_WRITE_FAILED`.
    """

    def __init__(
        self, log: LogDirectory, writer: LogWriter, session: Session, source: PostgresSource
    ) -> None:
        self._log = log
        kept = kept_renames(log, TASK)
        if kept is None:
            # The log is new, or of an earlier version: the names are read from its frames.
            with LogReader.open(log, TASK) as reader:
                kept = reader.renames()
        known = _facts_in(writer.schema_in_force.items())
        now = _names_now(session, (facts.relation for facts in known))
        for facts in known:
            kept = kept.with_names(facts, now.get(facts.relation, {}))
        self._renames = kept
        keep_renames(log, TASK, kept)
        self.look(session, source)

    def look(self, session: Session, source: PostgresSource) -> None:
        """Store the present column names of all tables that a column pattern matches.

        The frames lack a column that a snapshot leaves out, and a name that changes before the first row.
        """
        patterns = [pattern for _, pattern in source.column_patterns()]
        if not patterns:
            return
        now = _names_now(session, (table.oid for table in matching_tables(session, source)))
        concerned = {
            relation: columns
            for relation, columns in now.items()
            if any(matches_column(pattern, *name) for name in columns.values() for pattern in patterns)
        }
        self._keep(self._renames.with_columns(concerned))

    @property
    def renames(self) -> Renames:
        """The stored names of columns. Only for the thread that appends."""
        return self._renames

    def note(self, chunk: Bytes, in_force: KnownFacts) -> None:
        """Store the names in a chunk's facts, durably.

        :param in_force: the facts before the chunk.
        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`; `PROTOCOL_VIOLATION`.
        """
        known, renames = KnownFacts(base=in_force), self._renames
        for facts in _facts_in(schema_frames(chunk)):
            renames = renames.after(known.get(facts.relation), facts)
            known.put(facts)
        self._keep(renames)

    def _keep(self, renames: Renames) -> None:
        if renames != self._renames:
            keep_renames(self._log, TASK, renames)
            self._renames = renames


def _facts_in(frames: Iterable[tuple[str, bytes]]) -> list[Facts]:
    return [Facts.from_json(control_json(frame)) for key, frame in frames if key.startswith("F")]


def _names_now(session: Session, oids: Iterable[int]) -> dict[int, dict[int, ColumnName]]:
    oids = list(oids)
    if not oids:
        return {}
    command = _NAMES.format(oids=",".join(map(str, oids)))
    found: dict[int, dict[int, ColumnName]] = {}
    for row in session.run(command, "look at the names of columns"):
        name = (*row.name, row.text("column"))
        found.setdefault(row.number("relation"), {})[row.number("number")] = name
    return found
