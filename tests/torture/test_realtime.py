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
from tests.support.realtime.story import OPTIONS, Killed, Story

FALLS = int(os.environ.get("TAILRACE_REALTIME_FALLS", "500"))
POINTS = sorted(name for name in failpoints.NAMES if name.startswith("realtime."))

pytestmark = [pytest.mark.torture, pytest.mark.timeout(7200)]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    info = tmp_path / "package" / "text_shards-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: text-shards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tailrace.sources]\ntext_shards = tests.support.sources.text_shards:TextShards\n"
    )
    return info.parent


def test_overflows_returns_and_kills_in_any_order_lose_and_repeat_nothing(
    tmp_path: Path, package: Path
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - a failure shows it
    choose = random.Random(seed)
    story = Story(tmp_path, package, OPTIONS)
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
    finally:
        story.stop()
    story.check()
