"""What a source is: everything that the pipeline asks of a type of database.

A source writes the frames of `tailrace.protocol` into a change log. The log finds transactions and positions
in them; readers decode the rows by the tables that the frames describe, as PostgreSQL's text of
PostgreSQL's types, whatever the source is.

A *position* is one rising integer, a PostgreSQL LSN for instance. A source with many logs of its own
(shards) numbers its transactions as they come into ours, and writes beside them how far each shard is
(`frames.shard_frame`): such a frame stands in force like the description of a table, so that the state of
all shards is known at every boundary of the log.
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
    """Brings one database into one log, here or on an executor.

    `run` once; the rest from any thread.
    """

    def run(self) -> None:
        """Capture until `stop`, or until there is nothing more to do.

        :raises TailraceError: what a person must deal with.
        """
        ...

    def stop(self) -> None:
        """Ask `run` to return, with everything that was received durable and acknowledged."""
        ...

    def caught_up(self, position: int) -> bool:
        """Return whether everything that was committed before `position` is durable in the log."""
        ...

    def progress(self) -> CaptureProgress:
        """Return how far it is."""
        ...


class SourceCheck(Protocol):
    """Preflight of one source, in steps; used by one thread at a time.

    `connect` first, for all sources of a pipeline side by side; then `findings`; `close` at the end.
    """

    def connect(self) -> Iterator[Finding]:
        """Connect, and yield what is found before anybody takes more of the server."""
        ...

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with everything else."""
        ...

    def relations(self, wants: Callable[[str, str], bool]) -> Sequence[Relation]:
        """Return the tables that are captured, as the log would describe them now.

        :param wants: given schema and table, whether the table is asked for.
        """
        ...

    def tables(self) -> Sequence[tuple[str, str]]:
        """Return schema and name of the tables that are captured."""
        ...

    def close(self) -> None:
        """End the connection, if there is one."""
        ...


class Snapshots(Protocol):
    """Snapshots of one log, read again beside its stream; asked from any process.

    :raises TailraceError: from every method, `LOG_MISSING`, `LOG_CORRUPT`; where something is asked for,
        `LOG_FULL` and `LOG_WRITE_FAILED`, too.
    """

    def request(self, tables: Sequence[str], where: str) -> dict[str, Any]:
        """Ask for rows of `tables`, each as `schema.table`; return `id` and `engine_runs`.

        No tables: those rows are asked for that the source can't go on with (shards of Vitess).
        """
        ...

    def cancel(self, tables: Sequence[str]) -> dict[str, Any]:
        """Ask for the end of the requested snapshots that have one of `tables`; of all if none are named."""
        ...

    def pause(self, *, pauses: bool) -> dict[str, Any]:
        """Ask that snapshots beside the stream pause, or go on if not `pauses`."""
        ...

    def known(self) -> list[dict[str, Any]]:
        """Return the snapshots that are over, those at work, those that wait: `tailrace snapshot --list`."""
        ...

    @property
    def is_request_open(self) -> bool:
        """Whether a snapshot that was asked for is not read yet."""
        ...

    @property
    def needed_from(self) -> int | None:
        """The log offset from which on the log must tell which rows are read; None if no snapshot is open."""
        ...

    @property
    def warnings(self) -> Sequence[SourceWarning]:
        """What a person should know of the snapshots. Never raises."""
        ...

    @property
    def unfinished(self) -> Mapping[str, TableProgress]:
        """Tables whose snapshot is not whole, as it was last written down. Never raises."""
        ...


class Source(Protocol):
    """A type of source, by its name under `source.type`; found as an entry point of `tailrace.sources`.

    Methods are called from any thread. `section` is always an object of `settings`, a check one that `check`
    returned: a type of source may name its own classes there.
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
        """Return what captures into task "0" of the log at `log`, which may not be there yet.

        :param name: of the pipeline.
        :param semaphore: held while a snapshot begins, where other sources begin, too.
        :param listener: for the log's writer (`LogWriter.open`): hears of what is appended and durable.
        """
        ...

    def end(self, section: Any, stop: threading.Event) -> int:
        """Return the position that the source's newest commit lies before.

        :raises TailraceError: if the source can't be asked.
        :raises Stopped: if `stop` was set meanwhile.
        """
        ...

    def look(
        self, pipeline: PipelineConfig, directory: LogDirectory, timeout_s: float, stop: threading.Event
    ) -> SourceLook:
        """Return what the source says of itself now, with nothing captured; for `tailrace status`.

        :raises TailraceError: if the source can't be asked.
        """
        ...

    def snapshots(self, log: Path) -> Snapshots | None:
        """Return the snapshots of a log; None if this type of source reads tables at the start alone."""
        ...

    def check(self, pipeline: PipelineConfig, directory: LogDirectory | None) -> SourceCheck:
        """Return the preflight of the pipeline's source; `directory` is its log, if there is one."""
        ...

    def findings_together(self, checks: Sequence[Any]) -> Iterator[Finding]:
        """Yield what sources of this type lack together; `checks` have connected."""
        ...

    def with_recovery(self, error: TailraceError, pipeline: PipelineConfig) -> TailraceError:
        """Return `error` with the commands that lead on, where only a new snapshot does."""
        ...

    def leftover_repair(self, source: SourceFingerprint) -> str:
        """Return the command that frees what the source still keeps for a log that nobody feeds any more;
        empty: it keeps nothing.
        """
        ...
