"""A process with an embedded engine is killed: uncommitted records come again, in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tailrace import failpoints

POINTS = sorted(name for name in failpoints.NAMES if name.startswith("engine."))

#: Each run is another process, forked before there is any thread.
PROGRAM = """
import json, logging, os, sys
import structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
import tailrace
from tailrace import failpoints
from tailrace.testing import LinesSource

def live(directory, armed):
    failpoints.arm(armed)
    with open(directory + "/done", "a", buffering=1) as done:
        tailrace.Engine(
            connector=LinesSource(50),
            on_record=lambda record: done.write(f"{record.after['number']}\\n"),
            options={
                "offset_storage": {"type": "file", "path": directory + "/offsets"},
                "offset_commit": {"policy": "always"},
            },
        ).run()

lives = {}
for point in sys.argv[2:]:
    directory = sys.argv[1] + "/" + point
    os.mkdir(directory)
    for armed in (f"{point}=kill@{1 if point == 'engine.before_stop' else 2}", "", ""):
        open(directory + "/done", "w").close()
        child = os.fork()
        if not child:
            live(directory, armed)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with open(directory + "/done") as done:
            seen = [int(line) for line in done]
        lives.setdefault(point, []).append((os.waitstatus_to_exitcode(status), seen))
print(json.dumps(lives))
"""


@pytest.mark.slow
def test_after_a_kill_anywhere_the_next_process_continues_without_a_gap(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *POINTS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    lives = json.loads(found.stdout)
    assert sorted(lives) == POINTS
    for point, (killed, after, last) in lives.items():
        assert killed[0] == -signal.SIGKILL, point
        done = killed[1]
        assert done == list(range(1, len(done) + 1)), point
        assert after[0] == 0, point
        begin = after[1][0] if after[1] else 51
        assert begin <= len(done) + 1, point
        assert after[1] == list(range(begin, 51)), point
        assert begin > 1 or point == "engine.after_poll", point
        assert last == [0, []], point
