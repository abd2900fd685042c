"""The heartbeat's own writes: a logical message, or a query of the user's.

Nothing needs them for WAL to be freed: keepalives are acknowledged without any write (see
`stream`). They are for those who want to see a change come through, or who capture through
something that swallows keepalives.
"""

from __future__ import annotations

from tailrace.capture.publication import READ_ONLY
from tailrace.capture.session import Session
from tailrace.capture.slot_health import Concern
from tailrace.config.slot_care import HeartbeatConfig
from tailrace.errors import TailraceError

#: Prefix of the messages, by which a consumer knows them.
PREFIX = "tailrace.heartbeat"

_MESSAGE = (
    "SELECT CASE WHEN pg_is_in_recovery() THEN NULL "
    "ELSE pg_logical_emit_message({transactional}, '" + PREFIX + "', '') END AS lsn"
)


class Heartbeat:
    """Runs what the configuration says, once a call, on the watch's thread."""

    def __init__(self, config: HeartbeatConfig) -> None:
        self._query = config.query
        self._message = _MESSAGE.format(transactional=str(config.action == "transaction").lower())

    def beat(self, session: Session) -> Concern | None:
        """Write once; return what is wrong with it, None if it did its work.

        :raises TailraceError: if the connection was lost.
        """
        try:
            if self._query is None:
                told = session.run(self._message, "write a heartbeat")
                return _ON_STANDBY if told and told[0]["lsn"] is None else None
            rows = session.affected(self._query, "run the heartbeat's query")
        except TailraceError as error:
            state = str(error.context.get("sqlstate", ""))
            if not state:
                raise
            if state == READ_ONLY:
                return _ON_STANDBY
            return Concern(
                "heartbeat_failed",
                error.message,
                "correct source.heartbeat, or grant the role what the query needs; until then keepalives "
                "are acknowledged as ever",
            )
        if rows == 0:
            return Concern(
                "heartbeat_without_effect",
                "the heartbeat's query changed no row, so that it writes nothing",
                "insert the row that it updates, or make it an INSERT … ON CONFLICT DO UPDATE",
            )
        return None


_ON_STANDBY = Concern(
    "heartbeat_on_standby",
    "the heartbeat can't write: the server is read only. Keepalives are acknowledged instead",
    "take action or query out of source.heartbeat, or connect to the primary",
)
