"""Faults at file operations: at the n-th one below a directory a process dies, or the disk is full.

Operations are those that Python tells of (`sys.addaudithook`): files opened to be written, names made, moved,
linked and removed. A death is played in this process: that operation and all after it raise, so that what is
below the directory stays as a process that was killed leaves it.
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

#: Where an operation of `sys.audit` has the path that it makes or takes away.
_PATH_AT = {"open": 0, "os.rename": 1, "os.link": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0}
#: What needs no room, as a file that is there does not.
_FREES = frozenset({"os.remove", "os.rmdir"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_faults: list[Callable[[str, str], None]] = []


class DiedError(BaseException):
    """The process is dead: nothing may catch it."""


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
        sys.addaudithook(_hook)  # which can't be taken back
        sys._tailrace_file_faults = True  # type: ignore[attr-defined]
    _faults.append(below)
    try:
        yield
    finally:
        _faults.remove(below)


def deaths(root: Path, act: Callable[[], object]) -> Iterator[str]:
    """Have `act` die at its first operation below `root`, then at its second, … until it lives; yield each
    operation, once it is dead.
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
    raise AssertionError("it dies for ever")


def full_disks(root: Path, act: Callable[[], object]) -> Iterator[tuple[str, BaseException | None]]:
    """Have the disk be full at the first operation below `root` that needs room, then at the second, …; yield
    each operation, with what `act` raised.
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
    raise AssertionError("it finds no room for ever")


@contextmanager
def not_durable(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Give the names that were made, moved or removed below `root` and would not outlive a loss of power:
    whose directory was not made durable since. Emptied as they become durable.
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
