"""The commit record of a sink of plain files: a chain of manifests.

A manifest lists the files of one range. It is put in place by a hard link, which fails if a
manifest of that name exists: at most one manifest can follow each position, by any writer. The
link is the commit. Files become visible after it, so only the last manifest may have files that
are still in staging. Until they are moved, there is a mark next to the manifest: without the mark,
missing files were published, and removed later by the user or another program.

A manifest's name is its range's start, so the highest name is the last one, and the chain has no
gap: each start is the previous end, or an offset up to which the log was read and has nothing for
the sink (`idle`).
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tailrace.changelog import durable
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.target import read_checked, writing

_NAME = re.compile(r"([0-9a-f]{16})\.json")
_IDLE = "idle.json"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a range: `name` in the table's folder `directory`."""

    directory: str
    name: str
    table: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of one commit, the range `[start, end)` of the task's log."""

    task: str
    start: int
    end: int
    files: tuple[DataFile, ...]


class Manifests:
    """The chain of one task, in a separate folder."""

    def __init__(self, directory: Path, sink: str) -> None:
        self._directory = directory
        self._sink = sink

    def last(self) -> Manifest | None:
        """Return the last commit, or None before the first.

        :raises TailraceError: `SINK_DAMAGED`.
        """
        try:
            names = [name for name in os.listdir(self._directory) if _NAME.fullmatch(name)]
        except FileNotFoundError:
            return None
        if not names:
            return None
        content = read_checked(self._directory / max(names), self._sink)
        assert content is not None, "manifests are never removed"
        return _manifest(content)

    def position(self) -> int | None:
        """Return the log offset up to which the sink has everything; None if nothing was ever written.

        :raises TailraceError: `SINK_DAMAGED`.
        """
        last = self.last()
        idle = read_checked(self._directory / _IDLE, self._sink)
        ends = [] if last is None else [last.end]
        if idle is not None:
            ends.append(int(idle["position"]))
        return max(ends, default=None)

    def commit(self, manifest: Manifest) -> None:
        """Append a manifest to the chain, durably. This is the commit.

        :raises TailraceError: `SINK_FOREIGN` if it exists already, which only another
            engine can have written; `SINK_WRITE_FAILED`.
        """
        path = self._directory / f"{manifest.start:016x}.json"
        with writing(self._sink, "commit a range"):
            durable.make_directory(self._directory, durable.SHARED_DIRECTORY_MODE)
            self._mark(manifest).touch()
            temporary = durable.write_temporary(path, [durable.encode_state(asdict(manifest))])
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                raise TailraceError(
                    Kind.SINK_FOREIGN,
                    f"commit a range: the sink has one from offset {manifest.start} already",
                    "another engine writes to this target: stop one of them",
                    {"sink": self._sink, "file": str(path)},
                ) from None
            finally:
                temporary.unlink(missing_ok=True)
            durable.sync_directory(self._directory)

    def is_published(self, manifest: Manifest) -> bool:
        """Return whether a commit's files were moved to their folders; older versions' always were."""
        return not self._mark(manifest).exists()

    def note_published(self, manifest: Manifest) -> None:
        """Record, durably, that a commit's files are durable in their folders."""
        self._mark(manifest).unlink(missing_ok=True)
        durable.sync_directory(self._directory)

    def take_back(self, manifest: Manifest) -> None:
        """Remove the last commit, which has lost all of its files, so that its range is written again.

        :raises TailraceError: `SINK_WRITE_FAILED`.
        """
        with writing(self._sink, "take back a range"):
            (self._directory / f"{manifest.start:016x}.json").unlink()
            durable.sync_directory(self._directory)  # first: without the mark, the files would count as moved
            self.note_published(manifest)

    def _mark(self, manifest: Manifest) -> Path:
        return self._directory / f"{manifest.start:016x}.unpublished"

    def note_idle(self, position: int) -> None:
        """Record that everything before `position` was read and has nothing for the sink.

        :raises TailraceError: `SINK_WRITE_FAILED`.
        """
        with writing(self._sink, "record the position"):
            durable.make_directory(self._directory, durable.SHARED_DIRECTORY_MODE)
            durable.write_atomically(self._directory / _IDLE, durable.encode_state({"position": position}))


def _manifest(content: dict[str, Any]) -> Manifest:
    files = tuple(DataFile(**each) for each in content["files"])
    return Manifest(content["task"], content["start"], content["end"], files)
