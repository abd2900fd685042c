"""Python imports this by its name when it starts, so that Spark's workers are forked with everything
imported.

A Python that Spark starts passes its streams to the test's process (`forked.py`) and lives as long as the
process forked there in its place. If no test listens, it goes on by itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

#: The environment variable that names the abstract socket where the test's process listens.
ADDRESS = "TAILRACE_TESTS_FORKS"
#: What the PYTHONPATH of a Spark must contain for that. Its workers find modules of tests there, too.
PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[3])]


def main(words: list[str]) -> None:
    """Have `python -m words` forked, and wait for its end."""
    request = {"words": words, "environment": dict(os.environ), "directory": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect("\0" + os.environ[ADDRESS])
        socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
        asked.recv(1)  # empty: the other end is closed when the forked process ends
    os._exit(0)


if ADDRESS in os.environ and sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].startswith("pyspark."):
    main(sys.orig_argv[2:])
