"""The directory of a change log: its identity and the paths of its files.

identity.json                 log id, format, source; written once
lock, status.json             of the engine that runs on the log (`pipeline.log.root`)
readers/<name>.json           registered readers
tasks/<task>/lock             held by the writer
tasks/<task>/end              how far the log is durable, and the writer's epoch
tasks/<task>/<offset>.seg     segments
tasks/<task>/<name>.state     other state of a task, in two generations
"""

from __future__ import annotations

import os
import secrets
import time
import urllib.parse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tailrace.changelog import durable
from tailrace.changelog.durable import write_atomically
from tailrace.changelog.format import FORMAT_VERSION, segment_offset
from tailrace.errors import Kind, TailraceError
from tailrace.model import SourceFingerprint

__all__ = ["LogDirectory", "LogIdentity", "decode_name", "encode_name", "write_atomically"]

_IDENTITY = "identity.json"
_TASKS = "tasks"
#: The name of the only task that today's sources write.
TASK = "0"
#: Files that a new log's directory may already contain: an engine's lock and status (`pipeline.log.root`),
#: and those of a file system's root.
OF_THE_ROOT = frozenset({"lock", "status.json", "lost+found"})


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """The identity of a log: its source and `log_id`, 32 random hexadecimal digits."""

    log_id: str
    format_version: int
    source: SourceFingerprint
    created_us: int


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """An existing log. A value without open files, which may be pickled."""

    path: Path
    identity: LogIdentity

    @classmethod
    def create_or_open(cls, path: Path | str, source: SourceFingerprint) -> LogDirectory:
        """Open the log of `source` at `path`, or create it if there is none.

        Several processes may do so at once: one of them creates the log.

        :raises TailraceError: `LOG_FOREIGN`, if `path` has another source's log or other files;
            `LOG_CORRUPT` or `LOG_FORMAT_UNKNOWN`, as `open`; `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        path = Path(path).absolute()
        if not (path / _IDENTITY).exists():
            _create(path, source)
        log = cls.open(path)
        if log.identity.source != source:
            raise TailraceError(
                Kind.LOG_FOREIGN,
                f"open the change log: it was made from {_describe(log.identity.source)}, "
                f"the configuration names {_describe(source)}",
                "give this pipeline its own directory in log.path, or correct the source",
                {"path": str(path)},
            )
        return log

    @classmethod
    def open(cls, path: Path | str) -> LogDirectory:
        """Open an existing log for reading; nothing is written.

        :raises TailraceError: `LOG_MISSING`; `LOG_CORRUPT`, if its identity is damaged;
            `LOG_FORMAT_UNKNOWN`, if a later version created it; `ENVIRONMENT_UNFIT`, if it is another user's.
        """
        path = Path(path).absolute()
        try:
            content = durable.decode_state((path / _IDENTITY).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise TailraceError(
                Kind.LOG_MISSING,
                "open a change log: there is none",
                "check the path; a log is created when its pipeline first runs",
                {"path": str(path)},
            ) from None
        except PermissionError:
            raise _closed(path) from None
        if content is None:
            raise TailraceError(
                Kind.LOG_CORRUPT,
                f"read {_IDENTITY}: it does not match its checksum",
                "restore this small file from a backup; the rest of the log is not affected",
                {"file": str(path / _IDENTITY)},
            )
        if content["format_version"] != FORMAT_VERSION:
            raise TailraceError(
                Kind.LOG_FORMAT_UNKNOWN,
                f"open a change log: its format is {content['format_version']}, "
                f"this version knows {FORMAT_VERSION}",
                "read the log with the version of tailrace that wrote it",
                {"path": str(path)},
            )
        return cls(path, LogIdentity(**{**content, "source": SourceFingerprint(**content["source"])}))

    def tasks(self) -> list[str]:
        """Return the names of the tasks that have a folder, sorted."""
        try:
            names = os.listdir(self.path / _TASKS)
        except FileNotFoundError:
            return []
        return sorted(decode_name(name) for name in names if not name.startswith("."))

    def task_path(self, task: str) -> Path:
        """Return the folder of a task; it need not exist."""
        return self.path / _TASKS / encode_name(task)

    def segments(self, task: str) -> list[int]:
        """Return the first log offsets of a task's segments, in increasing order.

        :raises TailraceError: `LOG_MISSING`, if the task has no folder.
        """
        try:
            names = os.listdir(self.task_path(task or "."))  # "" would be the folder of all tasks
        except FileNotFoundError:
            raise TailraceError(
                Kind.LOG_MISSING,
                f"read task {task!r} of a change log: it has no such task",
                f"it has: {', '.join(self.tasks()) or 'none yet; run the pipeline first'}",
                {"path": str(self.path)},
            ) from None
        return sorted(offset for name in names if (offset := segment_offset(name)) is not None)

    def state_read(self, name: str) -> dict[str, Any] | None:
        """Return what `state_write` last wrote under `name`, a path inside the log.

        If the newest generation is damaged, the previous one is returned.

        :raises TailraceError: `LOG_CORRUPT`, if every existing generation is damaged.
        """
        return durable.read_state(self.path / name)

    def state_write(self, name: str, content: dict[str, Any]) -> None:
        """Store a JSON object under `name`, durably. Only one writer per name at a time.

        :raises TailraceError: `LOG_FULL` or `LOG_WRITE_FAILED`; the old content is then in place.
        """
        path = self.path / name
        self.make_folder(os.path.dirname(name))
        durable.write_state(path, content)

    def make_folder(self, name: str) -> None:
        """Create a folder of the log and those above it, unless they exist. They belong to the log's owner,
        also if root creates them.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        path = self.path / name
        durable.make_directory(path)
        try:
            while path != self.path:
                self.give_to_owner(path)
                path = path.parent
        except OSError as error:
            raise durable.write_failure(error, f"make the folder {name}", path) from error

    def give_to_owner(self, path: Path) -> bool:
        """Give a file that root created in the log to the log's owner; return whether it is the owner's."""
        return durable.give_to_owner(path, self.path / _IDENTITY)


