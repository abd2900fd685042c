"""Writing files atomically and durably, and state files, which are checked when read.

A *state file* is a small JSON document with a checksum, stored in two generations: `<name>` and
`<name>.previous`. If a file was truncated or changed, the previous generation is used.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import crc32c
import structlog

from tailrace.errors import RAISE_LIMIT, TOO_MANY_FILES, Kind, TailraceError

log = structlog.get_logger(__name__)

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
#: Mode of directories that other users read, too; the umask applies.
SHARED_DIRECTORY_MODE = 0o777
PREVIOUS_SUFFIX = ".previous"
TEMPORARY_SUFFIX = ".tmp"

#: Errors of the operating system for a full disk, quota or, for EFBIG, file size limit.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_failure(error: OSError, attempted: str, path: Path) -> TailraceError:
    """Return the error of a failed write: `LOG_FULL` or `LOG_WRITE_FAILED`."""
    if error.errno in NO_ROOM:
        return TailraceError(
            Kind.LOG_FULL,
            f"{attempted}: {error.strerror}",
            "make room on the log's file system; nothing that was stored is lost. What waits for room "
            "continues by itself; restart what has ended with this error",
            {"file": str(path)},
        )
    return final(error, attempted, path)


def final(error: OSError, attempted: str, path: Path) -> TailraceError:
    """Return `LOG_WRITE_FAILED` even for a full disk: for writes that can't be undone and repeated."""
    repair = "check the disk and the kernel's messages"
    if error.errno in (errno.EACCES, errno.EPERM):
        repair = "give the log's files to the user who runs the pipeline"
    elif error.errno in TOO_MANY_FILES:
        repair = RAISE_LIMIT
    return TailraceError(
        Kind.LOG_WRITE_FAILED,
        f"{attempted}: {error.strerror or error}",
        f"{repair}, then start again: what was acknowledged is in the log, the rest comes from the source "
        "again",
        {"file": str(path)},
    )


def write_fully(fd: int, parts: Sequence[Any], at: int) -> int:
    """Write all of `parts` at a file offset and return the offset after them.

    Continues after short writes; does not copy the data.

    :raises OSError: the operating system's error; a part may have been written.
    """
    views = [memoryview(part).cast("B") for part in parts]
    while views:
        written = os.pwritev(fd, views, at)
        if written == 0:
            raise OSError(errno.EIO, "the write wrote nothing")
        at += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
    return at


