"""Queries about the server, and the replication commands that capture uses.

Columns of system views differ between versions 13 and 18. They are read by name; a missing column
has the meaning that its version implies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import REPORT_STREAM, Kind, TailraceError
from tailrace.model import format_lsn, parse_lsn
from tailrace.sources.postgres.connection.errors import connection_lost
from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_literal
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.slot.invalidation import invalidation
from tailrace.sources.postgres.streaming.reconcile import ServerState, SlotFacts

#: Timeout, in seconds, of creating a slot, which waits for every older transaction to end.
SLOT_CREATION_DEADLINE_S = 3600.0

_WAL_END = (
    "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() "
    "ELSE pg_current_wal_flush_lsn() END AS lsn"
)

#: The first version with the option `origin`.
ORIGIN_VERSION_MIN = 160000

#: The first version with failover slots.
FAILOVER_VERSION = 170000


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """A snapshot that a slot's creation exported, and the LSN for which it is exact: the slot's consistent
    point.
    """

    lsn: int
    name: str


def system(session: Session) -> tuple[str, int, int, str]:
    """Return system identifier, timeline, WAL end and database; `session` is a replication session.

    On a standby the WAL end is what it has replayed or received, whichever the server returns.
    """
    row = session.run("IDENTIFY_SYSTEM", "identify the server")[0]
    return (
        _text(row, "systemid"),
        int(_text(row, "timeline")),
        parse_lsn(_text(row, "xlogpos")),
        _text(row, "dbname"),
    )


def facts(session: Session, slot: str, stored_timeline: int | None) -> ServerState:
    """Return the server's state for `reconcile.decide`; `session` is a replication session."""
    system_identifier, timeline, flush_lsn, database = system(session)
    left_at = None
    if stored_timeline is not None and stored_timeline < timeline:
        left_at = _left_at(session, timeline, stored_timeline)
    return ServerState(
        system_identifier,
        database,
        timeline,
        flush_lsn,
        slot_facts(session, slot),
        left_at,
        standby=is_standby(session),
    )


def require_unchanged(session: Session, facts: ServerState) -> None:
    """Check that the server that answers `session`, a replication session, is the one with these facts, on
    the same timeline, and still a primary or a standby.

    :raises TailraceError: `SOURCE_UNREACHABLE`.
    """
    system_identifier, timeline, _, _ = system(session)
    found = (system_identifier, timeline, is_standby(session))
    if found != (facts.system_identifier, facts.timeline, facts.standby):
        attempted = "connect to the server that was compared with the log"
        raise connection_lost(attempted, "another server, or another timeline of it, answers now")


def is_standby(session: Session) -> bool:
    """Return whether the server is a standby."""
    return session.run("SELECT pg_is_in_recovery() AS standby", "look at the server")[0]["standby"] == "t"


def wal_end(session: Session) -> int | None:
    """Return the end of the WAL that is flushed or, on a standby, replayed; None: a standby has replayed
    nothing yet.
    """
    return session.run(_WAL_END, "ask the source for the end of its WAL")[0].lsn("lsn")


def slot_facts(session: Session, slot: str) -> SlotFacts | None:
    """Return the present state of the slot; None if it does not exist."""
    rows = session.run(
        "SELECT *, pg_is_in_recovery() AS standby FROM pg_replication_slots "  # noqa: S608 - quoted
        f"WHERE slot_name = {quote_literal(slot)}",
        "look at the replication slot",
    )
    if not rows:
        return None
    row = rows[0]
    return SlotFacts(
        plugin=row.text("plugin"),
        database=row.text("database"),
        temporary=row.flag("temporary"),
        active_pid=row.optional_number("active_pid"),
        restart_lsn=row.lsn("restart_lsn"),
        confirmed_flush_lsn=row.lsn("confirmed_flush_lsn"),
        invalidation=invalidation(row),
        failover=row.get("failover") == "t",
        synced=row.get("synced") == "t",
    )


