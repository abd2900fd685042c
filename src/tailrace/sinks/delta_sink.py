"""What both Delta sinks share: which range each table lacks, one job, a commit a table.

Tables commit one by one, so after a crash some may be further than others. Each table tells how
far it is (`DeltaFolder.committed`), and what it has is left out when the range, or another that
begins at the same place, is written again. The sink's position is a lower bound, moved when all
tables of a range are committed and on disk; only tables with changes in a range are touched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tailrace import failpoints
from tailrace.config.disclosure import Disclosure
from tailrace.decode.disclosed import Disclosed
from tailrace.errors import Kind, TailraceError
from tailrace.model import OWN_FORMS, LogRange, Relation, ValueModes
from tailrace.sinks import layout
from tailrace.sinks.contract import SinkCommit, first_missing
from tailrace.sinks.delta_folder import AddedFile, DeltaFolder
from tailrace.sinks.form_marks import require_same_forms
from tailrace.sinks.key_marks import require_same_keys
from tailrace.sinks.lineage import Move, trace
from tailrace.sinks.mask_marks import require_same_masks
from tailrace.sinks.moving import finish_moves, move
from tailrace.sinks.target import Target, read_checked, remove_folder, require_ours, writing
from tailrace.sinks.write_files import OpenWriter, StagedFile, WriteJob, run, write_piece
from tailrace.spark.tags import bearing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.changelog.directory import LogIdentity
    from tailrace.ranges.plan import Piece


@dataclass(frozen=True, slots=True)
class TableWork:
    """What a range brings to one table: its staged files in log order."""

    folder: DeltaFolder
    staging: Path
    files: tuple[StagedFile, ...]
    version: int  # the log offset that the table's transaction moves to

    @property
    def table(self) -> str:
        return self.files[-1].table

    def staged(self, directory: str, name: str) -> str:
        """Return the path of a file in staging."""
        return str(self.staging / layout.staged_name(directory, name))

    def place(self, file: StagedFile) -> AddedFile:
        """Move a staged file into the table's folder. Nobody sees it before a commit names it."""
        source = Path(self.staged(file.directory, file.name))
        self.folder.path.mkdir(parents=True, exist_ok=True)
        source.replace(self.folder.path / file.name)
        return AddedFile(file.name, file.rows, file.bytes, file.facts)


class DeltaMode(Protocol):
    """How files are written and brought into a table: append or mirror."""

    kind: str
    #: Tables that are committed at once.
    commits_at_once: int
    #: Whether a folder belongs to a relation and follows its name, or to a name.
    follows_names: bool

    def names(self, relation: Relation) -> Relation:
        """Return a table as the target holds it, its columns' names among others. Importable."""

    def opener(self) -> OpenWriter:
        """Return what executors open a file with."""

    def commit(self, spark: SparkSession, work: TableWork) -> None:
        """Bring the files into the table and move its transaction, in one Delta commit."""


