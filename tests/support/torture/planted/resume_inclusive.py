"""Planted bug: `<=` for `<` in the test for transactions that the log has already, after a restart.

A commit record may begin exactly where the one before it ended: that transaction is then lost.
"""

from __future__ import annotations

from typing import Any

if __name__ == "__main__":
    from tailrace.cli.main import app
    from tailrace.sources.postgres.streaming.frame_filters import ResumptionFilter

    as_built = ResumptionFilter.__init__

    def inclusive(self: ResumptionFilter, position: int, *rest: Any) -> None:
        as_built(self, position + 1, *rest)  # lsn < position + 1 is lsn <= position

    ResumptionFilter.__init__ = inclusive  # type: ignore[method-assign]
    app()
