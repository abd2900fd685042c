"""Every committed change, handed over on Spark's executors: a file for each row, its story in order.

python engine_on_spark.py DSN LOG FOLDER          DSN as in postgresql://cdc@db.example/shop
"""

import contextlib
import sys
from pathlib import Path

import tailrace

dsn, log, folder = sys.argv[1:]


def note(event):
    """Called on an executor; those of a key one after another. When it returns, the event counts."""
    with Path(folder, f"{event.topic}.{event.key['id']}").open("a") as story:
        print(event.value["op"], event.value["after"], file=story)


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
