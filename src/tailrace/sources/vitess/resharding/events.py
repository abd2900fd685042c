"""What the coordinator of shards is told, and what it has done. Pure.

Streams are named by shard and attempt: what comes of an attempt that is over is refused, however late it
comes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.sources.vitess.resharding.shard_state import CopyChunk, Journal, ShardState


class EndReason(enum.StrEnum):
    """Why a stream ended, as far as it matters for what is done next."""

    INTERRUPTED = "interrupted"  # the connection, vtgate or a tablet went; the server closed it; a deadline
    PARTICIPANTS_ABSENT = "participants absent"  # it is at a journal of several shards
    SHARD_UNKNOWN = "shard unknown"  # vtgate has no such shard
    PURGED = "purged"  # the server has no longer what follows the position
    UNDESCRIBED = "undescribed"  # it has, of a table whose columns it does not know any more
    UNNAMED = "unnamed"  # it has sent a table whose columns it does not know any more
    AMBIGUOUS = "ambiguous"  # which changes the log already has is not known
    BEHIND = "behind"  # the tablet lacks transactions that were read


@dataclass(frozen=True, slots=True)
class ShardsListed:
    """The shards that serve: the answer to the `ListShards` of this number, asked for after it was given."""

    number: int
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShardsServing:
    """The shards that serve, asked for now and then."""

    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PositionReached:
    """Everything of a shard up to `gtid` is here, whole transactions.

    :param last_keys: of a copy, what the VGTID names: table → primary key. None: the event is none of a copy.
    """

    shard: str
    attempt: int
    gtid: str
    last_keys: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CopyCompleted:
    """All tables of a shard are copied (`COPY_COMPLETED` with the shard's name)."""

    shard: str
    attempt: int


@dataclass(frozen=True, slots=True)
class CopyPlanned:
    """A shard that is copied has these chunks: all that were begun, and those of tables that were not."""

    shard: str
    attempt: int
    chunks: tuple[CopyChunk, ...]


@dataclass(frozen=True, slots=True)
class ChunkReached:
    """Of a chunk of a copy, everything up to `gtid` is here, of the rows up to `key`.

    :param chunk: its place among the chunks.
    :param key: empty: no row was copied since the stream was opened.
    """

    shard: str
    attempt: int
    chunk: int
    gtid: str
    key: str = ""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class ChunksGathered:
    """One stream goes on in place of those of a copy's chunks.

    :param is_whole: all are done, and no table is missing among them. Else the shard is in a reshard.
    """

    shard: str
    attempt: int
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class JournalReached:
    """A journal of a reshard (migration type SHARDS) and its VGTID came; nothing after it counts.

    :param gtid: of the VGTID that follows the journal.
    """

    shard: str
    attempt: int
    journal: Journal
    gtid: str


@dataclass(frozen=True, slots=True)
class ShardStreamEnded:
    """A stream is over, or was silent past its deadline.

    :param participants: that the server named, of `PARTICIPANTS_ABSENT`.
    :param trouble: what the server said, for people.
    """

    shard: str
    attempt: int
    reason: EndReason
    participants: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a shard's server has: `@@global.gtid_executed` and `@@global.gtid_purged`.

    Of a shard that may be behind, or does not serve any more, its primary's; with nothing purged, unless that
    is who is read from.

    :param serves: false: it did not any more, before it was asked.
    """

    shard: str
    attempt: int
    executed: str
    purged: str
    serves: bool = True


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A silent shard was asked what it has, and gave no answer.

    :param trouble: what was said instead, for people.
    """

    shard: str
    attempt: int
    trouble: str


@dataclass(frozen=True, slots=True)
class TasksChanged:
    """The tasks that there are now.

    :param lost: those that ended with all their streams. One of the same number may be there again.
    """

    tasks: tuple[int, ...]
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotRequested:
    """The key ranges that need a snapshot are to be copied again."""


@dataclass(frozen=True, slots=True)
class TablesRequested:
    """Tables are to be copied again, beside the stream, in shards that are streamed.

    :param keys: by shard, what its stream is opened with: of each table the primary key behind which it is
        copied. A table that is to be read whole has one that lies before all of its rows, any other one that
        lies behind them.
    :param tables: those that are to be read whole.
    """

    keys: Mapping[str, Mapping[str, str]]
    tables: frozenset[str]


#: Events of one attempt to read a shard.
StreamEvent = (
    PositionReached
    | CopyCompleted
    | CopyPlanned
    | ChunkReached
    | ChunksGathered
    | JournalReached
    | ShardStreamEnded
    | Probed
    | ProbeFailed
)
Event = ShardsListed | ShardsServing | StreamEvent | TasksChanged | SnapshotRequested | TablesRequested


@dataclass(frozen=True, slots=True)
class Keep:
    """Write the states of these shards into the log, with what came with the event, as one transaction."""

    states: Mapping[str, ShardState]


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a stream in a task, for the events of `shard` alone.

    :param positions: by shard, its own first; several: a junction.
    :param keys: of its copy: table → primary key. Only for its own.
    :param is_copied: whether rows are to be copied.
    :param wait_s: before the stream is opened.
    :param deadline_s: seconds after which a stream that has not ended by itself is over; None: it stays open.
    """

    shard: str
    task: int
    attempt: int
    positions: Mapping[str, str]
    keys: Mapping[str, str]
    is_copied: bool
    wait_s: float = 0.0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class CancelStream:
    """End a stream. What it sends until then is refused."""

    shard: str
    task: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ListShards:
    """Ask for the serving shards, after `wait_s`; `ShardsListed` answers. Asked again if it fails, and not
    any more when a later one is given.
    """

    number: int
    wait_s: float = 0.0


Command = Keep | OpenStream | CancelStream | ListShards
