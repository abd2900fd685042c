"""The document behind `tailrace status`: the same shape whether or not the pipeline runs.

A running engine writes it to `<log.path>/status.json` every second; `status` reads that file, and the
lock there says whether to believe it. Without an engine it is put together by `at_rest`.

The file is a convenience: it is replaced atomically, not fsynced, and nothing is decided by it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import structlog

from tailrace.config import EngineConfig
from tailrace.pipeline.log.root import is_running
from tailrace.pipeline.status.at_rest import view_at_rest
from tailrace.pipeline.status.lifecycle import ENDED, PipelineState
from tailrace.pipeline.status.views import PipelineView

log = structlog.get_logger(__name__)

FILE_NAME = "status.json"
WRITE_INTERVAL_S = 1.0
#: Older than this, the file is that of an engine that hangs or of one that was killed.
FRESH_S = 10.0


class StatusFile:
    """Writes the document of a running engine, once a second. One thread."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._next_s = 0.0
        self._complained = False

    def turn(self, view: PipelineView) -> None:
        """Write `view` if it is time to."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + WRITE_INTERVAL_S
            self.last(view)

    def last(self, view: PipelineView) -> None:
        """Write `view` now. A file that can't be written is said once and hurts nobody.

        Only for the engine that holds the log.
        """
        path = self._log_path / FILE_NAME
        temporary = path.with_name(f".{FILE_NAME}.{os.getpid()}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(view.as_json(), file)
            temporary.replace(path)
        except OSError as error:
            if not self._complained:
                log.warning("could not write the status file", file=str(path), reason=error.strerror)
            self._complained = True


def document(config: EngineConfig) -> dict[str, Any]:
    """Return the document as of now, from the running engine or from what it left.

    Never raises for a pipeline that is broken: what is wrong is in the document's `error`.
    """
    written = _read(config.log.path / FILE_NAME)
    if not is_running(config):
        return view_at_rest(config, written, PipelineState.STOPPED).as_json()
    fresh = written is not None and time.time() - written.get("updated_us", 0) / 1e6 < FRESH_S
    if written is not None and fresh and written.get("state") not in ENDED:
        return written
    return view_at_rest(config, None, PipelineState.STARTING).as_json()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("sinks"), list) else None
