"""Queries open transactions: a new slot waits for their end, and the server keeps WAL for them."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.connection.session import Session

# A transaction holds a lock on its own xid, which every role can see; its details in pg_stat_activity
# are visible only to members of pg_read_all_stats. Prepared transactions have no process.
_OPEN = """
SELECT * FROM (
  SELECT l.pid AS pid, '' AS gid, a.usename AS user, a.datname AS database,
         a.application_name AS application, a.state AS state,
         extract(epoch FROM clock_timestamp() - a.xact_start) AS age_s, l.xid_age, l.xid
    FROM (SELECT pid, max(age(transactionid)) AS xid_age,
                 (array_agg(transactionid::text ORDER BY age(transactionid) DESC))[1] AS xid
            FROM pg_locks
           WHERE locktype = 'transactionid' AND granted AND mode = 'ExclusiveLock' AND pid IS NOT NULL
           GROUP BY pid) l
    LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  UNION ALL
  SELECT NULL, p.gid, p.owner, p.database, '', 'prepared',
         extract(epoch FROM clock_timestamp() - p.prepared), age(p.transaction), p.transaction::text
    FROM pg_prepared_xacts p
) t ORDER BY xid_age DESC LIMIT 5
"""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An open transaction.

    `gid` is set for a prepared transaction, which has no process. What the server hides from a
    role without `pg_read_all_stats` is empty, and `age_s` is None.
    """

    pid: int | None
    gid: str
    user: str
    database: str
    application: str
    state: str
    age_s: float | None
    xid: str = ""

    @property
    def identity(self) -> str:
        """A unique name, also among the transactions of one process."""
        return f"{self.pid}/{self.xid}"

    @property
    def words(self) -> str:
        """A description for messages. Names come from clients, so they are shown with `repr`."""
        who = f"prepared transaction {self.gid!r}" if self.pid is None else f"process {self.pid}"
        details = [
            f"{name} {value!r}"
            for name, value in (
                ("user", self.user),
                ("database", self.database),
                ("application", self.application),
            )
            if value
        ]
        if self.state:
            details.append(self.state)
        if self.age_s is not None:
            details.append(f"open for {self.age_s:.0f} s")
        return f"{who} ({', '.join(details)})" if details else who

    @property
    def repair(self) -> str:
        """The SQL that ends it."""
        if self.pid is not None:
            return f"SELECT pg_terminate_backend({self.pid});"
        return f"ROLLBACK PREPARED {quote_literal(self.gid)};"


def open_transactions(session: Session) -> tuple[OpenTransaction, ...]:
    """Return the oldest open transactions of the whole cluster, including prepared ones."""
    return tuple(
        OpenTransaction(
            pid=row.optional_number("pid"),
            gid=row.text("gid"),
            user=row.text("user"),
            database=row.text("database"),
            application=row.text("application"),
            state=row.text("state"),
            age_s=float(row["age_s"]) if row["age_s"] else None,
            xid=row.text("xid"),
        )
        for row in session.run(_OPEN, "look for open transactions")
    )
