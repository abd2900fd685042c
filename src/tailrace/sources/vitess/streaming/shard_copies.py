"""Copies of shards by several streams at the same time, one chunk each.

A chunk's stream reads the chunk's rows as of one position, and is closed. If it is interrupted, the remaining
rows become a chunk of their own, at another position: so one stream delivers all changes, in complete
transactions. It starts once all chunks are copied, at the position that all have reached; changes that chunks
already had beyond it are filtered out (`rows.change_filters`).

If the table's key isn't one integer column, a stream continues the interrupted chunk instead: it sends the
changes since then in the whole table, and then the remaining rows.

All streams of a shard belong to one attempt: if one ends, all are ended and opened again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.metadata import ask_gtids, of_primary, serving_shards
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
    TablesStreamed,
)
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.resharding.shard_state import CopyChunk
from tailrace.sources.vitess.resharding.transitions import READ
from tailrace.sources.vitess.rows import events as vevents
from tailrace.sources.vitess.rows.copy_keys import before_all, key_text
from tailrace.sources.vitess.streaming.copy_plan import has_too_many_parts, planned_chunks
from tailrace.sources.vitess.streaming.one_stream_copies import OneStreamCopy

#: Time without a row after which a chunk's stream is opened again, in seconds, and limit of its doublings: if
#: a tablet stops before the first row, vtgate continues at another one with changes only, and an idle shard
#: has none. It is doubled each time, because a tablet may have to sort the table first. Likewise for the one
#: stream of a shard, between two tables.
ROWLESS_S = 60.0
ROWLESS_MAX = 10


@dataclass(slots=True)
class ChunkStream:
    """The open stream of a chunk.

    :ivar gtid: the last position received.
    :ivar key: the primary key up to which rows were received.
    :ivar is_broken_off: vtgate opened the tablet's stream again by itself: the remaining rows are as of
        another position, or are not sent at all.
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
        """Return the responses up to the end of the chunk's copy: later changes come from the shard's one
        stream.

        :raises TailraceError: if the stream was interrupted inside a transaction.
        """
        if self.is_broken_off:
            message = f"copy {self.chunk.table} of {self.shard}: interrupted inside a transaction"
            raise TailraceError(Kind.SOURCE_UNREACHABLE, message, "it is retried")
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
        """Note a position. A second position before any row means that vtgate's new stream copies no rows."""
        if gtid != self.gtid and self.gtid and not self.key:
            self.is_broken_off = True
        self.gtid, self.key = gtid, key or self.key


