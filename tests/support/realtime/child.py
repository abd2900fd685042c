"""An engine in another process, to be killed at any moment; its handler writes to a file, or it writes to
Kafka.

python -m tests.support.realtime.child SETTINGS OPTIONS FILE        the first two as JSON; no FILE: to Kafka
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tailrace import Engine
from tailrace.pipeline.connector import PipelineConnector

STALL = ".stall"


def main(settings: dict[str, Any], options: dict[str, Any], path: str) -> None:
    """Run the engine until it is killed, or until SIGINT."""
    engine_of: dict[str, Any] = {"name": "shop", "connector": PipelineConnector(), "settings": settings}
    if not path:
        Engine(**engine_of, options=options).run()
        return
    stall = Path(path + STALL)
    with open(path, "a", encoding="ascii") as file:

        def take(batch: Any) -> None:
            while stall.exists():
                time.sleep(0.01)
            for record in batch:
                print(record.after["id"], record.source["log_offset"], file=file)
            file.flush()

        Engine(**engine_of, options=options, on_batch=take).run()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
    except KeyboardInterrupt:
        sys.exit(0)