def create_slot(session: Session, slot: str, *, temporary: bool, failover: bool = False) -> ExportedSnapshot:
    """Create the slot and export its snapshot, which exists until the session's next command.

    :param failover: standbys synchronise the slot; ignored for a temporary one.
    :raises TailraceError: `SLOT_FOREIGN` if it already exists, `SOURCE_MISCONFIGURED`,
        `SOURCE_PRIVILEGE_MISSING`.
    """
    option = "(SNAPSHOT 'export')" if session.server_version >= 150000 else "EXPORT_SNAPSHOT"
    kind = "TEMPORARY LOGICAL" if temporary else "LOGICAL"
    if failover and not temporary:
        option = "(SNAPSHOT 'export', FAILOVER true)"
    # It waits for the locks that transactions hold on their own xids until they end.
    session.run("SET lock_timeout = 0", "create the replication slot")
    try:
        row = session.run(
            f"CREATE_REPLICATION_SLOT {quote_identifier(slot)} {kind} pgoutput {option}",
            "create the replication slot",
            deadline_s=SLOT_CREATION_DEADLINE_S + 60.0,  # `SlotCreation` gives up first
        )[0]
    except TailraceError as error:
        # Here these SQLSTATEs mean that the server can't decode at all.
        hint = {
            "55000": "ALTER SYSTEM SET wal_level = logical, then restart the server",
            "0A000": "a standby decodes since version 16, and not with slot_failover: connect to the primary",
        }.get(str(error.context.get("sqlstate")))
        if hint is None:
            raise
        raise TailraceError(Kind.SOURCE_MISCONFIGURED, error.message, hint, error.context) from None
    return ExportedSnapshot(parse_lsn(_text(row, "consistent_point")), _text(row, "snapshot_name"))


def make_failover(session: Session, slot: str) -> None:
    """Make standbys synchronise the slot; `session` is a replication session, and the slot is inactive.

    :raises TailraceError: `SOURCE_MISCONFIGURED`, `SLOT_IN_USE`.
    """
    session.run(
        f"ALTER_REPLICATION_SLOT {quote_identifier(slot)} (FAILOVER true)", "make the slot a failover slot"
    )


def drop_slot(session: Session, slot: str) -> None:
    """Drop the slot, which must have been created for this log."""
    session.run(f"DROP_REPLICATION_SLOT {quote_identifier(slot)}", "drop the slot of an unfinished start")


def unsupported(source: PostgresSource, server_version: int) -> Iterator[TailraceError]:
    """Yield a `SOURCE_MISCONFIGURED` for each setting of the stream that the server does not support."""
    if source.slot_failover and server_version < FAILOVER_VERSION:
        yield TailraceError(
            Kind.SOURCE_MISCONFIGURED,
            f"make the slot a failover slot: the server is PostgreSQL {server_version // 10000}, and only 17 "
            "and later have them",
            "upgrade the server, or remove source.slot_failover",
        )
    if source.origin != "any" and server_version < ORIGIN_VERSION_MIN:
        yield TailraceError(
            Kind.SOURCE_MISCONFIGURED,
            f"request changes with source.origin {source.origin!r}: the server is PostgreSQL "
            f"{server_version // 10000}, and only 16 and later can filter changes by their origin",
            "upgrade the server, or remove source.origin",
        )


def status_interval_s(session: Session, wanted_s: float) -> float:
    """Return the seconds between status messages: `wanted_s`, or less if the server's timeout requires it.
    The server requests a reply before it times out, but nothing reads that while the stream waits.
    """
    [row] = session.run(
        "SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'", "look at the server's settings"
    )
    timeout_s = row.number("setting") / 1000
    return min(wanted_s, timeout_s / 3) if timeout_s else wanted_s


def start_command(source: PostgresSource, position: int, server_version: int) -> str:
    """Return START_REPLICATION at `position` with the options of `source`."""
    options = f"proto_version '1', publication_names {quote_literal(quote_identifier(source.publication))}"
    if source.message_prefixes and server_version >= 140000:
        options += ", messages 'true'"
    if source.origin != "any":
        options += f", origin {quote_literal(source.origin)}"
    return (
        f"START_REPLICATION SLOT {quote_identifier(source.slot)} LOGICAL {format_lsn(position)} ({options})"
    )


def _left_at(session: Session, timeline: int, stored: int) -> int | None:
    """Return the LSN at which the history of `timeline` left `stored`; None if it was never on it."""
    row = session.run(f"TIMELINE_HISTORY {timeline}", "read the server's timeline history")[0]
    for line in (row.get("content") or "").splitlines():
        parts = line.split()
        if len(parts) >= 2 and parts[0] == str(stored):
            return parse_lsn(parts[1])
    return None


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not value:
        raise TailraceError(
            Kind.PROTOCOL_VIOLATION, f"read the server's answer: it has no {name}", REPORT_STREAM
        )
    return value
