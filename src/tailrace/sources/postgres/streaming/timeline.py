"""The timeline of a standby that is streamed from.

A standby that is promoted goes on sending over the same connection, from its new timeline. The next
connection compares the log's timeline with the server's, and takes a log that went on without knowing for
one that has what the failover lost. So nothing that the standby did not replay while it was one is appended
before it was asked, and a new timeline is written down first.
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

# What is replayed after it was promoted is the end of the old timeline. The one that a standby receives is
# shown to members of pg_read_all_stats only.
_WHERE = """
SELECT pg_is_in_recovery() AS standby, pg_last_wal_replay_lsn() AS replayed,
       CASE WHEN pg_is_in_recovery() THEN (SELECT received_tli FROM pg_stat_wal_receiver)
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END AS timeline,
       (SELECT active_pid FROM pg_replication_slots WHERE slot_name = {slot}) AS pid
"""


class StandbyTimeline:
    """Follows the timeline of the standby that one connection streams from. The receiving thread's.

    :param connect: opens a session for SQL with the same server.
    :param slot: the slot that is streamed from, by the server's process `pid`: another server is known by it.
    :param timeline: that the log is on.
    :param keep: writes another one down, durably.
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
        self._replayed = 0  # while it was a standby: all before lies on the timeline that is known
        self._promoted = False

    def before_append(self, data: Bytes, *, unit_open: bool) -> None:
        """Make sure that the timeline of all transactions that end in `data`, whole frames, is written down.

        :raises TailraceError: `SOURCE_UNREACHABLE` if that can't be found out.
        """
        if not self._promoted and frame_filters.before(data, self._replayed, unit_open=unit_open) < len(data):
            self._ask()

    def before_position(self, lsn: int) -> None:
        """As `before_append`, for the position `lsn`."""
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
            raise connection_lost(attempted, "another server answers than the one that is streamed from")
        timeline = row.number("timeline")
        if timeline > self._timeline:
            log.info("the standby is on another timeline", timeline=timeline, before=self._timeline)
            self._keep(timeline)
            self._timeline = timeline
        self._promoted = row["standby"] == "f"
        self._replayed = parse_lsn(row["replayed"] or "0/0")
