"""The demo's pipeline: `tailrace run` in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.errors import Kind, TailraceError

_POLL_S = 0.25
_STOP_TIMEOUT_S = 30.0


class DemoPipeline:
    """`tailrace run FILE`, with its output appended to `output`. Leaving the context kills it."""

    def __init__(self, file: Path, output: Path) -> None:
        self._command = [sys.executable, "-m", "tailrace", "run", str(file)]
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it in a separate session, so that a terminal's Ctrl-C reaches only the demo."""
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait for `condition` while the pipeline runs.

        :raises TailraceError: `INTERNAL`, with the last lines of its output, if the pipeline ends
            by itself or the timeout has passed.
        """
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while not condition():
            if (status := self._process.poll()) is not None:
                self._fail(f"it ended with status {status}", what)
            if time.monotonic() > deadline:
                self._fail(f"this did not happen within {timeout_s:.0f} s", what)
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Kill it with SIGKILL: nothing is flushed, nothing is closed.

        Its Spark process notices this and ends, too, but later: until then it may still write, which
        is a part of the demo's test.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop it with SIGTERM, as an operator does.

        :raises TailraceError: `INTERNAL` if it does not end in time, or not with status 0.
        """
        assert self._process is not None
        self._process.terminate()
        try:
            status = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._fail(f"it still runs {_STOP_TIMEOUT_S:.0f} s after SIGTERM", "its clean end")
        if status != 0:
            self._fail(f"it ended with status {status}", "its clean end")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _fail(self, found: str, what: str) -> None:
        with self._output.open(encoding="utf-8", errors="replace") as output:
            last = " | ".join(line.strip() for line in deque(output, maxlen=2))  # an error and its hint
        raise TailraceError(
            Kind.INTERNAL,
            f"wait for the pipeline ({what}): {found}; its last output: {last}",
            f"all of its output is in {self._output}",
        )
