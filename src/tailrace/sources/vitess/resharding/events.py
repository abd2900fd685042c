"""The events and commands of the coordinator of shards. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.sources.vitess.resharding.shard_state import CopyChunk, Journal, ShardState


class EndReason(enum.StrEnum):
    """The reason why a stream ended, as far as the next step depends on it."""

    INTERRUPTED = "interrupted"  # connection, vtgate or tablet failed; the server closed it; a deadline
    PARTICIPANTS_ABSENT = "participants absent"  # it is at a journal of several shards
    SHARD_UNKNOWN = "shard unknown"  # vtgate has no such shard
    PURGED = "purged"  # the server no longer has the changes after the position
    UNDESCRIBED = "undescribed"  # they concern a table whose columns the server no longer knows
    UNNAMED = "unnamed"  # the server sent a table whose columns it no longer knows
    UNREADABLE = "unreadable"  # the server's settings left something out of its binlog
    AMBIGUOUS = "ambiguous"  # which changes the log already has is not known
    UNSENT = "unsent"  # vtgate left out changes of tables that were copied
    BEHIND = "behind"  # the tablet lacks transactions that were read


@dataclass(frozen=True, slots=True)
class ShardsListed:
    """The shards that serve: the answer to the last `ListShards`, requested after that command."""

    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShardsServing:
    """The shards that serve, requested periodically."""

    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AttemptEvent:
    """An event of one attempt to read a shard; once the attempt is over, its late events are refused."""

    shard: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PositionReached(AttemptEvent):
    """Everything of a shard up to `gtid` has arrived, in complete transactions.

    :param last_keys: during a copy, the VGTID's table → primary key. None: the event isn't part of a copy.
    """

    gtid: str
    last_keys: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CopyCompleted(AttemptEvent):
    """All tables of a shard are copied (`COPY_COMPLETED` with the shard's name)."""


@dataclass(frozen=True, slots=True)
class TablesStreamed(AttemptEvent):
    """While one stream copies a shard, it sends changes of tables of which it copied no row: they were empty,
    or are new.

    :param keys: with which they are named if the stream is opened again: else it would leave their changes
        out until it has read them.
    """

    keys: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CopyPlanned(AttemptEvent):
    """The chunks of a shard's copy are planned: all that were begun, and those of tables that were not."""

    chunks: tuple[CopyChunk, ...]


@dataclass(frozen=True, slots=True)
class ChunkReached(AttemptEvent):
    """For a chunk's rows up to `key`, everything up to `gtid` has arrived.

    :param chunk: the chunk's index.
    :param key: empty: no row was copied since the stream was opened.
    """

    chunk: int
    gtid: str
    key: str = ""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class ChunksGathered(AttemptEvent):
    """One stream replaces the streams of a copy's chunks.

    :param is_whole: all chunks are done, and they cover all tables. Else the shard is in a reshard.
    """

    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class JournalReached(AttemptEvent):
    """A journal of a reshard (migration type SHARDS) and its VGTID arrived; nothing after it counts.

    :param gtid: the position in the VGTID that follows the journal.
    """

    journal: Journal
    gtid: str


@dataclass(frozen=True, slots=True)
class ShardStreamEnded(AttemptEvent):
    """A stream ended, or was silent past its deadline.

    :param participants: for `PARTICIPANTS_ABSENT`, the participants that the server named.
    :param trouble: the server's message, for logs and errors.
    """

    reason: EndReason
    participants: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Probed(AttemptEvent):
    """The transactions of a shard's server: `@@global.gtid_executed` and `@@global.gtid_purged`.

    For a shard that may be behind, or no longer serves, they are its primary's; `purged` is then empty,
    unless the primary is the server that is read.

    :param serves: false: it no longer served before the server was asked.
    """

    executed: str
    purged: str
    serves: bool = True


@dataclass(frozen=True, slots=True)
class ProbeFailed(AttemptEvent):
    """The server of a silent shard was asked for its transactions, and didn't answer.

    :param trouble: the error's message, for logs and errors.
    """

    trouble: str


@dataclass(frozen=True, slots=True)
class SnapshotRequested:
    """The key ranges that need a snapshot are to be copied again."""


@dataclass(frozen=True, slots=True)
class TablesRequested:
    """Tables are to be copied again during streaming, in shards that are streamed.

    :param keys: by shard, the keys with which its stream is opened: for each table the primary key behind
        which it is copied. For a table to be copied again it lies before all rows, for any other behind all.
    :param tables: the tables to be copied again.
    """

    keys: Mapping[str, Mapping[str, str]]
    tables: frozenset[str]


Event = ShardsListed | ShardsServing | AttemptEvent | SnapshotRequested | TablesRequested


@dataclass(frozen=True, slots=True)
class Keep:
    """Write the states of these shards to the log, with the rows of the event, as one transaction."""

    states: Mapping[str, ShardState]


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a stream in a task, for the events of `shard` alone.

    :param positions: by shard, that of `shard` first; several: a junction.
    :param keys: for the copy of `shard`: table → primary key.
    :param wait_s: seconds to wait before the stream is opened.
    :param deadline_s: seconds after which the stream is ended; None: it stays open.
    """

    shard: str
    task: int
    attempt: int
    positions: Mapping[str, str]
    keys: Mapping[str, str]
    wait_s: float = 0.0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class CancelStream:
    """End a stream. What it still sends is refused."""

    shard: str
    task: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ListShards:
    """Request the serving shards, after `wait_s` seconds; `ShardsListed` answers. A failed request is
    retried; a later command replaces an earlier one.
    """

    wait_s: float = 0.0


Command = Keep | OpenStream | CancelStream | ListShards
