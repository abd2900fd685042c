"""Filters changes out of a stream's responses that the log already has.

A copy by several streams needs this. At its end each chunk has a position of its own, and the one stream that
continues starts at the least of them: the changes of chunks that it sends again are filtered out. A row can
move from one chunk to another: then only the delete or the insert of its update is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.resharding.shard_state import CopyChunk
from tailrace.sources.vitess.rows.types import is_unnamed

#: Size in bytes from which a transaction is not held until its position is known.
HELD_BYTES_MAX = 32 << 20


class AmbiguousError(Exception):
    """Neither the positions nor the row show which changes the log already has."""


class RepeatedChangeFilter:
    """A filter for a shard's stream that removes the changes of chunks that the log already has.

    Each position of a shard contains the one before: a chunk's position includes a transaction if it contains
    the position after the transaction.

    :param chunks: each with the position up to which the log has it.
    :raises AmbiguousError: if one of two positions doesn't contain the other.
    """

    def __init__(self, keyspace: str, shard: str, chunks: Iterable[CopyChunk]) -> None:
        self._keyspace, self._shard = keyspace, shard
        ahead = [(GtidSet.parse(chunk.gtid), chunk) for chunk in chunks]
        self._ahead = sorted(ahead, key=lambda each: _size(each[0]))  # the least position first
        for (before, _), (after, _) in zip(self._ahead, self._ahead[1:], strict=False):
            if not after.contains(before):
                raise AmbiguousError
        self._keys = _KeyColumns(keyspace, (chunk for _, chunk in self._ahead))
        self._held: list[pb.VEvent] = []
        self._held_bytes = 0
        self._has_rows = False  # whether held events have rows of the chunks' tables
        self._is_settled = False  # the held transaction was filtered by all chunks ahead, position unknown

    @property
    def is_over(self) -> bool:
        """Whether nothing is filtered any more."""
        return not self._ahead and not self._held

    def left_of(self, responses: Sequence[bytes]) -> list[bytes]:
        """Return the remaining events of the responses, and of held ones whose position is now known.

        :raises AmbiguousError: if a position lies between two chunks' positions.
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
            # No later transaction is part of a position that is reached, however large it is.
            while self._ahead and position.contains(self._ahead[0][0]):
                del self._ahead[0]

    def _reach(self, position: GtidSet) -> None:
        """Remove the chunks that are not ahead of the transaction whose position is now known."""
        while self._ahead and not self._ahead[0][0].contains(position):
            if self._is_settled or not position.contains(self._ahead[0][0]):
                raise AmbiguousError
            del self._ahead[0]

    def _release(self, left: list[pb.VEvent]) -> None:
        left.extend(event for event in self._held if not self._is_repeated(event))
        self._held, self._held_bytes, self._has_rows = [], 0, False

    def _is_repeated(self, event: pb.VEvent) -> bool:
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
    """The index of the key's column in rows of chunked tables, from the tables' descriptions."""

    def __init__(self, keyspace: str, chunks: Iterable[CopyChunk]) -> None:
        self._keyspace = keyspace
        self._columns = {chunk.table: chunk.column for chunk in chunks if chunk.is_range}
        self._places: dict[str, int] = {}
        self._unnamed: dict[str, bool] = {}

    def note(self, event: pb.VEvent) -> None:
        """Note the columns of a table if the event describes one."""
        if event.type != pb.FIELD:
            return
        table = event.field_event.table_name.removeprefix(f"{self._keyspace}.")
        if (column := self._columns.get(table)) is not None:
            fields = event.field_event.fields
            names = [each.name for each in fields]
            self._places[table] = names.index(column) if column in names else -1
            self._unnamed[table] = any(map(is_unnamed, fields))

    def is_in(self, chunk: CopyChunk, row: pb.Row) -> bool:
        """Return whether a row of the chunk's table lies in the chunk.

        :raises AmbiguousError: if its key is no longer an integer.
        """
        if self._unnamed.get(chunk.table):
            return False  # the transcoder refuses the description, and says why
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
    """Remove row images from an event; return whether a change remains.

    :raises AmbiguousError: if the remaining part of a change needs the removed one.
    """
    changes = event.row_event.row_changes
    for number in reversed(range(len(changes))):
        change = changes[number]
        before = change.HasField("before") and is_left(change.before)
        after = change.HasField("after") and is_left(change.after)
        if not before and not after:
            del changes[number]
        elif not before and change.HasField("before"):
            # The row moves in from another chunk: its unchanged values are not in the change.
            if change.HasField("data_columns") or change.HasField("json_partial_values"):
                raise AmbiguousError
            change.ClearField("before")
        elif not after and change.HasField("after"):
            for name in ("after", "data_columns", "json_partial_values"):
                change.ClearField(name)
    return bool(changes)


def _size(position: GtidSet) -> int:
    return sum(last - first + 1 for found in position.intervals.values() for first, last in found)
