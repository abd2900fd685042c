"""Random schemas, transactions and schema changes through every sink.

After each range of the log the mirrors equal the source as it was there, and at the end every
history has every change. `TAILRACE_SEEDS=7,8,9 pytest tests/differential/test_sinks.py` runs these
seeds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.differential.ddl import LAKE_DDL
from tests.support.differential.feeding import Feeding
from tests.support.differential.merging import without_spark
from tests.support.differential.story import Story
from tests.support.postgres import Database

SEEDS = [int(seed) for seed in os.environ.get("TAILRACE_SEEDS", "101").split(",")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(900)
@pytest.mark.ci
def test_every_sink_equals_the_source(
    pg: Database, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    with Story(seed, pg, tmp_path, LAKE_DDL, for_lakes=True) as story:
        story.chapters(2, 40)
    if not story.problems:
        story.problems += Feeding(story.log, tmp_path / "lake", story.rng, 100).fill()
    assert not story.problems, story.verdict(__file__)
