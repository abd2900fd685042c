"""What is asked of the source beside the capture: how far it is, and how its slot is."""

from __future__ import annotations

import threading
from contextlib import closing

from tailrace.config import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import parse_lsn
from tailrace.pipeline.background import Background
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.slot.health import SlotHealth
from tailrace.sources.postgres.slot.monitor import look

_WAL_END = (
    "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() "
    "ELSE pg_current_wal_flush_lsn() END AS lsn"
)


def wal_end(source: PostgresSource, stop: threading.Event) -> int:
    """Return the LSN up to which the source's WAL is written at this moment.

    :raises TailraceError: if the source can't be asked.
    :raises Stopped: if `stop` was set meanwhile.
    """
    with closing(Session.connect(source, stop)) as session:
        return _wal_end(session)


def _wal_end(session: Session) -> int:
    lsn = session.run(_WAL_END, "ask the source for the end of its WAL")[0]["lsn"]
    if lsn is None:
        raise TailraceError(
            Kind.SOURCE_QUERY_FAILED, "ask the source for the end of its WAL: it does not tell"
        )
    return parse_lsn(lsn)


def look_within(source: PostgresSource, timeout_s: float) -> tuple[int | None, SlotHealth | None]:
    """Return `wal_end` and the slot's health; None for what is not told in time.

    The name's look-up counts, too. Never raises.
    """
    ends: list[int] = []
    slots: list[SlotHealth] = []
    hurried = source.model_copy(update={"connect_timeout": max(2, int(timeout_s))})
    stop = threading.Event()

    def ask() -> None:
        with closing(Session.connect(hurried, stop)) as session:
            ends.append(_wal_end(session))
            if (health := look(session, source.slot)) is not None:
                slots.append(health)

    asking = Background("ask-source", ask)
    asking.start()
    asking.join(timeout_s)
    stop.set()
    return next(iter(ends), None), next(iter(slots), None)
