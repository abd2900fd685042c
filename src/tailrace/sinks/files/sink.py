"""A sink of plain files, Parquet or JSON Lines, with exactly-once delivery by a chain of manifests.

For each range, executors write files into staging and put them on disk; the driver makes the
staging folder durable, commits a manifest, and moves the files into their tables' folders. After a
crash before the manifest, staging is removed; after a later crash, the next `open` moves the files.
So a reader of a folder never sees an incomplete file, nor one of an uncommitted range; it may see
the files of one range appear one after another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tailrace import failpoints
from tailrace.changelog import durable
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.model import LogRange
from tailrace.sinks import names
from tailrace.sinks.contract import SinkCommit, first_missing
from tailrace.sinks.files.manifests import DataFile, Manifest, Manifests
from tailrace.sinks.target import Target, remove_folder, require_ours, sync_directories, writing
from tailrace.sinks.write_job import FileFormat, SinkInput, StagedFile, write_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.changelog.directory import LogIdentity
    from tailrace.ranges.plan import InputSplit

log = structlog.get_logger(__name__)


class FileSink:
    """The sink `parquet` or `jsonl` (`contract.Sink`); see this module's docstring."""

    def __init__(
        self,
        name: str,
        path: Path,
        form: FileFormat,
        given: SinkInput | None = None,
    ) -> None:
        self.name = name
        self.type = form.suffix
        self._path = path
        self._format = form
        self._given = given or SinkInput()
        self._target: Target | None = None
        self._origin: SourceInfo | None = None
        self._positions: dict[str, int | None] = {}
        self._settled = False

    def open(self, log: LogIdentity, pipeline: str) -> None:
        """As `contract.Sink.open`: moves the last manifest's files to their folders."""
        self.close()
        self._target = Target.open(self.name, self._path, self.type, log, pipeline)
        self._origin = SourceInfo.of(pipeline, log.source)
        try:
            self._settle()
            self._target.clear_staging()
        except BaseException:
            self.close()
            raise

    def position(self, task: str) -> int | None:
        """As `contract.Sink.position`: the end of the last manifest."""
        self._settle()
        if task not in self._positions:
            self._positions[task] = _position(self._opened().path, self.type, task, self.name)
        return self._positions[task]

    def reach(self, task: str) -> int | None:
        """As `contract.Sink.reach`: all tables have the same position."""
        return self.position(task)

    def write(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit]
    ) -> SinkCommit:
        """As `contract.Sink.write`."""
        started = time.perf_counter()
        self._settle()
        have = first_missing(self.name, span, self.position(span.task))
        if have >= span.end:
            return SinkCommit(span)
        # Until the whole range is written, this object's knowledge of the target is uncertain.
        self._settled = False
        failpoints.hit("sink.before_write")
        assert self._origin is not None, "open comes first"
        missing = LogRange(span.task, have, span.end)
        staged = write_files(
            spark, self._opened(), log, missing, splits, self._given, self._format, self._origin, {}, {}
        )
        failpoints.hit("sink.after_write")
        written = time.perf_counter()
        committed = self._commit(span, have, staged)
        self._positions[span.task] = span.end
        self._settled = True
        rows, size = sum(file.rows for file in staged), sum(file.bytes for file in staged)
        tables = len({file.directory for file in staged})
        done = time.perf_counter()
        seconds = {"write": written - started, "commit": committed - written, "publish": done - committed}
        return SinkCommit(span, rows, size, tables, seconds)

    def close(self) -> None:
        """As `contract.Sink.close`."""
        if self._target is not None:
            self._target.close()
        self._target, self._positions, self._settled = None, {}, False

    def _settle(self) -> None:
        """Complete the last commit after a failure, in this object or in a process that died."""
        if self._settled:
            return
        self._positions = {}
        for folder in self._manifest_folders():
            manifests = Manifests(folder, self.name)
            if (last := manifests.last()) is not None:
                self._publish(manifests, last)
        self._settled = True

    # ------------------------------------------------------------------ steps of a write

    def _commit(self, span: LogRange, have: int, staged: Sequence[StagedFile]) -> float:
        """Commit the range and make its files visible; return when it was committed."""
        manifests = self._manifests(span.task)
        failpoints.hit("sink.before_commit")
        if not staged:
            remove_folder(self._opened().staging(span.task, have))
            manifests.note_idle(span.end)
        else:
            files = tuple(
                DataFile(file.directory, file.name, file.table, file.rows, file.bytes) for file in staged
            )
            manifest = Manifest(span.task, have, span.end, files)
            with writing(self.name, "make staged files durable"):
                durable.sync_directory(self._opened().staging(span.task, have))
            manifests.commit(manifest)
        committed = time.perf_counter()
        failpoints.hit("sink.after_commit")
        if staged:
            self._publish(manifests, manifest)
        return committed

    def _publish(self, manifests: Manifests, manifest: Manifest) -> None:
        """Move a committed range's files to their tables' folders. Idempotent.

        The staging folder is removed last, when the moves are durable: while it exists, the range
        may be visible only in part; once it is removed, the files are not looked for again.
        """
        target = self._opened()
        staging = target.staging(manifest.task, manifest.start)
        files, published = manifest.files, manifests.is_published(manifest)
        if not staging.exists():
            if not published:
                self._go_without_staging(manifests, manifest)
            return
        if published:
            # Files that are missing in staging were moved, and perhaps deleted since.
            files = tuple(file for file in files if _staged(staging, file).exists())
        with writing(self.name, "move files to their folders"):
            made = False
            for directory in {file.directory for file in files}:
                if not (target.path / directory).is_dir():
                    (target.path / directory).mkdir(exist_ok=True)
                    made = True
            for file in files:
                self._move(_staged(staging, file), file)
            failpoints.hit("sink.after_publish")
            failpoints.hit("sink.before_position")
            sync_directories({target.path / file.directory for file in files})
            if made:
                durable.sync_directory(target.path)
            # Before staging is removed: after this record, deleted files are not written again.
            manifests.note_published(manifest)
            remove_folder(staging)
            failpoints.hit("sink.after_position")

    def _go_without_staging(self, manifests: Manifests, manifest: Manifest) -> None:
        """Handle a committed range without a record of publication whose staging folder is gone.

        :raises TailraceError: `SINK_DAMAGED` if some of its files were published, and others are gone.
        """
        path = self._opened().path
        gone = [file for file in manifest.files if not (path / file.directory / file.name).exists()]
        if not gone:
            manifests.note_published(manifest)
        elif len(gone) == len(manifest.files):
            # No reader has seen any of its files. If the log no longer has the range, reading it fails.
            log.warning(
                "the staging folder of a committed range is gone: the range is written again",
                sink=self.name,
                task=manifest.task,
                start=manifest.start,
                end=manifest.end,
            )
            manifests.take_back(manifest)
        else:
            raise _gone(self.name, gone[0])

    def _move(self, source: Path, file: DataFile) -> None:
        goal = self._opened().path / file.directory / file.name
        try:
            source.replace(goal)
        except FileNotFoundError:
            if not goal.exists():
                raise _gone(self.name, file) from None

    # ------------------------------------------------------------------ its own record

    def _opened(self) -> Target:
        assert self._target is not None, "open comes first"
        return self._target

    def _manifest_folders(self) -> list[Path]:
        return sorted((self._opened().state / "manifests").glob("*"))

    def _manifests(self, task: str) -> Manifests:
        return _manifests_of(self._opened().state, task, self.name)


