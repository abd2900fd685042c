"""`tailrace offsets show`: the offsets that an engine has committed, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.config import EngineConfig
from tailrace.config.load import from_mapping
from tailrace.engine.offsets.stores import FileOffsetStore
from tailrace.pipeline.log.consumer import partition_of
from tailrace.pipeline.offsets.commands import kept


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return from_mapping(
        {
            "name": "shop",
            "source": {"type": "postgresql", "dbname": "shop"},
            "log": {"path": str(tmp_path / "log")},
            "engine": {"offset_storage": {"type": "file", "path": str(tmp_path / "state" / "offsets")}},
        }
    )


def test_a_file_of_offsets_is_shown_while_an_engine_uses_it_and_is_not_locked(
    config: EngineConfig, tmp_path: Path
) -> None:
    assert kept(config) == []
    assert not (tmp_path / "state").exists()
    path, partition = tmp_path / "state" / "offsets", partition_of(config.pipelines[0])
    engine = FileOffsetStore(path, "shop")
    engine.start()
    for log_offset in (5, 7):
        engine.write([(partition, {"log": "a", "log_offset": log_offset})], 60)
        assert [(entry["log_offset"], entry["error"]) for entry in kept(config)] == [(log_offset, None)]
    path.unlink()  # as a process leaves it that dies between its two renames
    assert [entry["log_offset"] for entry in kept(config)] == [5]
    engine.stop()


def test_an_unreadable_file_of_offsets_is_reported_in_the_entry(config: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "state" / "offsets").mkdir(parents=True)  # root may read every file
    (entry,) = kept(config)
    assert entry["error"]["kind"] == "offsets_unreadable"
    assert entry["log_offset"] is None
