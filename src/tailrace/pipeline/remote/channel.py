"""The messages between driver and capturing task: two small files next to the log, each with one writer.

The driver writes `wanted.json`: which of its jobs is current, whether to stop. The file's modification time
is the driver's heartbeat, which needs no space on a full disk. The task writes `report.json`: its progress.
Both are replaced as a whole and have a checksum; neither is fsynced, and no data depends on them: the log's
lock and epoch keep a second writer from it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from tailrace.changelog.durable import decode_state, encode_state, make_directory, write_whole
from tailrace.changelog.writer import Tail
from tailrace.errors import TailraceError
from tailrace.sources.progress import (
    CaptureProgress,
    SourceHealth,
    SourceNumber,
    SourceWarning,
    TableProgress,
)

M = TypeVar("M", bound=BaseModel)

#: Parts of the name of the folder with the two files, `.<log>.task`. No source's log has such a name, and a
#: folder of logs may contain both.
PREFIX, SUFFIX = ".", ".task"

#: Fields of CaptureProgress and of TableProgress whose values are JSON values.
_PLAIN = ("phase", "rows", "bytes", "source_end", "acknowledged", "reconnects")
_PLAIN_OF_TABLE = ("rows", "rows_estimated", "done", "chunks", "chunks_done", "rows_before")


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DesiredState(_Message):
    """The state that the driver wants the task to have.

    :param run_id: of the driver's capture; a task of another capture must end.
    :param round: the number of the driver's current job.
    :param stop: make durable and acknowledge what was received, and end.
    :param position: report when everything committed before this LSN is in the log; 0: no report is needed.
    """

    run_id: str
    round: int
    stop: bool = False
    position: int = 0


class Report(_Message):
    """A task's report to the driver.

    :param attempt: round of the job and Spark's number of the attempt: a later attempt replaces this one.
    :param process: the capturing process, in words.
    :param caught_up: everything committed before this LSN is in the log.
    :param capture: its `CaptureProgress` as JSON. Clocks differ, so a table has the seconds since its reading
        began; None: not begun in this run.
    """

    run_id: str
    attempt: tuple[int, int]
    process: str
    caught_up: int
    capture: dict[str, Any]

    @classmethod
    def of(
        cls,
        run_id: str,
        attempt: tuple[int, int],
        process: str,
        caught_up: int,
        now_s: float,
        progress: CaptureProgress,
    ) -> Report:
        """Return the report of `progress`; `now_s` on the monotonic clock of the process that captures."""
        error, health = progress.error, progress.health
        context = {} if error is None else {name: str(value) for name, value in error.context.items()}
        capture = {
            **{name: getattr(progress, name) for name in _PLAIN},
            "appended": asdict(progress.appended),
            "durable": asdict(progress.durable),
            "snapshot": {
                name: {each: getattr(table, each) for each in _PLAIN_OF_TABLE}
                | {"for_s": now_s - table.began_s if table.began_s else None}
                for name, table in progress.snapshot.items()
            },
            "error": None if error is None else {**error.as_json(), "context": context},
            "health": None if health is None else asdict(health),
            "warnings": [asdict(warning) for warning in progress.warnings],
        }
        return cls(run_id=run_id, attempt=attempt, process=process, caught_up=caught_up, capture=capture)

    def progress(self, now_s: float) -> CaptureProgress:
        """Return the progress; `now_s` on the monotonic clock of this process."""
        found = self.capture
        error, health = found["error"], found["health"]
        return CaptureProgress(
            **{
                **found,
                "appended": Tail(**found["appended"]),
                "durable": Tail(**found["durable"]),
                "snapshot": {name: _of_table(table, now_s) for name, table in found["snapshot"].items()},
                "error": None if error is None else TailraceError(**error),
                "health": None if health is None else _health(health),
                "warnings": tuple(SourceWarning(**warning) for warning in found["warnings"]),
            }
        )


class Channel:
    """The two files of the log at `log_path`. Any thread; one writer for each file."""

    def __init__(self, log_path: Path) -> None:
        self._folder = log_path.with_name(PREFIX + log_path.name + SUFFIX)
        self._wanted = self._folder / "wanted.json"
        self._report = self._folder / "report.json"

    def prepare(self) -> None:
        """Create the folder."""
        make_directory(self._folder)

    def ask(self, wanted: DesiredState) -> None:
        """Write the desired state.

        :raises OSError: the disk is full, or there is no folder.
        """
        write_whole(self._wanted, encode_state(wanted.model_dump(mode="json")))

    def beat(self) -> None:
        """Set the time of the driver's heartbeat to now.

        :raises OSError: there is no desired state yet.
        """
        os.utime(self._wanted)

    @property
    def beat_ns(self) -> int:
        """The time of the driver's last heartbeat, by the driver's clock; 0: it can't be read now."""
        # Of the opened file: a network file system may show an older time of a path.
        with contextlib.suppress(OSError), self._wanted.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
        return 0

    def wanted(self) -> DesiredState | None:
        """Return the desired state; None if it can't be read now."""
        return _read(self._wanted, DesiredState)

    def put_report(self, report: Report) -> None:
        """Write the task's report.

        :raises OSError: the disk is full, or there is no folder.
        """
        write_whole(self._report, encode_state(report.model_dump(mode="json")))

    def report(self) -> Report | None:
        """Return the last report; None if it can't be read now."""
        return _read(self._report, Report)


def _read(path: Path, kind: type[M]) -> M | None:
    with contextlib.suppress(OSError, ValueError):
        content = decode_state(path.read_bytes())
        return None if content is None else kind.model_validate(content)
    return None


def _health(found: dict[str, Any]) -> SourceHealth:
    return SourceHealth(**{**found, "numbers": tuple(SourceNumber(**each) for each in found["numbers"])})


def _of_table(content: dict[str, Any], now_s: float) -> TableProgress:
    for_s = content["for_s"]
    began_s = 0.0 if for_s is None else now_s - for_s
    return TableProgress(**{name: content[name] for name in _PLAIN_OF_TABLE}, began_s=began_s)
