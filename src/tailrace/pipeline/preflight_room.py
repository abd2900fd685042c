"""Whether a server has room for all of the sources that are on it. Pure.

Slots and WAL senders belong to a server, and several sources of one pipeline may be databases of
the same server: each alone would find the last free slot free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tailrace.errors import Kind
from tailrace.pipeline.findings import Finding, error

#: What the repair leaves free beyond what is asked for: a few more will be needed some day.
_SPARE = 3


@dataclass(frozen=True, slots=True)
class Room:
    """What one source will take of its server, and what the server has.

    :param source: the source's name, empty for the only one.
    :param server: the same for two sources exactly if they are on the same running server.
    :param takes_slot: whether the source has no slot yet and will make one.
    :param takes_sender: whether it has no WAL sender at this moment and will need one.
    """

    source: str
    server: str
    takes_slot: bool
    slots: int
    slots_max: int
    takes_sender: bool
    senders: int
    senders_max: int


def room_findings(rooms: Sequence[Room]) -> Iterator[Finding]:
    """Yield where the sources of one server need more than is free there."""
    for server in dict.fromkeys(room.server for room in rooms):
        here = [room for room in rooms if room.server == server]
        newest = here[-1]
        yield from _short(
            [room.source for room in here if room.takes_slot],
            "replication slot",
            "max_replication_slots",
            newest.slots,
            newest.slots_max,
            "; or drop a slot that nobody needs",
        )
        yield from _short(
            [room.source for room in here if room.takes_sender],
            "WAL sender",
            "max_wal_senders",
            newest.senders,
            newest.senders_max,
            "",
        )


def _short(
    sources: list[str], what: str, setting: str, used: int, most: int, or_else: str
) -> Iterator[Finding]:
    free = max(0, most - used)
    if len(sources) <= free:
        return
    found = f"no {what} is free" if free == 0 else f"only {free} {what}{'s' * (free > 1)} free"
    needed = ""
    if len(sources) > 1:
        needed = f"; {len(sources)} sources on this server need one each: {', '.join(sources)}"
    finding = error(
        Kind.SOURCE_MISCONFIGURED,
        f"{found}: {used} of {most} ({setting}) are in use{needed}",
        f"ALTER SYSTEM SET {setting} = {used + len(sources) + _SPARE}; then restart the server{or_else}",
    )
    yield replace(finding, source=sources[0] if len(sources) == 1 else "")
