"""Chaos in small; `make torture` goes on for an hour."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.postgres import Database
from tests.support.torture.chaos import Chaos

#: `make torture` has a cut every 90 s.
CUTS, CUT_S = 2, 15


@pytest.mark.ci
@pytest.mark.torture
@pytest.mark.timeout(900)
def test_the_mirror_is_the_source_at_each_cut_of_random_chaos(pg: Database, tmp_path: Path) -> None:
    seed = int(os.environ.get("TAILRACE_SEEDS") or random.SystemRandom().randrange(1 << 32))
    print(f"TAILRACE_SEEDS={seed}")  # noqa: T201 (pytest shows it with a failure)
    chaos = Chaos(tmp_path, pg, seed, lock_s_max=5)
    try:
        for _ in range(CUTS):
            assert chaos.run_until_cut(CUT_S) == []
        chaos.end()
    finally:
        chaos.close()
