"""Derives the coordinator's events from the responses of a stream, and from its end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tailrace.errors import Policy
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.errors import Status, from_status
from tailrace.sources.vitess.resharding.events import (
    ChunkReached,
    ChunksGathered,
    CopyCompleted,
    EndReason,
    Event,
    JournalReached,
    PositionReached,
    ShardStreamEnded,
)
from tailrace.sources.vitess.resharding.shard_state import Journal
from tailrace.sources.vitess.rows import events as vevents
from tailrace.sources.vitess.rows.copy_keys import last_keys, own_position
from tailrace.sources.vitess.rows.transcoder import Transcoded
from tailrace.sources.vitess.streaming.shard_copies import ChunkStream
from tailrace.sources.vitess.streaming.shard_health import ShardProgress

_PARTICIPANTS_ABSENT = re.compile(
    r"not all journaling participants.*?journal: \[(?P<participants>[^\]]*)", re.DOTALL
)
_SHARD = re.compile(r'shard:"([^"]*)"')
#: Patterns in the status message of a stream's end, and the reason that they mean; the first match counts.
_REASONS = (
    (re.compile(r"shard provided in VGTID, .*, not found", re.DOTALL), EndReason.SHARD_UNKNOWN),
    (re.compile(r"purged (?:required )?binary logs|\(errno 1789\)|no longer has"), EndReason.PURGED),
    (re.compile(r"unknown table \S+ in schema|cannot determine table columns"), EndReason.UNDESCRIBED),
    # The columns have no names, and one of them is an enum or a set.
    (re.compile(r"enum or set column @\d+ does not have valid string values"), EndReason.UNDESCRIBED),
    (re.compile(r"GTIDSet Mismatch|has more GTIDs than", re.IGNORECASE), EndReason.BEHIND),
)

#: Limit of the characters of the server's message that are reported.
_TROUBLE_MAX = 300


def events_of(
    shard: str, attempt: int, made: Transcoded, known: ShardProgress, *, is_copied: bool
) -> Iterable[tuple[Event, int]]:
    """Yield the events of a shard's stream, each with its offset in the frames; of consecutive positions,
    only the last one.

    :param known: the shard's progress; it is updated.
    """
    if is_copied or made.events.of(vevents.JOURNAL, vevents.COPY_COMPLETED):
        yield from _each_event(shard, attempt, made, known, is_copied=is_copied)
        return
    for number in reversed(range(len(made.events))):
        event = made.events[number]
        if event.kind == vevents.COMMIT:
            known.whole_until_us = max(known.whole_until_us, event.time_s * 1_000_000)
        elif event.kind == vevents.VGTID and (position := own_position(event.body, shard)) is not None:
            known.move(is_further=True)
            yield PositionReached(shard, attempt, position.gtid), len(made.frames)
            return


def _each_event(
    shard: str, attempt: int, made: Transcoded, known: ShardProgress, *, is_copied: bool
) -> Iterable[tuple[Event, int]]:
    reached: PositionReached | None = None
    at = 0
    journal: Journal | None = None
    for event in made.events.of(vevents.VGTID, vevents.JOURNAL, vevents.COPY_COMPLETED):
        if event.kind == vevents.VGTID:
            position = own_position(event.body, shard)
            if position is None:
                continue
            known.move(is_further=made.rows > 0 or not is_copied)
            if reached is not None and is_copied:
                yield reached, at
            at = event.at
            if journal is not None:
                yield JournalReached(shard, attempt, journal, position.gtid), made.end_of(event)
                return
            keys = last_keys(position) if is_copied else None
            reached = PositionReached(shard, attempt, position.gtid, keys)
        elif event.kind == vevents.JOURNAL:
            message = pb.Journal.FromString(event.body)
            journal = _journal(message) if message.migration_type == pb.SHARDS else None
        elif is_copied:
            # The copy's last position came with this event or before it.
            if reached is not None:
                yield reached, at
            reached, is_copied = None, False
            yield CopyCompleted(shard, attempt), event.at
    if reached is not None:
        yield reached, at


def chunk_events_of(stream: ChunkStream, made: Transcoded) -> Iterator[Event]:
    """Yield the events of a chunk's stream."""
    is_done = is_at_journal = False
    for event in made.events.of(vevents.VGTID, vevents.JOURNAL, vevents.COPY_COMPLETED):
        if event.kind == vevents.COPY_COMPLETED:
            is_done = True
        elif event.kind == vevents.JOURNAL:
            is_at_journal = pb.Journal.FromString(event.body).migration_type == pb.SHARDS
            if is_at_journal:
                break  # the stream that continues has to reach the journal
        elif (position := own_position(event.body, stream.shard)) is not None:
            stream.reach(position.gtid, last_keys(position).get(stream.chunk.table, ""))
    if stream.gtid:
        yield ChunkReached(stream.shard, stream.attempt, stream.number, stream.gtid, stream.key, is_done)
    if is_at_journal:
        yield ChunksGathered(stream.shard, stream.attempt)


def found_no_table(status: Status) -> bool:
    """Return whether a copy ended because its tablet has none of the tables."""
    return "stream needs a position or a table to copy" in status.words


def stream_ended(shard: str, attempt: int, status: Status) -> ShardStreamEnded:
    """Return the event for the end of a shard's stream.

    :raises TailraceError: if opening the stream again would not help; names the shard.
    """
    words = status.words
    # The cause comes last: vtgate and vttablet prefix it with what they attempted.
    trouble = f"{status.code}: {words[-_TROUBLE_MAX:]}"
    if (found := _PARTICIPANTS_ABSENT.search(words)) is not None:
        participants = tuple(_SHARD.findall(found["participants"]))
        return ShardStreamEnded(shard, attempt, EndReason.PARTICIPANTS_ABSENT, participants, trouble)
    for pattern, reason in _REASONS:
        if pattern.search(words):
            return ShardStreamEnded(shard, attempt, reason, (), trouble)
    error = from_status(status, f"stream the shard {shard}", shard)
    if error.policy is not Policy.RETRY:
        raise error
    return ShardStreamEnded(shard, attempt, EndReason.INTERRUPTED, (), trouble)


def _journal(message: pb.Journal) -> Journal:
    participants = [each.shard for each in message.participants]
    return Journal.of(message.id, participants, {each.shard: each.gtid for each in message.shard_gtids})
