"""Creates a slot, whose creation exports a snapshot.

The server creates a slot only when every running transaction has ended, which may take long. Meanwhile a
second session queries which transactions these are, for a warning, and a position that is certainly
before the consistent point, so that a stream which must not pass that point can continue up to this
position.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, Stopped, TailraceError
from tailrace.sources.postgres.connection import server
from tailrace.sources.postgres.connection.server import ExportedSnapshot
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.published_tables import terms_digest
from tailrace.sources.postgres.slot.open_transactions import OpenTransaction, open_transactions
from tailrace.sources.postgres.snapshot.exported_snapshot import enter, leave

log = structlog.get_logger(__name__)

LOOK_S = 0.1

#: Seconds until transactions that delay the creation are reported, between reports, and their minimum age.
NAMED_AFTER_S = 2.0
NAMED_EVERY_S = 30.0
PASSING_S = 1.0

# A snapshot lists running transactions before its xmax, which follows the last one that has *ended*: newer
# ones are only in pg_locks, where each holds a lock on its own xid. A snapshot of a standby lists none of the
# primary's transactions, but its xmin is the oldest of them. xids are without their epoch.
_RUNNING = """
WITH now AS MATERIALIZED (SELECT pg_current_snapshot() AS seen),
     bounds AS (SELECT pg_snapshot_xmin(seen)::text::bigint AS xmin,
                       pg_snapshot_xmax(seen)::text::bigint AS xmax FROM now)
SELECT pg_snapshot_xip(seen)::text::bigint & 4294967295 AS xid FROM now
UNION
SELECT transactionid::text::bigint FROM pg_locks, bounds
 WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted AND NOT pg_is_in_recovery()
   AND (transactionid::text::bigint - xmax) & 4294967295 < 2147483648
