"""Offset stores: in a file, or only in memory.

With the change log its connector stores them; `kafka.offsets.store` stores them in a topic; users can pass
their own object (`contracts.OffsetStore`).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from tailrace.changelog import durable
from tailrace.changelog.lock import FileLockedError, lock_file
from tailrace.config.engine_options import OffsetStorage
from tailrace.engine.contracts import OffsetStore
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Offset, Partition

log = structlog.get_logger(__name__)

#: Suffix of the lock file next to the file of offsets; the process that may write holds its lock.
LOCK_SUFFIX = ".lock"

_FORM = 1

#: Longest wait of `stop` for a running write, in seconds.
_STOP_S = 1.0

Key = tuple[tuple[str, str], ...]


def store_for(storage: OffsetStorage, name: str, *, atomic: bool = False, tasks: int = 0) -> OffsetStore:
    """Return the store that the configuration names, for the engine `name`; not for `log`, the connector's.

    :param atomic: `EngineOptions.atomic_source_offset_commit`.
    :param tasks: as for `KafkaOffsetStore`.
    """
    if storage.type == "memory":
        return MemoryOffsetStore()
    if storage.type == "file":
        assert storage.path is not None
        return FileOffsetStore(storage.path, name)
    assert storage.type == "kafka", "the connector keeps what is kept with the log"
    # Imported here: engines without Kafka need not load its client.
    from tailrace.kafka.offsets.store import KafkaOffsetStore

    return KafkaOffsetStore(storage, name, atomic=atomic, tasks=tasks)


def key_of(partition: Partition) -> Key:
    """Return the hashable form of a partition, by which it is compared."""
    return tuple(sorted(partition.items()))


class MemoryOffsetStore:
    """Keeps offsets as long as the object lives: engines that share it continue from each other's offsets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offsets: dict[Key, Offset] = {}

    def start(self) -> None:
        """Do nothing."""

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        """Return the offset of each partition that has one, by its number."""
        with self._lock:
            return _found(self._offsets, partitions)

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        """Store offsets."""
        with self._lock:
            self._offsets.update({key_of(partition): offset for partition, offset in offsets})

    def stop(self) -> None:
        """Do nothing."""


