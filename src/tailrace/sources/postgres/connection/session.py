"""Sessions with the server: connecting, and commands with a deadline.

libpq connects and authenticates. Every later wait for the server can be interrupted and has a
deadline, so nothing here uses libpq's blocking calls. Neither conninfo nor password is logged
or included in an error.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import psycopg
from psycopg import pq

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import REPORT, Kind, Stopped, TailraceError
from tailrace.model import parse_lsn
from tailrace.secrets import redact
from tailrace.sources.postgres.connection.errors import STARTING, connection_lost, from_connecting
from tailrace.sources.postgres.connection.text_encoding import SQL_ASCII, TextEncoding
from tailrace.sources.postgres.connection.transport import (
    LibpqTransport,
    SocketTransport,
    Transport,
    result_failure,
)

#: Settings that determine the text of values, or that could end a session or refuse its queries. They are set
#: when connecting, and so have precedence over settings of the role or the database.
SESSION_SETTINGS = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "search_path": "pg_catalog",
    "quote_all_identifiers": "off",
    "client_min_messages": "warning",  # the warning that changes are skipped must be sent
    "standard_conforming_strings": "on",
    "row_security": "off",  # a policy must be an error, not missing rows
    "idle_in_transaction_session_timeout": "0",
    "default_transaction_isolation": r"read\ committed",  # a standby refuses `serializable`
}

#: Those of them that libpq's environment variables PGDATESTYLE and PGTZ set again when connecting.
_OF_ENVIRONMENT = ("DateStyle", "TimeZone")

#: Settings that older servers do not have, with the first version that does.
LATER_SETTINGS = ((140000, "idle_session_timeout"), (170000, "transaction_timeout"))

#: Default timeout of a command, in seconds; for small queries of the catalogue.
QUERY_DEADLINE_S = 60.0

#: Default timeout for a lock, in seconds.
LOCK_WAIT_S = 5.0

#: Keepalive settings with which a vanished peer is noticed after about a minute.
_LIVENESS = {
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}

#: json and jsonb.
JSON_OIDS = (114, 3802)


class Row(dict[str, str | None]):
    """A row of a result: its values as text, by column name; None is NULL."""

    @property
    def name(self) -> tuple[str, str]:
        """Schema and name of its table, from the columns `schema` and `table`."""
        return self.text("schema"), self.text("table")

    def text(self, column: str) -> str:
        """Return a text; empty for NULL."""
        return self[column] or ""

    def number(self, column: str) -> int:
        """Return a whole number; 0 for NULL."""
        return int(self[column] or 0)

    def optional_number(self, column: str) -> int | None:
        """Return a whole number; None for NULL, and for a column that the server's version lacks."""
        value = self.get(column)
        return int(value) if value else None

    def flag(self, column: str) -> bool:
        """Return a boolean; false for NULL."""
        return self[column] == "t"

    def lsn(self, column: str) -> int | None:
        """Return an LSN; None for NULL, and for a column that the server's version lacks."""
        value = self.get(column)
        return parse_lsn(value) if value else None


