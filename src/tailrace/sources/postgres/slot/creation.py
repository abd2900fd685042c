"""Creating a slot, whose creation exports a snapshot.

The server creates a slot when every transaction that was under way has ended, which may be long after
it was asked. Meanwhile a second session looks which transactions those are, for a warning, and up to
where the consistent point surely does not lie yet, so that a stream which must not pass that point can
go on behind it.
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

#: Transactions that hold the creation up are named after so long, and again that often; younger ones are not.
NAMED_AFTER_S = 2.0
NAMED_EVERY_S = 30.0
PASSING_S = 1.0

# A snapshot lists those before its xmax, which is after the last one that has *ended*: a transaction that is
# newer than all of those stands in pg_locks alone, where each holds its own id. A snapshot of a standby lists
# none of the primary's transactions, and begins with the oldest of them. Ids are without their epoch.
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
    """Up to where a slot that is being created is surely not consistent yet. Pure.

    The server builds the slot's first snapshot in two steps. It waits for all transactions that
    ran at the first, `running` among them; then for all that ran at the second. So as long as
    one of `running` runs, neither has come to its end; and of those that ran when this was seen
    for the last time, all must end before the slot is consistent. On a standby that goes by what
    it has replayed.

    :param running: transactions that ran before the slot's creation was asked for, or some of them.
    """

    def __init__(self, running: frozenset[int]) -> None:
        self._first = running
        self._second: frozenset[int] = frozenset()

    def passed(self, running: frozenset[int]) -> bool:
        """Return whether the consistent point lies after all that was written up to now.

        :param running: transactions that run now; to be asked for after the end of the WAL was.
        """
        if self._first & running:
            self._second = running
            return True
        self._first = frozenset()
        return bool(self._second & running)


class SlotCreation:
    """Creates a slot on `session`, which holds the exported snapshot until its next command.

    :param side: a second session, for looking.
    :param temporary: the slot goes when `session` is closed.
    :param behind: called with LSNs below the consistent point while that is not known.
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

        :param failover: as `server.create_slot`.
        :raises TailraceError: as `server.create_slot`; `SLOT_CREATION_HELD_UP`, with the
            transactions that were waited for.
        :raises Stopped: if stopping was asked for.
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
        # The server waits for a lock and would not notice that nobody listens any more.
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
    """Create the slot that `source` captures from; a temporary one where only the snapshot is wanted.

    :param session: for replication.
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
        if not temporary:  # else nothing is decoded
            try:
                _require_steady(side, source.publication, exported, before)
            except TailraceError:
                server.drop_slot(session, source.slot)
                raise
        return exported


def _require_steady(session: Session, publication: str, exported: ExportedSnapshot, before: str) -> None:
    """Make sure that nothing which a change is decoded by was altered while the slot was made.

    PostgreSQL decodes as if a transaction that altered the catalogue, and ended while the slot waited for
    others, had never been (seen on 15 to 18): changes of a table that it published, or values of a column
    that it added, would be missing from the stream without a word, although the exported snapshot has them.

    :param before: `published.terms_digest` before the slot's creation was asked for.
    :raises TailraceError: `SNAPSHOT_DELAYED`.
    """
    enter(session, exported)
    after = terms_digest(session, publication)
    leave(session)
    if after != before:
        raise TailraceError(
            Kind.SNAPSHOT_DELAYED,
            f"create the replication slot: the publication {publication!r} or a table of it was altered "
            "meanwhile, and PostgreSQL would decode as if it had not been",
            "it is tried again automatically",
        )


def temporary_name(slot: str) -> str:
    """Return a name for a temporary slot beside `slot`; one that was left behind has another."""
    return f"{temporary_prefix(slot)}{secrets.token_hex(6)}"


def temporary_prefix(slot: str) -> str:
    """Return how the names of the temporary slots beside `slot` begin."""
    return f"{slot[:48]}_"


def running(session: Session) -> frozenset[int]:
    """Return the transactions that run now and have an id; of the primary's, on a standby, the oldest."""
    return frozenset(row.number("xid") for row in session.run(_RUNNING, "ask what is running"))


def lasting_transactions(session: Session) -> list[OpenTransaction]:
    """Return the oldest transactions that are open, without those that are just passing by."""
    return [found for found in open_transactions(session) if found.age_s is None or found.age_s > PASSING_S]


def described(found: Sequence[OpenTransaction]) -> str:
    """Return the transactions in words."""
    return ", ".join(each.words for each in found)


def held_up(found: Sequence[OpenTransaction], waited_s: float) -> TailraceError:
    """Return the error for a slot that older transactions held up too long."""
    pids = [each.pid for each in found if each.pid is not None]
    way_out = f"SELECT pg_terminate_backend({pids[0]}), or wait" if pids else "wait"
    return TailraceError(
        Kind.SLOT_CREATION_HELD_UP,
        f"create a replication slot: it waited {waited_s:.0f} s for older transactions to end: "
        + (described(found) or "which ones can't be seen here"),
        f"end them ({way_out}); it is tried again",
        {"transactions": len(found)},
    )
