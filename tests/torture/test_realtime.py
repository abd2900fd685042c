"""Real time under torture: the buffer overflows and recovers, with a kill at a random failpoint each time.

`TAILRACE_REALTIME_FALLS` sets the number of overflows, 500 by default.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.realtime.story import Killed, Story

FALLS = int(os.environ.get("TAILRACE_REALTIME_FALLS", "500"))
POINTS = sorted(name for name in failpoints.NAMES if name.startswith("realtime."))

pytestmark = [pytest.mark.ci, pytest.mark.timeout(7200)]


def _torture(story: Story) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - a failure shows it
    choose = random.Random(seed)
    try:
        while story.falls < FALLS:
            story.start(f"{choose.choice(POINTS)}=kill@{choose.randrange(1, 12)}")
            with contextlib.suppress(Killed):
                story.begin()
                for _ in range(choose.randrange(1, 20)):
                    story.turn(choose)
            story.stop()
        story.start()
        story.play()
        story.wait_for_all()
    finally:
        story.stop()
    story.check()


def test_a_handler_gets_every_change_despite_random_overflows_and_kills(tmp_path: Path) -> None:
    _torture(Story(tmp_path))


def test_kafka_gets_every_change_despite_random_overflows_and_kills(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    _torture(Story(tmp_path, (kafka.bootstrap, topic_name)))
