"""A small disk that can be filled: a tmpfs, which needs root."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def can_mount() -> bool:
    """Tell whether this process may mount file systems."""
    return os.geteuid() == 0 and Path("/proc/filesystems").read_text().find("tmpfs") >= 0


@contextlib.contextmanager
def small_disk(mount_point: Path, size_mib: int) -> Iterator[Path]:
    """Mount a tmpfs of `size_mib`, for as long as the context is open."""
    mount_point.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", mount_point], check=True)
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "--lazy", mount_point], check=True)


def fill(disk: Path) -> Path:
    """Fill `disk` to its last byte with a file, and return that file."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return ballast
