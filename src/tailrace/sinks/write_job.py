"""The one job that writes a range: all tables at once, a task of Spark for each piece.

A range of one piece is written by the same functions in this process, where Spark has not started or would
take longer to begin a job than the piece takes to be written.

An executor decodes its piece and writes one file a table (one more where a table's schema
changes on the way) into the range's staging folder, with PyArrow. Nothing that it does is
visible or counts for anything: the driver commits. So a task may be repeated, run twice at
once or be left over from an engine that is dead: the same piece gives the same names and the
same bytes, each put in place by a rename.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import os
import secrets
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa

from tailrace import failpoints
from tailrace.config.patterns import matches_any
from tailrace.errors import Kind, TailraceError
from tailrace.model import OWN_FORMS, Relation, ValueModes
from tailrace.ranges.changes import changes_of
from tailrace.ranges.plan import Piece
from tailrace.sinks import folders
from tailrace.sources.postgres.decode.changes import TableChanges
from tailrace.sources.postgres.decode.column_policy import EVERYTHING, TablePolicy
from tailrace.spark import jobs
from tailrace.spark.folders import not_shared

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Work = TypeVar("Work")
Result = TypeVar("Result")

#: Executors hold so much of one table before it is written out as a row group.
BUFFERED_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What every task of a range's job is told.

    `have` maps tables, by their folders, to the log offset up to which the sink has them
    already: their changes before it are left out. Tables that it does not name are `have_all` far.
    `names` gives a table, as it is let out, as the target holds it. `table_policy` holds secrets: a job
    is only ever part of a task's closure, which nothing shows. `have_relations` maps relations, by
    oid, where the sink knows whose rows a folder has; it goes first, since tables change their names.
    """

    log: str
    staging: str
    task: str
    start: int
    end: int
    suffix: str
    tables: tuple[str, ...] | None
    have_all: int
    have: dict[str, int]
    names: Callable[[Relation], Relation]
    table_policy: TablePolicy = EVERYTHING
    modes: ValueModes = OWN_FORMS
    have_relations: dict[int, int] = field(default_factory=dict)

    def first_missing(self, relation: Relation) -> int:
        """Return the log offset from which on the sink lacks the table; `end` if it isn't wanted."""
        if self.tables is not None and not matches_any(self.tables, relation.schema, relation.table):
            return self.end
        if relation.oid in self.have_relations:
            return self.have_relations[relation.oid]
        directory = folders.table_directory(relation.schema, relation.table)
        return self.have.get(directory, self.have_all)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that an executor left in staging, complete and on disk.

    `relation` is the table as the target holds it, `source` as it is let out of the log, and `first`
    the log offset of the file's first change. `schema` is the file's Arrow schema, serialised;
    `facts` is what the file's format tells beyond.
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
    """Writes one file. `close` returns facts about it, once its bytes are handed over."""

    rows: int

    def write(self, changes: TableChanges) -> None: ...

    def close(self) -> dict[str, Any]: ...


#: Opens a writer for a path; the relation's typed rows have the given schema.
OpenWriter = Callable[[str, Relation], FileWriter]


def write_piece(job: WriteJob, open_writer: OpenWriter, piece: Piece) -> list[StagedFile]:
    """Write the changes of one piece, and return the files; all of them are on disk then."""
    failpoints.hit("sink.in_task")
    writing: dict[str, _Writing] = {}
    parts: dict[str | int, int] = {}  # the last number under a name, and of a relation, which may be renamed
    done: list[StagedFile] = []
    missing_from: dict[Relation, int] = {}
    wanted = changes_of(job.log, piece, modes=job.modes, table_policy=job.table_policy)
    for changes in itertools.chain.from_iterable(wanted):
        relation = changes.relation
        if relation is None:
            continue  # a logical message belongs to no table
        if relation not in missing_from:
            missing_from[relation] = job.first_missing(relation)
        part = changes.slice(missing_from[relation], job.end)
        if not part.count:
            continue
        table = relation.qualified_name
        if table in writing and writing[table].relation != relation:
            done.append(writing.pop(table).finish())
        if table not in writing:
            number = max(parts.get(table, -1), parts.get(relation.oid, -1)) + 1
            parts[table] = parts[relation.oid] = number
            first = int(part.log_offset[0])
            writing[table] = _Writing(job, open_writer, relation, first, piece.index, number)
        writing[table].write(part.named(writing[table].held))
    done += [writing.pop(table).finish() for table in list(writing)]
    return done


class _Writing:
    """A file on its way into staging, under a name of its own until it is complete."""

    def __init__(
        self,
        job: WriteJob,
        open_writer: OpenWriter,
        relation: Relation,
        first: int,
        piece: int,
        part: int,
    ) -> None:
        self.relation = relation
        self.held = job.names(relation)
        self._first = first
        self._directory = folders.table_directory(relation.schema, relation.table)
        self._name = folders.file_name(job.task, job.start, job.end, piece, part, job.suffix)
        self._path = os.path.join(job.staging, folders.staged_name(self._directory, self._name))
        self._temporary = f"{self._path}.{secrets.token_hex(4)}.tmp"
        self._writer = open_writer(self._temporary, self.held)

    def write(self, changes: TableChanges) -> None:
        self._writer.write(changes)

    def finish(self) -> StagedFile:
        facts = self._writer.close()
        sync_file(self._temporary)
        size = os.stat(self._temporary).st_size
        os.replace(self._temporary, self._path)
        schema = facts.pop("schema", b"")
        return StagedFile(
            self.held, self.relation, self._first, self._directory, self._name,
            self._writer.rows, size, schema, facts,
        )  # fmt: skip


def sync_file(path: str) -> None:
    """Put a file's content on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def run(
    spark: SparkSession | None, work: Sequence[Work], function: Callable[[Work], Result], sink: str
) -> list[Result]:
    """Run `function` on each of `work`, as `spark.jobs.run`.

    :raises TailraceError: the first that a task met; `SPARK_FAILED` if Spark itself failed.
    """
    return jobs.run(spark, work, function, partial(_failure, sink))


def _failure(sink: str, error: Exception) -> TailraceError:
    if isinstance(error, TailraceError):
        if error.kind is Kind.LOG_MISSING:  # the driver has it
            return not_shared(socket.gethostname(), "log.path", str(error.context["path"]), "there is no log")
        return error
    if isinstance(error, OSError):
        return _refused(error, sink)
    # Of an error that nobody foresaw, only its type and place: its words may quote a row.
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
    hint = "make room on the sink's file system, or check that it may be written to"
    if error.errno == errno.ENOENT:
        hint = "the sink's path must lead to the same folder on the driver and on every executor of Spark"
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"write a range on {socket.gethostname()}: {found}",
        hint,
        {"sink": sink},
    )


class ArrowBuffer:
    """Gathers record batches until they are worth a row group."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> bool:
        """Keep `batch`; tell whether it is time to `take`."""
        self._batches.append(batch)
        self._bytes += batch.nbytes
        return self._bytes >= BUFFERED_BYTES_MAX

    def take(self) -> pa.Table | None:
        """Return what was gathered as a table, and forget it; None if there is nothing."""
        if not self._batches:
            return None
        table = pa.Table.from_batches(self._batches)
        self._batches, self._bytes = [], 0
        return table
