"""Changes taken out of a stream's responses that the log has already.

A copy by several streams needs it. Each of its chunks is at a position of its own in the end, and the one
stream that goes on begins at the least of them: what it sends again of a chunk is taken out. A row can move
from one chunk into another: then half of its update is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.resharding.shard_state import CopyChunk

#: From this size on, a transaction is not held until its position is known.
HELD_BYTES_MAX = 32 << 20


class AmbiguousError(Exception):
    """Which changes the log already has does not follow from positions, or from what came of a row."""


class RepeatedChangeFilter:
    """Takes out of a shard's stream what the log has of some chunks already.

    A shard's positions follow each other: a transaction is part of a chunk's position if the position after
    it is.

    :param chunks: each with the position up to which the log has it.
    :raises AmbiguousError: if positions do not follow each other.
    """

    def __init__(self, keyspace: str, shard: str, chunks: Iterable[CopyChunk]) -> None:
        self._keyspace, self._shard = keyspace, shard
        ahead = [(GtidSet.parse(chunk.gtid), chunk) for chunk in chunks]
        self._ahead = sorted(ahead, key=lambda each: _size(each[0]))  # the nearest position first
        for (before, _), (after, _) in zip(self._ahead, self._ahead[1:], strict=False):
            if not after.contains(before):
                raise AmbiguousError
        self._keys = _KeyColumns(keyspace, (chunk for _, chunk in self._ahead))
        self._held: list[pb.VEvent] = []
        self._held_bytes = 0
        self._has_rows = False  # among what is held, of tables of the chunks
        self._is_settled = False  # the transaction that is held is taken out of all chunks that are ahead

    @property
    def is_over(self) -> bool:
        """Whether responses are whole from now on."""
        return not self._ahead and not self._held

    def left_of(self, responses: Sequence[bytes]) -> list[bytes]:
        """Return what is left of responses, and of those before whose position comes now.

        :raises AmbiguousError: if a position comes between two chunks' positions.
        """
        left: list[pb.VEvent] = []
        for data in responses:
            for event in pb.VStreamResponse.FromString(data).events:
                self._take(event, left)
            self._held_bytes += len(data)
            if self._has_rows and self._held_bytes > HELD_BYTES_MAX:
                self._is_settled = True
                self._release(left)
            elif not self._has_rows:
                self._release(left)
        return [pb.VStreamResponse(events=left).SerializeToString()] if left else []

    def _take(self, event: pb.VEvent, left: list[pb.VEvent]) -> None:
        self._keys.note(event)
        self._held.append(event)
        if event.type == pb.ROW:
            self._has_rows = self._has_rows or any(
                chunk.table == self._table(event) for _, chunk in self._ahead
            )
        elif event.type == pb.VGTID and (gtid := self._own(event)):
            position = GtidSet.parse(gtid)
            self._reach(position)
            self._release(left)
            self._is_settled = False
            # Nothing that comes is part of a position that is reached, however large it is.
            while self._ahead and position.contains(self._ahead[0][0]):
                del self._ahead[0]

    def _reach(self, position: GtidSet) -> None:
        """Let chunks go that are not ahead of a transaction, whose position is known now."""
        while self._ahead and not self._ahead[0][0].contains(position):
            if self._is_settled or not position.contains(self._ahead[0][0]):
                raise AmbiguousError
            del self._ahead[0]

    def _release(self, left: list[pb.VEvent]) -> None:
        left.extend(event for event in self._held if not self._is_had(event))
        self._held, self._held_bytes, self._has_rows = [], 0, False

    def _is_had(self, event: pb.VEvent) -> bool:
        if event.type != pb.ROW:
            return False
        table = self._table(event)
        chunks = [chunk for _, chunk in self._ahead if chunk.table == table]
        return bool(chunks) and not _leave(
            event,
            lambda row: not any(self._keys.is_in(chunk, row) for chunk in chunks),
        )

    def _table(self, event: pb.VEvent) -> str:
        return event.row_event.table_name.removeprefix(f"{self._keyspace}.")

    def _own(self, event: pb.VEvent) -> str:
        return next((each.gtid for each in event.vgtid.shard_gtids if each.shard == self._shard), "")


class _KeyColumns:
    """Where in a row the key of a chunk's range stands: descriptions of tables tell."""

    def __init__(self, keyspace: str, chunks: Iterable[CopyChunk]) -> None:
        self._keyspace = keyspace
        self._columns = {chunk.table: chunk.column for chunk in chunks if chunk.is_range}
        self._places: dict[str, int] = {}

    def note(self, event: pb.VEvent) -> None:
        """Take a description of a table."""
        if event.type != pb.FIELD:
            return
        table = event.field_event.table_name.removeprefix(f"{self._keyspace}.")
        if (column := self._columns.get(table)) is not None:
            names = [each.name for each in event.field_event.fields]
            self._places[table] = names.index(column) if column in names else -1

    def is_in(self, chunk: CopyChunk, row: pb.Row) -> bool:
        """Tell whether a row of its table lies in a chunk.

        :raises AmbiguousError: if its key is none any more that is a whole number.
        """
        return not chunk.is_range or chunk.contains(self._value(chunk, row))

    def _value(self, chunk: CopyChunk, row: pb.Row) -> int:
        place = self._places.get(chunk.table, -1)
        if not 0 <= place < len(row.lengths) or row.lengths[place] < 0:
            raise AmbiguousError
        at = sum(max(length, 0) for length in row.lengths[:place])
        try:
            return int(row.values[at : at + row.lengths[place]])
        except ValueError:
            raise AmbiguousError from None


def _leave(event: pb.VEvent, is_left: Callable[[pb.Row], bool]) -> bool:
    """Take images of rows out of an event; return whether a change is left.

    :raises AmbiguousError: if a part of a change would be left that needs the rest of it.
    """
    changes = event.row_event.row_changes
    for number in reversed(range(len(changes))):
        change = changes[number]
        before = change.HasField("before") and is_left(change.before)
        after = change.HasField("after") and is_left(change.after)
        if not before and not after:
            del changes[number]
        elif not before and change.HasField("before"):
            # A row comes in from elsewhere: what it had there and kept is not in the change.
            if change.HasField("data_columns") or change.HasField("json_partial_values"):
                raise AmbiguousError
            change.ClearField("before")
        elif not after and change.HasField("after"):
            for name in ("after", "data_columns", "json_partial_values"):
                change.ClearField(name)
    return bool(changes)


def _size(position: GtidSet) -> int:
    return sum(last - first + 1 for found in position.intervals.values() for first, last in found)
