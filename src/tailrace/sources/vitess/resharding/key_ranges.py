"""Key ranges: the part of a keyspace that a shard has, parsed from its name. Pure.

A shard `40-80` has the rows whose keyspace id is from 0x40, inclusive, to 0x80, exclusive; an omitted side
has no limit. A shard whose name has no dash, `0` for instance, has all rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.errors import Kind, TailraceError

_BOUNDED = re.compile(r"(?P<start>(?:[0-9a-f]{2})*)-(?P<end>(?:[0-9a-f]{2})*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
    """Keyspace ids from `start`, inclusive, to `end`, exclusive; `end` None: to the last one.

    Trailing zero bytes have no meaning and are removed, so that equal ranges are equal objects.
    """

    start: bytes = b""
    end: bytes | None = None

    @classmethod
    @functools.lru_cache(1024)
    def of_shard(cls, shard: str) -> KeyRange:
        """Return the key range of a shard.

        :raises TailraceError: `PROTOCOL_VIOLATION` if the name is not a range of keys.
        """
        if "-" not in shard:
            return cls()
        match = _BOUNDED.fullmatch(shard)
        if match is None:
            raise _unreadable(shard)
        start = bytes.fromhex(match["start"]).rstrip(b"\0")
        end = bytes.fromhex(match["end"]).rstrip(b"\0") if match["end"] else None
        if end is not None and start >= end:
            raise _unreadable(shard)
        return cls(start, end)

    def __str__(self) -> str:
        return f"{self.start.hex()}-{'' if self.end is None else self.end.hex()}"

    def overlaps(self, other: KeyRange) -> bool:
        """Return whether a keyspace id is in both ranges."""
        return _below(self.start, other.end) and _below(other.start, self.end)


def merged(ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    """Return the union of the ranges: as few ranges as possible, in order."""
    found: list[KeyRange] = []
    for following in sorted(ranges, key=lambda key_range: key_range.start):
        last = found[-1] if found else None
        if last is None or not (last.end is None or following.start <= last.end):
            found.append(following)
        elif last.end is not None:
            end = None if following.end is None else max(last.end, following.end)
            found[-1] = KeyRange(last.start, end)
    return tuple(found)


def uncovered(wanted: KeyRange, ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    """Return the parts of `wanted` that none of `ranges` covers, in order."""
    gaps: list[KeyRange] = []
    at = wanted.start
    for held in merged(key_range for key_range in ranges if key_range.overlaps(wanted)):
        if at < held.start:
            gaps.append(KeyRange(at, held.start))
        if held.end is None:
            return tuple(gaps)
        at = max(at, held.end)
    return (*gaps, KeyRange(at, wanted.end)) if _below(at, wanted.end) else tuple(gaps)


def overlapping(shard: str, shards: Iterable[str]) -> tuple[str, ...]:
    """Return those of `shards` that overlap `shard`, in order of their keys."""
    wanted = KeyRange.of_shard(shard)
    return tuple(other for other in by_keys(shards) if KeyRange.of_shard(other).overlaps(wanted))


def by_keys(shards: Iterable[str]) -> list[str]:
    """Return the shards in order of their keys."""
    return sorted(shards, key=lambda shard: (KeyRange.of_shard(shard).start, shard))


def _below(value: bytes, end: bytes | None) -> bool:
    return end is None or value < end


def _unreadable(shard: str) -> TailraceError:
    return TailraceError(
        Kind.PROTOCOL_VIOLATION,
        f"read the key range of the shard {shard!r}: a range is two even numbers of hex digits with a dash "
        "between, the first one smaller",
        "report it, with the names of the keyspace's shards",
        {"shard": shard},
    )