UNION
SELECT xmin & 4294967295 FROM bounds WHERE pg_is_in_recovery() AND xmin < xmax
"""


class Horizon:
    """Decides whether a slot that is being created can be consistent already. Pure.

    The server builds the slot's first snapshot in two steps: it waits for all transactions that
    ran at the first step, including `running`, then for all that ran at the second. So while one
    of `running` runs, the first step has not ended; and all transactions that ran when this was
    last observed must end before the slot is consistent. On a standby, this applies to the
    transactions that it has replayed.

    :param running: transactions, or some of them, that ran before the slot's creation was requested.
    """

    def __init__(self, running: frozenset[int]) -> None:
        self._first = running
        self._second: frozenset[int] = frozenset()

    def passed(self, running: frozenset[int]) -> bool:
        """Return whether the consistent point lies after all WAL written so far.

        :param running: transactions that run now; queried after the end of the WAL was queried.
        """
        if self._first & running:
            self._second = running
            return True
        self._first = frozenset()
        return bool(self._second & running)


class SlotCreation:
    """Creates a slot on `session`, which holds the exported snapshot until its next command.

    :param side: a second session, for queries.
    :param behind: called with LSNs before the consistent point while that is unknown.
    """

    def __init__(
        self,
        session: Session,
        side: Session,
        stopping: threading.Event,
        *,
        behind: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._session = session
        self._side = side
        self._stopping = stopping
        self._behind = behind
        self._exported: ExportedSnapshot | None = None
        self._error: BaseException | None = None

    def create(
        self, slot: str, *, temporary: bool, deadline_s: float, failover: bool = False
    ) -> ExportedSnapshot:
        """Create the slot, within `deadline_s`.

        :param temporary: the server drops the slot when `session` is closed.
        :param failover: as for `server.create_slot`.
        :raises TailraceError: as `server.create_slot`; `SLOT_CREATION_HELD_UP`, which names the open
            transactions.
        :raises Stopped: if the task was asked to stop.
        """
        horizon = Horizon(running(self._side))
        self._behind(server.wal_end(self._side) or 0)
        began = time.monotonic()
        named_at = began + NAMED_AFTER_S
        asking = threading.Thread(
            target=self._ask, args=(slot, temporary, failover), name="tailrace-create-slot", daemon=True
        )
        asking.start()
        try:
            while True:
                asking.join(LOOK_S)
                if not asking.is_alive():
                    break
                if self._stopping.is_set():
                    raise Stopped
                end = server.wal_end(self._side) or 0
                if horizon.passed(running(self._side)):
                    self._behind(end)
                now = time.monotonic()
                if now >= named_at:
                    named_at = now + NAMED_EVERY_S
                    self._name(now - began)
                if now - began > deadline_s:
                    raise held_up(lasting_transactions(self._side), deadline_s)
        except BaseException:
            if asking.is_alive():
                self._cancel()
                asking.join(5)
            raise
        if self._error is not None:
            raise self._error
        assert self._exported is not None
        return self._exported

    def _ask(self, slot: str, temporary: bool, failover: bool) -> None:
        try:
            self._exported = server.create_slot(self._session, slot, temporary=temporary, failover=failover)
        except BaseException as error:  # noqa: BLE001 - raised again on the waiting thread
            self._error = error

    def _cancel(self) -> None:
        # The server waits for a lock and would not notice a closed connection.
        try:
            self._side.run(
                f"SELECT pg_cancel_backend({self._session.backend_pid})", "give up creating the slot"
            )
        except (TailraceError, Stopped) as error:
            log.debug("could not cancel the creation of a slot", reason=str(error))

    def _name(self, waited_s: float) -> None:
        if found := lasting_transactions(self._side):
            log.warning(
                "the snapshot waits for older transactions to end",
                waited_s=round(waited_s),
                transactions=described(found),
            )


def create_own_slot(session: Session, source: PostgresSource, stopping: threading.Event) -> ExportedSnapshot:
    """Create the slot of `source`; with `snapshot: only`, a temporary one.

    :param session: a replication session.
    :raises TailraceError: as `SlotCreation.create`; `SNAPSHOT_DELAYED`.
    """
    temporary = source.snapshot == "only"
    with Session.connect(source, stopping) as side:
        before = terms_digest(side, source.publication)
        exported = SlotCreation(session, side, stopping).create(
            source.slot,
            temporary=temporary,
            failover=source.slot_failover,
            deadline_s=server.SLOT_CREATION_DEADLINE_S,
        )
        if not temporary:  # from a temporary slot nothing is decoded
            try:
                _require_steady(side, source.publication, exported, before)
            except TailraceError:
                server.drop_slot(session, source.slot)
                raise
        return exported


def _require_steady(session: Session, publication: str, exported: ExportedSnapshot, before: str) -> None:
    """Check that the publication and its tables were not altered while the slot was created.

    When PostgreSQL decodes, it ignores a transaction that altered the catalogue and ended while the slot
    waited for others (seen on 15 to 18): changes of a table that it published, or values of a column that it
    added, would silently be missing from the stream, although the exported snapshot has them.

    :param before: `published_tables.terms_digest` before the slot's creation was requested.
    :raises TailraceError: `SNAPSHOT_DELAYED`.
    """
    enter(session, exported)
    after = terms_digest(session, publication)
    leave(session)
    if after != before:
        raise TailraceError(
            Kind.SNAPSHOT_DELAYED,
            f"create the replication slot: the publication {publication!r} or a table of it was altered "
            "meanwhile, which PostgreSQL would ignore when it decodes",
            "it is tried again automatically",
        )


def temporary_name(slot: str) -> str:
    """Return a new, unique name for a temporary slot in addition to `slot`."""
    return f"{temporary_prefix(slot)}{secrets.token_hex(6)}"


def temporary_prefix(slot: str) -> str:
    """Return the prefix of the names of temporary slots in addition to `slot`."""
    return f"{slot[:48]}_"


def running(session: Session) -> frozenset[int]:
    """Return the running transactions that have an xid; on a standby, the primary's oldest one."""
    return frozenset(row.number("xid") for row in session.run(_RUNNING, "ask what is running"))


def lasting_transactions(session: Session) -> list[OpenTransaction]:
    """Return the oldest open transactions, without those younger than `PASSING_S`."""
    return [found for found in open_transactions(session) if found.age_s is None or found.age_s > PASSING_S]


def described(found: Sequence[OpenTransaction]) -> str:
    """Return a description of the transactions."""
    return ", ".join(each.words for each in found)


def held_up(found: Sequence[OpenTransaction], waited_s: float) -> TailraceError:
    """Return the error for a slot whose creation older transactions delayed for too long."""
    pids = [each.pid for each in found if each.pid is not None]
    way_out = f"SELECT pg_terminate_backend({pids[0]}), or wait" if pids else "wait"
    return TailraceError(
        Kind.SLOT_CREATION_HELD_UP,
        f"create a replication slot: it waited {waited_s:.0f} s for older transactions to end: "
        + (described(found) or "they are not visible to this role"),
        f"end them ({way_out}); it is tried again",
        {"transactions": len(found)},
    )
