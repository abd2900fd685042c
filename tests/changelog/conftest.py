"""Logs in memory, where an fsync costs nothing; processes that start with everything imported."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.support.changelog.processes import PROCESSES


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


@pytest.fixture(scope="session")
def processes() -> Any:
    """Return the class of processes that are forked from one which has imported our modules."""
    with pytest.MonkeyPatch.context() as patched:
        # The server imports what is preloaded before it learns of this process's sys.path.
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return PROCESSES.Process
