"""Copies of shards by several streams at the same time, a chunk each.

A chunk's stream brings its rows as they are at one position, and is closed. If it breaks off before, the rest
of the rows is a chunk of its own, at another position: so all changes come by one stream, whole transactions.
It begins once all chunks are there, at the position that all have, and what chunks had beyond it is taken out
of what it sends (`rows.change_filters`).

Only where rows can't be told by their key, a stream goes on with a chunk that broke off: it brings what
changed since in all of the table, and then the rest of the rows.

All streams of a shard are one attempt: if one ends, all end, and are opened again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.sources.vitess.connection.metadata import ask_gtids, serving_shards
from tailrace.sources.vitess.connection.vtgate import Vtgate, answer_of
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.events import (
    ChunkReached,
    ChunksGathered,
    CopyPlanned,
    EndReason,
    Event,
    OpenStream,
    ShardStreamEnded,
)
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.resharding.shard_state import CopyChunk
from tailrace.sources.vitess.resharding.transitions import READ
from tailrace.sources.vitess.rows import events as vevents
from tailrace.sources.vitess.streaming.copy_plan import has_too_many_parts, planned_chunks

#: A chunk's stream that brought no row for so long is opened again: if its tablet ended before the first row,
#: vtgate goes on at another one with changes alone, and a shard that nobody writes to has none. Twice as long
#: each time, so often: a tablet may have to sort the table first.
ROWLESS_S = 60.0
ROWLESS_MAX = 10


@dataclass(slots=True)
class ChunkStream:
    """The open stream of a chunk.

    :ivar gtid: the last position that came.
    :ivar key: the primary key up to which rows came.
    :ivar is_broken_off: vtgate opened the tablet's stream again by itself, and what is left of the rows is of
        another position, or does not come at all.
    """

    name: str
    shard: str
    attempt: int
    task: int
    number: int
    chunk: CopyChunk
    gtid: str = ""
    key: str = ""
    is_broken_off: bool = False
    opened_s: float = field(default_factory=time.monotonic)

    def left_of(self, responses: Sequence[bytes]) -> list[bytes]:
        """Return the responses of the copy: not what comes behind its end, where all changes come by one
        stream.

        :raises TailraceError: if what came before broke off inside a transaction.
        """
        if self.is_broken_off:
            message = f"copy {self.chunk.table} of {self.shard}: it broke off inside a transaction"
            raise TailraceError(Kind.SOURCE_UNREACHABLE, message, "it is tried again")
        event = np.empty(vevents.EVENT_FIELDS, np.int64)
        for number, data in enumerate(responses):
            found = vevents.change_or_end(np.frombuffer(data, np.uint8), event)
            if found == vevents.COPY_COMPLETED:
                return list(responses[: number + 1])
            if found == vevents.ROW and not self.chunk.is_begun:
                self.is_broken_off = True
                return list(responses[:number])
        return list(responses)

    def reach(self, gtid: str, key: str) -> None:
        """Take a position. Without rows before it, another one is that of a stream that copies none."""
        if gtid != self.gtid and self.gtid and not self.key:
            self.is_broken_off = True
        self.gtid, self.key = gtid, key or self.key


class ShardCopies:
    """For the thread that has its turn at the log.

    :param step: has the coordinator take an event, and carries out its commands.
    :param start: opens the stream of a chunk.
    :param stop: ends it.
    :param copy_whole: has a shard copied by one stream.
    """

    def __init__(
        self,
        source: VitessSource,
        vtgate: Vtgate,
        coordinator: Coordinator,
        step: Callable[[Event], None],
        start: Callable[[ChunkStream], None],
        stop: Callable[[ChunkStream], None],
        copy_whole: Callable[[OpenStream], None],
    ) -> None:
        self._source = source
        self._vtgate = vtgate
        self._coordinator = coordinator
        self._step = step
        self._start, self._stop, self._copy_whole = start, stop, copy_whole
        #: By name, those that are open.
        self.streams: dict[str, ChunkStream] = {}
        self._opened: dict[str, OpenStream] = {}  # by shard, what its chunks are copied for
        self._planned_at_s: dict[str, float] = {}  # when the chunks of a shard are looked at next
        self._without_tables: set[str] = set()  # shards of which one stream found no table to copy
        self._rowless: Counter[tuple[str, str]] = Counter()  # by shard and table, how often no row came

    def takes(self, command: OpenStream) -> bool:
        """Tell whether a shard is copied here, by several streams or the rest of what they had begun."""
        copy = self._coordinator.shards[command.shard].kept.copy
        if copy is None or command.deadline_s is not None:
            return False
        is_planned = self._share() > 1 or command.shard in self._without_tables
        return bool(copy.chunks) or (not copy.keys and is_planned)

    def note_without_tables(self, shard: str) -> None:
        """Have a shard's tables looked at before its next stream: its tablet has none to copy."""
        self._without_tables.add(shard)

    def open(self, command: OpenStream) -> None:
        """Have a shard copied."""
        self._opened[command.shard] = command
        self._planned_at_s[command.shard] = time.monotonic() + command.wait_s

    def end(self, shard: str) -> None:
        """End all streams that copy a shard."""
        self._opened.pop(shard, None)
        self._planned_at_s.pop(shard, None)
        for stream in self.of(shard):
            self._end(stream)

    def of(self, shard: str) -> list[ChunkStream]:
        """Return the open streams of a shard."""
        return [stream for stream in self.streams.values() if stream.shard == shard]

    def go_on(self, stream: ChunkStream, *, is_done: bool) -> None:
        """Go on with the next chunk of a shard after one is done; copy anew after one that broke off."""
        if stream.name not in self.streams:
            return
        if is_done:
            self._end(stream)
            self._open_next(stream.shard)
        elif stream.is_broken_off:
            self._begin_again(stream, "vtgate went on with a copy at another position")

    def _begin_again(self, stream: ChunkStream, trouble: str) -> None:
        # As another attempt: what still comes of this one does not count.
        self.end(stream.shard)
        self._step(ShardStreamEnded(stream.shard, stream.attempt, EndReason.INTERRUPTED, (), trouble))

    def turn(self, now_s: float) -> None:
        """Plan what is to be copied where it is time; open streams again that bring no row.

        :raises TailraceError: what will not pass.
        """
        for stream in list(self.streams.values()):
            if stream.name not in self.streams or stream.key:
                continue
            table = stream.shard, stream.chunk.table
            if now_s > stream.opened_s + ROWLESS_S * 2 ** min(self._rowless[table], ROWLESS_MAX):
                self._rowless[table] += 1
                self._begin_again(stream, f"the copy of {stream.chunk.table} brought no row")
        for shard, at_s in list(self._planned_at_s.items()):
            if now_s < at_s or shard not in self._planned_at_s:
                continue
            del self._planned_at_s[shard]
            attempt = self._opened[shard].attempt
            try:
                self._plan(shard)
            except TailraceError as error:
                if error.policy is not Policy.RETRY:
                    raise
                if not self._go_on_with_one(shard):
                    self.end(shard)
                    self._step(ShardStreamEnded(shard, attempt, EndReason.INTERRUPTED, (), error.message))

    def _go_on_with_one(self, shard: str) -> bool:
        """Have one stream go on with a shard that serves no more: it answers no question, and is streamed
        all the same, up to its journal. Return whether it is so.
        """
        try:
            if shard in serving_shards(self._vtgate, self._source):
                return False
        except TailraceError:
            return False
        if any(chunk.is_begun for chunk in self._chunks(shard)):
            self._step(ChunksGathered(shard, self._opened[shard].attempt))
        else:
            self._copy_whole(self._opened.pop(shard))
        return True

    def _plan(self, shard: str) -> None:
        attempt = self._opened[shard].attempt
        if not self._coordinator.accepts(shard, attempt):
            return
        before = self._chunks(shard)
        self._without_tables.discard(shard)
        chunks = planned_chunks(self._vtgate, self._source, shard, before, self._share())
        if not chunks and not (chunks := self._begin_without_tables(shard, attempt)):
            return
        if has_too_many_parts(self._source, chunks):
            self._step(ChunksGathered(shard, attempt))
            return
        if chunks != before:
            self._step(CopyPlanned(shard, attempt, chunks))
        if all(chunk.is_done for chunk in chunks):
            # No table came that is older than the position from which one stream goes on.
            self._step(ChunksGathered(shard, attempt, is_whole=True))
        else:
            self._open_next(shard)

    def _begin_without_tables(self, shard: str, attempt: int) -> tuple[CopyChunk, ...]:
        """Go on with a shard that has no table to copy as with one that is copied up to its position. Return
        what there is to copy after all.
        """
        asked = ask_gtids(self._vtgate, self._source, shard)
        attempted = f"ask the shard {shard} for its position"
        executed = answer_of(asked, 2 * self._source.connect_timeout, attempted)[0][0]
        # Of a table that comes after the position, all changes are sent. A replica may lack one from before.
        primary = self._source.model_copy(update={"tablet_type": "primary"})
        if chunks := planned_chunks(self._vtgate, primary, shard, (), self._share()):
            return chunks
        gtid = str(GtidSet.parse(executed or ""))
        self._step(CopyPlanned(shard, attempt, (CopyChunk(""),)))
        self._step(ChunkReached(shard, attempt, 0, gtid, "", is_done=True))
        self._step(ChunksGathered(shard, attempt, is_whole=True))
        return ()

    def _open_next(self, shard: str) -> None:
        command = self._opened[shard]
        open_now = {stream.number for stream in self.of(shard)}
        for number, chunk in enumerate(self._chunks(shard)):
            if chunk.is_done or number in open_now:
                continue
            if open_now and len(open_now) >= self._share():
                return
            name = f"{shard} {number}"
            stream = ChunkStream(
                name, shard, command.attempt, command.task, number, chunk, chunk.gtid, chunk.key
            )
            self.streams[stream.name] = stream
            open_now.add(number)
            self._start(stream)
        if not open_now:
            self._planned_at_s[shard] = 0.0

    def _end(self, stream: ChunkStream) -> None:
        if self.streams.pop(stream.name, None) is not None:
            self._stop(stream)

    def _chunks(self, shard: str) -> tuple[CopyChunk, ...]:
        copy = self._coordinator.shards[shard].kept.copy
        return () if copy is None else copy.chunks

    def _share(self) -> int:
        """Return how many streams each shard that is copied may have."""
        shards = self._coordinator.shards.values()
        copied = sum(1 for each in shards if each.state in READ and each.kept.copy is not None)
        return self._source.snapshot_connections // max(1, copied)
