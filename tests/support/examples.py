"""How many examples hypothesis tries: as many as the tests say in `make torture`, two fifths in the suite,
a tenth with `--fast`. `TAILRACE_EXAMPLES` is the number to try in place of a hundred.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

WHOLE = 100
USUAL = int(os.environ.get("TAILRACE_EXAMPLES", "40"))
FAST = min(10, USUAL)


def examples(count: int) -> settings:
    """Return settings with `count` examples, reduced in the same proportion as everywhere."""
    return settings(max_examples=max(5, count * settings.default.max_examples // WHOLE))


def seeds(count: int, quick: int) -> list[Any]:
    """Return the parameters 0 to `count` - 1; those from `quick` on are marked slow."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= quick)) for seed in range(count)]