def encode_name(name: str) -> str:
    """Return a file name for any text: characters other than A-Z a-z 0-9 _ - . become %XX."""
    encoded = urllib.parse.quote(name, safe="").replace("~", "%7E")
    return f"%2E{encoded[1:]}" if encoded.startswith(".") else encoded


def decode_name(name: str) -> str:
    """Return the text that `encode_name` encoded."""
    return urllib.parse.unquote(name)


def require_unused(path: Path) -> None:
    """Check that a directory has a log, or that one may be created in it.

    :raises TailraceError: `LOG_FOREIGN`; `ENVIRONMENT_UNFIT`, if it is another user's.
    """
    try:
        held = os.listdir(path) if path.is_dir() else []
    except PermissionError:
        raise _closed(path) from None
    strange = [name for name in held if not name.startswith(".") and name not in OF_THE_ROOT]
    if strange and _IDENTITY not in held:
        raise TailraceError(
            Kind.LOG_FOREIGN,
            f"create a change log: the directory contains other files ({strange[0]!r} …), no {_IDENTITY}",
            f"name an empty directory in log.path; if this was a change log, restore its {_IDENTITY}",
            {"path": str(path)},
        )


def _create(path: Path, source: SourceFingerprint) -> None:
    durable.make_directory(path)
    require_unused(path)
    path.chmod(durable.DIRECTORY_MODE)
    identity = LogIdentity(secrets.token_hex(16), FORMAT_VERSION, source, time.time_ns() // 1000)
    target = path / _IDENTITY
    temporary = durable.write_temporary(target, [durable.encode_state(asdict(identity))])
    try:
        # Unlike a rename, a link never replaces a file that another process has created meanwhile.
        target.hardlink_to(temporary)
    except FileExistsError:
        pass
    except OSError as error:
        raise durable.write_failure(error, f"write {_IDENTITY}", target) from error
    finally:
        temporary.unlink(missing_ok=True)
    durable.sync_directory(path)


def _closed(path: Path) -> TailraceError:
    return TailraceError(
        Kind.ENVIRONMENT_UNFIT,
        "open a change log: this user has no right to it",
        "run the command as the user who runs the pipeline, or as root",
        {"path": str(path)},
    )


def _describe(source: SourceFingerprint) -> str:
    slot = f", slot {source.slot!r}" if source.slot else ""
    return f"{source.type} system {source.system_identifier}, database {source.database!r}{slot}"
