"""Checks the slot and the publication periodically, on a separate thread and connection.

Capture neither waits for it nor fails with it: failed queries are repeated later. Each check is a
few small queries; the pause after a slow one is proportionally longer, up to five minutes, so the
watch uses at most about a fiftieth of one connection's time. The heartbeat writes over the same
connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from tailrace.backoff import Backoff
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Stopped, TailraceError
from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_table
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.publication import (
    left_out,
    names_by_oid,
    publication_warnings,
    snapshot_command,
    unlogged_warning,
)
from tailrace.sources.postgres.schema.source_tables import Name
from tailrace.sources.postgres.slot.health import concerns, look
from tailrace.sources.postgres.slot.heartbeat import Heartbeat
from tailrace.sources.postgres.slot.open_transactions import OpenTransaction
from tailrace.sources.postgres.streaming.task_log import TaskLog
from tailrace.sources.progress import SourceHealth, SourceWarning

log = structlog.get_logger(__name__)

#: Seconds until the first check, and between checks while a slot is created, to show what it waits for.
SOON_S = 3.0
#: The pause after a check is at least this many times as long as the check took.
PAUSE_SHARE = 50
PAUSE_S_MAX = 300.0
#: Timeout for locks, in seconds; only the heartbeat's query may need one.
LOCK_WAIT_S = 1.0
#: Interval, in seconds, at which a warning is repeated while it holds; the shorter one while creating a slot.
REPEAT_S = 600.0
REPEAT_SOON_S = 30.0
AGAIN_S_MAX = 60.0
#: Interval, in seconds, of the search for new tables, which reads all table names of the database.
NEW_TABLES_S = 60.0
CLOSE_WAIT_S = 1.0

_UNLOGGED = """
SELECT c.oid AS oid, n.nspname AS schema, c.relname AS table
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'u'
"""


class SlotWatch:
    """Watches one slot and its publication from `start` to `close`.

    :param name: the pipeline's name, for messages.
    :param task_log: returns the log into which changes are captured; None: it is not open yet.
    """

    def __init__(self, source: PostgresSource, name: str, task_log: Callable[[], TaskLog | None]) -> None:
        self._source = source
        self._name = name
        self._task_log = task_log
        self._interval_s = source.slot_watch.interval_s
        self._heartbeat = Heartbeat(source.heartbeat, source.publication) if source.heartbeat.writes else None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailrace-slot-watch", daemon=True)
        self._session: Session | None = None
        self._said: dict[str, float] = {}
        self._first_seen: dict[str, float] = {}
        self._backoff = Backoff(first_s=SOON_S, longest_s=AGAIN_S_MAX)
        self._beat_concern: SourceWarning | None = None
        self._publication_warnings: list[SourceWarning] = []
        self._publication_looked_s = float("-inf")
        #: The slot as of the last check. Replaced as a whole; read from any thread.
        self.health: SourceHealth | None = None
        self._creating = False
        self.concerns: tuple[SourceWarning, ...] = ()

    def start(self) -> None:
        """Start the thread, if the slot is to be watched or a heartbeat written."""
        if self._interval_s or self._heartbeat is not None:
            self._thread.start()

    def close(self) -> None:
        """End the watch; a connection that is being opened ends by itself."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        now = time.monotonic()
        look_at = now + min(SOON_S, self._interval_s) if self._interval_s else float("inf")
        beat_at = now + self._source.heartbeat.interval_s if self._heartbeat is not None else float("inf")
        try:
            while not self._ending.wait(max(0.0, min(look_at, beat_at) - time.monotonic())):
                began = time.monotonic()
                if self._turn(look=began >= look_at, beat=began >= beat_at):
                    pause_s = min(PAUSE_S_MAX, PAUSE_SHARE * (time.monotonic() - began))
                else:
                    pause_s = self._backoff.wait_s
                now = time.monotonic()
                if began >= look_at:
                    look_at = now + max(pause_s, self._look_interval_s())
                if began >= beat_at:
                    beat_at = now + max(pause_s, self._source.heartbeat.interval_s)
        except Stopped:
            pass
        finally:
            self._disconnect()

    def _look_interval_s(self) -> float:
        creating = self._creating
        return min(SOON_S, self._interval_s) if creating else self._interval_s

    def _turn(self, *, look: bool, beat: bool) -> bool:
        """Write the heartbeat and check the slot, as far as due; return False if that failed."""
        try:
            if self._session is None:
                self._session = Session.connect(self._source, self._ending, lock_wait_s=LOCK_WAIT_S)
            if beat and self._heartbeat is not None:
                self._beat_concern = self._heartbeat.beat(self._session)
            if look:
                self._look(self._session)
        except TailraceError as error:
            self._disconnect()
            self._backoff = self._backoff.failed()
            if self._backoff.attempts == 2:  # a server that merely restarts is not reported
                log.warning("the slot can't be watched now", pipeline=self._name, message=error.message)
            return False
        self._backoff = self._backoff.after_success()
        return True

    def _look(self, session: Session) -> None:
        source = self._source
        health = look(session, source.slot)
        if health is not None and health.holders:
            health = replace(health, holders=self._aged(health.holders))
        found = [] if health is None else concerns(source.slot, health, source.slot_watch)
        if health is not None and not health.creating:
            found += self._left_out(session)
            found += self._of_publication(session)
        if self._beat_concern is not None:
            found.append(self._beat_concern)
        self._creating = health is not None and health.creating
        self.health, self.concerns = None if health is None else health.shown(), tuple(found)
        self._say(found, REPEAT_SOON_S if self._creating else REPEAT_S)

    def _aged(self, seen: tuple[OpenTransaction, ...]) -> tuple[OpenTransaction, ...]:
        """Return `seen`; if the server hides a transaction's age, with the time since it was first seen."""
        now = time.monotonic()
        self._first_seen = {holder.identity: self._first_seen.get(holder.identity, now) for holder in seen}
        return tuple(
            replace(holder, age_s=now - self._first_seen[holder.identity]) if holder.age_s is None else holder
            for holder in seen
        )

    def _left_out(self, session: Session) -> list[SourceWarning]:
        publication = self._source.publication
        found = []
        names = left_out(session, publication, self._captured())
        unlogged = _unlogged_tables(session, self._source)
        if (task_log := self._task_log()) is not None:
            published = names_by_oid(session, publication)
            found += task_log.gaps.look({**names, **unlogged}, published, task_log.snapshots.plans)
        for oid, (schema, name) in names.items():
            if not self._source.captures(schema, name):
                continue  # it was removed deliberately, or is a partition that was detached
            if oid in unlogged:
                found.append(unlogged_warning((schema, name), (schema, name)))
                continue
            table = quote_table(schema, name)
            found.append(
                SourceWarning(
                    f"table_left_out:{schema}.{name}",
                    f"the table {table} was removed from the publication {publication!r}: its changes since "
                    "then are not captured",
                    f"ALTER PUBLICATION {quote_identifier(publication)} ADD TABLE {table}; -- then, for the "
                    f"changes in between: {snapshot_command(schema, name)}",
                )
            )
        return found

    def _captured(self) -> list[int]:
        """Return the oids of the tables that the log has."""
        task_log = self._task_log()
        return [] if task_log is None else task_log.appender.tables

    def _of_publication(self, session: Session) -> list[SourceWarning]:
        now = time.monotonic()
        if now - self._publication_looked_s >= NEW_TABLES_S:
            self._publication_looked_s = now
            captured = frozenset(self._captured())
            self._publication_warnings = publication_warnings(session, self._source, captured)
        return self._publication_warnings

    def _say(self, found: list[SourceWarning], repeat_s: float) -> None:
        now = time.monotonic()
        self._said = {concern.key: at for concern in found if (at := self._said.get(concern.key)) is not None}
        for concern in found:
            if now - self._said.get(concern.key, float("-inf")) >= repeat_s:
                self._said[concern.key] = now
                log.warning(concern.message, pipeline=self._name, repair=concern.repair)

    def _disconnect(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _unlogged_tables(session: Session, source: PostgresSource) -> dict[int, Name]:
    rows = session.run(_UNLOGGED, "look for unlogged tables")
    return {row.number("oid"): row.name for row in rows if source.captures(*row.name)}
