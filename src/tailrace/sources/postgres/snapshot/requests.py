"""Adds requested snapshots to the snapshot plans."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import structlog

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, Policy, Stopped, TailraceError
from tailrace.sources.postgres.connection.errors import LOCK_NOT_AVAILABLE, of_condition, unforeseen
from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_table
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.catalog import (
    is_partitioned,
    published_oids,
    published_roots,
    published_table,
)
from tailrace.sources.postgres.schema.publication import add_command
from tailrace.sources.postgres.schema.source_tables import matching_tables
from tailrace.sources.postgres.snapshot.plan import (
    Origin,
    SnapshotOutcome,
    SnapshotPlan,
    TableSnapshotPlan,
)
from tailrace.sources.postgres.snapshot.state import SnapshotState
from tailrace.sources.snapshot_requests import Request, take_requests

log = structlog.get_logger(__name__)


class Requests:
    """Adds requests to the snapshot plans. One thread.

    :param settling: while streaming: a context in which nothing is appended, so that a table's changes can
        be held back if the log does not have the table yet.
    """

    def __init__(
        self,
        source: PostgresSource,
        state: SnapshotState,
        settling: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._source = source
        self._state = state
        self._settling = settling or (lambda: state.lock)

    def take(self, session: Session) -> bool:
        """Take the waiting requests; return whether any was taken. A request whose table is locked stays.

        :raises TailraceError: the server's error; `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        return take_requests(self._state.directory, lambda request: self._take(request, session))

    def _take(self, request: Request, session: Session) -> bool:
        """Take one request; return whether that is done: if not, it is tried again with the next ones."""
        if request.cancels:
            self._cancel(request)
        elif request.pauses is not None:
            self._pause(pauses=request.pauses)
        else:
            try:
                self._begin(request, session)
            except Stopped:
                raise
            except TailraceError as error:
                if error.context.get("sqlstate") == LOCK_NOT_AVAILABLE:
                    return False
                if error.policy is Policy.RETRY:
                    raise
                self._refuse(request, error)
            except Exception as error:
                log.debug("a request for a snapshot ended by an error", exc_info=True)
                self._refuse(request, unforeseen(error))
        return True

    def _begin(self, request: Request, session: Session) -> None:
        """Add the snapshot of one request to the plans.

        :raises TailraceError: if it can't be taken; the server's error.
        """
        published = {
            f"{schema}.{name}": (oid, schema, name)
            for (schema, name), oid in published_oids(session, self._source).items()
        }
        names = list(dict.fromkeys(request.tables))
        if missing := [name for name in names if name not in published]:
            roots = published_roots(session, [oid for oid, *_ in published.values()])
            if found := {name: roots[name] for name in missing if name in roots}:
                raise _partitions(found)
            raise self._not_published(session, missing)
        for name in names if request.where else ():
            check_condition(session, *published[name][1:], request.where)
        keyless = [name for name in names if self._is_keyless(session, *published[name])]
        with self._settling():
            if self._state.plans.find(request.id) is not None:
                # The engine was killed before it removed the file, or the disk had no room for the plans.
                self._state.write()
                return
            # A table that the log does not know yet has no changes in it: they are left out until its rows
            # are read, all of which must then be read. If another snapshot reads it first, it is known then.
            known = set(self._state.appender.tables)
            known |= {table.oid for each in self._state.plans.open for table in each.tables}
            wanted = [published[name] for name in names]
            tables = _table_plans(wanted, {oid for oid, *_ in wanted} if request.where else known)
            if doubled := [t.qualified_name for t in tables if not t.fresh and t.qualified_name in keyless]:
                raise _doubled(doubled)
            self._state.plans.open.append(_plan_of(request, tables))
            self._state.write()
        log.info("a snapshot was requested", snapshot=request.id, tables=list(request.tables))

    def ask_for_all(self, session: Session) -> None:
        """Plan, durably, to read all published tables again, because changes of them were lost.

        A table whose changes are left out until its rows are read is planned already.

        :raises TailraceError: `SINK_KEY_MISSING` if the log would have rows of a table twice; the server's
            error.
        """
        published = published_oids(session, self._source)
        with self._state.lock:
            # An earlier one has read rows as they were before the loss.
            for snapshot in [each for each in self._state.plans.open if each.origin is Origin.NEEDED]:
                self._state.finish(snapshot, SnapshotOutcome.CANCELLED)
            awaited = self._state.plans.awaiting()
            known = set(self._state.appender.tables)
        wanted = [(oid, *name) for name, oid in sorted(published.items()) if oid not in awaited]
        keyless = [each for each in wanted if each[0] in known and self._is_keyless(session, *each)]
        if keyless:
            raise _doubled([f"{schema}.{name}" for _, schema, name in keyless])
        tables = _table_plans(wanted, known)
        with self._state.lock:
            self._state.plans.open.append(
                SnapshotPlan(secrets.token_hex(8), Origin.NEEDED, tables, requested_us=time.time_ns() // 1000)
            )
            self._state.write()

    def _refuse(self, request: Request, refusal: TailraceError) -> None:
        """End a request, and keep the reason for `tailrace snapshot --list`."""
        with self._state.lock:
            snapshot = self._state.plans.find(request.id)
            if snapshot is None:
                snapshot = not_taken(request)
            elif snapshot.outcome is not SnapshotOutcome.OPEN:
                self._state.write()  # the disk may have had no room for it before
                return
        log.error("a snapshot can't be taken", snapshot=request.id, error=str(refusal))
        self._state.finish(snapshot, SnapshotOutcome.FAILED, refusal.as_json())

    def _is_keyless(self, session: Session, oid: int, schema: str, name: str) -> bool:
        """Return whether the table has no key by which a row that is read again can be recognised."""
        try:
            table = published_table(session, self._source, oid, with_filter=False)
        except TailraceError as error:
            if error.policy is Policy.RETRY:
                raise
            return False  # the read reports it
        return table is not None and not table.key and not self._source.key_of(schema, name)

    def _not_published(self, session: Session, missing: Sequence[str]) -> TailraceError:
        source = self._source
        meant = [table for table in matching_tables(session, source) if table.qualified_name in missing]
        command = f"{add_command(session, source, meant)}; then repeat the request" if meant else ""
        return TailraceError(
            Kind.TABLE_MISSING,
            f"take a snapshot of {', '.join(missing)}: the publication {source.publication!r} does not have "
            "it",
            command
            or "name published tables as schema.table, without quotes, or add them: ALTER PUBLICATION … ADD "
            "TABLE …",
            {"tables": ", ".join(missing), "publication": source.publication},
        )

    def _pause(self, *, pauses: bool) -> None:
        with self._state.lock:
            changes = self._state.plans.paused is not pauses
            self._state.plans.paused = pauses
            self._state.write()
        if changes:
            log.info("snapshots are paused" if pauses else "snapshots are resumed")

    def _cancel(self, request: Request) -> None:
        def is_meant(snapshot: SnapshotPlan) -> bool:
            named = {table.qualified_name for table in snapshot.tables}
            return snapshot.origin is Origin.REQUESTED and bool(
                not request.tables or named & {*request.tables}
            )

        with self._state.lock:
            ended = [snapshot for snapshot in self._state.plans.open if is_meant(snapshot)]
            for snapshot in filter(is_meant, self._state.plans.finished):
                if snapshot.outcome is SnapshotOutcome.FAILED:
                    snapshot.outcome = SnapshotOutcome.CANCELLED  # which ends the warning about it
            self._state.write()
        for snapshot in ended:
            self._state.abandon(snapshot, SnapshotOutcome.CANCELLED)
            log.info("a snapshot was cancelled; rows that were read stay in the log", snapshot=snapshot.id)


def check_condition(session: Session, schema: str, name: str, where: str) -> None:
    """Check that the server parses `where` as one condition over a table. Nothing is executed.

    A text is rejected if it closes a parenthesis that it did not open, and so could end the statement in
    which it is inserted.

    :raises TailraceError: `SNAPSHOT_FAILED`; `SOURCE_UNREACHABLE`.
    """
    attempted = f"take a snapshot of {schema}.{name}"
    try:
        relation = f"ONLY {quote_table(schema, name)}"
        if is_partitioned(session, schema, name):
            relation += f" AS {quote_identifier(name)}"  # as in the commands that read its partitions
        session.parse(f"SELECT FROM {relation} WHERE (\n{where}\n)", attempted)
    except TailraceError as error:
        raise of_condition(error, attempted) from None


def _plan_of(request: Request, tables: list[TableSnapshotPlan]) -> SnapshotPlan:
    return SnapshotPlan(
        request.id, Origin.REQUESTED, tables, request.where, requested_us=request.requested_us
    )


def not_taken(request: Request) -> SnapshotPlan:
    """Return the plan of a request whose tables were not looked up in the database."""
    named = (name.partition(".") for name in dict.fromkeys(request.tables))
    return _plan_of(request, _table_plans([(0, schema, name) for schema, _, name in named], {0}))


def _table_plans(tables: Iterable[tuple[int, str, str]], known: Container[int]) -> list[TableSnapshotPlan]:
    # `tables` has oid, schema and name; a table whose oid is not in `known` is fresh.
    return [TableSnapshotPlan(at, *table, fresh=table[0] not in known) for at, table in enumerate(tables)]


def _partitions(roots: Mapping[str, str]) -> TailraceError:
    names, wanted = ", ".join(roots), list(dict.fromkeys(roots.values()))
    return TailraceError(
        Kind.TABLE_MISSING,
        f"take a snapshot of {names}: it is a partition, whose rows are captured under the name of "
        f"{', '.join(wanted)}",
        f"take one of {', '.join(wanted)}. If a mirror asks for the partition, which was captured by itself "
        "before, leave the partition out with the sink's `tables`",
        {"tables": names},
    )


def _doubled(tables: Sequence[str]) -> TailraceError:
    return TailraceError(
        Kind.SINK_KEY_MISSING,
        f"take a snapshot of {', '.join(tables)}: the log may have rows of it already, and without a key "
        "they can't be distinguished from those that would be read again, so that each would be there twice",
        "give it a primary key, or name columns that identify its rows in source.message_keys",
        {"tables": ", ".join(tables)},
    )
