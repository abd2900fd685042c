"""Snapshots that somebody asks for, and takes back: files in the log's directory.

Any process may write a request, whether or not an engine runs; the engine takes it into its
agenda, durably, and removes the file then. So a request is never lost and never taken twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import structlog

from tailrace.capture.agenda import Origin, Outcome, SnapshotAgenda, TableAgenda
from tailrace.capture.catalog import published_oids, published_table
from tailrace.capture.ledger import Ledger
from tailrace.capture.publication import add_command, matching_tables
from tailrace.capture.session import Session
from tailrace.changelog import durable
from tailrace.changelog.directory import LogDirectory
from tailrace.config.postgres import PostgresSource
from tailrace.errors import Kind, Policy, TailraceError

log = structlog.get_logger(__name__)

FOLDER = "requests"
_SUFFIX = ".state"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: a snapshot of tables, or the end of one.

    :ivar tables: as `schema.table`.
    :ivar where: SQL condition; empty: all rows.
    :ivar cancels: it is the end that is asked for, of those asked-for snapshots that have one of
        `tables`; of all where none are named.
    """

    id: str
    requested_us: int
    tables: tuple[str, ...] = ()
    where: str = ""
    cancels: bool = False


def ask(
    directory: LogDirectory,
    task: str,
    *,
    tables: Sequence[str] = (),
    where: str = "",
    cancels: bool = False,
) -> Request:
    """Leave a request for the engine that captures `task`, now or later. Any process.

    :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    request = Request(secrets.token_hex(8), time.time_ns() // 1000, tuple(tables), where, cancels)
    content = {name: getattr(request, name) for name in request.__slots__}
    directory.state_write(f"tasks/{task}/{FOLDER}/{request.id}{_SUFFIX}", content)
    return request


def waiting(directory: LogDirectory, task: str) -> list[Request]:
    """Return the requests that no engine has taken yet, the oldest first."""
    return _read_all(_files(directory, task))


class Requests:
    """Takes requests into the ledger's agenda. One thread.

    :param in_force: the schema frames in force at the log's end, by key.
    """

    def __init__(
        self,
        directory: LogDirectory,
        task: str,
        source: PostgresSource,
        ledger: Ledger,
        in_force: Callable[[], Mapping[str, bytes]],
    ) -> None:
        self._directory = directory
        self._task = task
        self._source = source
        self._ledger = ledger
        self._in_force = in_force
        #: Wraps what finds out whether a table is in the log yet, and has its changes wait if not.
        self.settling: Callable[[], AbstractContextManager[object]] = lambda: ledger.lock

    def take(self, session: Session) -> bool:
        """Take the requests that wait; return whether there were any.

        :raises TailraceError: what the server refused with; `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        files = _files(self._directory, self._task)
        if not files:
            return False
        for request in _read_all(files):
            if request.cancels:
                self._cancel(request)
            else:
                self._begin(request, session)
        for path in files:
            path.unlink(missing_ok=True)
            durable.previous_of(path).unlink(missing_ok=True)
        return True

    def _begin(self, request: Request, session: Session) -> None:
        published = {
            f"{schema}.{name}": (oid, schema, name)
            for (schema, name), oid in published_oids(session, self._source).items()
        }
        names = list(dict.fromkeys(request.tables))
        missing = [name for name in names if name not in published]
        keyless = [
            name for name in names if name in published and self._is_keyless(session, *published[name])
        ]
        refusal = self._not_published(session, missing) if missing else None
        with self.settling():
            if self._ledger.agenda.find(request.id) is not None:
                return  # the engine was killed before it could remove the file
            # Nothing of a table that the log does not know yet is in it: changes wait for the rows,
            # all of which must then be read.
            known = {int(key[1:]) for key in self._in_force() if key.startswith("F")}
            # One that another snapshot is to read first is in the log by then.
            known |= {table.oid for each in self._ledger.agenda.open for table in each.tables}
            tables = [
                TableAgenda(
                    number, *published[name], fresh=not request.where and published[name][0] not in known
                )
                for number, name in enumerate(names)
                if name in published
            ]
            snapshot = SnapshotAgenda(
                request.id, Origin.REQUESTED, tables, request.where, requested_us=request.requested_us
            )
            self._ledger.agenda.open.append(snapshot)
            doubled = [table.qualified_name for table in tables if not table.fresh]
            doubled = [name for name in doubled if name in keyless]
            if doubled:
                refusal = refusal or _doubled(doubled)
            if refusal is not None:
                log.error("a snapshot can't be taken", snapshot=request.id, error=str(refusal))
                self._ledger.finish(snapshot, Outcome.FAILED, refusal.as_json())
                return
            self._ledger.write()
        log.info("a snapshot was asked for", snapshot=request.id, tables=list(request.tables))

    def _is_keyless(self, session: Session, oid: int, schema: str, name: str) -> bool:
        """Tell whether nothing tells a row that is read again from another one like it."""
        try:
            table = published_table(session, self._source, oid)
        except TailraceError as error:
            if error.policy is Policy.RETRY:
                raise
            return False  # it is told when it is read
        return table is not None and not table.key and not self._source.key_of(schema, name)

    def _not_published(self, session: Session, missing: Sequence[str]) -> TailraceError:
        source = self._source
        meant = [table for table in matching_tables(session, source) if table.qualified_name in missing]
        command = f"{add_command(session, source, meant)}; then ask again" if meant else ""
        return TailraceError(
            Kind.TABLE_MISSING,
            f"take a snapshot of {', '.join(missing)}: the publication {source.publication!r} does not have "
            "it",
            command or "name published tables as schema.table, or add them: ALTER PUBLICATION … ADD TABLE …",
            {"tables": ", ".join(missing), "publication": source.publication},
        )

    def _cancel(self, request: Request) -> None:
        with self._ledger.lock:
            ended = [
                snapshot
                for snapshot in self._ledger.agenda.open
                if snapshot.origin is Origin.REQUESTED
                and (
                    not request.tables
                    or {table.qualified_name for table in snapshot.tables} & {*request.tables}
                )
            ]
        for snapshot in ended:
            self._ledger.abandon(snapshot, Outcome.CANCELLED)
            log.info("a snapshot was cancelled; what was read of it stays", snapshot=snapshot.id)


def _doubled(tables: Sequence[str]) -> TailraceError:
    return TailraceError(
        Kind.SINK_KEY_MISSING,
        f"take a snapshot of {', '.join(tables)}: the log may have rows of it already, and without a key "
        "nothing tells them from those that would be read again, so that each would be there twice",
        "give it a primary key, or name columns that tell its rows apart in source.message_keys",
        {"tables": ", ".join(tables)},
    )


def _files(directory: LogDirectory, task: str) -> list[Path]:
    return sorted((directory.task_path(task) / FOLDER).glob(f"*{_SUFFIX}"))


def _read_all(files: Sequence[Path]) -> list[Request]:
    found = (_read(path) for path in files)
    return sorted((each for each in found if each is not None), key=lambda each: each.requested_us)


def _read(path: Path) -> Request | None:
    try:
        content = durable.read_state(path)
        if content is None:
            return None
        return Request(**{**content, "tables": tuple(content["tables"])})
    except (TailraceError, TypeError, KeyError) as error:
        log.warning("a request for a snapshot can't be read: passed over", file=str(path), reason=str(error))
        return None
