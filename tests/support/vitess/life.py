"""Our process, which runs a pipeline until it is killed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path


class Life:
    """Lives of one pipeline, one after another. Any thread."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.lives = 0

    def start(self) -> None:
        """Begin a life, if there is none."""
        with self._lock:
            if self._process is None:
                self.lives += 1
                with (self._file.parent / "run.log").open("ab") as out:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tailrace", "run", str(self._file)], stdout=out, stderr=out
                    )

    def kill(self) -> None:
        """End it with SIGKILL."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait(30)
                self._process = None
