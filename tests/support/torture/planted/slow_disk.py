"""No bug: the unchanged product on a disk with slow fsyncs, as the control."""

from __future__ import annotations

from tests.support.torture import power

FSYNC_S = 1.5

if __name__ == "__main__":
    power.record(FSYNC_S)
    from tailrace.cli.main import app

    app()
