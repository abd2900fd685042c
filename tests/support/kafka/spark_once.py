"""A Spark job whose tasks die, run as a program so that its Spark may retry a task.

python -m tests.support.kafka.spark_once BOOTSTRAP NAME LOG END FLAG

Each task dies once, half-way through its share, by `os._exit`; files beginning with FLAG remember it.
Prints how many rows were written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tailrace.changelog.directory import LogDirectory
from tailrace.config import SparkConfig
from tailrace.converters.debezium import JsonConverter
from tailrace.records.events import Converted
from tailrace.spark.session import session
from tests.support.kafka.shares_rig import sink_of, write


class Dying(JsonConverter):
    """Ends its process after it has converted a part, unless an earlier attempt of this task has done so."""

    def __init__(self, flag: str) -> None:
        super().__init__(schemas_enable=False)
        self._flag = flag
        self._converted = 0

    def convert(self, group: Any) -> Converted:
        from pyspark import TaskContext

        self._converted += 1
        context = TaskContext.get()
        if context is not None and self._converted == 2:
            flag = Path(f"{self._flag}.{context.partitionId()}")
            if not flag.exists():
                flag.touch()
                os._exit(1)
        return super().convert(group)


def main() -> None:
    bootstrap, name, log, end, flag = sys.argv[1:]
    spark = session(SparkConfig(master="local[2,3]"), "once")
    kafka: Any = SimpleNamespace(bootstrap=bootstrap)
    sink = sink_of(kafka, name, 2, converter=Dying(flag))
    directory = LogDirectory.open(Path(log))
    sink.open(directory.identity, "shop")
    opened: Any = SimpleNamespace(path=Path(log), directory=directory)
    sys.stdout.write(f"{write(sink, opened, int(end), spark).rows}\n")
    sink.close()
    spark.stop()


if __name__ == "__main__":
    main()
