"""The names that columns have had, kept beside the log before it has a row under a new one.

At the start the server is asked for the names that the log's columns have now: the stream tells them only
with the next row of a table, and the configuration may name columns as they are called now.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.disclosure import keep_renames, kept_renames
from tailrace.changelog.reader import LogReader
from tailrace.changelog.writer import LogWriter
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import Bytes, control_json, schema_frames
from tailrace.protocol.renames import ColumnName, Renames
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.table_metadata import KnownFacts

_NAMES = """
SELECT a.attrelid::bigint AS relation, a.attnum AS number, n.nspname AS schema, c.relname AS table,
       a.attname AS column
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE a.attrelid = ANY ('{{{oids}}}'::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
"""


class ColumnNames:
    """Keeps the names that columns have had. Belongs to the thread that appends.

    :raises TailraceError: as `Session.run`; `LOG_CORRUPT`, `LOG_FULL`, `LOG_WRITE_FAILED`.
    """

    def __init__(self, log: LogDirectory, task: str, writer: LogWriter, session: Session) -> None:
        self._log, self._task = log, task
        kept = kept_renames(log, task)
        if kept is None:
            # A version before wrote the log, or it is new: what it still has tells.
            with LogReader.open(log, task) as reader:
                kept = reader.renames()
        known = _facts_in(writer.schema_in_force.items())
        now = _names_now(session, (facts.relation for facts in known))
        for facts in known:
            kept = kept.with_names(facts, now.get(facts.relation, {}))
        self._renames = kept
        keep_renames(log, task, kept)

    @property
    def renames(self) -> Renames:
        """The names that columns have had, as they are kept. The thread that appends."""
        return self._renames

    def note(self, chunk: Bytes, in_force: KnownFacts) -> None:
        """Keep the names in a chunk's facts, durably.

        :param in_force: the facts before the chunk.
        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`; `PROTOCOL_VIOLATION`.
        """
        known, renames = KnownFacts(base=in_force), self._renames
        for facts in _facts_in(schema_frames(chunk)):
            renames = renames.after(known.get(facts.relation), facts)
            known.put(facts)
        if renames != self._renames:
            keep_renames(self._log, self._task, renames)
            self._renames = renames


def _facts_in(frames: Iterable[tuple[str, bytes]]) -> list[Facts]:
    return [Facts.from_json(control_json(frame)) for key, frame in frames if key.startswith("F")]


def _names_now(session: Session, oids: Iterable[int]) -> dict[int, dict[int, ColumnName]]:
    oids = list(oids)
    if not oids:
        return {}
    command = _NAMES.replace("{{{oids}}}", "{" + ",".join(map(str, oids)) + "}")
    found: dict[int, dict[int, ColumnName]] = {}
    for row in session.run(command, "look at the names of columns"):
        name = row["schema"] or "", row["table"] or "", row["column"] or ""
        found.setdefault(int(row["relation"] or 0), {})[int(row["number"] or 0)] = name
    return found
