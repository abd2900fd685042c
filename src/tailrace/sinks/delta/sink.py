"""The sink `delta`, with the common part of its modes: one job per range, one commit per table.

Tables commit one by one, so after a crash some may have more than others. Each table records its
log offset (`DeltaFolder.committed`), and changes that it has are left out when the range, or another
that begins at the same offset, is written again. The sink's position is a lower bound. It is moved
when all tables of a range are committed and on disk; only tables with changes are committed.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tailrace import failpoints
from tailrace.changelog.reader import LogReader
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.model import LogRange
from tailrace.protocol.facts import Facts
from tailrace.protocol.renames import Renames
from tailrace.ranges import plan
from tailrace.ranges.changes import with_renames
from tailrace.sinks import names
from tailrace.sinks.contract import SinkCommit, SparkNeededError, first_missing
from tailrace.sinks.delta.folder import AddedFile, DeltaFolder
from tailrace.sinks.delta.mirror.merge import remove_unread
from tailrace.sinks.delta.mirror.small_merge import remove_unread_small
from tailrace.sinks.delta.settings import require_same_settings
from tailrace.sinks.delta.table_identity import (
    Displaced,
    Holder,
    facts_within,
    home_folders,
    name_now,
    place,
    read_from,
)
from tailrace.sinks.delta.wanted_tables import note_read_again, returned
from tailrace.sinks.target import Target, read_checked, remove_folder, require_ours, writing
from tailrace.sinks.write_job import FileFormat, SinkInput, StagedFile, write_files
from tailrace.spark.jobs import with_tags_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.changelog.directory import LogIdentity
    from tailrace.ranges.plan import InputSplit

#: Characters that delta-rs decodes, or takes for a slash, in some of its parts.
_NOT_IN_PATHS = {"%": "percent sign", "\\": "backslash"}


@dataclass(frozen=True, slots=True)
class TableWork:
    """The staged files of a range for one table, in log order.

    `note_columns` records the log offset from which on the log has the columns that the table will get.
    """

    folder: DeltaFolder
    staging: Path
    files: tuple[StagedFile, ...]
    version: int  # the log offset that the table's transaction moves to
    note_columns: Callable[[int], None]

    @property
    def table(self) -> str:
        return self.files[-1].table

    def staged(self, directory: str, name: str) -> str:
        """Return the path of a file in staging."""
        return str(self.staging / names.staged_name(directory, name))

    def place(self, file: StagedFile) -> AddedFile:
        """Move a staged file into the table's folder. Readers don't see it before a commit."""
        source = Path(self.staged(file.directory, file.name))
        name = self.move(source, file.name)
        return AddedFile(name, file.rows, file.bytes, file.facts)

    def move(self, source: Path, name: str) -> str:
        """Move a file into the table's folder; return its name there: `name` with the commit's version.

        Files are numbered within the changes that the table lacks. If a range has several commits of the
        table and is written again after the first, `name` alone may be the name of a committed file.
        """
        stem, suffix = os.path.splitext(name)
        unique = f"{stem}-{self.version:016x}{suffix}"
        self.folder.path.mkdir(parents=True, exist_ok=True)
        source.replace(self.folder.path / unique)
        return unique


class DeltaMode(Protocol):
    """How files are written and committed to a table: append or mirror."""

    kind: str
    #: Number of tables that are committed in parallel.
    commits_at_once: int
    #: Whether a folder belongs to a relation, whose name may change, or to a name.
    follows_names: bool
    format: FileFormat

    def commit(self, spark: SparkSession | None, work: TableWork) -> None:
        """Commit the files to the table and move its transaction, in one Delta commit."""


class DeltaSink:
    """The sink `delta` (`contract.Sink`); see this module's docstring."""

    type = "delta"

    def __init__(
        self,
        name: str,
        path: Path,
        mode: DeltaMode,
        given: SinkInput | None = None,
    ) -> None:
        self.name = name
        self._path = path
        self._mode = mode
        self._given = given or SinkInput()
        self._origin: SourceInfo | None = None
        self._target: Target | None = None
        self._folders: dict[tuple[str, str], DeltaFolder] = {}
        self._have: dict[str, dict[str, int]] = {}
        self._records: dict[str, dict[str, Any] | None] = {}
        self._noting = threading.Lock()

    def open(self, log: LogIdentity, pipeline: str) -> None:
        """As `contract.Sink.open`."""
        require_path(self.name, self._path)
        self.close()
        self._target = Target.open(self.name, self._path, f"delta {self._mode.kind}", log, pipeline)
        self._origin = SourceInfo.of(pipeline, log.source)
        _refuse_begun_moves(self._target)
        self._target.clear_staging()

    def position(self, task: str) -> int | None:
        """As `contract.Sink.position`: the content of the position file."""
        content = self._recorded(task)
        return None if content is None else int(content["position"])

    def reach(self, task: str) -> int | None:
        """As `contract.Sink.reach`: tables may be ahead of the position."""
        reached = [*self._tables_have(task).values()]
        if (position := self.position(task)) is not None:
            reached.append(position)
        if (since := self._columns_since(task)) is not None:
            reached.append(since + 1)
        return max(reached, default=None)

    def write(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit]
    ) -> SinkCommit:
        """As `contract.Sink.write`."""
        have = first_missing(self.name, span, self.position(span.task))
        if have >= span.end:
            return SinkCommit(span)
        span, splits = self._with_columns(spark, log, span, splits)
        if self.position(span.task) is None:
            self._begin(span)
        started = time.perf_counter()
        failpoints.hit("sink.before_write")
        try:
            assert self._origin is not None, "open comes first"
            missing = LogRange(span.task, have, span.end)
            tables, relations = self._tables_have(span.task), self._relations_have(span.task)
            for directory in (name for name, committed in tables.items() if committed > have):
                self._folder(span.task, directory, directory).require_whole(have)  # the write was interrupted
            staged = write_files(
                spark, self._opened(), log, missing, splits, self._given, self._mode.format, self._origin,
                tables, relations,
            )  # fmt: skip
            failpoints.hit("sink.after_write")
            written = time.perf_counter()
            self._commit(spark, log, span, have, staged)
        except BaseException:
            # It is unknown which commits happened: the tables are read again.
            self._have.pop(span.task, None)
            raise
        if self._mode.kind == "mirror":
            self._remove_unread(spark, log, span, splits)
        committed = time.perf_counter()
        failpoints.hit("sink.before_position")
        self._record(span.task, span.end)
        failpoints.hit("sink.after_position")
        done = time.perf_counter()
        return SinkCommit(
            span,
            sum(file.rows for file in staged),
            sum(file.bytes for file in staged),
            len({file.directory for file in staged}),
            {"write": written - started, "commit": committed - written, "position": done - committed},
        )

    def close(self) -> None:
        """As `contract.Sink.close`."""
        if self._target is not None:
            self._target.close()
        self._target = None
        self._folders, self._have, self._records = {}, {}, {}

    # ------------------------------------------------------------------ steps of a write

    def _begin(self, span: LogRange) -> None:
        """Record the position at which a new sink begins, before it creates its first table."""
        tables = self._tables_have(span.task)
        if tables and span.start > 0:
            raise TailraceError(
                Kind.SINK_DAMAGED,
                "write the first range: there are tables already, but the sink's position is gone",
                "restore _tailrace from a backup, or give the sink a new, empty path and let it read "
                "the log from its start",
                {"sink": self.name, "path": str(self._path)},
            )
        self._record(span.task, span.start)

    def _with_columns(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit]
    ) -> tuple[LogRange, Sequence[InputSplit]]:
        """Return a range and its splits, extended if a table already has columns of changes after the range.

        An interrupted write added the columns. Rows of a shorter range would remove them again, with values
        that can't be restored.
        """
        since = self._columns_since(span.task)
        if since is None or since < span.end:
            return span, splits
        with LogReader.open(log, span.task) as reader:
            end = reader.boundary_within(reader.boundary_up_to(since), 1, 1, reader.end().offset)
            splits = plan.input_splits(span.task, reader.blocks(span.start, end), span.start, end)
        if spark is None and len(splits) > 1:
            raise SparkNeededError
        return LogRange(span.task, span.start, end), splits

    def _commit(
        self, spark: SparkSession | None, log: Path, span: LogRange, have: int, staged: Sequence[StagedFile]
    ) -> None:
        staging = self._opened().staging(span.task, have)
        work = [
            TableWork(
                self._folder(span.task, directory, files[-1].table), staging, files, span.end,
                partial(self._note_columns, span.task),
            )
            for directory, files in self._by_table(log, span, have, staged)
        ]  # fmt: skip
        if self._mode.kind == "mirror":
            with LogReader.open(log, span.task) as reader:
                table_policy = with_renames(TablePolicy.of(self._given.rules), reader)
            begun = require_same_settings(self._opened(), table_policy, self._given.chain, work, have)
            self._require_there(log, LogRange(span.task, have, span.end), work, begun)
        with ThreadPoolExecutor(self._mode.commits_at_once, "tailrace-commit", with_tags_of(spark)) as pool:
            # All tables are committed, also after a failure; the first error is raised.
            outcomes = [pool.submit(self._commit_table, spark, span.task, each) for each in work]
        for outcome in outcomes:
            outcome.result()
        done = {str(each.folder.path.relative_to(self._path)): span.end for each in work}
        self._tables_have(span.task).update(done)
        with writing(self.name, "make commits durable"):
            for directory, committed in [*self._tables_have(span.task).items()]:
                if committed > have:  # by this write, or by an earlier one that failed before this step
                    # A merge that changes no row makes no commit: the table has what it had.
                    made = self._folder(span.task, directory, directory).make_durable(have)
                    self._tables_have(span.task)[directory] = made
        remove_folder(staging)
        failpoints.hit("sink.after_publish")

    def _remove_unread(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit]
    ) -> None:
        """Remove rows that no longer exist from each table that a snapshot has read again as a whole.

        This may be done twice: it is recorded afterwards, and the range's position after that.
        """
        if not any(block.header.has_schema for split in splits for block in split.blocks):
            return
        name = f"read-{names.task_name(span.task)}.json"
        done: dict[str, int] = self._opened().read(name) or {}
        found = read_from(log, span, self._given.tables)
        due = {oid: offset for oid, offset in found.items() if offset > done.get(str(oid), 0)}
        if not due:
            return
        for oid, directory in home_folders(self._holders(span.task)).items():
            if oid in due:
                folder = self._folder(span.task, directory, directory)
                failpoints.hit("sink.before_remove")
                if not remove_unread_small(folder, due[oid]):
                    remove_unread(spark, folder, due[oid])
                folder.committed()
                folder.make_durable(span.start)
        self._opened().write(name, {**done, **{str(oid): offset for oid, offset in due.items()}})

    def _by_table(
        self, log: Path, span: LogRange, have: int, staged: Sequence[StagedFile]
    ) -> list[tuple[str, tuple[StagedFile, ...]]]:
        """Return the files of each table in log order, by its folder.

        :raises TailraceError: `SINK_SCHEMA_REFUSED` if rows of a table are in a folder with another name, and
            are not read again later in the log.
        """
        if not self._mode.follows_names:
            return _by_directory(staged)
        holders = self._holders(span.task)
        found = place(staged, holders, have)
        missing = LogRange(span.task, have, span.end)
        displaced = found.displaced | self._newly_wanted(log, missing, staged)
        if lost := self._not_read_again(log, missing, displaced):
            raise _displaced(self.name, lost, {file.source.oid for file in staged if not file.relation.key})
        self._require_returned(log, missing, staged, holders)
        return found.tables

    def _require_returned(
        self, log: Path, span: LogRange, staged: Sequence[StagedFile], holders: Mapping[str, Holder]
    ) -> None:
        """Check that tables that the settings left out for a while, as a whole or in part, were read again.

        :raises TailraceError: `SINK_SCHEMA_REFUSED`.
        """
        name = _tables_file(span.task)

        def known() -> tuple[list[Facts], Renames]:
            with LogReader.open(log, span.task) as reader:
                renames = reader.renames()
            return facts_within(log, LogRange(span.task, span.start, span.start)), renames

        awaited = returned(self._opened(), name, self._given, span.start, known)
        # Only tables with rows: the log has facts of others, such as partitions of a root.
        there = {file.source.oid for file in staged} | {holder.relation for holder in holders.values()}
        due = {oid: each for oid, each in awaited.items() if oid in there}
        if lost := self._not_read_again(log, span, due):
            raise _left_out(self.name, lost)
        missing = {oid: each for oid, each in awaited.items() if oid not in due}
        note_read_again(self._opened(), name, self._given, missing)

    def _require_there(
        self, log: Path, span: LogRange, work: Sequence[TableWork], begun: Mapping[int, int]
    ) -> None:
        """Check that no table of `work` was removed from the target, or replaced by an older copy, unless its
        rows are read again.

        :param begun: the log offset at which the mirror's rows of a relation begin, as far as it is known.
        :raises TailraceError: `SINK_DAMAGED`.
        """
        gone = {
            oid: Displaced(each.table, span.start)
            for each in work
            if begun.get(oid := each.files[-1].source.oid, span.start) < span.start
            and self._has_less(span.task, each.folder, each.folder.committed())
        }
        if lost := self._not_read_again(log, span, gone):
            named = sorted(lost.values())
            raise TailraceError(
                Kind.SINK_DAMAGED,
                f"mirror a table: the folder of {', '.join(named)} is gone, or an older copy replaced it: "
                "the mirror's rows are missing",
                f"{_read_again(named)}; or give the sink a new, empty path, so that it reads the log from "
                "its start",
                {"sink": self.name, "tables": named},
            )

    def _newly_wanted(self, log: Path, span: LogRange, staged: Sequence[StagedFile]) -> dict[int, Displaced]:
        """Return the relations of files that had rows before under a name that the sink's `tables` exclude.

        :param span: the range of the files.
        """
        # A relation with only its first version has had no other name.
        renamed = sorted((file for file in staged if file.source.version > 1), key=attrgetter("first"))
        if self._given.tables is None or not renamed:
            return {}
        with LogReader.open(log, span.task) as reader:
            if not any(block.header.has_schema for block in reader.blocks(span.start, span.end)):
                return {}  # no table has another name than at the range's start
        found = {}
        for facts in facts_within(log, span):
            if self._given.wants(facts.schema, facts.table):
                continue
            own = (file for file in renamed if file.source.oid == facts.relation)
            if later := next((file for file in own if file.source.version > facts.version), None):
                found[facts.relation] = Displaced(facts.qualified_name, later.first)
        return found

    def _not_read_again(
        self, log: Path, span: LogRange, displaced: Mapping[int, Displaced]
    ) -> dict[int, str]:
        """Return the names of those that still exist and that no snapshot has read again later in the log."""
        if not displaced:
            return {}
        with LogReader.open(log, span.task) as reader:
            end = reader.end().offset
        facts = facts_within(log, LogRange(span.task, span.start, end))
        latest = {each.relation: each for each in facts}
        lost = {}
        for oid, each in displaced.items():
            own = latest.get(oid)
            if own is None:
                lost[oid] = each.before
            elif own.read_from < each.since and (name := name_now(own, facts)) and self._given.wants(*name):
                lost[oid] = ".".join(name)
        return lost

    def _commit_table(self, spark: SparkSession | None, task: str, work: TableWork) -> None:
        committed = work.folder.committed()
        if committed is not None and committed >= work.version:
            return
        is_mirror = self._mode.follows_names
        work.folder.require_ours(is_mirror=is_mirror)
        if not is_mirror and committed is not None and self._has_less(task, work.folder, committed):
            raise TailraceError(
                Kind.SINK_DAMAGED,
                "write to a Delta table: it lacks changes that it had, as an older copy of it does",
                f"stop the pipeline and remove {self._opened().state / _position_file(task)}: if the log "
                "still has its start, it is read again, and tables get what they lack; or give the sink a "
                "new, empty path",
                work.folder.context,
            )
        failpoints.hit("sink.before_commit")
        with writing(self.name, "commit to a Delta table"):
            self._mode.commit(spark, work)
        failpoints.hit("sink.after_commit")

    # ------------------------------------------------------------------ its own record

    def _opened(self) -> Target:
        assert self._target is not None, "open comes first"
        return self._target

    def _recorded(self, task: str) -> dict[str, Any] | None:
        if task not in self._records:
            self._records[task] = self._opened().read(_position_file(task))
        return self._records[task]

    def _record(self, task: str, position: int) -> None:
        # What a table had stays recorded until its next change, which finds it removed or replaced.
        tables: dict[str, int] = dict((self._recorded(task) or {}).get("tables", {}))
        for directory, committed in self._tables_have(task).items():
            tables[directory] = max(committed, tables.get(directory, 0))
        self._records.pop(task, None)  # so that it is read again if this fails half-way
        record = {"position": position, "tables": tables}
        self._opened().write(_position_file(task), record)
        self._records[task] = record

    def _has_less(self, task: str, folder: DeltaFolder, committed: int | None) -> bool:
        """Return whether a table, which has `committed`, is gone or had more at the recorded position."""
        had: dict[str, int] = (self._recorded(task) or {}).get("tables", {})
        if committed is None:
            return folder.path.name in had and not folder.exists()
        return committed < had.get(folder.path.name, 0)

    def _columns_since(self, task: str) -> int | None:
        """Return the log offset of a change whose columns, but not its row, a table may have; None: none."""
        content = self._opened().read(_columns_file(task))
        return None if content is None else int(content["since"])

    def _note_columns(self, task: str, since: int) -> None:
        """Record the log offset of the first change with columns that a table will get. Any thread."""
        with self._noting:
            if since > (self._columns_since(task) or -1):
                self._opened().write(_columns_file(task), {"since": since})

    def _folder(self, task: str, directory: str, table: str) -> DeltaFolder:
        if (task, directory) not in self._folders:
            path = self._path / directory
            application = self._application(task, directory)
            self._folders[task, directory] = DeltaFolder(path, self.name, table, application)
        return self._folders[task, directory]

    def _application(self, task: str, directory: str) -> str:
        target = self._opened()
        return f"tailrace:{target.pipeline}:{directory}:{target.log_id}:{task}"

    def _tables_have(self, task: str) -> dict[str, int]:
        """Return the log offset up to which each table has everything, by its folder."""
        if task not in self._have:
            found: dict[str, int] = {}
            parked = self._path.glob(f"{names.STATE}/parked/*/_delta_log")  # by an earlier version
            for log in sorted([*self._path.glob("*/_delta_log"), *parked]):
                directory = str(log.parent.relative_to(self._path))
                committed = self._folder(task, directory, directory).committed()
                if committed is not None:
                    found[directory] = committed
            self._have[task] = found
        return self._have[task]

    def _holders(self, task: str) -> dict[str, Holder]:
        """Return the relation of each folder, as far as it is known."""
        found = {}
        for directory, committed in self._tables_have(task).items():
            oid = self._folder(task, directory, directory).relation()
            if oid:
                found[directory] = Holder(oid, committed)
        return found

    def _relations_have(self, task: str) -> dict[int, int]:
        if not self._mode.follows_names:
            return {}
        holders = self._holders(task)
        return {oid: holders[directory].committed for oid, directory in home_folders(holders).items()}


