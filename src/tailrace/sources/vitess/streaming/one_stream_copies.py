"""The copy of a shard by one stream, one table after another.

If the tablet's stream ends, vtgate opens it again by itself, from the last position and with the keys of the
tables that it last named. The tablet then reads finished tables again, and until then leaves out their
changes: the log would not show that a row was deleted. Or vtgate names no table, and those that remain are
never read. So Tailrace ends the stream, and opens one that names all tables.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.resharding.events import EndReason
from tailrace.sources.vitess.rows import events as vevents
from tailrace.sources.vitess.rows.copy_keys import last_keys, own_position


@dataclass(slots=True)
class OneStreamCopy:
    """The one stream that copies a shard.

    :param named: the tables that the request names; then those that vtgate names.
    :param moved_s: when the copy last progressed, or is opened, monotonic.
    :ivar keys: the keys up to which the named tables are copied, once vtgate has sent them.
    :ivar finished: the tables that vtgate no longer names.
    :ivar table: the table whose rows are received; empty: the copy is between two tables.
    :ivar gtid: the position at which it last progressed; `last`: the table.
    :ivar broken_off: vtgate opened the tablet's stream again by itself: why this one has to end.
    """

    shard: str
    attempt: int
    task: int
    named: AbstractSet[str]
    moved_s: float = 0.0
    keys: Mapping[str, str] | None = None
    finished: set[str] = field(default_factory=set)
    table: str = ""
    gtid: str = ""
    last: str = ""
    broken_off: EndReason | None = None

    @property
    def name(self) -> str:
        """The stream's name."""
        return self.shard

    def left_of(self, responses: Sequence[bytes]) -> list[bytes]:
        """Return the responses up to the point where vtgate opened the tablet's stream again.

        :raises TailraceError: if that point was inside a transaction.
        """
        if self.broken_off is not None:
            message = f"copy the shard {self.shard}: interrupted inside a transaction"
            raise TailraceError(Kind.SOURCE_UNREACHABLE, message, "it is retried")
        for number, data in enumerate(responses):
            for position in self._positions(data):
                self.broken_off = self.broken_off or self._reach(position.gtid, last_keys(position))
            if self.broken_off is not None:
                return list(responses[:number])
        return list(responses)

    def _positions(self, data: bytes) -> Iterator[pb.ShardGtid]:
        event = np.empty(vevents.EVENT_FIELDS, np.int64)
        buffer = np.frombuffer(data, np.uint8)
        at = 0
        while (at := vevents.next_of(buffer, at, vevents.VGTID, event)) > 0:
            body = data[event[vevents.BODY_AT] : event[vevents.BODY_END]]
            if (position := own_position(body, self.shard)) is not None:
                yield position

    def _reach(self, gtid: str, keys: Mapping[str, str]) -> EndReason | None:
        """Note a position; return why the stream has to end, if vtgate opened the tablet's one again."""
        before = keys if self.keys is None else self.keys
        moved = [table for table, key in keys.items() if before.get(table) != key]
        gone = self.named - keys.keys()
        if not self.finished.isdisjoint(moved):
            return EndReason.INTERRUPTED if gtid == self.gtid else EndReason.UNSENT
        if self.table in keys and (gtid != self.gtid or moved not in ([], [self.table])):
            # All rows of a table are as of one position, and come one after another.
            return EndReason.INTERRUPTED
        if moved or gone or self.keys is None:
            self.finished |= gone
            self.table = moved[0] if moved else ""
            self.last = self.table or max(gone, default=self.last)
            self.gtid, self.moved_s = gtid, time.monotonic()
            self.keys, self.named = keys, keys.keys()
        return None
