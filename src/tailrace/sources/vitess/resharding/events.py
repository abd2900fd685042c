"""What the coordinator of shards is told, and what it has done. Pure."""

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
    """The shards that serve: the answer to the last `ListShards`, asked for after it was given."""

    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShardsServing:
    """The shards that serve, asked for now and then."""

    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AttemptEvent:
    """What comes of one attempt to read a shard: once that is over it is refused, however late it comes."""

    shard: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PositionReached(AttemptEvent):
    """Everything of a shard up to `gtid` is here, whole transactions.

    :param last_keys: of a copy, what the VGTID names: table → primary key. None: the event is none of a copy.
    """

    gtid: str
    last_keys: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CopyCompleted(AttemptEvent):
    """All tables of a shard are copied (`COPY_COMPLETED` with the shard's name)."""


@dataclass(frozen=True, slots=True)
class CopyPlanned(AttemptEvent):
    """A shard that is copied has these chunks: all that were begun, and those of tables that were not."""

    chunks: tuple[CopyChunk, ...]


@dataclass(frozen=True, slots=True)
class ChunkReached(AttemptEvent):
    """Of a chunk of a copy, everything up to `gtid` is here, of the rows up to `key`.

    :param chunk: its place among the chunks.
    :param key: empty: no row was copied since the stream was opened.
    """

    chunk: int
    gtid: str
    key: str = ""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class ChunksGathered(AttemptEvent):
    """One stream goes on in place of those of a copy's chunks.

    :param is_whole: all are done, and no table is missing among them. Else the shard is in a reshard.
    """

    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class JournalReached(AttemptEvent):
    """A journal of a reshard (migration type SHARDS) and its VGTID came; nothing after it counts.

    :param gtid: of the VGTID that follows the journal.
    """

    journal: Journal
    gtid: str


@dataclass(frozen=True, slots=True)
class ShardStreamEnded(AttemptEvent):
    """A stream is over, or was silent past its deadline.

    :param participants: that the server named, of `PARTICIPANTS_ABSENT`.
    :param trouble: what the server said, for people.
    """

    reason: EndReason
    participants: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Probed(AttemptEvent):
    """What a shard's server has: `@@global.gtid_executed` and `@@global.gtid_purged`.

    Of a shard that may be behind, or does not serve any more, its primary's; with nothing purged, unless that
    is who is read from.

    :param serves: false: it did not any more, before it was asked.
    """

    executed: str
    purged: str
    serves: bool = True


@dataclass(frozen=True, slots=True)
class ProbeFailed(AttemptEvent):
    """A silent shard was asked what it has, and gave no answer.

    :param trouble: what was said instead, for people.
    """

    trouble: str


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


Event = ShardsListed | ShardsServing | AttemptEvent | SnapshotRequested | TablesRequested


@dataclass(frozen=True, slots=True)
class Keep:
    """Write the states of these shards into the log, with what came with the event, as one transaction."""

    states: Mapping[str, ShardState]


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a stream in a task, for the events of `shard` alone.

    :param positions: by shard, its own first; several: a junction.
    :param keys: of its copy: table → primary key. Only for its own.
    :param wait_s: before the stream is opened.
    :param deadline_s: seconds after which a stream that has not ended by itself is over; None: it stays open.
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
    """End a stream. What it sends until then is refused."""

    shard: str
    task: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ListShards:
    """Ask for the serving shards, after `wait_s`; `ShardsListed` answers. Asked again if it fails, and not
    any more when a later one is given.
    """

    wait_s: float = 0.0


Command = Keep | OpenStream | CancelStream | ListShards
