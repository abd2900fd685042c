"""The job that writes a range: all tables at once, with one Spark task for each split.

A range of one split is written by the same functions in this process, if Spark has not started or would
take longer to start a job than this process takes to write the split.

An executor decodes its split and writes one file per table (one more if a table's schema changes
within the split) into the range's staging folder, with PyArrow. Its files are not visible until
the driver commits them. So a task may be repeated, run twice at once, or be left over from a dead
engine: the same split gives the same names and the same bytes, each put in place by a rename.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import os
import secrets
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa

from tailrace import failpoints
from tailrace.changelog import durable
from tailrace.config.patterns import matches_any
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.decode.changes import TableChanges
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.model import OWN_FORMS, LogRange, Relation, ValueModes
from tailrace.ranges.changes import decoded_batches
from tailrace.ranges.plan import InputSplit
from tailrace.sinks import names
from tailrace.sinks.target import Target, remove_folder, writing
from tailrace.spark import jobs
from tailrace.spark.folders import not_shared
from tailrace.transforms.tables import NO_STEPS, TableChain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Work = TypeVar("Work")
Result = TypeVar("Result")

#: Most bytes of one table that an executor buffers before it writes them as a row group.
BUFFERED_BYTES_MAX = 64 << 20
#: Most files that a task writes at a time; before another one, the oldest is finished.
OPEN_FILES_MAX = 256


@dataclass(frozen=True, slots=True)
class SinkInput:
    """The part of a log that a sink of folders writes, and in which form.

    :param tables: patterns; None: all tables.
    :param rules: which columns are delivered, and how they are masked.
    :param modes: the form of values.
    :param chain: the transformations of changes.
    """

    tables: tuple[str, ...] | None = None
    rules: ColumnPolicy = field(default_factory=ColumnPolicy)
    modes: ValueModes = OWN_FORMS
    chain: TableChain = NO_STEPS

    def wants(self, schema: str, table: str) -> bool:
        """Return whether the sink gets a table."""
        return self.tables is None or matches_any(self.tables, schema, table)


@dataclass(frozen=True, slots=True)
class FileFormat:
    """The format of a sink's files.

    :param suffix: of their names.
    :param names: returns a table with its column names in the target. Picklable, as the result of `opener`.
    :param opener: returns a function that opens a writer, for changes of this origin and task.
    """

    suffix: str
    names: Callable[[Relation], Relation]
    opener: Callable[[SourceInfo, str], OpenWriter]


@dataclass(frozen=True, slots=True)
class WriteJob:
    """The input of every task of a range's job.

    `have` maps tables, by their folders, to the log offset up to which the sink has them
    already: their changes before it are left out. For other tables it is `have_all`.
    `names` maps a masked and transformed table to its form in the target. `table_policy` and
    the chain contain secrets: a job is only ever part of a task's closure, which is never shown.
    `have_relations` maps relations, by oid, if the sink knows whose rows a folder has; it takes precedence,
    since tables change their names. `origin` is the changes' source for transformations.
    """

    log: str
    staging: str
    task: str
    start: int
    end: int
    given: SinkInput
    table_policy: TablePolicy
    suffix: str
    names: Callable[[Relation], Relation]
    origin: SourceInfo
    have_all: int
    have: Mapping[str, int]
    have_relations: Mapping[int, int]

    def first_missing(self, relation: Relation, directory: str) -> int:
        """Return the log offset of the first change of a table that a folder may lack."""
        if relation.oid in self.have_relations:
            return self.have_relations[relation.oid]
        return self.have.get(directory, self.have_all)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that an executor wrote into staging, complete and on disk.

    `relation` is the table as the target has it, `source` the masked table before transformations,
    and `first` the log offset of the file's first change. `schema` is the file's Arrow
    schema, serialised; `facts` are further facts of the file's format.
    """

    relation: Relation
    source: Relation
    first: int
    directory: str
    name: str
    rows: int
    bytes: int
    schema: builtins.bytes
    facts: dict[str, Any]

    @property
    def table(self) -> str:
        return self.relation.qualified_name


class FileWriter(Protocol):
    """Writes one file. `close` returns facts about it, after all bytes are passed to the system."""

    rows: int

    def write(self, changes: TableChanges) -> None: ...

    def close(self) -> dict[str, Any]: ...


#: Opens a writer for a path and the changes of a relation.
OpenWriter = Callable[[str, Relation], FileWriter]


def write_split(job: WriteJob, open_writer: OpenWriter, split: InputSplit) -> list[StagedFile]:
    """Write the changes of one split, and return the files, which are on disk."""
    failpoints.hit("sink.in_task")
    files = _Files(job, open_writer, split.index)
    batches = decoded_batches(job.log, split, modes=job.given.modes, table_policy=job.table_policy)
    for changes in itertools.chain.from_iterable(decoded.changes for decoded in batches):
        relation = changes.relation
        # A logical message has no table.
        if relation is None or not job.given.wants(relation.schema, relation.table):
            continue
        for target, made in job.given.chain.apply(changes, job.origin):
            directory = names.table_directory(*target)
            part = made.slice(job.first_missing(relation, directory), job.end)
            if part.count:
                files.write(directory, relation, part)
    return files.finish()


