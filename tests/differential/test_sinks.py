"""Random schemas, transactions and changes of schemas through every sink.

After each range of the log the mirrors are the source as it was there, and in the end every
history has every change. `TAILRACE_SEEDS=7,8,9 pytest tests/differential/test_sinks.py` runs the
seeds that are named.
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
def test_every_sink_holds_what_the_source_had(
    pg: Database, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    with Story(seed, pg, tmp_path, LAKE_DDL, for_lakes=True) as story:
        story.chapters(2, 40)
    if not story.problems:
        story.problems += Feeding(story.log, tmp_path / "lake", story.rng, 100).fill()
    assert not story.problems, story.verdict(__file__)
