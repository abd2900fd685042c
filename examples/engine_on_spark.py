"""Converts every committed change on executors of Spark, into a file for each row with its changes in order.

python engine_on_spark.py DSN LOG FOLDER          DSN as in postgresql://cdc@db.example/shop
"""

import contextlib
import sys
from pathlib import Path

import tailrace

dsn, log, folder = sys.argv[1:]


def note(event):
    """Called with the events of a key one after another. When it returns, the event counts as processed."""
    with Path(folder, f"{event.topic}.{event.key['id']}").open("a") as changes:
        print(event.value["op"], event.value["after"], file=changes)


engine = tailrace.Engine(
    {
        "name": "shop",
        "source": {"type": "postgresql", "dsn": dsn, "tables": ["public.*"]},
        "log": {"path": log},
        "engine": {
            "record_processing": {"runs_on": "spark", "order": "key"},
            "converter": {"type": "python"},
        },
    },
    on_record=note,
)
with contextlib.suppress(KeyboardInterrupt):
    engine.run()