class _Files:
    """The files of a split: one for each table and folder, and for each version of the table's schema."""

    def __init__(self, job: WriteJob, open_writer: OpenWriter, split: int) -> None:
        self._job = job
        self._open_writer = open_writer
        self._split = split
        self._open: dict[tuple[str, Relation, Relation], _Writing] = {}
        # The last number of a folder, and of a relation, which may be renamed.
        self._parts: dict[str | int, int] = {}
        self._done: list[StagedFile] = []

    def write(self, directory: str, source: Relation, changes: TableChanges) -> None:
        """Write transformed changes of the table `source` into a file for `directory`."""
        relation = changes.relation
        assert relation is not None, "messages were left out"
        place = (directory, source, relation)
        if place not in self._open:
            for other in list(self._open):
                # There are no further changes of an earlier version of the table.
                if other[1].qualified_name == source.qualified_name and other[1] != source:
                    self._finish(other)
            if len(self._open) >= OPEN_FILES_MAX:
                self._finish(next(iter(self._open)))
            number = max(self._parts.get(directory, -1), self._parts.get(source.oid, -1)) + 1
            self._parts[directory] = self._parts[source.oid] = number
            first = int(changes.log_offset[0])
            self._open[place] = _Writing(
                self._job, self._open_writer, source, relation, directory, first, self._split, number
            )
        self._open[place].write(changes)

    def finish(self) -> list[StagedFile]:
        """Finish open files and return all files."""
        for place in list(self._open):
            self._finish(place)
        return self._done

    def _finish(self, place: tuple[str, Relation, Relation]) -> None:
        self._done.append(self._open.pop(place).finish())


class _Writing:
    """A file that is being written into staging, with a temporary name until it is complete."""

    def __init__(
        self,
        job: WriteJob,
        open_writer: OpenWriter,
        source: Relation,
        relation: Relation,
        directory: str,
        first: int,
        split: int,
        part: int,
    ) -> None:
        self._source = source
        self._held = job.names(relation)
        self._first = first
        self._directory = directory
        self._name = names.file_name(job.task, job.start, job.end, split, part, job.suffix)
        self._path = os.path.join(job.staging, names.staged_name(self._directory, self._name))
        self._temporary = f"{self._path}.{secrets.token_hex(4)}.tmp"
        self._writer = open_writer(self._temporary, self._held)

    def write(self, changes: TableChanges) -> None:
        self._writer.write(changes.named(self._held))

    def finish(self) -> StagedFile:
        facts = self._writer.close()
        durable.sync_file(self._temporary)
        size = os.stat(self._temporary).st_size
        os.replace(self._temporary, self._path)
        schema = facts.pop("schema", b"")
        return StagedFile(
            self._held, self._source, self._first, self._directory, self._name,
            self._writer.rows, size, schema, facts,
        )  # fmt: skip


def write_files(
    spark: SparkSession | None,
    target: Target,
    log: Path,
    span: LogRange,
    splits: Sequence[InputSplit],
    given: SinkInput,
    form: FileFormat,
    origin: SourceInfo,
    have: Mapping[str, int],
    have_relations: Mapping[int, int],
) -> list[StagedFile]:
    """Write the changes of `span` into the range's staging folder, and return the files.

    :param have: as in `WriteJob`, like `have_relations`.
    :raises TailraceError: as `run`; as `Target.require_in_place`.
    """
    target.require_in_place()
    wanted = [split for split in splits if split.end > span.start]
    if not any(split.rows for split in wanted):
        return []
    staging = target.staging(span.task, span.start)
    with writing(target.sink, "create the staging folder"):
        remove_folder(staging)  # of a failed write, perhaps with another end
        staging.mkdir(parents=True)
    job = WriteJob(
        str(log), str(staging), span.task, span.start, span.end, given, TablePolicy.of(given.rules),
        form.suffix, form.names, origin, span.start, have, have_relations,
    )  # fmt: skip
    done = run(spark, wanted, partial(write_split, job, form.opener(origin, span.task)), target.sink)
    target.require_in_place()  # before anything is committed there
    return [file for files in done for file in files]


def run(
    spark: SparkSession | None, work: Sequence[Work], function: Callable[[Work], Result], sink: str
) -> list[Result]:
    """Run `function` on each of `work`, as `spark.jobs.run`.

    :raises TailraceError: the first error of a task; `SPARK_FAILED` if Spark itself failed.
    """
    return jobs.run(spark, work, function, partial(_failure, sink))


def _failure(sink: str, error: Exception) -> TailraceError:
    if isinstance(error, TailraceError):
        if error.kind is Kind.LOG_MISSING:  # the driver has it
            return not_shared(socket.gethostname(), "log.path", str(error.context["path"]), "there is no log")
        return error
    if isinstance(error, OSError):
        return _refused(error, sink)
    # Only the type and place of an unexpected error are shown: its text may quote a row.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TailraceError(
        Kind.INTERNAL,
        f"write a range: {type(error).__name__} in {frame.name}, "
        f"{Path(frame.filename).name} line {frame.lineno}",
        "please report it with the version and the tables' definitions",
        {"sink": sink},
    )


def _refused(error: OSError, sink: str) -> TailraceError:
    found = os.strerror(error.errno) if error.errno else type(error).__name__
    hint = "make room on the sink's file system, or check that it is writable"
    if error.errno == errno.ENOENT:
        hint = "the sink's path must lead to the same folder on the driver and on every executor of Spark"
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"write a range on {socket.gethostname()}: {found}",
        hint,
        {"sink": sink},
    )


class ArrowBuffer:
    """Collects record batches until there are enough for a row group."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> bool:
        """Add `batch`; return whether the caller should `take`."""
        self._batches.append(batch)
        self._bytes += batch.nbytes
        return self._bytes >= BUFFERED_BYTES_MAX

    def take(self) -> pa.Table | None:
        """Return the collected batches as a table, and empty the buffer; None if it is empty."""
        if not self._batches:
            return None
        table = pa.Table.from_batches(self._batches)
        self._batches, self._bytes = [], 0
        return table
