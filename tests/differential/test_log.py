"""Random schemas, transactions and schema changes: the log's history folds to the source's tables.

`TAILRACE_SEEDS=7,8,9 pytest tests/differential/test_log.py` runs these seeds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.differential.ddl import DDL
from tests.support.differential.story import Story
from tests.support.postgres import Database

SEEDS = [int(seed) for seed in os.environ.get("TAILRACE_SEEDS", "1,2,3,4").split(",")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.each_postgres("all that pgoutput sends")
@pytest.mark.ci
def test_the_folded_log_equals_the_source(pg: Database, tmp_path: Path, seed: int) -> None:
    with Story(seed, pg, tmp_path, DDL) as story:
        story.chapters(3, 40)
    assert not story.problems, story.verdict(__file__)
