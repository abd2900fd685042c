"""The whole pipeline beside a random workload: at each cut the mirrors equal SELECT's result.

The command is killed in one of its commits and started again. A cut is a moment at which the workload rests
and all sinks have caught up. Every history then has every change of the log, which folds to the source, as
does the mirror. `TAILRACE_SEEDS=7,8,9 pytest tests/differential/test_pipeline.py` runs these seeds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.differential import lake, source
from tests.support.differential.ddl import LAKE_DDL
from tests.support.differential.history import read_log
from tests.support.differential.pipeline import SINKS, Pipeline
from tests.support.differential.story import Story
from tests.support.postgres import Database

SEEDS = [int(seed) for seed in os.environ.get("TAILRACE_SEEDS", "201").split(",")]
CUTS = 2
TRANSACTIONS = 40
DIES_AT = ("sink.after_write", "sink.before_commit", "sink.after_commit", "sink.before_position")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.torture
@pytest.mark.timeout(900)
def test_at_each_cut_the_mirrors_equal_the_source(pg: Database, tmp_path: Path, seed: int) -> None:
    with Story(seed, pg, tmp_path, LAKE_DDL, for_lakes=True) as story, Pipeline(story) as pipeline:
        tell(story, pipeline)
    assert not story.problems, story.verdict(__file__)


def tell(story: Story, pipeline: Pipeline) -> None:
    """Go on with the workload while the pipeline runs, dies and catches up; stop at the first wrong cut."""
    work, rng = story.work, story.rng
    work.run(rng.randint(0, TRANSACTIONS))
    work.is_calm = True
    work.rest(all_ended=True)
    pipeline.start(f"{rng.choice(DIES_AT)}=kill@{rng.randint(1, 2)}")
    while not pipeline.is_over:
        work.step()
        time.sleep(0.01)
    assert pipeline.was_killed, pipeline.last_words()
    work.rest(all_ended=True)
    pipeline.start()
    pipeline.wait_until_streaming()
    work.is_calm = False
    for _ in range(CUTS):
        work.may_drop = pipeline.catch_up_log
        work.run(rng.randint(TRANSACTIONS // 2, TRANSACTIONS))
        work.may_drop = lambda: False
        work.rest(all_ended=True)
        work.touch()
        pipeline.catch_up()
        story.problems += problems(story, pipeline)
        if story.problems:
            return
    pipeline.end()


def problems(story: Story, pipeline: Pipeline) -> list[str]:
    """Return how the log, the mirrors and the histories differ from the source as it is now."""
    tables = story.work.tables.values()
    wanted = source.rows_of(story.database.dsn, tables)
    found = story.compare()
    for table in tables:
        path = pipeline.sink("mirror")
        found += lake.mirror_problems(path, f"public.{table.name}", wanted[table.oid], table.names)
    changes = read_log(story.log)
    for kind in SINKS:
        if kind != "mirror":
            found += lake.history_problems(kind, pipeline.sink(kind), changes)
    return found
