"""Sets of MySQL's global transaction ids, as text in Vitess' positions. Pure.

    MySQL56/6a60d315-8e10-11eb-b894-04ed332e05c2:1-77:80,629442b7-8e10-11eb-a0bb-04ed332e05c2:1-76

Each server numbers its transactions; a set has intervals of numbers for each server. From MySQL 8.3 on a
server may number several series, each with a tag behind the server's UUID.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.errors import Kind, TailraceError

#: Prefix of a set of MySQL's GTIDs in Vitess' positions.
FLAVOR = "MySQL56/"

#: Positions that name no transaction: copy everything; start at the newest transaction.
TO_COPY, CURRENT = "", "current"

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_INTERVAL = re.compile(r"(?P<first>\d{1,19})(?:-(?P<last>\d{1,19}))?")
_TAG = re.compile(r"[a-z_][a-z0-9_]{0,31}")

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class GtidSet:
    """A set of GTIDs: by server or `server:tag`, ascending disjoint intervals, both ends inclusive."""

    intervals: Mapping[str, Intervals]

    @classmethod
    def parse(cls, text: str) -> GtidSet:
        """Return the set in a position, or in a value of MySQL's variables, which has no flavor prefix.

        :raises TailraceError: `SOURCE_MISCONFIGURED` for positions of another kind (file and offset,
            MariaDB), `PROTOCOL_VIOLATION` for text that is not a set.
        """
        flavor, slash, rest = text.partition("/")
        if slash and flavor != FLAVOR[:-1]:
            raise TailraceError(
                Kind.SOURCE_MISCONFIGURED,
                f"read a shard's position: it is of the kind {flavor!r}, and only sets of MySQL's GTIDs "
                "can be compared",
                "have the tablets run MySQL with gtid_mode=ON",
                {"position": text},
            )
        collected: dict[str, list[tuple[int, int]]] = {}
        for part in (rest if slash else text).replace("\n", "").split(","):
            if part.strip():
                _collect(part.strip().lower(), collected)
        return cls({server: _joined(found) for server, found in sorted(collected.items())})

    def __str__(self) -> str:
        return FLAVOR + ",".join(
            ":".join((server, *(str(first) if first == last else f"{first}-{last}" for first, last in found)))
            for server, found in self.intervals.items()
        )

    def contains(self, other: GtidSet) -> bool:
        """Return whether every id of `other` is in this set."""
        return all(
            all(_holds(self.intervals.get(server, ()), first, last) for first, last in found)
            for server, found in other.intervals.items()
        )

    def intersection(self, other: GtidSet) -> GtidSet:
        """Return the ids that are in both sets: a position that both have reached."""
        common = {
            server: _common(found, other.intervals.get(server, ()))
            for server, found in self.intervals.items()
        }
        return GtidSet({server: found for server, found in common.items() if found})


def is_read(position: str) -> bool:
    """Return whether a position names transactions: it was read from a stream."""
    return position not in (TO_COPY, CURRENT)


def _collect(part: str, collected: dict[str, list[tuple[int, int]]]) -> None:
    server, *rest = (piece.strip() for piece in part.split(":"))
    if not _UUID.fullmatch(server) or not rest:
        raise _unreadable(part)
    series = server
    for piece in rest:
        if _TAG.fullmatch(piece):
            series = f"{server}:{piece}"
            continue
        match = _INTERVAL.fullmatch(piece)
        if match is None:
            raise _unreadable(part)
        first = int(match["first"])
        last = int(match["last"] or first)
        if not 1 <= first <= last:
            raise _unreadable(part)
        collected.setdefault(series, []).append((first, last))


def _joined(found: list[tuple[int, int]]) -> Intervals:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return tuple(joined)


def _holds(found: Intervals, first: int, last: int) -> bool:
    return any(begin <= first and last <= end for begin, end in found)


def _common(one: Intervals, other: Intervals) -> Intervals:
    return tuple(
        (max(first, begin), min(last, end))
        for first, last in one
        for begin, end in other
        if max(first, begin) <= min(last, end)
    )


def _unreadable(part: str) -> TailraceError:
    return TailraceError(
        Kind.PROTOCOL_VIOLATION,
        f"read a set of GTIDs: {part[:100]!r} is not a set of GTIDs",
        "report it, with the version of Vitess",
    )
