"""Finds files without a common key from the bounds of their keys, without reading rows.

Most tables have ascending keys. Then new rows have higher keys than all rows of the mirror, and the
net changes of different splits have no common key. If the bounds prove this, no rows need to be matched.

Pure. Only whole numbers have bounds; without bounds nothing is proved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

#: Below every key.
NOTHING = -(2**63) - 1


def apart(files: Sequence[dict[str, Any]], column: str) -> bool:
    """Return whether these files (facts of `ParquetWriter`) certainly have no common value of `column`."""
    held = [facts for facts in files if facts["net_rows"]]
    if not all(bounded(facts, column) for facts in held):
        return False
    bounds = sorted((facts["lowest"][column], facts["highest"][column]) for facts in held)
    return all(before[1] < after[0] for before, after in itertools.pairwise(bounds))


def beyond(files: Sequence[dict[str, Any]], column: str, highest: int | None) -> bool:
    """Return whether `column` is certainly greater than `highest` in all rows of these files.

    :param highest: None: not known.
    """
    held = [facts for facts in files if facts["net_rows"]]
    return highest is not None and all(
        bounded(facts, column) and facts["lowest"][column] > highest for facts in held
    )


def bounded(facts: dict[str, Any], column: str) -> bool:
    """Return whether the file has bounds of `column` that include all of its rows."""
    return column in facts["lowest"] and facts["nulls"].get(column) == 0
