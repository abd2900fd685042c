"""Why libpq could not connect, by its words: there is no SQLSTATE then.

The words are English; a server that speaks another language before it knows its client is told
apart by less, and the reason is then `SOURCE_UNREACHABLE` with the server's own words.
"""

from __future__ import annotations

import re

from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact

#: The first pattern that is found decides. A name in the server's words is put into the hint, as
#: SQL quotes it.
REFUSALS: tuple[tuple[str, Kind, str], ...] = (
    (
        r'invalid (?:\S+ value: "|integer value "|SSL protocol version range)',
        Kind.SOURCE_MISCONFIGURED,
        "correct that option in source: PostgreSQL's manual has its values, among libpq's parameters",
    ),
    (
        r"starting up|shutting down|in recovery mode|not yet accepting|consistent recovery state",
        Kind.SOURCE_SHUTTING_DOWN,
        "it is tried again until the server is back",
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
            "the server's pg_hba.conf lets nobody in this way: add a line such as: hostssl {name} "
            "{user} {host}/32 scram-sha-256 (host instead of hostssl without TLS), then SELECT "
            "pg_reload_conf();"
        ),
    ),
    (
        r'password authentication failed for user "(?P<name>.*?)"\s*(?:\n|$)',
        Kind.SOURCE_AUTH_FAILED,
        "check source.password; to set it: ALTER ROLE {name} PASSWORD '…';",
    ),
    (
        r"no password supplied",
        Kind.SOURCE_AUTH_FAILED,
        "give source.password, by reference: ${{env:NAME}} or ${{file:/path}}; or source.passfile",
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
            "the server wants another way of authentication than source.require_auth accepts: change "
            "the method in its pg_hba.conf (scram-sha-256), or correct require_auth"
        ),
    ),
    (
        r"channel binding",
        Kind.SOURCE_AUTH_FAILED,
        (
            "channel binding needs TLS and a password kept as SCRAM: use sslmode verify-full and set "
            "the password anew under password_encryption = 'scram-sha-256', or take channel_binding out"
        ),
    ),
    (
        r"does not match host name",
        Kind.SOURCE_AUTH_FAILED,
        (
            "the server's certificate is for another name: write in source.host the name that it has, "
            "or have one made for this name"
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
            "the server's certificate does not come from the authority in source.sslrootcert, or is "
            "out of date: give that authority's file, or have the certificate renewed"
        ),
    ),
    (
        r"root certificate file",
        Kind.SOURCE_AUTH_FAILED,
        ("name the file of the authority's certificate in source.sslrootcert (or: sslrootcert: system)"),
    ),
    (
        (
            r"valid client certificate|certificate authentication failed|could not (?:read|load) "
            r"(?:certificate|private)|private key file|certificate file"
        ),
        Kind.SOURCE_AUTH_FAILED,
        (
            "the server wants a client certificate: give source.sslcert and source.sslkey (a file that "
            "only this user may read), for the role's name"
        ),
    ),
    (
        r"does not support SSL",
        Kind.SOURCE_AUTH_FAILED,
        (
            "TLS did not come about as sslmode demands: ALTER SYSTEM SET ssl = on; with a certificate, "
            "or choose another sslmode"
        ),
    ),
    (
        r"closed the connection unexpectedly|SSL SYSCALL|unexpected eof|Connection reset|timeout expired",
        Kind.SOURCE_UNREACHABLE,
        (
            "the connection broke while it was made; it is tried again. If that does not help: check host "
            "and port, sslmode and the server's ssl setting"
        ),
    ),
    (
        r"sslmode|certificate|SSL error",
        Kind.SOURCE_AUTH_FAILED,
        (
            "TLS did not come about as sslmode demands: check sslmode, sslrootcert and the server's "
            "ssl setting"
        ),
    ),
    (
        r"authentication failed",
        Kind.SOURCE_AUTH_FAILED,
        "check the user, its password and the server's pg_hba.conf",
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
    """Return the error for a connection that did not come about; `message` is libpq's."""
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
    # An address stands in pg_hba.conf as it is; names are quoted there as they are in SQL.
    return value if name == "host" else '"' + value.replace('"', '""') + '"'
