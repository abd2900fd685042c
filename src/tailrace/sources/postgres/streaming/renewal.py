"""Continues a log after changes were lost, under `snapshot: when_needed`: all tables are read again.

First the snapshot of all tables is stored in the plans, then the slot is created, then the log's position is
moved to the slot's: after a kill between these steps, the next start repeats them or continues. The rows are
read while streaming, like those of a snapshot on request, after which a mirror equals the source.
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
from tailrace.sources.postgres.streaming.reconcile import CapturePhase, ServerState, SlotFacts
from tailrace.sources.postgres.streaming.task_log import TaskLog

log = structlog.get_logger(__name__)


def renew(
    session: Session,
    source: PostgresSource,
    task_log: TaskLog,
    facts: ServerState,
    lost: TailraceError,
    stopping: threading.Event,
) -> None:
    """Continue the log at the slot's position, and plan to read all tables again.

    :param session: a replication session.
    :param facts: of the server. Its slot is kept if it is usable, unless an interrupted renewal created it.
    :param lost: the error by which changes were lost.
    :raises TailraceError: `PUBLICATION_MISSING`; `SINK_KEY_MISSING` if a table can't be read again; the
        server's error. `SLOT_IN_USE`, `SLOT_CREATION_HELD_UP` and `SOURCE_UNREACHABLE` are transient.
    """
    require_publication(session, source.publication)
    try:
        Requests(source, task_log.snapshots).ask_for_all(session)
    except TailraceError as error:
        if error.kind is not Kind.SINK_KEY_MISSING:
            raise
        message, hint = f"{lost.message}; {error.message}", f"{error.hint}. Or: {lost.hint}"
        raise error.changed(message=message, hint=hint) from None
    failpoints.hit("snapshot.after_plan")
    position = _kept_position(task_log, facts.slot)
    if position is None:
        if facts.slot is not None:
            server.drop_slot(session, source.slot)
        if (state := task_log.state) is not None:
            task_log.keep(replace(state, phase=CapturePhase.RENEWING))
        position = create_own_slot(session, source, stopping).lsn
        server.require_unchanged(session, facts)  # a standby may have been promoted meanwhile
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
    """Return the slot's position if the slot is kept, else None."""
    state = task_log.state
    if slot is None or slot.invalidation or (state is not None and state.phase is CapturePhase.RENEWING):
        return None
    return slot.confirmed_flush_lsn
