"""What the tests of joins share."""

from __future__ import annotations

import os
import random

import pytest


@pytest.fixture
def join_seed() -> int:
    """A seed of the run's own; `TAILRACE_SEEDS=7` runs that one. Failures show it."""
    given = os.environ.get("TAILRACE_SEEDS", "").split(",")[0]
    return int(given) if given else random.randrange(1_000_000)
