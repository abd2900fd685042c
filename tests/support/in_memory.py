"""Logs in memory, where an fsync costs nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Return an empty directory in memory if the machine has one, else on disk."""
    memory = Path("/dev/shm")  # noqa: S108 (a directory of our own is made in it)
    if not memory.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="tailrace-test-", dir=memory))
    yield path
    shutil.rmtree(path)
