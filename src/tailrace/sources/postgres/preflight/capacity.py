"""Checks whether a server has enough slots and WAL senders for all of its sources and snapshots. Pure.

Slots and WAL senders belong to a server, and several sources of one pipeline may be databases of
the same server: each alone would count the same last slot as free. In addition to its own, a source
temporarily needs one more of each while rows are read during streaming, for a temporary slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tailrace.errors import Kind
from tailrace.sources.findings import Finding, error, warning

#: Number of slots or WAL senders that the repair leaves free for future needs.
_SPARE = 3


@dataclass(frozen=True, slots=True)
class SourceCapacity:
    """The slots and WAL senders that one source will need of its server, and those that the server has.

    :param source: the source's name, empty for the only one.
    :param server: equal for two sources if and only if they are on the same running server.
    :param takes_slot: whether the source has no slot yet and will create one.
    :param takes_sender: whether it has no WAL sender at present and will need one.
    :param windows: how many more of both it needs for a snapshot while streaming.
    :param windows_open: how many of those it has at present.
    """

    source: str
    server: str
    takes_slot: bool
    slots: int
    slots_max: int
    takes_sender: bool
    senders: int
    senders_max: int
    windows: int = 1
    windows_open: int = 0


def room_findings(rooms: Sequence[SourceCapacity]) -> Iterator[Finding]:
    """Yield a finding for each server whose sources need more slots or WAL senders than are free."""
    for server in dict.fromkeys(room.server for room in rooms):
        here = [room for room in rooms if room.server == server]
        newest = here[-1]
        later = [room.source for room in here for _ in range(room.windows - room.windows_open)]
        yield from _short(
            [room.source for room in here if room.takes_slot],
            later,
            _Kept("replication slot", "max_replication_slots", newest.slots, newest.slots_max),
            "; or drop a slot that is not needed",
        )
        yield from _short(
            [room.source for room in here if room.takes_sender],
            later,
            _Kept("WAL sender", "max_wal_senders", newest.senders, newest.senders_max),
            "",
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """A resource of which a server has a fixed number."""

    what: str
    setting: str
    used: int
    most: int

    def free(self, taken: int) -> str:
        """Return the words for how many are free after `taken` more are used."""
        left = max(0, self.most - self.used - taken)
        return f"no {self.what} is" if left == 0 else f"only {left} {self.what}{'s' * (left > 1)}"

    def repair(self, needed: int) -> str:
        return f"ALTER SYSTEM SET {self.setting} = {self.used + needed + _SPARE}; then restart the server"


def _short(sources: list[str], later: list[str], kept: _Kept, or_else: str) -> Iterator[Finding]:
    free = max(0, kept.most - kept.used)
    repair = kept.repair(len(sources) + len(later)) + or_else
    if len(sources) > free:
        needed = ""
        if len(sources) > 1:
            needed = f"; {len(sources)} sources on this server need one each: {', '.join(sources)}"
        found = f"{kept.free(0)} free: {kept.used} of {kept.most} ({kept.setting}) are in use{needed}"
        short = error(Kind.SOURCE_MISCONFIGURED, found, repair)
        yield replace(short, source=sources[0] if len(sources) == 1 else "")
    elif len(sources) + len(later) > free:
        needed = (
            "" if len(later) == 1 else f", and {len(later)} sources on this server may: {', '.join(later)}"
        )
        found = (
            f"{kept.free(len(sources))} free for snapshots ({kept.setting} is {kept.most}): an interrupted "
            "or requested snapshot needs one more while it is read, and fails without it"
        )
        short = warning(Kind.SOURCE_MISCONFIGURED, found + needed, repair)
        yield replace(short, source=later[0] if len(later) == 1 else "")
