"""The offset store `log`, which stores an engine's offsets in the change logs that they refer to.

Each log has them in its list of readers, in one file with the log offset that the engine has released, and
written together with it. So a log that is moved, restored or removed has its offsets with it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.config import PipelineConfig
from tailrace.engine.offsets.stores import key_of
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.log.consumer import partition_of, reader_name
from tailrace.ranges.batches import log_offset_of
from tailrace.records.batch import Offset, Partition


class LogOffsetStore:
    """Stores the offsets of the engine `name`, those of each source in its log. Any thread.

    Writes are atomic for each log, not across logs: sources are not ordered relative to each other.
    """

    def __init__(self, name: str, pipelines: Sequence[PipelineConfig]) -> None:
        self._name = reader_name(name)
        self._paths = {key_of(partition_of(pipeline)): pipeline.log.path for pipeline in pipelines}
        self._logs: dict[Path, LogReader] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Do nothing: a log may be created later."""

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        """Return, by its number in `partitions`, the offset of each that has one.

        :raises TailraceError: `OFFSETS_UNREADABLE`; `LOG_CORRUPT`.
        """
        found: dict[int, Offset] = {}
        for number, partition in enumerate(partitions):
            path = self._paths.get(key_of(partition))
            kept = None if path is None else self._kept(path)
            if kept is not None:
                found[number] = kept
        return found

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        """Store these offsets durably. `timeout_s` has no effect: an fsync can't be interrupted.

        :raises TailraceError: `OFFSETS_UNWRITABLE`; `OFFSETS_FOREIGN` for an offset that is not one of
            the partition's log; `LOG_RANGE_GONE` if retention has dropped the engine's reader.
        """
        with self._lock:
            for partition, offset in offsets:
                path = self._paths.get(key_of(partition))
                if path is None:
                    raise TailraceError(
                        Kind.OFFSETS_UNWRITABLE,
                        "keep offsets with the change log: the pipeline has no such source",
                        "keep offsets of other partitions in another store: engine.offset_storage",
                        dict(partition),
                    )
                self._write(path, offset)

    def stop(self) -> None:
        """Close the logs' readers."""
        for reader in self._logs.values():
            reader.close()

    def _kept(self, path: Path) -> Offset | None:
        try:
            reader = Readers.open(path).get(self._name)
        except TailraceError as error:
            if error.kind is not Kind.LOG_MISSING:
                raise
            return None
        return None if reader is None else reader.kept.get(TASK)

    def _write(self, path: Path, offset: Offset) -> None:
        try:
            directory = LogDirectory.open(path)
            if path not in self._logs:
                self._logs[path] = LogReader.open(directory, TASK)
            boundary = self._logs[path].boundary_up_to(log_offset_of(offset, directory.identity.log_id))
            Readers(directory).commit(self._name, TASK, boundary, kept=dict(offset))
        except TailraceError as error:
            if error.kind not in {Kind.LOG_FULL, Kind.LOG_WRITE_FAILED}:
                raise
            raise error.changed(kind=Kind.OFFSETS_UNWRITABLE) from error
