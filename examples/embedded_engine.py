"""Prints every committed change as Debezium's JSON, a line each.

    python embedded_engine.py DSN LOG          DSN as in postgresql://cdc@db.example/shop

Stopped or killed and started again, it continues where it was: each change comes at least once, in order.
"""

import contextlib
import sys

import tailrace


def show(events):
    """Print a batch; when this returns, its events count as processed."""
    for event in events:
        print(event.value, flush=True)


dsn, log = sys.argv[1:]
engine = tailrace.Engine(
    {
        "name": "shop",
        "source": {"type": "postgresql", "dsn": dsn, "tables": ["public.*"]},
        "log": {"path": log},
        "engine": {"converter": {"type": "json", "schemas_enable": False}},
    },
    on_batch=show,
)
with contextlib.suppress(KeyboardInterrupt):
    engine.run()
