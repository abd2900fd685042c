"""A query in another process that writes the rows of each micro-batch to a file, and may kill itself."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tailrace.config.sections import SparkConfig
from tailrace.spark.session import session
from tests.support.join.spark_stream import JoinStream


def main(given: dict[str, Any]) -> None:
    out, kill_when = Path(given["out"]), given["kill_when"]
    kills = len(list(out.iterdir())) + 1

    def take(number: int, rows: list[Any]) -> None:
        if kill_when == "read" and number == kills:
            os.kill(os.getpid(), signal.SIGKILL)
        lines = [
            json.dumps([row.topic, row.partition, row.offset, row.key.decode(),
                        json.loads(row.value)["after"]["number"], row.transaction_id or ""])
            for row in sorted(rows, key=lambda each: (each.topic, each.partition, each.offset))
        ]  # fmt: skip
        file, text = out / f"{number}", "".join(f"{line}\n" for line in lines)
        assert not file.exists() or file.read_text() == text, f"batch {number} has other rows than before"
        file.write_text(text)
        if kill_when == "written" and number == kills:
            os.kill(os.getpid(), signal.SIGKILL)

    spark = SparkConfig(conf=given.get("conf", {}))
    JoinStream(session(spark, "join"), Path(given["checkpoint"]), given["options"], take)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
