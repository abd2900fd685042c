"""PostgreSQL's errors under Tailrace's names.

The server's own words are repeated only for classes of errors that speak of objects, limits
and states. A message about data (class 22: "invalid input syntax …") may quote a value of a
row and is left out; so are DETAIL and CONTEXT, always.
"""

from __future__ import annotations

import os
import traceback

from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact

#: SQLSTATE of a command that waited too long for somebody's lock.
LOCK_NOT_AVAILABLE = "55P03"
#: … that names a table which is not there.
UNDEFINED_TABLE = "42P01"
#: A text that the encoding of the client does not have, or that the database's does not allow.
UNCONVERTIBLE = ("22P05", "22021")

#: SQLSTATE, or its class of two letters, to (kind, hint). The whole state is looked up first.
_STATES: dict[str, tuple[Kind, str]] = {
    "57P01": (Kind.SOURCE_SHUTTING_DOWN, "it is tried again until the server is back"),
    "57P02": (Kind.SOURCE_SHUTTING_DOWN, "it is tried again until the server is back"),
    "57P03": (Kind.SOURCE_SHUTTING_DOWN, "it is tried again until the server is back"),
    "57014": (Kind.SOURCE_UNREACHABLE, "somebody cancelled the query; it is tried again"),
    LOCK_NOT_AVAILABLE: (
        Kind.SOURCE_UNREACHABLE,
        "another session holds a lock that this needs (pg_locks says which); it is tried again",
    ),
    "57P05": (Kind.SOURCE_UNREACHABLE, "the server ended an idle session; it is tried again"),
    "55006": (Kind.SLOT_IN_USE, "stop the other process, or give this pipeline a slot of its own"),
    "55000": (
        Kind.SLOT_INVALIDATED,
        (
            "the slot can't be used any more: drop it, raise max_slot_wal_keep_size, and begin a new log "
            "with a new snapshot"
        ),
    ),
    "58P01": (
        Kind.SLOT_INVALIDATED,
        (
            "WAL that the slot needs is gone: drop the slot, raise max_slot_wal_keep_size or wal_keep_size, "
            "and begin a new log with a new snapshot"
        ),
    ),
    "42501": (
        Kind.SOURCE_PRIVILEGE_MISSING,
        (
            "the role needs REPLICATION and SELECT on the tables; to create the publication it must own "
            "the tables and have CREATE on the database"
        ),
    ),
    "42710": (Kind.SLOT_FOREIGN, "drop it, or choose another name in source.slot or source.publication"),
    "53300": (
        Kind.SOURCE_UNREACHABLE,
        (
            "all connections or WAL senders are taken; it is tried again. To have more: ALTER SYSTEM SET "
            "max_wal_senders = …; (or max_connections), then restart the server"
        ),
    ),
    "53400": (
        Kind.SOURCE_MISCONFIGURED,
        "all replication slots are taken: drop one that is not needed or raise max_replication_slots",
    ),
    "25006": (Kind.SOURCE_MISCONFIGURED, "the server is read only: connect to the primary"),
    "3D000": (Kind.SOURCE_MISCONFIGURED, "check source.dbname"),
    "0A000": (Kind.SOURCE_MISCONFIGURED, "the server does not support what is needed here"),
    "08P01": (Kind.PROTOCOL_VIOLATION, "the server understood something else; please report it"),
    "08": (Kind.SOURCE_UNREACHABLE, ""),
    "28": (Kind.SOURCE_AUTH_FAILED, "check the user, its password and the server's pg_hba.conf"),
    "40": (Kind.SOURCE_UNREACHABLE, ""),
    "53": (Kind.SOURCE_UNREACHABLE, "the server ran out of a resource; it is tried again"),
    "57": (Kind.SOURCE_UNREACHABLE, ""),
    "58": (Kind.SOURCE_UNREACHABLE, "the server met an error of its operating system"),
}

