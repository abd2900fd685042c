"""Planted bug: a file sink makes data visible first, and records its position afterwards.

Its files have random names, as Spark's own writers choose them, so that writing a range again
overwrites nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":
    from tailrace import failpoints
    from tailrace.cli.main import app
    from tailrace.sinks import names
    from tailrace.sinks.files.sink import FileSink

    def in_two_steps(self: FileSink, span: Any, have: int, staged: Sequence[Any]) -> float:
        target = self._opened()
        for file in staged:
            table = target.path / file.directory
            table.mkdir(exist_ok=True)
            staging = target.staging(span.task, have) / names.staged_name(file.directory, file.name)
            staging.rename(table / f"{secrets.token_hex(8)}-{file.name}")
        failpoints.hit("sink.before_commit")
        self._manifests(span.task).note_idle(span.end)
        self._positions[span.task] = span.end
        return time.perf_counter()

    FileSink._commit = in_two_steps  # type: ignore[method-assign]
    app()
