"""Kill -9 at every step of every switch: a handler gets rows at least once, Kafka once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.realtime.story import Killed, Story

POINTS = sorted(name for name in failpoints.NAMES if name.startswith("realtime."))


def _kill_everywhere(story: Story) -> None:
    try:
        for point in POINTS:
            story.start(f"{point}=kill")
            with pytest.raises(Killed):
                story.play()
            story.stall.unlink(missing_ok=True)
        story.start()
        story.play()
        story.wait_for_all()
    finally:
        story.stop()
    story.check()


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_handler_gets_each_row_in_order_after_a_kill_at_any_step(tmp_path: Path) -> None:
    _kill_everywhere(Story(tmp_path))


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_kafka_has_each_row_once_after_a_kill_at_any_step(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    _kill_everywhere(Story(tmp_path, (kafka.bootstrap, topic_name)))
