"""Our process, which runs a pipeline until it is killed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path


class Life:
    """Processes of one pipeline, one after another. Any thread may use it.

    :param file: returns the pipeline's file, before each start.
    :param module: of the command line.
    """

    def __init__(self, file: Callable[[], Path], module: str = "tailrace") -> None:
        self._file = file
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.lives = 0
        #: Exit statuses of processes that ended before they were killed.
        self.ended: list[int] = []

    def start(self) -> None:
        """Start a process, if none runs."""
        with self._lock:
            if self._process is None:
                self.lives += 1
                file = self._file()
                with (file.parent / "run.log").open("ab") as out:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", self._module, "run", str(file)], stdout=out, stderr=out
                    )

    def kill(self) -> None:
        """SIGKILL the process."""
        with self._lock:
            if self._process is not None:
                if (status := self._process.poll()) is not None:
                    self.ended.append(status)
                self._process.kill()
                self._process.wait(30)
                self._process = None