def _staged(staging: Path, file: DataFile) -> Path:
    return staging / names.staged_name(file.directory, file.name)


def _gone(sink: str, file: DataFile) -> TailraceError:
    return TailraceError(
        Kind.SINK_DAMAGED,
        f"publish a committed range: its file {file.name} is gone",
        "give the sink a new, empty path and let it read the log from its start",
        {"sink": sink, "table": file.table},
    )


def recorded_files_position(
    name: str, path: Path, kind: str, pipeline: str, log: LogIdentity, task: str
) -> int | None:
    """Return the position of a sink of plain files, without opening it; see `build`."""
    if not require_ours(name, path, kind, log, pipeline):
        return None
    return _position(path, kind, task, name)


def _position(path: Path, kind: str, task: str, sink: str) -> int | None:
    """Return the end of the last manifest; None: there is none.

    :raises TailraceError: `SINK_DAMAGED` if the manifest of a visible file is gone: its range would be
        written once more.
    """
    # The files first: an engine that writes meanwhile commits a manifest before its files are visible.
    files = path.glob(f"*/{names.task_name(task)}-{'?' * 16}-*.{kind}")
    newest = max(files, key=lambda file: file.name, default=None)
    position = _manifests_of(path / names.STATE, task, sink).position()
    if newest is not None and newest.name >= f"{names.task_name(task)}-{position or 0:016x}":
        raise TailraceError(
            Kind.SINK_DAMAGED,
            f"read the sink's position: the file {newest.name} is after it, so a manifest is gone",
            "put the newest manifests back into _tailrace/manifests, or give the sink a new, empty path and "
            "let it read the log from its start",
            {"sink": sink, "path": str(newest)},
        )
    return position


def _manifests_of(state: Path, task: str, sink: str) -> Manifests:
    return Manifests(state / "manifests" / names.task_name(task), sink)
