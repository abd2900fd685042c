"""The messages between driver and capturing task: two small files beside the log, each with one writer.

`wanted.json` is the driver's: which of its jobs counts, whether to stop; its time says that the driver
lives, which needs no room on a full disk. `report.json` is the task's: what it does and how far it is. Both
are replaced as a whole and have a checksum; neither is fsynced, and no data depends on them: what keeps two
writers from one log is its lock and its epoch.
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

#: What is added to the log's name for the folder of the two files: `.<log>.task`, which no source's log
#: is called, as a folder of logs may hold both.
PREFIX, SUFFIX = ".", ".task"

#: What a progress has that is JSON as it is, and what one of a table has.
_PLAIN = ("phase", "rows", "bytes", "source_end", "acknowledged", "reconnects")
_PLAIN_OF_TABLE = ("rows", "rows_estimated", "done", "chunks", "chunks_done", "rows_before")


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DesiredState(_Message):
    """What the driver wants.

    :param run_id: of the driver's capture; a task of another one is to end.
    :param round: which of its jobs.
    :param stop: make durable and acknowledge what was received, and end.
    :param position: report when everything committed before this LSN is in the log; 0: nobody waits.
    """

    run_id: str
    round: int
    stop: bool = False
    position: int = 0


class Report(_Message):
    """What a task reports.

    :param attempt: round of the job and Spark's number of the attempt: a later one takes its place.
    :param process: that captures, for people.
    :param caught_up: everything committed before this LSN is in the log.
    :param capture: its `CaptureProgress` as JSON. Clocks differ: a table has the seconds that it has been
        read for, None: not yet in this run.
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
        """Return what there is to report; `now_s` on the monotonic clock of the process that captures."""
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
        """Make the folder."""
        make_directory(self._folder)

    def ask(self, wanted: DesiredState) -> None:
        """Write what is wanted.

        :raises OSError: there is no room, or no folder.
        """
        write_whole(self._wanted, encode_state(wanted.model_dump(mode="json")))

    def beat(self) -> None:
        """Show that the driver lives.

        :raises OSError: nothing was asked for.
        """
        os.utime(self._wanted)

    @property
    def beat_ns(self) -> int:
        """When the driver showed last that it lives, by its own clock; 0: that can't be read now."""
        # Of the opened file: a network file system may show an older time of a path.
        with contextlib.suppress(OSError), self._wanted.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
        return 0

    def wanted(self) -> DesiredState | None:
        """Return what is wanted; None if it can't be read now."""
        return _read(self._wanted, DesiredState)

    def put_report(self, report: Report) -> None:
        """Write what is done.

        :raises OSError: there is no room, or no folder.
        """
        write_whole(self._report, encode_state(report.model_dump(mode="json")))

    def report(self) -> Report | None:
        """Return what was reported last; None if it can't be read now."""
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
