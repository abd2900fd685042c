"""Chunks that another process reads: what it is told, what it does, and what becomes of the result.

An *assignment* is all that a process needs to read a chunk as this one would: where the source is
(with references to secrets, which it resolves itself), the exported snapshot, the COPY. It opens a
connection, takes the snapshot over, locks and checks as everybody does, and leaves the rows in a
staged file. Here they are taken into the log from there; the chunk counts when they are.

Who runs assignments, and where, is not known here: a `Delegate` does.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Protocol

import structlog

from tailrace import failpoints
from tailrace.capture import staged
from tailrace.capture.copying import ChunkCopy, ChunkJob, CopyOrder
from tailrace.capture.readers import OwnConnection, Window
from tailrace.capture.session import Session, Stopped
from tailrace.capture.staged import StagedFile, StagedWriter, TooLarge
from tailrace.capture.units import Postponed, RowFrame
from tailrace.capture.window import Exported, Observer, enter, lock_and_check, observing
from tailrace.config.fields import MIB
from tailrace.config.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError

log = structlog.get_logger(__name__)

#: A staged file may have so many times the planned size of a chunk, which is that on the server's
#: disk, compressed; and so much in any case. Larger chunks are read by this process.
SIZE_TIMES_PLANNED = 4
SIZE_MIN = 64 * MIB

#: A chunk whose reader was lost is read again within its window, so often in all.
ATTEMPTS = 3
AGAIN_S = 0.5

#: Between looks whether there is room again for a staged file.
FULL_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A chunk to be read and staged. A plain value without secrets, may be pickled."""

    source: PostgresSource
    exported: Exported
    order: CopyOrder
    folder: str
    size_max: int


class PutOff(Enum):
    """Why a chunk was not staged, where that is no error."""

    PLAN_ANEW = "plan anew"  # the table is not what it was planned as
    LATER = "later"  # it has another file than the snapshot sees
    TOO_LARGE = "too large"


#: What became of an assignment. An error comes as a value: raised, it would reach another process
#: as text.
Outcome = StagedFile | PutOff | TailraceError


class Delegate(Protocol):
    """Has assignments carried out by other processes. Any thread."""

    def prepare(self, stopping: threading.Event) -> None:
        """Return when assignments can be given; called before anything is made for them at the source.

        :raises TailraceError: `SPARK_FAILED`, `ENVIRONMENT_UNFIT`.
        :raises Stopped: if `stopping` was set.
        """

    def carry_out(self, assignment: Assignment, stopping: threading.Event) -> Outcome:
        """Have `carry_out` run elsewhere; return what it returned, once, however often it was run.

        :raises TailraceError: `SPARK_FAILED` if it was not, or may not have been.
        :raises Stopped: if `stopping` was set.
        """


def carry_out(assignment: Assignment) -> Outcome:
    """Read a chunk and stage it. In a process of its own, or a thread."""
    never = threading.Event()
    order = assignment.order
    try:
        with closing(Session.connect(assignment.source, never)) as session:
            enter(session, assignment.exported)
            with observing(assignment.source, never) as side:
                lock_and_check(session, Observer(side, None), order.stretch)
            with StagedWriter(assignment.folder, assignment.size_max) as writer:
                row_bytes_max = assignment.source.frame_bytes_max
                ChunkCopy(
                    session, order, writer.write, never, row_bytes_max=row_bytes_max, held_bytes=0
                ).run()
                return writer.finish()
    except Postponed as postponed:
        return PutOff.PLAN_ANEW if postponed.planned_anew else PutOff.LATER
    except TooLarge:
        return PutOff.TOO_LARGE
    except TailraceError as error:
        return error
    except Exception as error:  # noqa: BLE001
        # Of an error that nobody foresaw, only its type and place: its words may quote a row.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return TailraceError(
            Kind.INTERNAL,
            f"copy {order.table}: {type(error).__name__} in {frame.name}, "
            f"{os.path.basename(frame.filename)} line {frame.lineno}",
            "please report it with the version",
        )


class Delegation:
    """The way in which a task's chunks are read by others.

    :param parent: where staged files lie; nobody else's.
    """

    def __init__(self, delegate: Delegate, parent: Path) -> None:
        self._delegate = delegate
        self._parent = parent

    def prepare(self, stopping: threading.Event) -> None:
        """As `Delegate.prepare`."""
        self._delegate.prepare(stopping)

    def open_reader(self, window: Window) -> Delegated:
        """Return one more reader of a window."""
        return Delegated(self._delegate, staged.new_folder(self._parent), window)


class Delegated:
    """Has chunks read elsewhere, one after another, and takes their rows into the log.

    :param folder: for staged files; removed by `close`.
    """

    def __init__(self, delegate: Delegate, folder: Path, window: Window) -> None:
        self._delegate = delegate
        self._folder = folder
        self._window = window
        planned = window.source.snapshot_chunk_bytes
        self._size_max = max(SIZE_TIMES_PLANNED * planned, SIZE_MIN)

    def read(self, job: ChunkJob) -> None:
        """As `ChunkReader.read`; also :raises TailraceError: `SPARK_FAILED`, `ENVIRONMENT_UNFIT`."""
        window = self._window
        found = self._staged(
            Assignment(window.source, window.exported, job.order, str(self._folder), self._size_max)
        )
        if found is PutOff.TOO_LARGE:
            with closing(OwnConnection(window)) as own:
                own.read(job)
        elif isinstance(found, PutOff):
            raise Postponed(planned_anew=found is PutOff.PLAN_ANEW)
        else:
            failpoints.hit("staging.before_take")
            self._take(found, job)
            failpoints.hit("staging.taken")
            Path(found.path).unlink(missing_ok=True)

    def close(self) -> None:
        staged.remove(self._folder)

    def _staged(self, assignment: Assignment) -> StagedFile | PutOff:
        """Return the chunk, staged and checked, or why it is not."""
        for attempt in count(1):
            try:
                outcome = self._delegate.carry_out(assignment, self._window.over)
                if isinstance(outcome, TailraceError):
                    raise outcome
                if isinstance(outcome, StagedFile):
                    staged.check(outcome)
            except TailraceError as error:
                self._bear(error, attempt, assignment.order)
            else:
                return outcome
        raise AssertionError

    def _bear(self, error: TailraceError, attempt: int, order: CopyOrder) -> None:
        """Wait before a chunk is read again, or raise what ends the window."""
        if error.kind is Kind.LOG_FULL:
            wait_s = FULL_WAIT_S
        elif error.kind is Kind.SPARK_FAILED and attempt < ATTEMPTS:
            wait_s = AGAIN_S
        else:
            raise error
        if attempt == 1:
            log.warning(
                "a chunk could not be staged; it is read again",
                table=order.table,
                chunk=order.number,
                kind=str(error.kind),
                message=error.message,
            )
        if self._window.over.wait(wait_s):
            raise Stopped

    def _take(self, found: StagedFile, job: ChunkJob) -> None:
        head = job.head(self._window.exported.lsn)

        def write(frames: Sequence[RowFrame]) -> None:
            self._window.units.write(job.unit, job.table.oid, head, frames)

        rows = 0
        try:
            write(())  # also of a chunk without rows the log has the table's schema
            for frame, number in staged.rows_of(found):
                write([(frame, number)])
                rows += number
                job.progress.add(number)
            self._window.units.part_done(job.unit, rows)
        except Postponed:
            job.progress.add(-rows)
            raise
