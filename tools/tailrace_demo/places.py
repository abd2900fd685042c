"""The demo's directory: the paths of its files, and a check that only a demo's directory is emptied."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import Kind, TailraceError

#: File that marks a directory as created by the demo; locked while a demo runs there.
_MARK = ".tailrace-demo"


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of the demo's files."""

    root: Path

    @property
    def file(self) -> Path:
        return self.root / "pipeline.yaml"

    @property
    def password(self) -> Path:
        return self.root / "password"

    @property
    def log(self) -> Path:
        return self.root / "shop.log"

    @property
    def mirror(self) -> Path:
        return self.root / "lake" / "current"

    @property
    def history(self) -> Path:
        return self.root / "lake" / "history"

    @property
    def output(self) -> Path:
        return self.root / "run.output"


@contextlib.contextmanager
def own_directory(path: Path) -> Iterator[Places]:
    """Create `path`, or empty it if an earlier demo created it, and exclude other demos from it.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if it contains other files, or a demo runs there.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = path.resolve()
    entries = os.listdir(path)
    if entries and _MARK not in entries:
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"prepare the demo's directory: {path} contains files that no demo has created",
            "name an empty or new directory with --dir",
        )
    lock = os.open(path / _MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TailraceError(
                Kind.ENVIRONMENT_UNFIT,
                f"prepare the demo's directory: another demo runs in {path}",
                "wait until it ends, or name another directory with --dir",
            ) from None
        for entry in entries:
            if (path / entry).is_dir():
                shutil.rmtree(path / entry)
            elif entry != _MARK:
                (path / entry).unlink()
        yield Places(path)
    finally:
        os.close(lock)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read."""
    with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
