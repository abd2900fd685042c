"""Planted bug: changes are acknowledged to the source as soon as they are written, before the fsync.

The check at start-up would notice that the slot is ahead of the log; it is removed too, so
that the loss must be found in the sinks.
"""

from __future__ import annotations

import os

from tests.support.torture import power
from tests.support.torture.planted.slow_disk import FSYNC_S

#: If set, the check at start-up is kept.
KEEP_CHECK = "TORTURE_KEEP_CHECK"

if __name__ == "__main__":
    power.record(FSYNC_S)

    from tailrace.cli.main import app
    from tailrace.sources.postgres.streaming import reconcile
    from tailrace.sources.postgres.streaming.appender import PostgresAppender

    PostgresAppender.durable = PostgresAppender.tail  # type: ignore[method-assign]
    if KEEP_CHECK not in os.environ:
        reconcile._check_position = lambda *_: None
    app()
