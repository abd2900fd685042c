"""An embedded engine whose handler writes what it gets to a file, to be killed at any moment.

python keeping_engine.py SETTINGS FILE UNTIL_CAUGHT_UP        SETTINGS as JSON; 0 or 1
"""

import json
import sys

from tailrace import Engine

settings, path, until_caught_up = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
with open(path, "a", encoding="ascii") as file:

    def keep(batch):
        for record in batch:
            print(record.source["log_offset"], record.topic, record.after["id"], file=file)
        file.flush()

    Engine(settings, settings={"until_caught_up": until_caught_up}, on_batch=keep).run()
