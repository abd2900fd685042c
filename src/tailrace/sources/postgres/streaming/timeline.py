"""Follows the timeline of a standby from which changes are streamed.

A promoted standby continues to send over the same connection, from its new timeline. The next connection
compares the log's timeline with the server's; a log that continued under the old timeline would look like
one with transactions that the failover lost. So before appending anything that the server did not replay
while it was a standby, the server is queried, and a new timeline is stored first.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from tailrace.model import parse_lsn
from tailrace.protocol.frames import Bytes
from tailrace.sources.postgres.connection.errors import connection_lost
from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.streaming import frame_filters

log = structlog.get_logger(__name__)

# After the promotion, `replayed` is the end of the old timeline. Only members of pg_read_all_stats see the
# timeline that a standby receives.
_WHERE = """
SELECT pg_is_in_recovery() AS standby, pg_last_wal_replay_lsn() AS replayed,
       CASE WHEN pg_is_in_recovery() THEN (SELECT received_tli FROM pg_stat_wal_receiver)
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END AS timeline,
       (SELECT active_pid FROM pg_replication_slots WHERE slot_name = {slot}) AS pid
"""


class StandbyTimeline:
    """Follows the timeline of the standby of one connection. Used only by the receiving thread.

    :param connect: opens a session for SQL on the same server.
    :param slot: the streamed slot; if its server process is not `pid`, another server has answered.
    :param timeline: the log's timeline.
    :param keep: stores another timeline durably.
    """

    def __init__(
        self, connect: Callable[[], Session], slot: str, pid: int, timeline: int, keep: Callable[[int], None]
    ) -> None:
        self._connect = connect
        self._slot = slot
        self._pid = pid
        self._timeline = timeline
        self._keep = keep
        self._session: Session | None = None
        self._replayed = 0  # while it was a standby: everything before is on the known timeline
        self._promoted = False

    def before_append(self, data: Bytes, *, unit_open: bool) -> None:
        """Store the timeline of the transactions that end in `data`, complete frames, if it is a new one.

        :raises TailraceError: `SOURCE_UNREACHABLE` if the server can't be queried.
        """
        if not self._promoted and frame_filters.before(data, self._replayed, unit_open=unit_open) < len(data):
            self._ask()

    def before_position(self, lsn: int) -> None:
        """Do the same as `before_append` for the position `lsn`."""
        if not self._promoted and lsn > self._replayed:
            self._ask()

    def close(self) -> None:
        """Close the session, if there is one."""
        if self._session is not None:
            self._session.close()

    def _ask(self) -> None:
        attempted = "look at the standby's timeline"
        if self._session is None:
            self._session = self._connect()
        row = self._session.run(_WHERE.format(slot=quote_literal(self._slot)), attempted)[0]
        if row["pid"] != str(self._pid):
            raise connection_lost(attempted, "another server answers than the one that sends the stream")
        timeline = row.number("timeline")
        if timeline > self._timeline:
            log.info("the standby is on another timeline", timeline=timeline, before=self._timeline)
            self._keep(timeline)
            self._timeline = timeline
        self._promoted = row["standby"] == "f"
        self._replayed = parse_lsn(row["replayed"] or "0/0")
