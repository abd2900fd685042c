"""Reasons for which a server invalidates a slot, and how to prevent them.

Reasons are values of `invalidation_reason`, which PostgreSQL has since version 17; other columns of
older versions are mapped to them. Source: PostgreSQL manual, `pg_replication_slots`.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Reason to (explanation, SQL that prevents it). The SQL is for the server that the explanation names.
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
        "it was unused for longer than idle_replication_slot_timeout",
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
    """Return the reason why the slot is invalid; empty if it is valid.

    :param row: of `pg_replication_slots`, with `standby`, whether the server is one.
        `invalidation_reason` exists since 17. `conflicting`, since 16, is true after every
        invalidation; on a primary the only reason then is removed WAL, as before 16.
    """
    if reason := row.get("invalidation_reason"):
        return reason
    if row.get("conflicting") == "t" and row["standby"] == "t":
        return "conflicting"
    return "wal_removed" if row.get("conflicting") == "t" or row.get("wal_status") == "lost" else ""


def explained(reason: str) -> str:
    """Return the reason with its explanation, if it is known."""
    said = REASONS.get(reason, ("", ""))[0]
    return f"{reason}: {said}" if said else reason


def prevention(reason: str) -> str:
    """Return the SQL that prevents it in future; empty for an unknown reason."""
    return REASONS.get(reason, ("", ""))[1]
