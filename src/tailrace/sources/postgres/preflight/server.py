"""Preflight of the server, the connection, the role, and the slot with the risks to it.

The same function as at the pipeline's start (`reconcile.decide`) checks whether log and slot still
match, over a replication connection like the pipeline's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from tailrace.changelog.directory import TASK
from tailrace.changelog.lock import is_written
from tailrace.changelog.reader import LogReader
from tailrace.config import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.findings import Finding, error, from_failure, warning
from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_literal
from tailrace.sources.postgres.connection.server import facts, slot_facts, unsupported
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.connection.text_encoding import own_encoding
from tailrace.sources.postgres.preflight.capacity import SourceCapacity
from tailrace.sources.postgres.preflight.checked_source import CheckedSource
from tailrace.sources.postgres.slot.creation import temporary_prefix
from tailrace.sources.postgres.slot.health import concerns, look, mib
from tailrace.sources.postgres.slot.open_transactions import OpenTransaction, open_transactions
from tailrace.sources.postgres.slot.way_out import RENEWAL, with_way_out
from tailrace.sources.postgres.streaming.reconcile import LogFacts, decide
from tailrace.sources.postgres.streaming.task_log import capture_state
from tailrace.sources.progress import SourceWarning

#: Seconds between two queries for open transactions: only those in both results are reported.
SECOND_LOOK_S = 1.0
#: A lower limit of retained WAL, in bytes, causes a warning: a busy server writes this much in minutes.
KEEP_BYTES_WARNED = 1 << 30
#: A shorter timeout for idle slots, in seconds, causes a warning: a pipeline may be down for this long.
IDLE_TIMEOUT_S_WARNED = 24 * 3600
#: Age of xmin, in transactions, that causes a warning: without vacuum of the catalogue, queries become slow.
XMIN_AGE_WARNED = 50_000_000

_OTHER_SLOTS = """
SELECT slot_name AS name,
       pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                            ELSE pg_current_wal_lsn() END, restart_lsn)::bigint AS retained,
       greatest(age(xmin), age(catalog_xmin)) AS xmin_age
  FROM pg_replication_slots WHERE NOT active AND slot_name <> {slot} ORDER BY 1
"""

_WINDOWS = """
SELECT count(*) AS open FROM pg_replication_slots WHERE temporary AND starts_with(slot_name, {prefix})
"""

_PHYSICAL = """
SELECT string_agg(slot_name, ',') AS names FROM pg_replication_slots
 WHERE slot_type = 'physical' AND current_setting('synchronized_standby_slots') = ''
