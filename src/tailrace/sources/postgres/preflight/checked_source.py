"""A connected source with the facts that its checks share."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.config import PipelineConfig, PostgresSource
from tailrace.config.source.postgres import postgres_source
from tailrace.sources.postgres.connection.session import Row, Session

# `ALTER ROLE … SET role` gives the session another role's privileges, but whether it may replicate is decided
# by the role that logs in.
_SERVER = """
SELECT current_setting('wal_level') AS wal_level,
       pg_postmaster_start_time() || ' ' || current_setting('port') AS instance,
       current_setting('max_replication_slots')::int AS slots_max,
       (SELECT count(*) FROM pg_replication_slots) AS slots,
       current_setting('max_wal_senders')::int AS senders_max,
       (SELECT count(*) FROM pg_stat_replication) AS senders,
       pg_size_bytes(current_setting('max_slot_wal_keep_size')) AS keep_bytes,
       extract(epoch FROM coalesce(current_setting('idle_replication_slot_timeout', true), '0')
                          ::interval)::int AS idle_timeout_s,
       current_setting('hot_standby_feedback') AS feedback,
       pg_is_in_recovery() AS standby,
       current_setting('transaction_read_only') AS read_only,
       current_user AS role, session_user AS login,
       current_database() AS database,
       (SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()) AS tls,
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS superuser,
       EXISTS (SELECT FROM pg_roles r
                WHERE r.rolname = session_user AND (r.rolsuper OR r.rolreplication)
                   OR r.rolname IN ('rds_replication', 'rds_superuser', 'cloudsqlsuperuser')
                  AND pg_has_role(session_user, r.oid, 'member')) AS may_replicate,
       has_database_privilege(current_database(), 'CREATE') AS may_create
"""


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """A source with an open session, for its checks.

    :ivar server: facts of the server and the role.
    :ivar log: the pipeline's log, if there is one.
    """

    session: Session
    server: Row
    pipeline: PipelineConfig
    source: PostgresSource
    log: LogDirectory | None

    @classmethod
    def of(cls, session: Session, pipeline: PipelineConfig, log: LogDirectory | None) -> CheckedSource:
        """Return the source of a pipeline, with the facts of its server.

        :raises TailraceError: as `Session.run`.
        """
        [server] = session.run(_SERVER, "look at the server")
        return cls(session, server, pipeline, postgres_source(pipeline.source), log)

    @property
    def has_begun(self) -> bool:
        """Whether a start has opened the log."""
        return self.log is not None and TASK in self.log.tasks()

    @property
    def has_captured(self) -> bool:
        """Whether anything was appended to the log."""
        return self.log is not None and self.has_begun and bool(self.log.segments(TASK))
