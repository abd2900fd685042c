"""What the end of a shard's stream means, by its status and the words that came with it."""

from __future__ import annotations

import re

from tailrace.errors import Policy
from tailrace.sources.vitess.connection.errors import Status, from_status
from tailrace.sources.vitess.resharding.events import EndReason, ShardStreamEnded

_PARTICIPANTS_ABSENT = re.compile(
    r"not all journaling participants.*?journal: \[(?P<participants>[^\]]*)", re.DOTALL
)
_SHARD_UNKNOWN = re.compile(r"shard provided in VGTID, .*, not found", re.DOTALL)
_BEHIND = re.compile(r"GTIDSet Mismatch", re.IGNORECASE)
_PURGED = re.compile(r"purged required binary logs|\(errno (1236|1789)\)|no longer has")
_UNDESCRIBED = re.compile(r"unknown table \S+ in schema|cannot determine table columns")
_SHARD = re.compile(r'shard:"([^"]*)"')

#: Of the server's words so many go into what is told of a shard.
_TROUBLE_MAX = 300


def found_no_table(status: Status) -> bool:
    """Tell whether a copy ended because its tablet has none of the tables."""
    return "stream needs a position or a table to copy" in status.words


def stream_ended(shard: str, attempt: int, status: Status) -> ShardStreamEnded:
    """Return what the end of a shard's stream means for its next one.

    :raises TailraceError: where no next one would fare better; names the shard.
    """
    words = status.words
    # The cause comes last: vtgate and vttablet put before it what they did.
    trouble = f"{status.code}: {words[-_TROUBLE_MAX:]}"
    if (found := _PARTICIPANTS_ABSENT.search(words)) is not None:
        participants = tuple(_SHARD.findall(found["participants"]))
        return ShardStreamEnded(shard, attempt, EndReason.PARTICIPANTS_ABSENT, participants, trouble)
    if _SHARD_UNKNOWN.search(words):
        return ShardStreamEnded(shard, attempt, EndReason.SHARD_UNKNOWN, (), trouble)
    if _PURGED.search(words):
        return ShardStreamEnded(shard, attempt, EndReason.PURGED, (), trouble)
    if _UNDESCRIBED.search(words):
        return ShardStreamEnded(shard, attempt, EndReason.UNDESCRIBED, (), trouble)
    if _BEHIND.search(words):
        return ShardStreamEnded(shard, attempt, EndReason.BEHIND, (), trouble)
    error = from_status(status, f"stream the shard {shard}", shard)
    if error.policy is not Policy.RETRY:
        raise error
    return ShardStreamEnded(shard, attempt, EndReason.INTERRUPTED, (), trouble)
