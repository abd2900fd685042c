"""How a check says that a contract was broken."""

from __future__ import annotations


def require(kept: bool, rule: str) -> None:
    """Fail with the rule that was broken.

    :raises AssertionError: if it was not kept.
    """
    if not kept:
        raise AssertionError(f"contract broken: {rule}")
