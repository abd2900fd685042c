"""After changes were lost, under `snapshot: when_needed`: all tables are read again, and the stream goes on.

First it is written down that all tables are to be read, then the slot is made, then the log's position is
moved to where the slot begins: whatever is killed between, the next start does it again or goes on. The rows
are read beside the stream, as those of a snapshot on demand, with which a mirror equals the source.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import structlog

from tailrace import failpoints
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import format_lsn
from tailrace.protocol import frames
from tailrace.sources.postgres.connection import server
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.publication import require_publication
from tailrace.sources.postgres.snapshot.requests import Requests
from tailrace.sources.postgres.streaming.appender import Appender
from tailrace.sources.postgres.streaming.reconcile import SlotFacts

log = structlog.get_logger(__name__)


def renew(
    session: Session,
    source: PostgresSource,
    appender: Appender,
    requests: Requests,
    slot: SlotFacts | None,
    lost: TailraceError,
    *,
    create: Callable[[], server.CreatedSlot],
) -> None:
    """Have the log go on where the slot begins, and all tables be read again.

    :param session: for replication.
    :param slot: as it is; one that can be streamed from is kept.
    :param lost: why changes were lost.
    :param create: creates the slot.
    :raises TailraceError: `PUBLICATION_MISSING`; `SINK_KEY_MISSING` if a table can't be read again; what the
        server refused with. `SLOT_IN_USE`, `SLOT_CREATION_HELD_UP` may pass.
    """
    require_publication(session, source.publication)
    try:
        requests.ask_for_all(session)
    except TailraceError as error:
        if error.kind is not Kind.SINK_KEY_MISSING:
            raise
        raise TailraceError(
            error.kind, f"{lost.message}; {error.message}", f"{error.hint}. Or: {lost.hint}", error.context
        ) from None
    failpoints.hit("snapshot.after_plan")
    if slot is not None and slot.confirmed_flush_lsn is not None and not slot.invalidation:
        position = slot.confirmed_flush_lsn
    else:
        if slot is not None:
            server.drop_slot(session, source.slot)
        position = create().consistent_point
    failpoints.hit("snapshot.after_slot")
    before = appender.tail.position
    if position > before:
        frame = frames.control_frame(frames.PROGRESS, position, time.time_ns() // 1000, {})
        appender.append(np.frombuffer(frame, np.uint8))
        appender.sync()
    failpoints.hit("snapshot.after_handover")
    log.warning(
        "changes were lost: all tables are read again",
        reason=lost.message,
        lost_from=format_lsn(before),
        lost_to=format_lsn(position),
    )
