"""Maps PostgreSQL's errors to Tailrace's kinds of error.

The server's message is repeated only for classes of errors that concern objects, limits and
states. A message about data (class 22: "invalid input syntax …") may quote a value of a row and
is left out, as DETAIL and CONTEXT always are.

A failed connection attempt of libpq has no SQLSTATE, so its message is matched. The patterns are English;
if the server reports such errors in another language, the error may be `SOURCE_UNREACHABLE` with the
server's message.
"""

from __future__ import annotations

import os
import re
import traceback

from tailrace.errors import REPORT, REPORT_STREAM, Kind, TailraceError
from tailrace.secrets import redact

#: SQLSTATE of a command that waited too long for a lock.
LOCK_NOT_AVAILABLE = "55P03"
#: SQLSTATE of a command that names a table that does not exist.
UNDEFINED_TABLE = "42P01"
#: SQLSTATEs of text without an equivalent in the client's encoding, or invalid in the database's.
UNCONVERTIBLE = ("22P05", "22021")

#: Hint of `SOURCE_QUERY_FAILED`.
_SERVERS_LOG = "the server's log has the whole message and the statement: correct the cause, then start again"
#: Hint of `SOURCE_SHUTTING_DOWN`.
UNTIL_BACK = "it is tried again until the server is back"

#: SQLSTATE, or its class of two letters, to (kind, hint). The whole state is looked up first.
_STATES: dict[str, tuple[Kind, str]] = {
    "57P01": (Kind.SOURCE_SHUTTING_DOWN, UNTIL_BACK),
    "57P02": (Kind.SOURCE_SHUTTING_DOWN, UNTIL_BACK),
    "57P03": (Kind.SOURCE_SHUTTING_DOWN, UNTIL_BACK),
    "57014": (Kind.SOURCE_UNREACHABLE, "the query was cancelled on the server; it is tried again"),
    LOCK_NOT_AVAILABLE: (
        Kind.SOURCE_UNREACHABLE,
        "another session holds a lock that this needs (pg_locks shows which); it is tried again",
    ),
    "57P05": (Kind.SOURCE_UNREACHABLE, "the server ended an idle session; it is tried again"),
    "55006": (Kind.SLOT_IN_USE, "stop the other process, or give this pipeline a slot of its own"),
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
    "25006": (
        Kind.SOURCE_MISCONFIGURED,
        "transactions are read only: connect to the primary, with default_transaction_read_only = off",
    ),
    "3D000": (Kind.SOURCE_MISCONFIGURED, "check source.dbname"),
    "0A000": (Kind.SOURCE_MISCONFIGURED, "the server does not support what is needed here"),
    "08P01": (Kind.PROTOCOL_VIOLATION, REPORT_STREAM),
    "08": (Kind.SOURCE_UNREACHABLE, "the connection broke; it is tried again"),
    "28": (Kind.SOURCE_AUTH_FAILED, "check the user, its password and the server's pg_hba.conf"),
    "40": (Kind.SOURCE_UNREACHABLE, "the server rolled the statement back; it is tried again"),
    "53": (Kind.SOURCE_UNREACHABLE, "the server ran out of a resource; it is tried again"),
    "57": (Kind.SOURCE_UNREACHABLE, "the statement was ended on the server; it is tried again"),
    "58": (Kind.SOURCE_UNREACHABLE, "the server's operating system reported an error"),
    # Such as "tuple concurrently updated", or a lookup of what another session has dropped meanwhile.
    "XX000": (Kind.SOURCE_UNREACHABLE, "it is tried again; the server's log has its internal error"),
}

#: What is attempted while a slot is streamed.
STARTING, STREAMING = "start replication", "read the stream"

