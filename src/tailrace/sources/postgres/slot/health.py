"""The state of a slot as the server reports it, and the warnings that follow from it.

`look` queries the state, `concerns` returns the warnings. Three positions matter.
`restart_lsn` is the oldest WAL that the server keeps for the slot: it advances only when the
server writes a running-transactions record, about every 15 seconds while there are writes,
and never past the start of the oldest open transaction. `confirmed_flush_lsn` is the
acknowledged position. `server_lsn` is the end of the server's WAL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tailrace.config.source.postgres import SlotWatchConfig
from tailrace.model import format_lsn
from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.slot.invalidation import explained, invalidation, prevention
from tailrace.sources.postgres.slot.open_transactions import OpenTransaction, open_transactions
from tailrace.sources.progress import SourceHealth, SourceWarning

#: A slot is near its limit when less than this share of `max_slot_wal_keep_size` remains.
SAFE_WAL_SHARE_WARNED = 0.3

#: Age, in seconds, from which a transaction that retains WAL causes a warning.
TRANSACTION_AGE_WARNED_S = 300.0

#: Less WAL than this, in bytes, between the slot's two positions is normal: one segment, and
#: what is written until the next running-transactions record.
HELD_BYTES_MIN = 16 * 1024 * 1024

_SLOT = """
SELECT s.*,
       CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_lsn() END AS server_lsn,
       pg_is_in_recovery() AS standby,
       pg_size_bytes(current_setting('max_slot_wal_keep_size')) AS keep_size
  FROM pg_replication_slots s WHERE s.slot_name = {slot}
"""

_WAITED = """
SELECT trim(BOTH FROM w.name) AS name
  FROM unnest(string_to_array(current_setting('synchronized_standby_slots'), ',')) AS w(name)
  LEFT JOIN pg_replication_slots s ON s.slot_name = trim(BOTH FROM w.name) AND s.slot_type = 'physical'
 WHERE trim(BOTH FROM w.name) <> '' AND (s.slot_name IS NULL OR NOT s.active)
"""


@dataclass(frozen=True, slots=True)
class SlotHealth:
    """The state of a slot. LSNs and sizes are None if the server has NULL."""

    wal_status: str  # reserved, extended, unreserved, lost
    invalidation: str
    active_pid: int | None
    restart_lsn: int | None
    confirmed_flush_lsn: int | None
    server_lsn: int
    safe_wal_size: int | None
    keep_size_max: int | None  # max_slot_wal_keep_size in bytes; None: no limit
    standby: bool = False
    failover: bool = False
    waited_standbys: tuple[str, ...] = ()  # missing or unused slots of standbys that a failover slot awaits
    holders: tuple[OpenTransaction, ...] = ()  # oldest first

    @property
    def creating(self) -> bool:
        """Whether the server has not finished creating it."""
        return self.confirmed_flush_lsn is None and not self.invalidation

    @property
    def retained_bytes(self) -> int | None:
        """WAL that the server keeps for the slot, in bytes."""
        return None if self.restart_lsn is None else max(0, self.server_lsn - self.restart_lsn)

    @property
    def unconfirmed_bytes(self) -> int | None:
        """WAL that is not acknowledged yet, in bytes."""
        flushed = self.confirmed_flush_lsn
        return None if flushed is None else max(0, self.server_lsn - flushed)

    @property
    def held_bytes(self) -> int:
        """WAL that is acknowledged but still kept, in bytes."""
        return max(0, (self.retained_bytes or 0) - (self.unconfirmed_bytes or 0))

    def shown(self) -> SourceHealth:
        """Return the state as the terminal and `status --json` show it."""
        details = {
            "wal_status": self.wal_status,
            "invalidation_reason": self.invalidation or None,
            "active_pid": self.active_pid,
            "restart_lsn": _lsn(self.restart_lsn),
            "confirmed_flush_lsn": _lsn(self.confirmed_flush_lsn),
            "retained_bytes": self.retained_bytes,
            "unconfirmed_bytes": self.unconfirmed_bytes,
            "safe_wal_size_bytes": self.safe_wal_size,
            "failover": self.failover,
        }
        return SourceHealth(self.wal_status, self.retained_bytes, details)


def look(session: Session, slot: str) -> SlotHealth | None:
    """Return the present state of the slot; None if it does not exist.

    :raises TailraceError: if the server can't be queried.
    """
    rows = session.run(_SLOT.format(slot=quote_literal(slot)), "look at the replication slot")
    if not rows:
        return None
    row = rows[0]
    failover = row.get("failover") == "t"
    bare = SlotHealth(
        wal_status=row.get("wal_status") or "",
        invalidation=invalidation(row),
        active_pid=row.optional_number("active_pid"),
        restart_lsn=row.lsn("restart_lsn"),
        confirmed_flush_lsn=row.lsn("confirmed_flush_lsn"),
        server_lsn=row.lsn("server_lsn") or 0,
        safe_wal_size=row.optional_number("safe_wal_size"),
        keep_size_max=_limit(row),
        standby=row.flag("standby"),
        failover=failover,
    )
    if bare.invalidation:
        return bare
    waited = waited_standbys(session) if failover and not bare.standby else ()
    held = bare.creating or bare.held_bytes > HELD_BYTES_MIN
    return replace(bare, waited_standbys=waited, holders=open_transactions(session) if held else ())


def waited_standbys(session: Session) -> tuple[str, ...]:
    """Return the missing or unused slots of standbys for which failover slots wait; since version 17."""
    if session.server_version < 170000:
        return ()
    return tuple(row.text("name") for row in session.run(_WAITED, "look at synchronized_standby_slots"))


def concerns(slot: str, health: SlotHealth, limits: SlotWatchConfig) -> list[SourceWarning]:
    """Return warnings about the slot's present and imminent problems, the worst first."""
    if health.invalidation:
        return [
            SourceWarning(
                "slot_invalidated",
                f"the server has invalidated the slot {slot!r} ({explained(health.invalidation)})",
                prevention(health.invalidation),
            )
        ]
    if health.creating:
        return _while_creating(slot, health)
    return [
        *_before_the_limit(slot, health, limits),
        *_held(health.holders, health),
        *_waiting(health),
    ]


