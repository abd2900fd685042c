"""How many examples hypothesis tries: `--fast` tries a fifth of what the whole suite does."""

from __future__ import annotations

from hypothesis import settings

WHOLE = 100
FAST = 20


def examples(count: int) -> settings:
    """Return settings with so many examples, or a fifth of them."""
    return settings(max_examples=max(5, count * settings.default.max_examples // WHOLE))