_SLOT_INVALID = (
    Kind.SLOT_INVALIDATED,
    (
        "the slot can no longer be used: drop it, raise max_slot_wal_keep_size, and begin a new log "
        "with a new snapshot"
    ),
)
#: The server's functions that find WAL removed; elsewhere 58P01 is another missing file, as of the plugin.
_OF_REMOVED_WAL = {"WalSndSegmentOpen", "wal_segment_open", "CheckXLogRemoved"}
_WAL_REMOVED = (
    Kind.SLOT_INVALIDATED,
    (
        "WAL that the slot needs was removed: drop it, raise max_slot_wal_keep_size or wal_keep_size, "
        "and begin a new log with a new snapshot"
    ),
)
_SLOT_GONE = (
    Kind.SLOT_MISSING,
    "it was dropped: changes since then are lost; begin a new log with a new snapshot",
)
_ROWS_HIDDEN = (
    Kind.SOURCE_PRIVILEGE_MISSING,
    (
        "row-level security would hide rows from the role: ALTER ROLE … BYPASSRLS; or, if it owns the table: "
        "ALTER TABLE … NO FORCE ROW LEVEL SECURITY;"
    ),
)
_PUBLICATION_GONE = (
    Kind.PUBLICATION_MISSING,
    (
        "the publication must have existed before the slot's position. If source.publication was changed, "
        "restore it, run the pipeline until it has caught up, and change it then; otherwise begin a new log "
        "with a new snapshot"
    ),
)

#: Classes of errors whose messages concern objects and states, never the rows of a table.
_SPEAKING_CLASSES = frozenset({"08", "0A", "28", "3D", "42", "53", "55", "57", "58"})


def from_fields(fields: dict[str, str], attempted: str) -> TailraceError:
    """Return the error for an ErrorResponse.

    :param fields: its fields by their letter: `C` SQLSTATE, `M` message, `R` routine.
    :param attempted: what was being done, such as "start replication".
    """
    state = fields.get("C", "")
    routine = fields.get("R", "")  # the same in every language of the server
    if state == "42704" and "ublication" in routine:
        kind, hint = _PUBLICATION_GONE
    elif state == "42704" and "ReplicationSlot" in routine:
        kind, hint = _SLOT_GONE
    elif state == "42501" and routine == "check_enable_rls":
        kind, hint = _ROWS_HIDDEN
    elif state == "55000" and attempted in {STARTING, STREAMING}:
        kind, hint = _SLOT_INVALID
    elif state == "58P01" and attempted in {STARTING, STREAMING} and routine in _OF_REMOVED_WAL:
        kind, hint = _WAL_REMOVED
    else:
        kind, hint = _STATES.get(state) or _STATES.get(state[:2]) or (Kind.SOURCE_QUERY_FAILED, _SERVERS_LOG)
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
    """Return the error for a notice during replication; None for all but one.

    Since version 18, the server only warns of a missing publication and skips the changes that it
    would have sent: they would be lost.
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
        "correct the condition and try again: one read-only expression over the table's columns",
    )


def of_condition(error: TailraceError, attempted: str) -> TailraceError:
    """Return the error of a statement that contains a user's condition.

    The server's error then concerns the condition, also with an SQLSTATE that otherwise means the slot,
    a privilege or a resource. A lost connection and a held lock are returned unchanged.
    """
    state = str(error.context.get("sqlstate", ""))
    if not state or state in {LOCK_NOT_AVAILABLE, "57P01", "57P02", "57P03"} or state[:2] in {"08", "40"}:
        return error
    said = error.message.partition(": the server refused: ")[2] or error.message
    return condition_failure(attempted, f"the server refused the condition: {said}").changed(
        {"sqlstate": state}
    )


def unforeseen(error: Exception) -> TailraceError:
    """Return a snapshot's error for an unexpected one: only its type and place; its text may quote rows."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TailraceError(
        Kind.INTERNAL,
        f"take a snapshot: {type(error).__name__} in {frame.name}, {os.path.basename(frame.filename)} line "
        f"{frame.lineno}",
        REPORT,
    )


def connection_lost(attempted: str, found: str) -> TailraceError:
    """Return the error for a connection that ended or timed out."""
    return TailraceError(Kind.SOURCE_UNREACHABLE, f"{attempted}: {found}")


