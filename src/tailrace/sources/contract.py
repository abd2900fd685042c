"""The interface of a source: everything that the pipeline needs from a type of database.

A source writes the frames of `tailrace.protocol` into a change log. The log finds transactions and positions
in them. Readers decode the rows with the table descriptions in the frames, as PostgreSQL's text of
PostgreSQL's types, for every type of source.

A *position* is one increasing integer, for instance a PostgreSQL LSN. A source with several logs of its own
(shards) numbers its transactions in the order in which it writes them, and writes the position of each shard
with them (`frames.shard_frame`): such a frame is in force until the next one, as a table's description is,
so that the state of all shards is known at every boundary of the log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogListener
from tailrace.config import PipelineConfig
from tailrace.config.sections import LogConfig
from tailrace.config.source.section import SourceSection
from tailrace.errors import TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.model import Relation, SourceFingerprint
from tailrace.sources.findings import Finding
from tailrace.sources.progress import CaptureProgress, SourceLook, SourceWarning, TableProgress


class Capture(Protocol):
    """Captures one database into one log, in this process or on an executor.

    `run` is called once, the other methods from any thread.
    """

    def run(self) -> None:
        """Capture until `stop` is called or there is nothing more to do.

        :raises TailraceError: an error that the user must repair.
        """
        ...

    def stop(self) -> None:
        """Ask `run` to return after everything that was received is durable and acknowledged."""
        ...

    def caught_up(self, position: int) -> bool:
        """Return whether everything that was committed before `position` is durable in the log."""
        ...

    def progress(self) -> CaptureProgress:
        """Return the progress of the capture."""
        ...


class SourceCheck(Protocol):
    """Preflight of one source, in steps; used by one thread at a time.

    `connect` is called first, for all sources of a pipeline in parallel; then `findings`; `close` at the end.
    """

    def connect(self) -> Iterator[Finding]:
        """Connect, and yield what is found before more of the server's capacity is used."""
        ...

    def findings(self) -> Iterator[Finding]:
        """Yield the problems of everything else."""
        ...

    def relations(self, wants: Callable[[str, str], bool]) -> Sequence[Relation]:
        """Return the captured tables, as the log would describe them now.

        :param wants: returns whether the table with the given schema and name is to be returned.
        """
        ...

    def tables(self) -> Sequence[tuple[str, str]]:
        """Return schema and name of each captured table."""
        ...

    def close(self) -> None:
        """Close the connection, if there is one."""
        ...


class Snapshots(Protocol):
    """The snapshots of one log that are read while streaming; usable from any process.

    :raises TailraceError: from every method, `LOG_MISSING`, `LOG_CORRUPT`; from `request`, `cancel` and
        `pause` also `LOG_FULL` and `LOG_WRITE_FAILED`.
    """

    def request(self, tables: Sequence[str], where: str) -> dict[str, Any]:
        """Request a snapshot of `tables`, each as `schema.table`; return `id` and `engine_runs`.

        Without tables: of the rows without which the source can't continue (shards of Vitess).
        """
        ...

    def cancel(self, tables: Sequence[str]) -> dict[str, Any]:
        """Cancel the requested snapshots that have one of `tables`; all of them if none are named."""
        ...

    def pause(self, *, pauses: bool) -> dict[str, Any]:
        """Pause snapshots that are read while streaming, or resume them if not `pauses`."""
        ...

    def known(self) -> list[dict[str, Any]]:
        """Return the finished, the running and the waiting snapshots, for `tailrace snapshot --list`."""
        ...

    @property
    def is_request_open(self) -> bool:
        """Whether a requested snapshot is not finished yet."""
        ...

    @property
    def needed_from(self) -> int | None:
        """The log offset from which the log must be kept to find what was read; None: no open snapshot."""
        ...

    @property
    def warnings(self) -> Sequence[SourceWarning]:
        """Warnings for the user about the snapshots. Never raises an error."""
        ...

    @property
    def unfinished(self) -> Mapping[str, TableProgress]:
        """Tables whose snapshot is incomplete, as last stored. Never raises an error."""
        ...


class Source(Protocol):
    """A type of source; its name is an entry point of `tailrace.sources` and the value of `source.type`.

    Methods are called from any thread. `section` is always an instance of `settings`, and `checks` are what
    `check` returned: an implementation may declare its own classes there.
    """

    settings: ClassVar[type[SourceSection]]

    def capture(
        self,
        section: Any,
        log: Path,
        options: LogConfig,
        *,
        name: str,
        semaphore: FairSemaphore | None = None,
        listener: LogListener | None = None,
    ) -> Capture:
        """Return a capture into task "0" of the log at `log`, which may not exist yet.

        :param name: the pipeline's name.
        :param semaphore: held while a snapshot begins; limits how many sources do so at once.
        :param listener: for `LogWriter.open`: is notified of what is appended and durable.
        """
        ...

    def end(self, section: Any, stop: threading.Event) -> int:
        """Return a position after the source's newest commit.

        :raises TailraceError: if the source can't be queried.
        :raises Stopped: if `stop` was set meanwhile.
        """
        ...

    def look(
        self, pipeline: PipelineConfig, directory: LogDirectory, timeout_s: float, stop: threading.Event
    ) -> SourceLook:
        """Return the source's present state without capturing, for `tailrace status`.

        :raises TailraceError: if the source can't be queried.
        """
        ...

    def snapshots(self, log: Path) -> Snapshots | None:
        """Return the snapshots of a log; None if this type of source reads tables only at the start."""
        ...

    def check(self, pipeline: PipelineConfig, directory: LogDirectory | None) -> SourceCheck:
        """Return the preflight of the pipeline's source; `directory` is its log, if there is one."""
        ...

    def findings_together(self, checks: Sequence[Any]) -> Iterator[Finding]:
        """Yield what the sources of this type need together and lack; all `checks` are connected."""
        ...

    def with_recovery(self, error: TailraceError, pipeline: PipelineConfig) -> TailraceError:
        """Return `error`; if only a new snapshot helps, with the commands for it."""
        ...

    def leftover_repair(self, source: SourceFingerprint) -> str:
        """Return the command that releases what the source keeps for a log that is no longer written;
        empty: it keeps nothing.
        """
        ...
