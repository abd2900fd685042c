"""Our process, which runs a pipeline until it is killed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path


class Life:
    """Lives of one pipeline, one after another. Any thread.

    :param file: returns the pipeline's file, before each life.
    :param module: that is the command line.
    """

    def __init__(self, file: Callable[[], Path], module: str = "tailrace") -> None:
        self._file = file
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.lives = 0
        #: Exit statuses of those that were over before they were killed.
        self.ended: list[int] = []

    def start(self) -> None:
        """Begin a life, if there is none."""
        with self._lock:
            if self._process is None:
                self.lives += 1
                file = self._file()
                with (file.parent / "run.log").open("ab") as out:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", self._module, "run", str(file)], stdout=out, stderr=out
                    )

    def kill(self) -> None:
        """End it with SIGKILL."""
        with self._lock:
            if self._process is not None:
                if (status := self._process.poll()) is not None:
                    self.ended.append(status)
                self._process.kill()
                self._process.wait(30)
                self._process = None
