"""Records of topics, folded to rows."""

from __future__ import annotations

from collections import Counter
from typing import Any


def _changes(events: list[tuple[Any, Any]]) -> Counter[tuple[str, int, str]]:
    """Count (operation, id, what) of each change; tombstones do not count."""
    found: Counter[tuple[str, int, str]] = Counter()
    for _, value in events:
        if value is not None:
            row = value["after"] or value["before"]
            found[value["op"], row["id"], str(row.get("what"))] += 1
    return found


def _folded(events: list[tuple[Any, Any]]) -> dict[int, str]:
    rows: dict[int, str] = {}
    for key, value in events:
        if value is None or value["after"] is None:
            rows.pop(key["id"], None)
        else:
            rows[key["id"]] = value["after"]["what"]
    return rows