def read_fully(fd: int, size: int, at: int) -> bytes:
    """Return `size` bytes at a file offset, or fewer if the file ends before."""
    data = os.pread(fd, size, at)
    if len(data) == size or not data:
        return data
    parts = [data]
    missing = size - len(data)
    while missing and (part := os.pread(fd, missing, at + size - missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def make_directory(path: Path, mode: int = DIRECTORY_MODE) -> None:
    """Create a directory and its missing parents, each durably; by default only this user has access.

    :raises TailraceError: `LOG_FULL` or `LOG_WRITE_FAILED`.
    """
    try:
        if path.is_dir():
            return
        make_directory(path.parent, mode)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=mode)
        sync_directory(path.parent)
    except OSError as error:
        raise write_failure(error, f"make the directory {path.name}", path) from error


def sync_directory(path: Path) -> None:
    """Make the creations, renames and removals in a directory durable."""
    sync_file(path, os.O_DIRECTORY)


def sync_file(path: str | Path, flags: int = 0) -> None:
    """Make a file's content durable, including what other processes wrote."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_temporary(path: Path, parts: Sequence[Any]) -> Path:
    """Write a new durable, hidden file in the folder of `path`, to be renamed, and return its path.

    :raises TailraceError: `LOG_FULL` or `LOG_WRITE_FAILED`; the file is then removed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            write_fully(fd, parts, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_failure(error, f"write {path.name}", path) from error
    return temporary


def write_atomically(path: Path, data: bytes, *, keeps_previous: bool = False) -> None:
    """Replace a file: after a crash at any point it has its old content or the new one.

    :param keeps_previous: whether the old content is kept as the previous generation of a state file.
    :raises TailraceError: `LOG_FULL` or `LOG_WRITE_FAILED`; the old content is then in place.
    """
    try:
        temporary = write_temporary(path, [data])
    except TailraceError as error:
        reused = _over_previous(path, data) if keeps_previous and error.kind is Kind.LOG_FULL else None
        if reused is None:
            raise
        temporary = reused
    try:
        if keeps_previous:
            give_to_owner(temporary, path.parent)  # the engine must be able to read what root writes
        # A damaged current generation must not replace the sound previous one. Between the two
        # renames only `.previous` exists, and `read_state` returns it.
        if keeps_previous and path.exists() and decode_state(path.read_bytes()) is not None:
            path.replace(previous_of(path))
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_failure(error, f"write {path.name}", path) from error


def _over_previous(path: Path, data: bytes) -> Path | None:
    """Write the next generation of a state file over its previous one, which needs no room, and return its
    temporary path; None if that fails, or only the previous one is sound.

    Retention would never make room on a full disk if no reader could record that it has moved on.
    """
    if not path.exists() or decode_state(path.read_bytes()) is None:
        return None
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        previous_of(path).replace(temporary)
        fd = os.open(temporary, os.O_RDWR)
        try:
            os.ftruncate(fd, write_fully(fd, [data], 0))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:
        temporary.unlink(missing_ok=True)
        return None
    return temporary


def give_to_owner(path: Path, other: Path) -> bool:
    """Give a file that root created to the owner of `other`; return whether it belongs to that user now.

    A symbolic link is not followed: the owner of its folder may have put it there, to be given another file.

    :raises OSError: one of the files does not exist.
    """
    owner = other.stat()
    if path.lstat().st_uid != owner.st_uid:
        try:
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
        except OSError:
            return False
    return True


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file that nothing depends on. Readers see its old or its new content; a crash may lose both.

    :raises OSError: the old content is then in place.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    temporary.replace(path)


def remove_temporaries(directory: Path) -> None:
    """Remove temporary files left by a crash from a directory that only the caller writes to."""
    for path in directory.glob(f".*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def encode_state(content: dict[str, Any]) -> bytes:
    """Return a JSON document with a checksum, always the same for the same content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f'{{"content":{text},"crc32c":"{crc32c.crc32c(text.encode()):08x}"}}\n'.encode()


def decode_state(data: bytes) -> dict[str, Any] | None:
    """Return the content of a document with a checksum; `None` if any byte was changed."""
    try:
        content = json.loads(data)["content"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(content, dict) or encode_state(content) != data:
        return None
    return content


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the newest sound generation of a state file; `None` if there is no file.

    Logs a warning if the newest generation is damaged.

    :raises TailraceError: `LOG_CORRUPT`, if there are generations and all of them are damaged.
    """
    found = False
    for candidate in (path, previous_of(path)):
        try:
            data = candidate.read_bytes()
        except FileNotFoundError:
            continue
        if (content := decode_state(data)) is not None:
            if found:
                log.warning(
                    "a file is damaged: reading its previous generation", file=str(path), read=candidate.name
                )
            return content
        found = True
    if found:
        raise TailraceError(
            Kind.LOG_CORRUPT,
            f"read {path.name}: neither it nor its previous generation matches its checksum",
            "restore one of them from a backup of the log",
            {"file": str(path)},
        )
    return None


def write_state(path: Path, content: dict[str, Any]) -> None:
    """Write a new generation of a state file, durably. Only one writer per file at a time.

    :raises TailraceError: `LOG_FULL` or `LOG_WRITE_FAILED`; the old generation is then in place.
    """
    write_atomically(path, encode_state(content), keeps_previous=True)


def previous_of(path: Path) -> Path:
    """Return the path of a state file's previous generation."""
    return path.with_name(path.name + PREVIOUS_SUFFIX)
