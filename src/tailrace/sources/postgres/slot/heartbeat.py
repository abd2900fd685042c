"""The heartbeat's writes: a logical message, or the user's query.

They are not needed to let the server remove WAL: keepalives are acknowledged without any write (see
`stream`). A message makes the path visible to consumers; a query helps if something between server
and capture drops keepalives. What a query writes is never captured: its transaction is rolled back
if it has written to a table of the publication.
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.config.source.postgres import HeartbeatConfig
from tailrace.errors import TailraceError
from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_table
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.schema.publication import READ_ONLY
from tailrace.sources.postgres.schema.published_tables import published
from tailrace.sources.progress import SourceWarning

#: Prefix of the messages, by which a consumer recognises them.
PREFIX = "tailrace.heartbeat"

_MESSAGE = (
    "SELECT CASE WHEN pg_is_in_recovery() THEN NULL "
    "ELSE pg_logical_emit_message({transactional}, '" + PREFIX + "', '') END AS lsn"
)

# Relations to which this transaction has written, also through functions and triggers, are locked until
# its end. A partition may be published through one of its ancestors. Without a publication: a row of NULLs.
_PUBLISHED = """
WITH RECURSIVE {published},
     written AS (
       SELECT l.relation AS oid FROM pg_locks l
        WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()))
SELECT n.nspname AS schema, c.relname AS table
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid IN (SELECT oid FROM written
                 UNION SELECT a.relid FROM written w CROSS JOIN LATERAL pg_partition_ancestors(w.oid) a)
   AND c.oid IN (SELECT oid FROM published)
UNION ALL SELECT NULL, NULL WHERE NOT EXISTS (SELECT FROM publication)
 ORDER BY 1, 2
"""


class Heartbeat:
    """Writes one heartbeat per call, as configured, on the slot watch's thread.

    :param publication: must not contain the tables to which a query writes.
    """

    def __init__(self, config: HeartbeatConfig, publication: str) -> None:
        self._query = config.query
        self._publication = publication
        self._message = _MESSAGE.format(transactional=str(config.action == "transaction").lower())

    def beat(self, session: Session) -> SourceWarning | None:
        """Write once; return a warning if it had no effect or failed, else None.

        :raises TailraceError: if the connection was lost.
        """
        try:
            if self._query is None:
                written = session.run(self._message, "write a heartbeat")
                return _ON_STANDBY if written and written[0]["lsn"] is None else None
            return self._run_query(session, self._query)
        except TailraceError as error:
            state = str(error.context.get("sqlstate", ""))
            if not state:
                raise
            if state == READ_ONLY:
                return _ON_STANDBY
            return SourceWarning(
                "heartbeat_failed",
                error.message,
                "correct source.heartbeat, or grant the role what the query needs; until then keepalives "
                "are still acknowledged",
            )

    def _run_query(self, session: Session, query: str) -> SourceWarning | None:
        session.run("BEGIN", "begin the heartbeat")
        keep = False
        try:
            rows = session.affected(query, "run the heartbeat's query")
            command = _PUBLISHED.format(published=published(self._publication, session.server_version))
            captured = session.run(command, "look at what the heartbeat wrote")
            keep = not captured
        finally:
            # Fails on a lost connection, like the command before it.
            session.run("COMMIT" if keep else "ROLLBACK", "end the heartbeat")
        if captured:
            return _captured(captured, self._publication) if captured[0]["table"] else None
        if rows == 0:
            return SourceWarning(
                "heartbeat_without_effect",
                "the heartbeat's query changed no row, so it writes nothing",
                "insert the row that it updates, or make it an INSERT … ON CONFLICT DO UPDATE",
            )
        return None


def _captured(tables: Sequence[Row], publication: str) -> SourceWarning:
    names = ", ".join(".".join(row.name) for row in tables)
    quoted = ", ".join(quote_table(*row.name) for row in tables)
    return SourceWarning(
        "heartbeat_captured",
        f"the heartbeat's query writes to {names}, which is captured: it was rolled back",
        f"set source.tables_exclude: [{names}], and ALTER PUBLICATION {quote_identifier(publication)} "
        f"DROP TABLE {quoted}; or use source.heartbeat.action: message; until then "
        "keepalives are still acknowledged",
    )


_ON_STANDBY = SourceWarning(
    "heartbeat_on_standby",
    "the heartbeat can't write: transactions are read only. Keepalives are acknowledged instead",
    "remove action or query from source.heartbeat, or connect to the primary, as a role without "
    "default_transaction_read_only",
)