_SLOT_GONE = (
    Kind.SLOT_MISSING,
    "somebody dropped it: changes since then can't be had any more; begin a new log with a new snapshot",
)
_PUBLICATION_GONE = (
    Kind.PUBLICATION_MISSING,
    (
        "the publication must have existed before the slot's position: begin a new log with a new snapshot, "
        "or wait until the slot has passed the publication's creation"
    ),
)

#: Classes whose messages speak of objects and states, never of the rows of a table.
_SPEAKING_CLASSES = frozenset({"08", "0A", "28", "3D", "42", "53", "55", "57", "58"})


def from_fields(fields: dict[str, str], attempted: str) -> TailraceError:
    """Return the error for an ErrorResponse.

    :param fields: its fields by their letter: `C` SQLSTATE, `M` message, `R` routine.
    :param attempted: what was being done, such as "start replication".
    """
    state = fields.get("C", "")
    if state == "42704":
        # Both lack an object; the routine tells them apart in every language of the server.
        kind, hint = _PUBLICATION_GONE if "ublication" in fields.get("R", "") else _SLOT_GONE
    else:
        kind, hint = _STATES.get(state) or _STATES.get(state[:2]) or (Kind.SOURCE_QUERY_FAILED, "")
    said = (
        fields.get("M", "") if state[:2] in _SPEAKING_CLASSES else "its message is left out: it may hold data"
    )
    return TailraceError(
        kind, f"{attempted}: the server refused: {redact(said)}", hint, {"sqlstate": state or "?"}
    )


def parse_fields(body: bytes) -> dict[str, str]:
    """Return the fields of an ErrorResponse or NoticeResponse by their letter."""
    fields: dict[str, str] = {}
    for part in body.split(b"\0"):
        if len(part) > 1:
            fields[chr(part[0])] = part[1:].decode("utf-8", "replace")
    return fields


def from_notice(fields: dict[str, str], attempted: str) -> TailraceError | None:
    """Return the error that a notice during replication amounts to, None for all but one.

    From version 18 on, a publication that is missing is only warned of, and the changes that
    it would have let through are skipped: going on would lose them.
    """
    if fields.get("C") != "55000" or "ublication" not in fields.get("R", ""):
        return None
    kind, hint = _PUBLICATION_GONE
    return TailraceError(
        kind, f"{attempted}: the server skips changes: {fields.get('M', '')}", hint, {"sqlstate": "55000"}
    )


def condition_failure(attempted: str, found: str) -> TailraceError:
    """Return the error for a snapshot whose condition can't be used."""
    return TailraceError(
        Kind.SNAPSHOT_FAILED,
        f"{attempted}: {found}",
        "correct the condition, and ask again: one expression over the table's columns that only reads",
    )


def of_condition(error: TailraceError, attempted: str) -> TailraceError:
    """Return what `error` means where the statement had a condition that somebody else wrote.

    What the server says then is about that condition: a state that elsewhere speaks of the slot, a
    privilege or a resource does not here. An end of the connection and a held lock stay what they are.
    """
    state = str(error.context.get("sqlstate", ""))
    if not state or state in {LOCK_NOT_AVAILABLE, "57P01", "57P02", "57P03"} or state[:2] in {"08", "40"}:
        return error
    said = error.message.partition(": the server refused: ")[2] or error.message
    found = condition_failure(attempted, f"the server refused the condition: {said}")
    return TailraceError(found.kind, found.message, found.hint, {"sqlstate": state})


def unforeseen(error: Exception, attempted: str) -> TailraceError:
    """Return the error for one that nobody foresaw: its type and place alone, its words may quote a row."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TailraceError(
        Kind.INTERNAL,
        f"{attempted}: {type(error).__name__} in {frame.name}, {os.path.basename(frame.filename)} line "
        f"{frame.lineno}",
        "please report it with the version",
    )


def connection_lost(attempted: str, found: str) -> TailraceError:
    """Return the error for a connection that ended or fell silent."""
    return TailraceError(Kind.SOURCE_UNREACHABLE, f"{attempted}: {found}")