def _by_directory(staged: Sequence[StagedFile]) -> list[tuple[str, tuple[StagedFile, ...]]]:
    ordered = sorted(staged, key=attrgetter("directory", "first"))
    return [(directory, tuple(files)) for directory, files in groupby(ordered, attrgetter("directory"))]


def _displaced(sink: str, tables: Mapping[int, str], without_key: set[int]) -> TailraceError:
    named = sorted(tables.values())
    hint = _read_again(named)
    if without_key & tables.keys():
        hint = (
            "a table without a key is not read again: begin with another log, and an empty path for the sink"
        )
    return TailraceError(
        Kind.SINK_SCHEMA_REFUSED,
        f"mirror a table: {', '.join(named)} had another name, under which the mirror has its rows or the "
        "sink gets none; a mirror does not move them",
        f"{hint}; or leave a table out with the sink's `tables`, also one that no longer exists, or is a "
        "partition now",
        {"sink": sink, "tables": named},
    )


def _left_out(sink: str, tables: Mapping[int, str]) -> TailraceError:
    named = sorted(tables.values())
    return TailraceError(
        Kind.SINK_SCHEMA_REFUSED,
        f"mirror a table: the settings left out {', '.join(named)}, or columns of it, for a while, and the "
        "changes of that time are missing",
        f"{_read_again(named)}; or, if it was the table, give the sink a new, empty path, so that it reads "
        "the log from its start; or leave it out again. If the table no longer exists, move its folder away",
        {"sink": sink, "tables": named},
    )


