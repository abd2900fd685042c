"""Planted bug: recovery finds where the log ends, but does not truncate what follows."""

from __future__ import annotations

from typing import Any

from tests.support.torture import power

if __name__ == "__main__":
    power.record()

    from tailrace.changelog import recovery
    from tailrace.cli.main import app

    as_built = recovery._up_to_boundary

    def all_blocks(blocks: list[Any]) -> list[Any]:
        as_built(blocks)
        return blocks

    recovery._up_to_boundary = all_blocks
    app()
