"""Whether a server has room for all of the sources that are on it, and for their snapshots. Pure.

Slots and WAL senders belong to a server, and several sources of one pipeline may be databases of
the same server: each alone would find the last free slot free. Beside its own, a source needs one
of each more for a while, when rows are read beside its stream: a temporary slot gives the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tailrace.errors import Kind
from tailrace.sources.findings import Finding, error, warning

#: What the repair leaves free beyond what is asked for: a few more will be needed some day.
_SPARE = 3


@dataclass(frozen=True, slots=True)
class SourceCapacity:
    """What one source will take of its server, and what the server has.

    :param source: the source's name, empty for the only one.
    :param server: the same for two sources exactly if they are on the same running server.
    :param takes_slot: whether the source has no slot yet and will make one.
    :param takes_sender: whether it has no WAL sender at this moment and will need one.
    :param windows: how many more of both it needs for a snapshot beside the stream.
    :param windows_open: how many of those it has at this moment.
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
    """Yield where the sources of one server need more than is free there."""
    for server in dict.fromkeys(room.server for room in rooms):
        here = [room for room in rooms if room.server == server]
        newest = here[-1]
        later = [room.source for room in here for _ in range(room.windows - room.windows_open)]
        yield from _short(
            [room.source for room in here if room.takes_slot],
            later,
            _Kept("replication slot", "max_replication_slots", newest.slots, newest.slots_max),
            "; or drop a slot that nobody needs",
        )
        yield from _short(
            [room.source for room in here if room.takes_sender],
            later,
            _Kept("WAL sender", "max_wal_senders", newest.senders, newest.senders_max),
            "",
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a server has a fixed number of."""

    what: str
    setting: str
    used: int
    most: int

    def free(self, taken: int) -> str:
        """Return in words how many are free when so many more are taken."""
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
            f"{kept.free(len(sources))} free beside the stream ({kept.setting} is {kept.most}): a snapshot "
            "that was cut short, or that is asked for, needs one more while it is read, and fails without it"
        )
        short = warning(Kind.SOURCE_MISCONFIGURED, found + needed, repair)
        yield replace(short, source=later[0] if len(later) == 1 else "")
