"""Kill -9 at every step of every switch: for a handler at least once, for Kafka once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace import failpoints
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import read_topic
from tests.support.realtime.story import OPTIONS, Killed, Story

POINTS = sorted(name for name in failpoints.NAMES if name.startswith("realtime."))

POINTS_OF_KAFKA = ("realtime.before_work", "realtime.before_mark_handled", "realtime.before_mark_stop")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    info = tmp_path / "package" / "text_shards-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: text-shards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tailrace.sources]\ntext_shards = tests.support.sources.text_shards:TextShards\n"
    )
    return info.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_handler_gets_each_row_in_order_whatever_is_killed(tmp_path: Path, package: Path) -> None:
    story = Story(tmp_path, package, OPTIONS)
    try:
        for point in POINTS:
            story.start(f"{point}=kill")
            with pytest.raises(Killed):
                story.play()
            story.stall.unlink(missing_ok=True)
        story.start()
        story.play()
    finally:
        story.stop()
    story.check()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kafka_has_each_row_once_whatever_is_killed(
    tmp_path: Path, package: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    options: dict[str, Any] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "offsets_topic": f"{topic_name}-offsets"},
        "atomic_source_offset_commit": True,
        "transformations": [{"type": "route", "regex": r"public\.(.*)", "replacement": f"{topic_name}.$1"}],
    }
    story = Story(tmp_path, package, options, to_file=False)

    def numbers() -> list[int]:
        found = read_topic(kafka.bootstrap, f"{topic_name}.orders")
        return [message.document["after"]["id"] for message in found]

    try:
        for point in POINTS_OF_KAFKA:
            story.start(f"{point}=kill")
            with pytest.raises(Killed):
                story.play()
        story.start()
        story.play()
        story.wait(lambda: len(numbers()) >= story.shard.count, "the rows in Kafka")
    finally:
        story.stop()
    assert numbers() == list(range(1, story.shard.count + 1))
