"""What bounds of a key prove without reading rows: files that can have no key in common.

Most tables number their rows upwards. Their new rows then lie beyond all that the mirror has, and
the nets of two pieces beyond each other; where the bounds prove it, nothing needs to be matched.

Pure. Bounds are those of whole numbers; without them nothing is proved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

#: Below every key.
NOTHING = -(2**63) - 1


def apart(files: Sequence[dict[str, Any]], column: str) -> bool:
    """Return whether these files (facts of `ParquetWriter`) surely share no value of `column`."""
    held = [facts for facts in files if facts["net_rows"]]
    if not all(bounded(facts, column) for facts in held):
        return False
    bounds = sorted((facts["lowest"][column], facts["highest"][column]) for facts in held)
    return all(before[1] < after[0] for before, after in itertools.pairwise(bounds))


def beyond(files: Sequence[dict[str, Any]], column: str, highest: int | None) -> bool:
    """Return whether all rows of these files surely have a greater `column` than `highest`.

    :param highest: None: not known.
    """
    held = [facts for facts in files if facts["net_rows"]]
    return highest is not None and all(
        bounded(facts, column) and facts["lowest"][column] > highest for facts in held
    )


def bounded(facts: dict[str, Any], column: str) -> bool:
    """Return whether the file's bounds of `column` hold for all of its rows."""
    return column in facts["lowest"] and facts["nulls"].get(column) == 0
