"""How many examples hypothesis tries: as many as the tests say in `make torture`, two fifths of them in the
suite, a fifth with `--fast`. `TAILRACE_EXAMPLES` is the number that is tried in place of a hundred.
"""

from __future__ import annotations

import os

from hypothesis import settings

WHOLE = 100
USUAL = int(os.environ.get("TAILRACE_EXAMPLES", "40"))
FAST = min(20, USUAL)


def examples(count: int) -> settings:
    """Return settings with so many examples, or as large a part of them as is tried everywhere."""
    return settings(max_examples=max(5, count * settings.default.max_examples // WHOLE))