"""


def room_of(checked: CheckedSource) -> SourceCapacity:
    """Return the slots and WAL senders that the source will need, and those that the server has."""
    session, server, source = checked.session, checked.server, checked.source
    slot = slot_facts(session, source.slot)
    prefix = quote_literal(temporary_prefix(source.slot))
    [windows] = session.run(_WINDOWS.format(prefix=prefix), "look at the replication slots")
    return SourceCapacity(
        source=checked.pipeline.source_name,
        server=server.text("instance"),
        takes_slot=slot is None and not checked.has_begun,
        slots=server.number("slots"),
        slots_max=server.number("slots_max"),
        takes_sender=slot is None or slot.active_pid is None,
        senders=server.number("senders"),
        senders_max=server.number("senders_max"),
        windows=0 if source.snapshot == "only" else 1,
        windows_open=min(1, windows.number("open")),
    )


def server_findings(checked: CheckedSource) -> Iterator[Finding]:
    """Yield the problems of the server, the role and the connection."""
    session, server, source = checked.session, checked.server, checked.source
    yield from _logical_findings(server)
    yield from _role_findings(server)
    yield from _tls_findings(server, source)
    yield from _encoding_findings(session)
    yield from map(from_failure, unsupported(source, session.server_version))
    if server.flag("standby"):
        yield from _standby_findings(session, server, source)
    elif source.slot_failover and session.server_version >= 170000:
        yield from _failover_findings(session)


def slot_findings(checked: CheckedSource, gate: threading.Lock) -> Iterator[Finding]:
    """Yield problems that prevent the pipeline from using its slot, and risks to the slot.

    :param gate: allows only one source of a server at a time to use a WAL sender for its checks.
    """
    session, source = checked.session, checked.source
    slot = slot_facts(session, source.slot)
    if slot is not None and not checked.has_begun:
        yield error(
            Kind.SLOT_FOREIGN,
            f"the slot {source.slot!r} exists, but this pipeline has no log yet: its owner is unknown",
            f"if it is not needed: SELECT pg_drop_replication_slot({quote_literal(source.slot)}); otherwise "
            "choose another name in source.slot",
        )
    if _may_replicate(checked.server):
        with gate:
            yield from _start_findings(checked)
    yield from _health_findings(session, source, exists=slot is not None)
    yield from _other_slots(session, source)
    yield from _limit_findings(checked.server)


def _logical_findings(server: Row) -> Iterator[Finding]:
    if server["wal_level"] != "logical":
        yield error(
            Kind.SOURCE_MISCONFIGURED,
            f"wal_level is {server['wal_level']}; capture needs logical",
            "ALTER SYSTEM SET wal_level = logical; then restart the server"
            + ("" if not server.flag("standby") else ": the primary and this standby"),
        )


def _role_findings(server: Row) -> Iterator[Finding]:
    if not server.flag("may_replicate"):
        yield error(
            Kind.SOURCE_PRIVILEGE_MISSING,
            f"the role {server['login']!r} may not replicate",
            f"ALTER ROLE {quote_identifier(server.text('login'))} REPLICATION;",
        )


def _tls_findings(server: Row, source: PostgresSource) -> Iterator[Finding]:
    is_local, sslmode = source.tls()
    if is_local:
        return
    if not server.flag("tls"):
        yield warning(
            Kind.SOURCE_MISCONFIGURED,
            f"the connection is not encrypted (sslmode {sslmode}): rows are sent in plain text",
            "ALTER SYSTEM SET ssl = on; with a certificate, then set sslmode: verify-full in source",
        )
    elif not sslmode.startswith("verify"):
        yield warning(
            Kind.SOURCE_MISCONFIGURED,
            f"the server's certificate is not verified (sslmode {sslmode}): another host could impersonate "
            "the server",
            "set sslmode: verify-full in source, and sslrootcert to the file of the authority's certificate",
        )


def _encoding_findings(session: Session) -> Iterator[Finding]:
    if session.server_encoding == "SQL_ASCII":
        which = "is SQL_ASCII, which checks no text: a text or name that is not UTF-8"
    elif (encoding := own_encoding(session)) is not None:
        which = f"is {encoding}: a text or name with bytes that have no character in it"
    else:
        return
    yield warning(
        Kind.SOURCE_MISCONFIGURED,
        f"the database's encoding {which} is given in bytea's hexadecimal form",
        "repair such texts (docs/postgresql.md, Encodings), or move the database to UTF8",
    )


def _standby_findings(session: Session, server: Row, source: PostgresSource) -> Iterator[Finding]:
    if session.server_version < 160000:
        yield error(
            Kind.SOURCE_MISCONFIGURED,
            "the server is a standby, which can't decode before PostgreSQL 16",
            "name the primary in source.host",
        )
        return
    if server["feedback"] != "on":
        yield warning(
            Kind.SLOT_AT_RISK,
            "the server is a standby without hot_standby_feedback: its primary may vacuum away what the slot "
            "needs, and the slot is then invalidated",
            "ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf();",
        )
    if source.heartbeat.writes:
        yield warning(
            Kind.SOURCE_MISCONFIGURED,
            "source.heartbeat writes, but the server is a standby, which is read only",
            "remove action and query from source.heartbeat: keepalives are enough",
        )


def _failover_findings(session: Session) -> Iterator[Finding]:
    names = session.run(_PHYSICAL, "look at synchronized_standby_slots")[0]["names"]
    if names:
        yield warning(
            Kind.SLOT_AT_RISK,
            "synchronized_standby_slots is empty: the log may have changes that a standby does not have yet "
            "when it takes over, and the pipeline then stops",
            f"ALTER SYSTEM SET synchronized_standby_slots = {quote_literal(names)}; SELECT pg_reload_conf();",
        )


def _may_replicate(server: Row) -> bool:
    return server.flag("may_replicate") and server.number("senders_max") > server.number("senders")


def _start_findings(checked: CheckedSource) -> Iterator[Finding]:
    """Connect and decide like capture, without creating or changing anything."""
    source, log = checked.source, checked.log
    try:
        with Session.connect(source, threading.Event(), replication=True) as session:
            if log is None or not checked.has_begun:
                return
            state = capture_state(log)
            with LogReader.open(log, TASK) as reader:
                position = reader.end().position
            found = facts(session, source.slot, state.timeline if state else None)
            start = decide(found, LogFacts(log.identity.source, position, state), source.snapshot)
            if start.lost is not None:
                yield warning(start.lost.kind, start.lost.message, f"at the next start, {RENEWAL}")
    except TailraceError as failure:
        if failure.kind is Kind.SLOT_IN_USE and is_written(checked.pipeline.log.path, TASK):
            return  # this pipeline itself uses it
        yield from_failure(with_way_out(failure, checked.pipeline))


def _health_findings(session: Session, source: PostgresSource, *, exists: bool) -> Iterator[Finding]:
    if exists:
        health = look(session, source.slot)
        if health is not None and not health.invalidation:
            for concern in concerns(source.slot, health, source.slot_watch):
                yield _at_risk(concern)
        return
    for holder in _lasting_holders(session):
        yield warning(
            Kind.TRANSACTION_OPEN,
            f"creating the slot will wait for the end of {holder.words}",
            f"end the transaction; if its client can't: {holder.repair}",
        )


def _lasting_holders(session: Session) -> list[OpenTransaction]:
    first = {holder.identity for holder in open_transactions(session)}
    if not first:
        return []
    time.sleep(SECOND_LOOK_S)
    return [holder for holder in open_transactions(session) if holder.identity in first]


def _at_risk(concern: SourceWarning) -> Finding:
    kind = Kind.TRANSACTION_OPEN if concern.key.startswith("wal_held") else Kind.SLOT_AT_RISK
    return warning(kind, concern.message, concern.repair)


def _other_slots(session: Session, source: PostgresSource) -> Iterator[Finding]:
    rows = session.run(_OTHER_SLOTS.format(slot=quote_literal(source.slot)), "look at the other slots")
    for row in rows:
        retained, xmin_age = row.number("retained"), row.number("xmin_age")
        if retained <= source.slot_watch.retained_bytes_warned and xmin_age <= XMIN_AGE_WARNED:
            continue
        yield warning(
            Kind.SLOT_AT_RISK,
            f"the slot {row['name']!r}, which is unused, holds {mib(retained)} of WAL and prevents vacuum of "
            f"{xmin_age} transactions: it fills the server's disk",
            f"if it is not needed: SELECT pg_drop_replication_slot({quote_literal(row['name'] or '')});",
        )


def _limit_findings(server: Row) -> Iterator[Finding]:
    keep = server.number("keep_bytes")
    if 0 <= keep < KEEP_BYTES_WARNED:
        yield warning(
            Kind.SLOT_AT_RISK,
            f"max_slot_wal_keep_size is {mib(keep)}: the server invalidates the slot when the pipeline is "
            "this far behind, and then only a new snapshot helps",
            "ALTER SYSTEM SET max_slot_wal_keep_size = '64GB'; SELECT pg_reload_conf(); or what the disk has "
            "room for",
        )
    idle_s = server.number("idle_timeout_s")
    if 0 < idle_s < IDLE_TIMEOUT_S_WARNED:
        yield warning(
            Kind.SLOT_AT_RISK,
            f"idle_replication_slot_timeout is {idle_s} s: the server invalidates the slot when the pipeline "
            "is down for longer, and then only a new snapshot helps",
            "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf();",
        )