def _while_creating(slot: str, health: SlotHealth) -> list[SourceWarning]:
    if health.holders:
        return [
            SourceWarning(
                f"slot_creation:{holder.pid or holder.gid}",
                f"creating the slot {slot!r} waits for the end of {holder.words}",
                holder.repair,
            )
            for holder in health.holders
        ]
    if health.standby:
        return [
            SourceWarning(
                "slot_creation",
                f"creating the slot {slot!r} on a standby waits until the primary logs its transactions",
                "on the primary: SELECT pg_log_standby_snapshot();",
            )
        ]
    return []


def _before_the_limit(slot: str, health: SlotHealth, limits: SlotWatchConfig) -> list[SourceWarning]:
    retained = health.retained_bytes or 0
    raised = "64GB" if not health.keep_size_max else f"{max(1, 2 * health.keep_size_max >> 20)}MB"
    raise_it = f"ALTER SYSTEM SET max_slot_wal_keep_size = '{raised}'; SELECT pg_reload_conf();"
    if health.wal_status == "unreserved":
        return [
            SourceWarning(
                "slot_unreserved",
                f"the slot {slot!r} holds {mib(retained)} of WAL, more than max_slot_wal_keep_size: the next "
                "checkpoint may remove WAL that it needs, which only a new snapshot could replace",
                raise_it,
            )
        ]
    safe, keep = health.safe_wal_size, health.keep_size_max
    if safe is not None and keep and safe < SAFE_WAL_SHARE_WARNED * keep:
        return [
            SourceWarning(
                "slot_near_limit",
                f"the slot {slot!r} holds {mib(retained)} of WAL: with {mib(max(0, safe))} more, the server "
                "invalidates it (max_slot_wal_keep_size)",
                raise_it,
            )
        ]
    if retained > limits.retained_bytes_warned:
        why = (
            "it is not acknowledged yet: the pipeline is behind or does not run"
            if (health.unconfirmed_bytes or 0) > retained // 2
            else "it is acknowledged, but an open transaction prevents its removal"
        )
        return [
            SourceWarning(
                "slot_retains",
                f"the server keeps {mib(retained)} of WAL for the slot {slot!r}; {why}",
                "free space on the server's disk, or let the pipeline catch up",
            )
        ]
    return []


def _held(holders: Sequence[OpenTransaction], health: SlotHealth) -> list[SourceWarning]:
    return [
        SourceWarning(
            f"wal_held:{holder.pid or holder.gid}",
            f"{holder.words} prevents the removal of {mib(health.held_bytes)} of WAL that was acknowledged",
            f"end the transaction; if its client can't: {holder.repair}",
        )
        for holder in holders
        if holder.age_s is None or holder.age_s >= TRANSACTION_AGE_WARNED_S
    ]


def _waiting(health: SlotHealth) -> list[SourceWarning]:
    return [
        SourceWarning(
            f"standby_waited:{name}",
            f"the server sends no change before the standby with slot {name!r} has it, and that slot is "
            "missing or unused (synchronized_standby_slots)",
            "start the standby again, or remove its slot from synchronized_standby_slots: ALTER SYSTEM SET "
            "synchronized_standby_slots = ''; SELECT pg_reload_conf();",
        )
        for name in health.waited_standbys
    ]


def mib(size: int) -> str:
    """Return a size for messages, in MiB or GiB."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


def _lsn(lsn: int | None) -> str | None:
    return None if lsn is None else format_lsn(lsn)


def _limit(row: Row) -> int | None:
    size = int(row["keep_size"] or -1)
    return size if size >= 0 else None