#: Patterns for libpq's message, of which the first match applies. Its named groups are inserted in the
#: hint, quoted as in SQL.
REFUSALS: tuple[tuple[str, Kind, str], ...] = (
    (
        (
            r'invalid (?:\S+ value: "|integer value "|SSL protocol version range|value for parameter )|'
            r"unrecognized configuration parameter|permission denied to set parameter|requirepeer specifies"
        ),
        Kind.SOURCE_MISCONFIGURED,
        (
            "correct that option in source, or that parameter in source.options: PostgreSQL's manual has the "
            "values, of options among libpq's parameters"
        ),
    ),
    (
        r"unsupported startup parameter",  # of PgBouncer
        Kind.SOURCE_MISCONFIGURED,
        (
            "a connection pooler answers there, which can't carry replication: set source.host and "
            "source.port to the server's own"
        ),
    ),
    (
        r"starting up|shutting down|in recovery mode|not yet accepting|consistent recovery state",
        Kind.SOURCE_SHUTTING_DOWN,
        UNTIL_BACK,
    ),
    (
        r'too many connections for role "(?P<name>.*?)"\s*(?:\n|$)',
        Kind.SOURCE_UNREACHABLE,
        "the role's limit is reached; it is tried again: ALTER ROLE {name} CONNECTION LIMIT -1;",
    ),
    (
        r'too many connections for database "(?P<name>.*?)"\s*(?:\n|$)',
        Kind.SOURCE_UNREACHABLE,
        "the database's limit is reached; it is tried again: ALTER DATABASE {name} CONNECTION LIMIT -1;",
    ),
    (
        r"too many clients|connection slots|max_wal_senders|too many connections",
        Kind.SOURCE_UNREACHABLE,
        (
            "all connections or WAL senders are taken; it is tried again. To have more: ALTER SYSTEM "
            "SET max_wal_senders = …; (or max_connections), then restart the server"
        ),
    ),
    (
        (
            r'(?:no pg_hba\.conf entry|pg_hba\.conf rejects).* host "(?P<host>[^"]*)", user '
            r'"(?P<user>.*?)", database "(?P<name>.*?)", (?P<how>.*)'
        ),
        Kind.SOURCE_AUTH_FAILED,
        (
            "the server's pg_hba.conf has no entry for this connection: add a line such as: hostssl {name} "
            "{user} {host}/32 scram-sha-256 (host instead of hostssl without TLS), then SELECT "
            "pg_reload_conf();"
        ),
    ),
    (
        r'password authentication failed for user "(?P<name>.*?)"\s*(?:\n|$)',
        Kind.SOURCE_AUTH_FAILED,
        (
            "check source.password; to set it: ALTER ROLE {name} PASSWORD '…'; if it has expired (pg_roles."
            "rolvaliduntil): ALTER ROLE {name} VALID UNTIL 'infinity';"
        ),
    ),
    (
        r"no password supplied",
        Kind.SOURCE_AUTH_FAILED,
        (
            "give source.password, by reference: ${{env:NAME}} or ${{file:/path}}; or source.passfile, which "
            "only this user may read, with a line for this server and role"
        ),
    ),
    (
        r'role "(?P<name>.*?)" is not permitted to log in',
        Kind.SOURCE_AUTH_FAILED,
        "ALTER ROLE {name} LOGIN;",
    ),
    (
        r'permission denied for database "(?P<name>.*?)"\s*(?:\n|$)',
        Kind.SOURCE_PRIVILEGE_MISSING,
        "GRANT CONNECT ON DATABASE {name} TO …;",
    ),
    (
        r"start WAL sender|superuser or replication role|REPLICATION attribute",
        Kind.SOURCE_PRIVILEGE_MISSING,
        "the role may not replicate: ALTER ROLE … REPLICATION;",
    ),
    (
        r'database "(?P<name>.*?)" is not currently accepting connections',
        Kind.SOURCE_MISCONFIGURED,
        "ALTER DATABASE {name} ALLOW_CONNECTIONS true;",
    ),
    (
        r"authentication method requirement",
        Kind.SOURCE_AUTH_FAILED,
        (
            "the server requires another authentication method than source.require_auth accepts: change "
            "the method in its pg_hba.conf (scram-sha-256), or correct require_auth"
        ),
    ),
    (
        r"channel binding",
        Kind.SOURCE_AUTH_FAILED,
        (
            "channel binding needs TLS and a password stored as SCRAM: use sslmode verify-full and set "
            "the password again under password_encryption = 'scram-sha-256', or remove channel_binding"
        ),
    ),
    (
        r"does not match host name",
        Kind.SOURCE_AUTH_FAILED,
        (
            "the server's certificate is for another name: set source.host to the certificate's name, "
            "or get a certificate for this name"
        ),
    ),
    (
        r"certificate has expired",
        Kind.SOURCE_AUTH_FAILED,
        "have the server's certificate renewed",
    ),
    (
        r"certificate verify failed|self.signed certificate",
        Kind.SOURCE_AUTH_FAILED,
        (
            "the server's certificate does not come from the authority in source.sslrootcert, is out of "
            "date, or was revoked: give that authority's file, or have the certificate renewed"
        ),
    ),
    (
        r"host name must be specified",
        Kind.SOURCE_MISCONFIGURED,
        "set source.host to the name in the server's certificate; source.hostaddr stays its address",
    ),
    (
        r"alert (?:unknown ca|bad certificate|certificate (?:expired|revoked|unknown))",
        Kind.SOURCE_AUTH_FAILED,
        (
            "the server does not trust the certificate in source.sslcert: it must come from an authority in "
            "the server's ssl_ca_file, and be neither out of date nor revoked"
        ),
    ),
    (
        r"root certificate file",
        Kind.SOURCE_AUTH_FAILED,
        ("name the file of the authority's certificate in source.sslrootcert (or: sslrootcert: system)"),
    ),
    (
        r"could not (?:read|load) (?:certificate|private)|private key file|certificate file",
        Kind.SOURCE_AUTH_FAILED,
        (
            "source.sslcert must be a certificate and source.sslkey its key, which only this user may read; "
            "if the key is encrypted, give source.sslpassword, by reference"
        ),
    ),
    (
        r"valid client certificate|certificate authentication failed",
        Kind.SOURCE_AUTH_FAILED,
        (
            "the server requires a client certificate: give source.sslcert and source.sslkey (a file that "
            "only this user may read), for the role's name"
        ),
    ),
    (
        r"does not support SSL",
        Kind.SOURCE_AUTH_FAILED,
        (
            "sslmode requires TLS, which the server does not support: ALTER SYSTEM SET ssl = on; with a "
            "certificate, or choose another sslmode"
        ),
    ),
    (
        r"closed the connection unexpectedly|SSL SYSCALL|unexpected eof|Connection reset|timeout expired",
        Kind.SOURCE_UNREACHABLE,
        (
            "the connection was lost while connecting; it is tried again. If that does not help: check host "
            "and port, sslmode and the server's ssl setting"
        ),
    ),
    (
        r"sslmode|certificate|SSL error",
        Kind.SOURCE_AUTH_FAILED,
        (
            "TLS could not be set up as sslmode requires: check sslmode, sslrootcert and the server's "
            "ssl setting"
        ),
    ),
    (
        r"authentication failed",
        Kind.SOURCE_AUTH_FAILED,
        "check the user, its password and the server's pg_hba.conf",
    ),
    (
        r"session is (?:not )?read-only|server is (?:not )?in hot standby mode",
        Kind.SOURCE_UNREACHABLE,
        (
            "source.target_session_attrs (primary, if there are several hosts) refuses the servers that run, "
            "such as a standby; it is tried again, as after a failover"
        ),
    ),
    (
        r'database "(?P<name>.*?)" does not exist',
        Kind.SOURCE_MISCONFIGURED,
        "check source.dbname: it was dropped or renamed, or is on another server",
    ),
    (
        r'role "(?P<name>.*?)" does not exist',
        Kind.SOURCE_AUTH_FAILED,
        "CREATE ROLE {name} LOGIN REPLICATION;",
    ),
    (
        r"permission denied",
        Kind.SOURCE_PRIVILEGE_MISSING,
        (
            "the role needs REPLICATION and SELECT on the tables; to create the publication it must "
            "own the tables and have CREATE on the database"
        ),
    ),
)


def from_connecting(message: str, address: str) -> TailraceError:
    """Return the error for a failed attempt to connect; `message` is libpq's."""
    words = redact(message)
    said = " ".join(words.split())
    for pattern, kind, hint in REFUSALS:
        if found := re.search(pattern, words, re.DOTALL):
            names = {name: _quoted(name, value) for name, value in found.groupdict().items()}
            return TailraceError(kind, f"connect to {address}: {said}", hint.format_map(names))
    return TailraceError(
        Kind.SOURCE_UNREACHABLE,
        f"connect to {address}: {said}",
        "check host and port, and that the server runs and listens there",
    )


def _quoted(name: str, value: str) -> str:
    # In pg_hba.conf an address is not quoted; names are quoted as in SQL.
    return value if name == "host" else '"' + value.replace('"', '""') + '"'
