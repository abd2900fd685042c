"""No bug: the unchanged product, but Spark writes small ranges, too."""

from __future__ import annotations

from tailrace.config import FolderSink

if __name__ == "__main__":
    FolderSink.small_ranges_in_process = property(lambda _: False)  # type: ignore[method-assign, assignment]
    from tailrace.cli.main import app

    app()
