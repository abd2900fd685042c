"""The one question that the engine asks the source itself: how far is it?"""

from __future__ import annotations

import threading
from contextlib import closing

from tailrace.capture.session import Session
from tailrace.config import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import parse_lsn
from tailrace.pipeline.background import Background

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
        lsn = session.run(_WAL_END, "ask the source for the end of its WAL")[0]["lsn"]
    if lsn is None:
        raise TailraceError(
            Kind.SOURCE_QUERY_FAILED, "ask the source for the end of its WAL: it does not tell"
        )
    return parse_lsn(lsn)


def wal_end_within(source: PostgresSource, timeout_s: float) -> int | None:
    """As `wal_end`, but None if there is no answer in time, name look-up included."""
    found: list[int] = []
    hurried = source.model_copy(update={"connect_timeout": max(2, int(timeout_s))})
    stop = threading.Event()
    asking = Background("ask-source", lambda: found.append(wal_end(hurried, stop)))
    asking.start()
    asking.join(timeout_s)
    stop.set()
    return found[0] if found else None
