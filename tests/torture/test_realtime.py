"""Real time under torture: overflows and returns, with a kill at a step that is drawn at random each time.

`TAILRACE_REALTIME_FALLS` says how many overflows there are to be, in place of the five hundred.
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


def test_random_overflows_returns_and_kills_are_nothing_to_a_handler(tmp_path: Path) -> None:
    _torture(Story(tmp_path))


def test_random_overflows_returns_and_kills_are_nothing_to_kafka(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    _torture(Story(tmp_path, (kafka.bootstrap, topic_name)))
