"""Requested snapshots, which the streams themselves take one after another.

A stream that is opened with its position and with primary keys continues from the position, and copies the
rows behind the keys: a table is read again while its changes and all others are streamed. Shards that need a
snapshot are completely copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import islice
from typing import Any

import structlog

from tailrace.changelog.directory import LogDirectory
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, Policy, TailraceError, error_json
from tailrace.sources.appender import Appender
from tailrace.sources.progress import SourceWarning
from tailrace.sources.row_frames import RowFrames
from tailrace.sources.snapshot_requests import Request, request_files, take_requests
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.metadata import ask_last_key, primary_keys
from tailrace.sources.vitess.connection.vtgate import Vtgate, answer_of
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.events import Event, SnapshotRequested, TablesRequested
from tailrace.sources.vitess.resharding.key_ranges import KeyRange
from tailrace.sources.vitess.rows.copy_keys import before_all, key_text
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.transcoder import is_internal
from tailrace.sources.vitess.snapshots import AskedSnapshot, KeptSnapshots, Outcome
from tailrace.sources.vitess.streaming.stream_requests import is_sent

log = structlog.get_logger(__name__)

#: Interval of the check for requests and for the end of a snapshot, in seconds.
INTERVAL_S = 0.5
#: Limit of unanswered queries for keys at a time.
_ASKED_MAX = 32


class AskedSnapshots:
    """The requested snapshots of a log. For the thread that appends; `is_idle` from any.

    :param step: passes an event to the coordinator, and carries out its commands.
    """

    def __init__(
        self,
        directory: LogDirectory,
        source: VitessSource,
        vtgate: Vtgate,
        appender: Appender,
        tables: LogTables,
        coordinator: Coordinator,
        step: Callable[[Event], None],
    ) -> None:
        self._directory = directory
        self._source = source
        self._vtgate = vtgate
        self._appender = appender
        self._tables = tables
        self._coordinator = coordinator
        self._step = step
        self._kept = KeptSnapshots.read(directory)
        self._looked_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no requested snapshot is in progress or waits."""
        return self._kept.open is None and not request_files(self._directory)

    @property
    def warnings(self) -> list[SourceWarning]:
        """The warning about the last snapshot, if it failed. Any thread."""
        return self._kept.warnings

    def turn(self, now_s: float) -> None:
        """Take the next request, or continue the snapshot in progress.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`; the error that ended the log's writer.
        """
        if now_s - self._looked_s < INTERVAL_S:
            return
        self._looked_s = now_s
        if self._kept.open is None:
            take_requests(self._directory, self._take)
        if (asked := self._kept.open) is not None:
            try:
                self._continue(asked)
            except TailraceError as error:
                if error.policy is not Policy.RETRY:
                    raise
                log.warning("a snapshot failed; it is retried", snapshot=asked.id, error=error.message)
            except _RefusedError as refused:
                self._end(asked, refused.error)

    def _take(self, request: Request) -> bool:
        if self._kept.has(request):
            return True  # the process was killed before it removed the file
        if self._kept.open is not None:
            return False
        self._kept.all.append(AskedSnapshot(request.id, request.requested_us, request.tables))
        self._kept.write(self._directory)
        log.info("snapshot requested", snapshot=request.id, tables=list(request.tables))
        return True

    def _continue(self, asked: AskedSnapshot) -> None:
        lost = self._coordinator.needs_snapshot
        if not asked.tables:
            if not asked.begun:
                self._note_begun(asked, whole=lost == (KeyRange(),))
            if lost and not self._coordinator.requested:
                self._step(SnapshotRequested())
        elif lost:
            raise _RefusedError(
                Kind.SNAPSHOT_FAILED,
                f"take a snapshot of {', '.join(asked.tables)}: the stream of the keyspace's keys "
                f"{', '.join(map(str, lost))} can't continue",
                "tailrace snapshot FILE --lost; then request the snapshot again",
            )
        elif not asked.begun:
            if self._coordinator.is_whole:
                self._begin(asked, dict(self._keys(asked)))
            return
        if not lost and self._coordinator.is_whole:
            self._end(asked)

    def _begin(self, asked: AskedSnapshot, keys: Mapping[str, Mapping[str, str]]) -> None:
        """Start reading the tables. After a crash before `_note_begun`, the snapshot starts again."""
        asked.since = self._appender.tail.offset
        self._step(TablesRequested(keys, frozenset(asked.names)))
        self._appender.sync()
        self._note_begun(asked, whole=True)

    def _note_begun(self, asked: AskedSnapshot, *, whole: bool) -> None:
        asked.since = asked.since or self._appender.tail.offset
        asked.whole, asked.begun = whole, True
        self._kept.write(self._directory)

    def _end(self, asked: AskedSnapshot, error: TailraceError | None = None) -> None:
        if error is None and asked.whole:
            # A mirror removes the rows that were neither read nor changed since.
            found = RowFrames()
            for name in asked.names or self._tables.names(self._source.keyspace):
                shape = self._tables.read_again(self._source.keyspace, name, asked.since)
                if shape is not None:
                    found.describe(shape)
            position = max(self._appender.tail.position, time.time_ns() // 1000)
            self._appender.append_progress(position, found.take().tobytes())
            self._appender.sync()
        asked.state = Outcome.DONE if error is None else Outcome.FAILED
        asked.error = error_json(error)
        asked.finished_us = time.time_ns() // 1000
        self._kept.write(self._directory)
        log.info("snapshot finished", snapshot=asked.id, state=str(asked.state))

    # ------------------------------------------------------------------ keys with which streams are opened

    def _keys(self, asked: AskedSnapshot) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield, for each shard, the keys behind which its tables are copied."""
        for shard, known in self._coordinator.shards.items():
            if known.kept.children:
                continue
            found = primary_keys(self._vtgate, self._source, shard)
            tables = {
                table: list(key)
                for table, key in found.items()
                if self._source.captures(self._source.keyspace, table) and not is_internal(table)
            }
            if missing := set(asked.tables) - {f"{self._source.keyspace}.{table}" for table in tables}:
                names = ", ".join(sorted(missing))
                raise _RefusedError(
                    Kind.TABLE_MISSING,
                    f"take a snapshot of {names}: the shard {shard} has no such table that is captured",
                    "name tables as keyspace.table, and check that source.tables includes them",
                )
            if keyless := sorted(table for table, key in tables.items() if not key):
                raise _RefusedError(
                    Kind.SINK_KEY_MISSING,
                    f"take a snapshot: {', '.join(keyless)} has no primary key, without which its rows would "
                    "be sent again",
                    "give it a primary key, or exclude it with source.tables_exclude",
                )
            # A table without a key would be read completely, though its rows are left out.
            sent = {table: list(key) for table, key in found.items() if key and is_sent(self._source, table)}
            yield shard, dict(self._keys_of(shard, sent | tables, frozenset(asked.names)))

    def _keys_of(
        self, shard: str, tables: Mapping[str, list[str]], wanted: frozenset[str]
    ) -> Iterator[tuple[str, str]]:
        def asked() -> Iterator[tuple[str, Future[pb.QueryResult]]]:
            for table, key in tables.items():
                yield table, ask_last_key(self._vtgate, self._source, shard, table, key)

        for table, answer in _some_at_a_time(asked()):
            attempted = f"ask the shard {shard} for the last key of {table}"
            try:
                found = answer_of(answer, 2 * self._source.connect_timeout, attempted)
            except TailraceError as error:
                if error.policy is Policy.RETRY or self._source.captures(self._source.keyspace, table):
                    raise
                continue  # an excluded table that may not be read
            # A table that is empty now has no last row: what is inserted meanwhile is sent, too.
            is_left = bool(found.rows) and table not in wanted
            yield table, key_text(table, found if is_left else before_all(found.fields))


class _RefusedError(Exception):
    """A request can't be carried out: it fails, the stream continues."""

    def __init__(self, kind: Kind, message: str, hint: str) -> None:
        super().__init__(message)
        self.error = TailraceError(kind, message, hint)


def _some_at_a_time(asked: Iterable[Any]) -> Iterator[Any]:
    remaining = iter(asked)
    while batch := list(islice(remaining, _ASKED_MAX)):
        yield from batch