class Session:
    """One connection to the source, for SQL and, if `replication`, replication commands; `with` closes it.

    Used by one thread at a time.
    """

    def __init__(self, connection: psycopg.Connection[object], stopping: threading.Event) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._stopping = stopping
        self.server_version = self._pgconn.server_version
        self._encoding: TextEncoding | None = None

    @classmethod
    def connect(
        cls,
        source: PostgresSource,
        stopping: threading.Event,
        *,
        replication: bool = False,
        statement_s: float = QUERY_DEADLINE_S,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> Self:
        """Connect within `source.connect_timeout`.

        :param statement_s: the server's timeout for an SQL statement, in seconds; 0: none.
        :param lock_wait_s: the server's timeout for a lock, in seconds; 0: none.
        :raises TailraceError: `SOURCE_UNREACHABLE`, `SOURCE_AUTH_FAILED`, `SOURCE_MISCONFIGURED`,
            `SOURCE_SHUTTING_DOWN`, `SECRET_MISSING`.
        """
        settings = {
            **SESSION_SETTINGS,
            "statement_timeout": f"{statement_s * 1000:.0f}",
            "lock_timeout": f"{lock_wait_s * 1000:.0f}",
        }
        conninfo = source.conninfo(
            _LIVENESS,
            replication="database" if replication else None,
            client_encoding="UTF8",
            options=" ".join(f"-c {name}={value}" for name, value in settings.items()),
        )
        source.require_files()
        try:
            connection: psycopg.Connection[object] = psycopg.connect(conninfo, autocommit=True)
        except psycopg.Error as error:
            raise from_connecting(str(error), source.address) from None
        session = cls(connection, stopping)
        try:
            if session.server_encoding != "UTF8":
                session._disable_conversion(lambda: cls.connect(source, stopping))
            for setting in _OF_ENVIRONMENT:
                if not session._reported(setting).startswith(SESSION_SETTINGS[setting]):
                    session.run(f"SET {setting} = '{SESSION_SETTINGS[setting]}'", f"set {setting}")
            for version, setting in LATER_SETTINGS:
                if session.server_version >= version:
                    session.run(f"SET {setting} = 0", f"set {setting}")
        except BaseException:
            session.close()
            raise
        return session

    def run(self, command: str, attempted: str, *, deadline_s: float = QUERY_DEADLINE_S) -> list[Row]:
        """Run one SQL or replication command; return its rows by column name, values as text.

        :param attempted: what is being done, for the error.
        :raises TailraceError: the server's error, or `SOURCE_UNREACHABLE`.
        :raises Stopped: if the task was asked to stop meanwhile; then the session is no longer usable.
        """
        result = self._result(self._pgconn.send_query, command, attempted, deadline_s)
        names = [(result.fname(column) or b"").decode() for column in range(result.nfields)]
        types = [result.ftype(column) for column in range(result.nfields)]
        text = [self._json if oid in JSON_OIDS else self._text for oid in types]
        return [
            Row(
                (name, None if (value := result.get_value(row, column)) is None else text[column](value))
                for column, name in enumerate(names)
            )
            for row in range(result.ntuples)
        ]

    def affected(self, command: str, attempted: str) -> int | None:
        """Run SQL; return the number of rows that its last statement affected; None if it has no such number.

        :raises TailraceError: the server's error, or `SOURCE_UNREACHABLE`.
        """
        return self._result(self._pgconn.send_query, command, attempted, QUERY_DEADLINE_S).command_tuples

    def parse(self, statement: str, attempted: str) -> None:
        """Let the server parse one SQL statement, with the extended protocol, without executing it.

        :raises TailraceError: the server's error, or `SOURCE_UNREACHABLE`.
        """

        def send(command: bytes) -> None:
            self._pgconn.send_prepare(b"", command)

        self._result(send, statement, attempted, QUERY_DEADLINE_S)

    def _result(
        self, send: Callable[[bytes], None], command: str, attempted: str, deadline_s: float
    ) -> pq.abc.PGresult:
        raw = self.encoded(command)
        until = time.monotonic() + deadline_s
        readable = select.poll()
        with _connection_errors(attempted):
            readable.register(self._pgconn.socket, select.POLLIN)
            send(raw)
            last: pq.abc.PGresult | None = None
            failure: TailraceError | None = None
            while True:
                while self._pgconn.is_busy():
                    if self._stopping.is_set():
                        raise Stopped
                    if time.monotonic() > until:
                        raise connection_lost(attempted, f"no answer within {deadline_s:g} s")
                    self._pgconn.flush()
                    if readable.poll(100):
                        self._pgconn.consume_input()
                result = self._pgconn.get_result()
                if result is None:
                    break
                last = result
                if result.status == pq.ExecStatus.FATAL_ERROR:
                    # The remaining results are read, too, so that the session can be used again.
                    failure = failure or result_failure(result, attempted)
        if failure is not None:
            raise failure
        if last is None or last.status not in {pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK}:
            raise TailraceError(
                Kind.SOURCE_QUERY_FAILED, f"{attempted}: an unexpected type of result", REPORT
            )
        return last

    def encoded(self, command: str) -> bytes:
        """Return a command in the session's encoding.

        :raises TailraceError: `SOURCE_QUERY_FAILED` if the database's encoding lacks one of its characters.
        """
        return command.encode() if self._encoding is None else self._encoding.encoded(command)

    def streaming(self, frame_bytes_max: int) -> Transport:
        """Return the transport for START_REPLICATION; the session must not be used for anything else."""
        return self._transport(frame_bytes_max, STARTING, copies=False)

    def copying(self, row_bytes_max: int, attempted: str) -> Transport:
        """Return the transport for one COPY … TO STDOUT; `release` it before the next command."""
        return self._transport(row_bytes_max, attempted, copies=True)

    def _transport(self, message_bytes_max: int, attempted: str, *, copies: bool) -> Transport:
        with _connection_errors(attempted):
            kind = LibpqTransport if self.encrypted else SocketTransport
            return kind(self._pgconn, message_bytes_max, copies=copies, attempted=attempted if copies else "")

    @property
    def server_encoding(self) -> str:
        """PostgreSQL's name of the database's encoding."""
        return self._reported("server_encoding")

    @property
    def row_encoding(self) -> TextEncoding | None:
        """The converter of rows to UTF-8, for the session's thread until it is closed; None if the server
        converts them, or decoding does, as for SQL_ASCII.
        """
        return None if self.server_encoding == SQL_ASCII else self._encoding

    @property
    def backend_pid(self) -> int:
        """The server's process for this connection."""
        return self._pgconn.backend_pid

    @property
    def encrypted(self) -> bool:
        """Whether TLS or GSSAPI encryption is used, so that only libpq can read the connection."""
        if self._pgconn.ssl_in_use:
            return True
        gss = {option.keyword: option.val for option in self._pgconn.info}.get(b"gssencmode")
        if gss == b"disable" or self._pgconn.host.startswith(b"/"):
            return False
        rows = self.run(
            "SELECT encrypted FROM pg_stat_gssapi WHERE pid = pg_backend_pid()",
            "ask whether the connection is encrypted",
        )
        return bool(rows) and rows[0]["encrypted"] == "t"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, which ends its running command."""
        self._connection.close()
        if self._encoding is not None:
            self._encoding.close()

    def _reported(self, parameter: str) -> str:
        """Return the value of a parameter that the server reports."""
        return (self._pgconn.parameter_status(parameter.encode()) or b"").decode()

    def _disable_conversion(self, connect: Callable[[], Session]) -> None:
        """Disable the server's conversion of text, if there may be text that it can't convert."""
        if (encoding := TextEncoding.of(self, connect)) is not None:
            self.run("SET client_encoding = 'SQL_ASCII'", "set client_encoding")
            self._encoding = encoding

    def _text(self, raw: bytes) -> str:
        # The server's views have names of other databases, which may be in other encodings.
        return (raw if self._encoding is None else self._encoding.text(raw)).decode("utf-8", "replace")

    def _json(self, raw: bytes) -> str:
        return (raw if self._encoding is None else self._encoding.json(raw)).decode("utf-8", "replace")


@contextmanager
def _connection_errors(attempted: str) -> Iterator[None]:
    """Convert libpq's errors about a lost connection to `SOURCE_UNREACHABLE`."""
    try:
        yield
    except psycopg.Error as error:
        raise connection_lost(attempted, f"the connection broke: {_short(error)}") from None


def _short(error: Exception) -> str:
    return " ".join(redact(str(error)).split())