def _read_again(tables: Sequence[str]) -> str:
    return (
        "have the rows read again: `tailrace snapshot FILE "
        + " ".join(f"--table {shlex.quote(name)}" for name in tables)
        + "`, and run the pipeline; run it again when `tailrace snapshot FILE --list` shows it as done"
    )


def _refuse_begun_moves(target: Target) -> None:
    """Raise if an earlier version ended while it was moving folders of the target."""
    if (target.read("moves.json") or {}).get("moves"):
        raise TailraceError(
            Kind.SINK_DAMAGED,
            "open the sink: an earlier version ended while it renamed folders of tables",
            "open the sink once with that version, which completes this; or begin with another log, and an "
            "empty path for the sink",
            {"sink": target.sink},
        )


def _position_file(task: str) -> str:
    return f"position-{names.task_name(task)}.json"


def _tables_file(task: str) -> str:
    return f"tables-{names.task_name(task)}.json"


def _columns_file(task: str) -> str:
    return f"columns-{names.task_name(task)}.json"


def require_path(sink: str, path: Path) -> None:
    """Check that delta-rs can write below a path.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    if found := next((word for sign, word in _NOT_IN_PATHS.items() if sign in str(path)), ""):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"open the sink: its path has a {found}, and delta-rs can't write to such a path",
            "choose another path",
            {"sink": sink, "path": str(path)},
        )


def recorded_delta_position(
    name: str, path: Path, mode: str, pipeline: str, log: LogIdentity, task: str
) -> int | None:
    """Return the position of a Delta sink, without opening it; see `build`."""
    if not require_ours(name, path, f"delta {mode}", log, pipeline):
        return None
    content = read_checked(path / names.STATE / _position_file(task), name)
    return None if content is None else int(content["position"])
