"""Offsets in a table of PostgreSQL: a row for each engine and partition.

The table is made if it is missing:

    CREATE TABLE tailrace_offsets (
        engine text, source_partition text, source_offset json, stored_at timestamptz,
        PRIMARY KEY (engine, source_partition))
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from tailrace.config.engine_options import OffsetStorage
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Offset, Partition
from tailrace.secrets import redact, resolved

#: How long the first connection, and each question at the start, may take.
START_S = 30.0

_CREATE = sql.SQL(
    "create table if not exists {} (engine text not null, source_partition text not null, "
    "source_offset json not null, stored_at timestamptz not null default now(), "
    "primary key (engine, source_partition))"
)
_READ = sql.SQL("select source_partition, source_offset from {} where engine = %s")
_WRITE = sql.SQL(
    "insert into {} as kept (engine, source_partition, source_offset) values (%s, %s, %s) "
    "on conflict (engine, source_partition) "
    "do update set source_offset = excluded.source_offset, stored_at = now()"
)

_LIMIT = sql.SQL("set local statement_timeout = {}")

_HINT = (
    "check engine.offset_storage.dsn; the role needs SELECT, INSERT and UPDATE on the table, "
    "and CREATE on its schema if it is to be made"
)


class PostgresOffsetStore:
    """Keeps offsets in a table (`engine.contracts.OffsetStore`); found as `postgresql`.

    A connection that was lost is made anew at the next write. Any thread, one at a time.
    """

    def __init__(self, storage: OffsetStorage, name: str) -> None:
        assert storage.dsn is not None
        self._dsn = storage.dsn
        self._table_name = storage.table
        self._table = sql.Identifier(*storage.table.split(".", 1))
        self._name = name
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None

    def start(self) -> None:
        """Connect, and make the table if it is missing.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        with self._lock:
            try:
                connection = self._connected(START_S)
                found = connection.execute("select to_regclass(%s)", [self._table.as_string(connection)])
                if found.fetchone() == (None,):
                    self._create(connection)
            except psycopg.Error as error:
                raise self._failure(Kind.OFFSETS_UNREADABLE, "open the table of offsets", error) from None

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        """Return the offset of each partition that has one, by its number.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        with self._lock:
            try:
                rows = self._connected(START_S).execute(_READ.format(self._table), [self._name]).fetchall()
            except psycopg.Error as error:
                raise self._failure(Kind.OFFSETS_UNREADABLE, "read offsets", error) from None
        found = dict(rows)
        names = [_named(partition) for partition in partitions]
        return {number: found[name] for number, name in enumerate(names) if name in found}

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        """Keep offsets, all of them in one transaction that is durable when this returns.

        :raises TailraceError: `OFFSETS_UNWRITABLE`.
        """
        rows = [(self._name, _named(partition), json.dumps(dict(offset))) for partition, offset in offsets]
        with self._lock:
            try:
                connection = self._connected(timeout_s)
                with connection.transaction(), connection.cursor() as cursor:
                    # Whatever the role's settings are: what is told to the source must be on disk.
                    cursor.execute("set local synchronous_commit = on")
                    cursor.execute(
                        sql.SQL("set local statement_timeout = {}").format(_milliseconds(timeout_s))
                    )
                    cursor.executemany(_WRITE.format(self._table), rows)
            except psycopg.Error as error:
                self._disconnect()
                raise self._failure(Kind.OFFSETS_UNWRITABLE, "store offsets", error) from None

    def stop(self) -> None:
        """Disconnect."""
        with self._lock:
            self._disconnect()

    def _connected(self, timeout_s: float) -> psycopg.Connection[Any]:
        # Under the lock.
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                resolved(self._dsn),
                autocommit=True,
                connect_timeout=max(2, round(timeout_s)),
                application_name="tailrace offsets",
                tcp_user_timeout=round(timeout_s * 1000),
            )
        return self._connection

    def _create(self, connection: psycopg.Connection[Any]) -> None:
        try:
            connection.execute(_CREATE.format(self._table))
        except (
            psycopg.errors.UniqueViolation,
            psycopg.errors.DuplicateTable,
            psycopg.errors.DuplicateObject,
        ):
            # Another engine made it, or the type of its rows, at the same moment.
            return

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _failure(self, kind: Kind, attempted: str, error: psycopg.Error) -> TailraceError:
        found = (error.diag.message_primary or str(error)).strip().splitlines() or [type(error).__name__]
        # A message about data may quote it.
        is_of_data = (error.sqlstate or "").startswith("22")
        return TailraceError(
            kind,
            f"{attempted}: {type(error).__name__ if is_of_data else redact(found[0])}",
            _HINT,
            {"table": self._table_name},
        )


def _named(partition: Partition) -> str:
    return json.dumps(dict(partition), sort_keys=True, separators=(",", ":"))


def _milliseconds(timeout_s: float) -> sql.Literal:
    return sql.Literal(max(1, round(timeout_s * 1000)))
