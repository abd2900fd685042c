"""Why a server invalidated a slot, and how to prevent it.

The words are those of `invalidation_reason`, which PostgreSQL has since 17; what older versions
tell in other ways is brought to the same words. Source: PostgreSQL manual, `pg_replication_slots`.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Reason to (what happened, what prevents it). The SQL is for the server that the reason names.
REASONS: dict[str, tuple[str, str]] = {
    "wal_removed": (
        "WAL that it needs was removed, because it held more than max_slot_wal_keep_size",
        (
            "ALTER SYSTEM SET max_slot_wal_keep_size = '64GB'; SELECT pg_reload_conf(); -- or what the disk "
            "has room for, and let the pipeline run"
        ),
    ),
    "rows_removed": (
        "rows of the catalogue that it needs were vacuumed away on the primary",
        (
            "ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf(); -- on the standby, which "
            "also needs primary_slot_name"
        ),
    ),
    "wal_level_insufficient": (
        "wal_level was lowered on the primary",
        "ALTER SYSTEM SET wal_level = logical; -- on the primary, then restart it",
    ),
    "idle_timeout": (
        "nobody used it for longer than idle_replication_slot_timeout",
        (
            "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf(); -- or a time that "
            "is longer than the pipeline is ever down"
        ),
    ),
    "conflicting": (
        (
            "it conflicted with the recovery of this standby: rows of the catalogue were vacuumed away or "
            "wal_level was lowered on the primary"
        ),
        "ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf(); -- on the standby",
    ),
}


def invalidation(row: Mapping[str, str | None]) -> str:
    """Return the reason why the slot can't be used, empty if it can.

    :param row: of `pg_replication_slots`, and `standby`, whether the server is one.
        `invalidation_reason` came with 17, `conflicting` with 16, where it is true after every
        invalidation; on a primary there is but one. Before that only a lack of WAL was known.
    """
    if reason := row.get("invalidation_reason"):
        return reason
    if row.get("conflicting") == "t" and row["standby"] == "t":
        return "conflicting"
    return "wal_removed" if row.get("conflicting") == "t" or row.get("wal_status") == "lost" else ""


def explained(reason: str) -> str:
    """Return what `reason` means, with the server's own word."""
    said = REASONS.get(reason, ("", ""))[0]
    return f"{reason}: {said}" if said else reason


def prevention(reason: str) -> str:
    """Return the SQL that keeps it from happening again; empty for a reason that is not known."""
    return REASONS.get(reason, ("", ""))[1]