class DeltaSink:
    """Implements `contract.Sink`; see this module's docstring for how."""

    type = "delta"

    def __init__(
        self,
        name: str,
        path: Path,
        tables: tuple[str, ...] | None,
        mode: DeltaMode,
        rules: Disclosure | None = None,
        modes: ValueModes = OWN_FORMS,
    ) -> None:
        """:param rules: what of the tables is let out; None: everything.
        :param modes: how values are given.
        """
        self.name = name
        self._path = path
        self._tables = tables
        self._mode = mode
        self._rules = rules or Disclosure()
        self._modes = modes
        self._target: Target | None = None
        self._folders: dict[tuple[str, str], DeltaFolder] = {}
        self._have: dict[str, dict[str, int]] = {}
        self._positions: dict[str, int | None] = {}

    def open(self, log: LogIdentity, pipeline: str) -> None:
        """As `contract.Sink.open`."""
        if "%" in str(self._path):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                "open the sink: its path has a percent sign, which delta-rs can't write to",
                "choose another path",
                {"sink": self.name, "path": str(self._path)},
            )
        self.close()
        self._target = Target.open(self.name, self._path, f"delta {self._mode.kind}", log, pipeline)
        finish_moves(self._target)
        self._target.clear_staging()

    def position(self, task: str) -> int | None:
        """As `contract.Sink.position`: what the position file says."""
        if task not in self._positions:
            content = self._opened().read(_position_file(task))
            self._positions[task] = None if content is None else int(content["position"])
        return self._positions[task]

    def reach(self, task: str) -> int | None:
        """As `contract.Sink.reach`: the furthest table may be ahead of the position."""
        reached = [*self._tables_have(task).values()]
        if (position := self.position(task)) is not None:
            reached.append(position)
        return max(reached, default=None)

    def write(
        self, spark: SparkSession | None, log: Path, span: LogRange, pieces: Sequence[Piece]
    ) -> SinkCommit:
        """As `contract.Sink.write`."""
        assert spark is not None  # by `SinkConfig.on_spark`
        have = first_missing(self.name, span, self.position(span.task))
        if have >= span.end:
            return SinkCommit(span)
        if self.position(span.task) is None:
            self._begin(span)
        started = time.perf_counter()
        failpoints.hit("sink.before_write")
        try:
            staged = self._write_files(spark, log, span, have, pieces)
            failpoints.hit("sink.after_write")
            written = time.perf_counter()
            self._commit(spark, span, have, staged)
        except BaseException:
            # Which commits happened is not known here: the tables are asked again.
            self._have.pop(span.task, None)
            raise
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
        self._folders, self._have, self._positions = {}, {}, {}

    # ------------------------------------------------------------------ steps of a write

    def _begin(self, span: LogRange) -> None:
        """Record where a new sink begins, before its first table can exist."""
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

    def _write_files(
        self, spark: SparkSession, log: Path, span: LogRange, have: int, pieces: Sequence[Piece]
    ) -> list[StagedFile]:
        wanted = [piece for piece in pieces if piece.end > have]
        if not any(piece.rows for piece in wanted):
            return []
        staging = self._opened().staging(span.task, have)
        with writing(self.name, "make the staging folder"):
            remove_folder(staging)
            staging.mkdir(parents=True)
        job = WriteJob(
            str(log), str(staging), span.task, have, span.end, "parquet", self._tables,
            have, self._tables_have(span.task), self._mode.names, Disclosed.of(self._rules),
            self._modes, self._relations_have(span.task),
        )  # fmt: skip
        done = run(spark, wanted, partial(write_piece, job, self._mode.opener()), self.name)
        return [file for files in done for file in files]

    def _commit(self, spark: SparkSession, span: LogRange, have: int, staged: Sequence[StagedFile]) -> None:
        staging = self._opened().staging(span.task, have)
        work = [
            TableWork(self._folder(span.task, directory, files[-1].table), staging, files, span.end)
            for directory, files in self._by_table(span.task, staged)
        ]
        if self._mode.kind == "mirror":
            require_same_masks(self._opened(), Disclosed.of(self._rules), work)
            require_same_keys(self._opened(), work)
            require_same_forms(self._opened(), work)
        with ThreadPoolExecutor(self._mode.commits_at_once, "tailrace-commit", bearing(spark)) as pool:
            # Every table is given its chance; the first that failed is what is raised.
            outcomes = [pool.submit(self._commit_table, spark, each) for each in work]
        for outcome in outcomes:
            outcome.result()
        with writing(self.name, "make commits durable"):
            for each in work:
                each.folder.make_durable()
        done = {str(each.folder.path.relative_to(self._path)): span.end for each in work}
        self._tables_have(span.task).update(done)
        remove_folder(staging)
        failpoints.hit("sink.after_publish")

    def _by_table(self, task: str, staged: Sequence[StagedFile]) -> list[tuple[str, tuple[StagedFile, ...]]]:
        """Return the files of each table in log order, by its folder; move folders first."""
        if not self._mode.follows_names:
            return _by_directory(staged)
        holders = {directory: oid for directory, (oid, _) in self._holders(task).items()}
        lineages, moves = trace(staged, holders)
        if moves:
            for each in moves:
                if each.target not in holders and (self._path / each.target).exists():
                    raise _taken(self.name, each)
                self._folder(task, each.source, each.source).adopt(self._application(task, each.target))
            move(self._opened(), moves)
            self._folders, self._have = {}, {}
        return [(each.directory, each.files) for each in lineages]

    def _commit_table(self, spark: SparkSession, work: TableWork) -> None:
        committed = work.folder.committed()
        if committed is not None and committed >= work.version:
            return
        work.folder.require_ours()
        failpoints.hit("sink.before_commit")
        with writing(self.name, "commit to a Delta table"):
            self._mode.commit(spark, work)
        failpoints.hit("sink.after_commit")

    # ------------------------------------------------------------------ its own record

    def _opened(self) -> Target:
        assert self._target is not None, "open comes first"
        return self._target

    def _record(self, task: str, position: int) -> None:
        self._positions.pop(task, None)  # read again, should this fail half-way
        self._opened().write(_position_file(task), {"position": position})
        self._positions[task] = position

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
        """Return how far each table of the target is, by its folder."""
        if task not in self._have:
            found: dict[str, int] = {}
            parked = self._path.glob(layout.parked_directory("*") + "/_delta_log")
            for log in sorted([*self._path.glob("*/_delta_log"), *parked]):
                directory = str(log.parent.relative_to(self._path))
                committed = self._folder(task, directory, directory).committed()
                if committed is not None:
                    found[directory] = committed
            self._have[task] = found
        return self._have[task]

    def _holders(self, task: str) -> dict[str, tuple[int, int]]:
        """Return whose rows the folders have, where that is known, and how far each is."""
        found = {}
        for directory, committed in self._tables_have(task).items():
            oid = self._folder(task, directory, directory).relation()
            if oid:
                found[directory] = oid, committed
        return found

    def _relations_have(self, task: str) -> dict[int, int]:
        return dict(self._holders(task).values()) if self._mode.follows_names else {}


def _by_directory(staged: Sequence[StagedFile]) -> list[tuple[str, tuple[StagedFile, ...]]]:
    ordered = sorted(staged, key=attrgetter("directory", "first"))
    return [(directory, tuple(files)) for directory, files in groupby(ordered, attrgetter("directory"))]


def _taken(sink: str, move: Move) -> TailraceError:
    return TailraceError(
        Kind.SINK_FOREIGN,
        "move a renamed table's folder to its new name: there is a folder of that name that is no table of "
        "this mirror",
        "move it away and start again",
        {"sink": sink, "table": move.source, "folder": move.target},
    )


def _position_file(task: str) -> str:
    return f"position-{layout.task_name(task)}.json"


def recorded_delta_position(
    name: str, path: Path, mode: str, pipeline: str, log: LogIdentity, task: str
) -> int | None:
    """Return the position of a Delta sink, without opening it; see `build`."""
    if not require_ours(name, path, f"delta {mode}", log, pipeline):
        return None
    content = read_checked(path / layout.STATE / _position_file(task), name)
    return None if content is None else int(content["position"])
