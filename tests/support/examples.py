"""How many examples hypothesis tries. The counts in the tests are those of `make torture`; without it two
fifths of them are tried, with `--fast` a fifth, and `TAILRACE_EXAMPLES` says how many in place of a hundred.
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