class FileOffsetStore:
    """Keeps offsets in a file: a small JSON document with a checksum, replaced as a whole.

    A write is on disk when it returns. A write that runs when the store is stopped keeps the lock until it
    has ended, so that it cannot replace another process's later offsets. A crash leaves the old content or
    the new; the previous content stays next to it (`<name>.previous`), and is read, with a warning, if the
    file was damaged. The file may hold the offsets of several engines by their names, but only one process
    at a time may use it.

    :param path: the file; it and its folder are created if they are missing.
    :param name: of the engine.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = Path(path)
        self._name = name
        self._lock = threading.Lock()
        self._held = -1
        self._is_stopped = False
        self._others: dict[str, Any] = {}
        self._offsets: dict[Key, Offset] = {}

    def start(self) -> None:
        """Take the file's lock and read it.

        :raises TailraceError: `OFFSETS_LOCKED` if another process has it, `OFFSETS_UNREADABLE`.
        """
        self._is_stopped = False
        try:
            durable.make_directory(self._path.parent)
            self._held = lock_file(self._path.with_name(self._path.name + LOCK_SUFFIX), "")
        except FileLockedError:
            raise TailraceError(
                Kind.OFFSETS_LOCKED,
                "take the file of offsets: another process uses it",
                "stop the other engine, or give this one its own file",
                {"file": str(self._path)},
            ) from None
        except (OSError, TailraceError) as error:
            raise self._denied(error) from error
        self.load()

    def load(self) -> None:
        """Read the file without its lock: another process may hold that, and write at the same time.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        try:
            self._load()
        except OSError as error:
            raise self._denied(error) from error

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        """Return the offset of each partition that has one, by its number."""
        with self._lock:
            return _found(self._offsets, partitions)

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        """Store offsets durably.

        :raises TailraceError: `OFFSETS_UNWRITABLE`; the previous offsets remain.
        """
        given = {key_of(partition): self._as_json(offset) for partition, offset in offsets}
        with self._lock:
            try:
                self._write({**self._offsets, **given})
            finally:
                if self._is_stopped:
                    self._release_lock()

    def _as_json(self, offset: Offset) -> Offset:
        """Return an offset as the next attempt reads it: keys that are numbers become strings.

        :raises TailraceError: `OFFSETS_UNWRITABLE` if it is not JSON.
        """
        try:
            found: Offset = json.loads(json.dumps(dict(offset)))
        except (TypeError, ValueError) as error:
            raise TailraceError(
                Kind.OFFSETS_UNWRITABLE,
                "store offsets: an offset is not JSON",
                "return offsets as JSON objects from the connector's tasks, and pass JSON objects to "
                "mark_processed: strings, numbers, lists and dicts of Python's own types",
                {"file": str(self._path)},
            ) from error
        return found

    def _write(self, changed: dict[Key, Offset]) -> None:
        if self._is_stopped:
            raise TailraceError(
                Kind.OFFSETS_UNWRITABLE,
                "store offsets: the store was stopped, and another process may use the file",
                "write before the engine ends; records processed since the last commit are delivered again",
                {"file": str(self._path)},
            )
        listed = [{"partition": dict(key), "offset": dict(offset)} for key, offset in changed.items()]
        content = {"form": _FORM, "engines": {**self._others, self._name: listed}}
        try:
            durable.write_state(self._path, content)
        except TailraceError as error:
            raise TailraceError(
                Kind.OFFSETS_UNWRITABLE,
                f"store offsets: {error.message}",
                "check the file's permissions, and the free space and health of its disk",
                {"file": str(self._path)},
            ) from error
        self._offsets = changed

    def stop(self) -> None:
        """Release the lock; if a write hangs, it releases the lock once it has ended."""
        self._is_stopped = True
        if self._lock.acquire(timeout=_STOP_S):
            self._release_lock()
            self._lock.release()

    def _release_lock(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _load(self) -> None:
        try:
            content = durable.read_state(self._path)
        except TailraceError as error:
            raise self._unreadable(
                error.message, f"restore the file from a backup; or {self._removal_hint}"
            ) from error
        self._others, self._offsets = {}, {}
        if content is None:
            return
        if not self._path.exists():
            log.warning(
                "the file of offsets is missing (removed, or a process died while writing it): reading the "
                "previous content",
                file=str(self._path),
                read=durable.previous_of(self._path).name,
            )
        if content.get("form") != _FORM:
            raise self._unreadable(
                f"it has form {content.get('form')!r}, this version reads form {_FORM}",
                f"run the version of Tailrace that wrote it; or {self._removal_hint}",
            )
        self._others = dict(content["engines"])
        for entry in self._others.pop(self._name, []):
            self._offsets[key_of(entry["partition"])] = entry["offset"]

    @property
    def _removal_hint(self) -> str:
        name = self._path.name
        return (
            f"remove {name} and {durable.previous_of(self._path).name}, and every source is read from its "
            "beginning"
        )

    def _denied(self, error: OSError | TailraceError) -> TailraceError:
        found = error.message if isinstance(error, TailraceError) else error.strerror
        return self._unreadable(
            found or type(error).__name__,
            "let this user read and write the file, those next to it whose names begin with its name, and "
            "their folder",
        )

    def _unreadable(self, found: str, hint: str) -> TailraceError:
        return TailraceError(
            Kind.OFFSETS_UNREADABLE, f"read the file of offsets: {found}", hint, {"file": str(self._path)}
        )


def _found(offsets: Mapping[Key, Offset], partitions: Sequence[Partition]) -> dict[int, Offset]:
    keys = [key_of(partition) for partition in partitions]
    return {number: offsets[key] for number, key in enumerate(keys) if key in offsets}