class ShardCopies:
    """The copies of all shards. For the thread that has its turn at the log.

    :param step: passes an event to the coordinator, and carries out its commands.
    :param start: opens the stream of a chunk.
    :param stop: ends a stream.
    :param copy_whole: opens the one stream that copies a shard.
    """

    def __init__(
        self,
        source: VitessSource,
        vtgate: Vtgate,
        coordinator: Coordinator,
        step: Callable[[Event], None],
        start: Callable[[ChunkStream], None],
        stop: Callable[[ChunkStream | OneStreamCopy], None],
        copy_whole: Callable[[OpenStream], None],
    ) -> None:
        self._source = source
        self._vtgate = vtgate
        self._coordinator = coordinator
        self._step = step
        self._start, self._stop, self._copy_whole = start, stop, copy_whole
        #: The open streams, by name.
        self.streams: dict[str, ChunkStream] = {}
        #: By shard, the one stream that copies it.
        self.ones: dict[str, OneStreamCopy] = {}
        self._opened: dict[str, OpenStream] = {}  # by shard, the command that its streams carry out
        self._planned_at_s: dict[str, float] = {}  # by shard, when its chunks are planned next, monotonic
        self._without_tables: set[str] = set()  # shards of which one stream found no table to copy
        self._rowless: Counter[tuple[str, str]] = Counter()  # by shard and table: streams without a row

    def takes(self, command: OpenStream) -> bool:
        """Return whether a shard is copied by several streams, or such a copy remains to be finished."""
        copy = self._coordinator.shards[command.shard].kept.copy
        if copy is None or command.deadline_s is not None:
            return False
        is_planned = self._share() > 1 or command.shard in self._without_tables
        return bool(copy.chunks) or (not copy.keys and is_planned)

    def note_without_tables(self, shard: str) -> None:
        """Note that a shard's tablet has no table to copy: they are listed before its next stream."""
        self._without_tables.add(shard)

    def open(self, command: OpenStream) -> None:
        """Start the copy of a shard."""
        self._opened[command.shard] = command
        self._planned_at_s[command.shard] = time.monotonic() + command.wait_s

    def watch(self, command: OpenStream) -> None:
        """Watch the one stream of a shard if it copies."""
        copy = self._coordinator.shards[command.shard].kept.copy
        if copy is not None:
            self.ones[command.shard] = OneStreamCopy(
                command.shard,
                command.attempt,
                command.task,
                copy.keys.keys(),
                moved_s=time.monotonic() + command.wait_s,
            )

    def streamed(
        self, shard: str, attempt: int, described: Mapping[str, Sequence[pb.Field]]
    ) -> TablesStreamed | None:
        """Return the event for tables of which the one stream that copies a shard sends changes; None: their
        state stays as it is.

        :param described: their columns.
        """
        copy = self._coordinator.shards[shard].kept.copy
        keys = {} if copy is None else {
            table: key_text(table, before_all(fields))
            for table, fields in described.items()
            if table not in copy.keys
        }  # fmt: skip
        return TablesStreamed(shard, attempt, keys) if keys else None

    def end(self, shard: str) -> None:
        """End all streams that copy a shard."""
        self._opened.pop(shard, None)
        self._planned_at_s.pop(shard, None)
        if (one := self.ones.pop(shard, None)) is not None:
            self._stop(one)
        for stream in self.of(shard):
            self._end(stream)

    def of(self, shard: str) -> list[ChunkStream]:
        """Return the open streams of a shard."""
        return [stream for stream in self.streams.values() if stream.shard == shard]

    def go_on(self, stream: ChunkStream, *, is_done: bool) -> None:
        """Open the next chunk's stream if a chunk is done; restart the copy if a stream was interrupted."""
        if stream.name not in self.streams:
            return
        if is_done:
            self._end(stream)
            self._open_next(stream.shard)
        elif stream.is_broken_off:
            self._begin_again(stream, "vtgate continued a copy at another position")

    def go_on_with_one(self, shard: str) -> None:
        """Restart a shard's copy if its one stream was interrupted; forget the stream if it is complete."""
        if (one := self.ones.get(shard)) is None:
            return
        if self._coordinator.shards[shard].kept.copy is None:
            del self.ones[shard]
        elif one.broken_off is not None:
            self._begin_again(one, "vtgate continued the copy at another position", one.broken_off)

    def _begin_again(
        self, stream: ChunkStream | OneStreamCopy, trouble: str, reason: EndReason = EndReason.INTERRUPTED
    ) -> None:
        # As another attempt: late responses of this one don't count.
        self.end(stream.shard)
        self._step(ShardStreamEnded(stream.shard, stream.attempt, reason, (), trouble))

    def turn(self, now_s: float) -> None:
        """Plan the chunks of shards where it is due; open streams again that receive no row.

        :raises TailraceError: for errors that can't be retried.
        """
        for stream in list(self.streams.values()):
            if stream.name not in self.streams or stream.key:
                continue
            if self._is_late(now_s - stream.opened_s, stream.shard, stream.chunk.table):
                self._begin_again(stream, f"the copy of {stream.chunk.table} received no row")
        for one in list(self.ones.values()):
            if self._is_late(now_s - one.moved_s, one.shard, one.last):
                self._begin_again(one, f"the copy received no row after {one.last or 'its start'}")
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
                if not self._continue_with_one(shard):
                    self.end(shard)
                    self._step(ShardStreamEnded(shard, attempt, EndReason.INTERRUPTED, (), error.message))

    def _is_late(self, waited_s: float, shard: str, table: str) -> bool:
        """Return whether a copy waited too long for a row; then it waits for longer next time."""
        if waited_s <= ROWLESS_S * 2 ** min(self._rowless[shard, table], ROWLESS_MAX):
            return False
        self._rowless[shard, table] += 1
        return True

    def _continue_with_one(self, shard: str) -> bool:
        """Return whether a shard no longer serves; if so, one stream continues it. It answers no queries, but
        can still be streamed up to its journal.
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
            # No new table is older than the position from which one stream continues.
            self._step(ChunksGathered(shard, attempt, is_whole=True))
        else:
            self._open_next(shard)

    def _begin_without_tables(self, shard: str, attempt: int) -> tuple[CopyChunk, ...]:
        """Treat a shard without a table as copied up to its position; return chunks if its primary has a
        table after all.
        """
        asked = ask_gtids(self._vtgate, self._source, shard)
        attempted = f"ask the shard {shard} for its position"
        executed = answer_of(asked, 2 * self._source.connect_timeout, attempted)[0][0]
        # All changes of a table created after the position are sent. A replica may lack an earlier table.
        if chunks := planned_chunks(self._vtgate, of_primary(self._source), shard, (), self._share()):
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
        """Return the number of streams that each copied shard may have."""
        shards = self._coordinator.shards.values()
        copied = sum(1 for each in shards if each.state in READ and each.kept.copy is not None)
        return self._source.snapshot_connections // max(1, copied)
