"""Random chaos up to one cut; `make torture` runs for an hour, with a cut every 90 s."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.postgres import Database
from tests.support.torture.chaos import Chaos

#: `make torture` has more cuts and longer times between them. After the first cut the pipeline must go on.
CUTS, CUT_S = 2, 10


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_the_mirror_equals_the_source_at_each_cut_of_random_chaos(pg: Database, tmp_path: Path) -> None:
    seed = int(os.environ.get("TAILRACE_SEEDS") or random.SystemRandom().randrange(1 << 32))
    print(f"TAILRACE_SEEDS={seed}")  # noqa: T201 (pytest shows it with a failure)
    chaos = Chaos(tmp_path, pg, seed, lock_s_max=5)
    try:
        for _ in range(CUTS):
            assert chaos.run_until_cut(CUT_S) == []
        chaos.end()
    finally:
        chaos.close()
