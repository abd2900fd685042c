"""How a log goes on after changes were lost, under `snapshot: when_needed`: all tables are read again.

First it is written down that they are to be read, then the slot is made, then the log's position is moved to
where the slot begins: after a kill between these, the next start does it again or goes on. The rows are read
beside the stream, as those of a snapshot on demand, with which a mirror equals the source.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import structlog

from tailrace import failpoints
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import format_lsn
from tailrace.sources.postgres.connection import server
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.publication import require_publication
from tailrace.sources.postgres.slot.creation import create_own_slot
from tailrace.sources.postgres.snapshot.requests import Requests
from tailrace.sources.postgres.streaming.reconcile import CapturePhase, SlotFacts
from tailrace.sources.postgres.streaming.task_log import TaskLog

log = structlog.get_logger(__name__)


def renew(
    session: Session,
    source: PostgresSource,
    task_log: TaskLog,
    slot: SlotFacts | None,
    lost: TailraceError,
    stopping: threading.Event,
) -> None:
    """Have the log go on where the slot begins, and all tables be read again.

    :param session: for replication.
    :param slot: as it is; one that can be streamed from is kept, but for one that a renewal made which did
        not end.
    :param lost: why changes were lost.
    :raises TailraceError: `PUBLICATION_MISSING`; `SINK_KEY_MISSING` if a table can't be read again; what the
        server refused with. `SLOT_IN_USE`, `SLOT_CREATION_HELD_UP` may pass.
    """
    require_publication(session, source.publication)
    try:
        Requests(source, task_log.snapshots).ask_for_all(session)
    except TailraceError as error:
        if error.kind is not Kind.SINK_KEY_MISSING:
            raise
        raise TailraceError(
            error.kind, f"{lost.message}; {error.message}", f"{error.hint}. Or: {lost.hint}", error.context
        ) from None
    failpoints.hit("snapshot.after_plan")
    position = _kept_position(task_log, slot)
    if position is None:
        if slot is not None:
            server.drop_slot(session, source.slot)
        if (state := task_log.state) is not None:
            task_log.keep(replace(state, phase=CapturePhase.RENEWING))
        position = create_own_slot(session, source, stopping).lsn
    failpoints.hit("snapshot.after_slot")
    appender = task_log.appender
    before = appender.tail.position
    if position > before:
        appender.append_progress(position)
        appender.sync()
    failpoints.hit("snapshot.after_handover")
    log.warning(
        "changes were lost: all tables are read again",
        reason=lost.message,
        lost_from=format_lsn(before),
        lost_to=format_lsn(position),
    )


def _kept_position(task_log: TaskLog, slot: SlotFacts | None) -> int | None:
    """Return where the slot begins, if it is kept."""
    state = task_log.state
    if slot is None or slot.invalidation or (state is not None and state.phase is CapturePhase.RENEWING):
        return None
    return slot.confirmed_flush_lsn
