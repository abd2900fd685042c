"""Faults at file operations: at the n-th one below a directory the process dies, or the disk is full.

Operations are Python's audit events (`sys.addaudithook`) of files opened for writing and of names created,
moved, linked and removed. A death is simulated in this process: the operation and all later ones raise, so
the directory stays as a killed process leaves it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: Which argument of an audit event is the path that is created or removed.
_PATH_AT = {"open": 0, "os.rename": 1, "os.link": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0}
#: Operations that need no disk space.
_FREES = frozenset({"os.remove", "os.rmdir"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_faults: list[Callable[[str, str], None]] = []


class DiedError(BaseException):
    """The process is dead: no code may handle this."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _faults or event not in _PATH_AT:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    path = arguments[_PATH_AT[event]]
    if isinstance(path, (str, os.PathLike)):
        for fault in _faults:
            fault(event, os.fspath(path))


@contextmanager
def _at_each(root: Path, fault: Callable[[str, str], None]) -> Iterator[None]:
    def below(event: str, path: str) -> None:
        if path.startswith(f"{root}"):
            fault(event, path)

    if not getattr(sys, "_tailrace_file_faults", False):
        sys.addaudithook(_hook)  # can't be removed again
        sys._tailrace_file_faults = True  # type: ignore[attr-defined]
    _faults.append(below)
    try:
        yield
    finally:
        _faults.remove(below)


def deaths(root: Path, act: Callable[[], object]) -> Iterator[str]:
    """Run `act` with a death at its first operation below `root`, then at its second, … until it completes;
    yield each operation after the death at it.
    """
    for count in range(1, 10_000):
        seen: list[str] = []

        def die(event: str, path: str, seen: list[str] = seen, count: int = count) -> None:
            seen.append(f"{event} {path.removeprefix(str(root))}")
            if len(seen) >= count:
                raise DiedError(seen[-1])

        with _at_each(root, die):
            try:
                act()
            except DiedError:
                pass
            else:
                return
        yield seen[count - 1]
    raise AssertionError("more deaths than operations are possible")


def full_disks(root: Path, act: Callable[[], object]) -> Iterator[tuple[str, BaseException | None]]:
    """Run `act` with a full disk at its first operation below `root` that needs space, then at the second, …;
    yield each operation, with what `act` raised.
    """
    for count in range(1, 10_000):
        seen: list[str] = []

        def refuse(event: str, path: str, seen: list[str] = seen, count: int = count) -> None:
            if event not in _FREES and not (event == "open" and os.path.exists(path)):
                seen.append(f"{event} {path.removeprefix(str(root))}")
                if len(seen) == count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

        raised = None
        with _at_each(root, refuse):
            try:
                act()
            except Exception as error:  # noqa: BLE001 - the caller judges it
                raised = error
        if len(seen) < count:
            if raised is not None:
                raise raised
            return
        yield seen[count - 1], raised
    raise AssertionError("more full disks than operations are possible")


@contextmanager
def not_durable(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Yield the set of names that were created, moved or removed below `root` and would not survive a loss of
    power: those whose directory was not synced since.
    """
    lost: set[str] = set()
    fsync = os.fsync

    def note(event: str, path: str) -> None:
        if event != "open" or not os.path.exists(path):
            lost.add(path)

    def noted(fd: int) -> None:
        fsync(fd)
        directory = os.readlink(f"/proc/self/fd/{fd}")
        lost.difference_update([path for path in lost if os.path.dirname(path) == directory])

    monkeypatch.setattr(os, "fsync", noted)
    with _at_each(root, note):
        yield lost
