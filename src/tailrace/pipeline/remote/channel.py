"""The messages between driver and capturing task: two small files beside the log, each with one writer.

`wanted.json` is the driver's: which of its jobs counts, how far it has counted, whether to stop.
`report.json` is the task's: what it does and how far it is. Both are replaced as a whole and have a
checksum; neither is fsynced, and no data depends on them: what keeps two writers from one log is its
lock and its epoch.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from tailrace.changelog.durable import decode_state, encode_state, make_directory
from tailrace.changelog.writer import Tail
from tailrace.errors import Kind, TailraceError
from tailrace.sources.progress import CaptureProgress, PhaseName, SourceHealth, SourceWarning, TableProgress

M = TypeVar("M", bound=BaseModel)

#: What is added to the log's name for the folder of the two files: `.<log>.task`, which no source's log
#: is called, as a folder of logs may hold both.
PREFIX, SUFFIX = ".", ".task"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DesiredState(_Message):
    """What the driver wants.

    :param life: of the driver's capture; a task of another one is to end.
    :param round: which of its jobs.
    :param beat: rises as long as the driver lives.
    :param stop: make durable and acknowledge what was received, and end.
    :param position: tell when everything committed before this LSN is in the log; 0: no matter.
    """

    life: str
    round: int
    beat: int = 0
    stop: bool = False
    position: int = 0


class TableSnapshot(_Message):
    """A table's snapshot; `for_s`: how long it has been read in this run, None: not yet."""

    rows: int
    rows_estimated: int
    done: bool
    chunks: int
    chunks_done: int
    rows_before: int
    for_s: float | None


class ReportedFailure(_Message):
    """An error in words."""

    kind: Kind
    message: str
    hint: str
    context: dict[str, Any]

    @classmethod
    def of(cls, error: TailraceError) -> ReportedFailure:
        """Return `error` as it is reported."""
        context = {name: str(value) for name, value in error.context.items()}
        return cls(kind=error.kind, message=error.message, hint=error.hint, context=context)

    def error(self) -> TailraceError:
        """Return the error."""
        return TailraceError(self.kind, self.message, self.hint, self.context)


class Report(_Message):
    """What a task reports.

    :param attempt: round of the job and Spark's number of the attempt: a later one takes its place.
    :param process: that captures, for people.
    :param caught_up: everything committed before this LSN is in the log.
    """

    life: str
    attempt: tuple[int, int]
    process: str
    caught_up: int
    phase: PhaseName
    rows: int
    bytes: int
    appended: tuple[int, int, int]
    durable: tuple[int, int, int]
    source_end: int
    acknowledged: int
    snapshot: dict[str, TableSnapshot]
    reconnects: int
    error: ReportedFailure | None
    health: SourceHealth | None
    warnings: tuple[SourceWarning, ...]

    @classmethod
    def of(
        cls,
        life: str,
        attempt: tuple[int, int],
        process: str,
        caught_up: int,
        now_s: float,
        progress: CaptureProgress,
    ) -> Report:
        """Return what there is to tell; `now_s` on the monotonic clock of the process that captures."""
        return cls(
            life=life,
            attempt=attempt,
            process=process,
            caught_up=caught_up,
            phase=progress.phase,
            rows=progress.rows,
            bytes=progress.bytes,
            appended=_numbers(progress.appended),
            durable=_numbers(progress.durable),
            source_end=progress.source_end,
            acknowledged=progress.acknowledged,
            snapshot={
                name: TableSnapshot(
                    rows=table.rows,
                    rows_estimated=table.rows_estimated,
                    done=table.done,
                    chunks=table.chunks,
                    chunks_done=table.chunks_done,
                    rows_before=table.rows_before,
                    for_s=now_s - table.began_s if table.began_s else None,
                )
                for name, table in progress.snapshot.items()
            },
            reconnects=progress.reconnects,
            error=None if progress.error is None else ReportedFailure.of(progress.error),
            health=progress.health,
            warnings=progress.warnings,
        )

    def progress(self, now_s: float) -> CaptureProgress:
        """Return the progress; `now_s` on the monotonic clock of this process."""
        return CaptureProgress(
            phase=self.phase,
            rows=self.rows,
            bytes=self.bytes,
            appended=Tail(*self.appended),
            durable=Tail(*self.durable),
            source_end=self.source_end,
            acknowledged=self.acknowledged,
            snapshot={name: _progress_of(table, now_s) for name, table in self.snapshot.items()},
            reconnects=self.reconnects,
            error=None if self.error is None else self.error.error(),
            health=self.health,
            warnings=self.warnings,
        )


class Channel:
    """The two files of the log at `log_path`. Any thread; one writer for each file."""

    def __init__(self, log_path: Path) -> None:
        self._folder = log_path.with_name(PREFIX + log_path.name + SUFFIX)
        self._wanted = self._folder / "wanted.json"
        self._report = self._folder / "report.json"

    def prepare(self) -> None:
        """Make the folder."""
        make_directory(self._folder)

    def ask(self, wanted: DesiredState) -> None:
        """Tell what is wanted.

        :raises OSError: there is no room, or no folder.
        """
        _write(self._wanted, wanted)

    def wanted(self) -> DesiredState | None:
        """Return what is wanted; None if it can't be read now."""
        return _read(self._wanted, DesiredState)

    def tell(self, report: Report) -> None:
        """Tell what is done.

        :raises OSError: there is no room, or no folder.
        """
        _write(self._report, report)

    def report(self) -> Report | None:
        """Return what was reported last; None if it can't be read now."""
        return _read(self._report, Report)


def _write(path: Path, message: BaseModel) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(encode_state(message.model_dump(mode="json")))
    temporary.replace(path)


def _read(path: Path, kind: type[M]) -> M | None:
    with contextlib.suppress(OSError, ValueError):
        content = decode_state(path.read_bytes())
        return None if content is None else kind.model_validate(content)
    return None


def _numbers(tail: Tail) -> tuple[int, int, int]:
    return tail.offset, tail.position, tail.position_time_us


def _progress_of(table: TableSnapshot, now_s: float) -> TableProgress:
    return TableProgress(
        rows=table.rows,
        rows_estimated=table.rows_estimated,
        done=table.done,
        chunks=table.chunks,
        chunks_done=table.chunks_done,
        began_s=0.0 if table.for_s is None else now_s - table.for_s,
        rows_before=table.rows_before,
    )
