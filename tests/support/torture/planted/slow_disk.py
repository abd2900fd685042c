"""Not a bug: the product as it is, on a disk whose every fsync takes its time. The control."""

from __future__ import annotations

from tests.support.torture import power

FSYNC_S = 1.5

if __name__ == "__main__":
    power.record(FSYNC_S)
    from tailrace.cli.main import app

    app()
