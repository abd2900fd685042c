"""Reasons why a shard's stream can't continue: texts, and after how many failures each applies. Pure."""

from __future__ import annotations

from tailrace.sources.vitess.resharding.events import EndReason

#: Consecutive reports of purged changes after which a shard is lost: another tablet may still have them.
PURGED_MAX = 3

#: Consecutive reports of an unknown table after which a shard is lost: the server may have read its schema
#: before the table was altered. With the waits between attempts, they take some 25 s.
UNDESCRIBED_MAX = 8

#: Consecutive lacks of read transactions until a shard is lost. A replica may only lag: the primary is asked.
BEHIND_MAX = 3

#: Consecutive lists of serving shards that must lack a shard, until it counts as no longer serving.
UNLISTED_MAX = 2

#: Consecutive failures after which a shard's trouble is reported: one may be just a restarted tablet.
FAILURES_TOLD = 2

PURGED = "the server has purged the changes after its position"
UNDESCRIBED = (
    "the server no longer knows the columns of a table at its position: the table was altered or "
    "dropped since. With vttablet's --track_schema_versions it keeps them"
)
AMBIGUOUS = (
    "several streams copied it, and it is not known which of the changes since then the log already has: its "
    "tablets apply transactions in different orders, or a row with a partial image moved between chunks"
)
UNSENT = (
    "one stream copied it, its tablet ended between two tables, and another one continued without changes of "
    "finished tables"
)
#: Ends after which the server can't send what follows: the number in a row until the shard is lost, and why;
#: empty: as the end says.
REFUSALS = {
    EndReason.PURGED: (PURGED_MAX, PURGED),
    EndReason.UNDESCRIBED: (UNDESCRIBED_MAX, UNDESCRIBED),
    EndReason.UNNAMED: (1, UNDESCRIBED),
    EndReason.UNREADABLE: (1, ""),
    EndReason.AMBIGUOUS: (1, AMBIGUOUS),
    EndReason.UNSENT: (1, UNSENT),
}
NO_JOURNAL = "other shards serve its keys, and its stream has no journal of a reshard: Vitess wrote none"
STILL = (
    "its stream made no progress, but the server has changes. If it persists, its tablet may be throttled: "
    "vtctldclient GetThrottlerStatus; or a row is larger than its --grpc-max-message-size: see vtgate's log"
)
BEHIND = "the server lacks transactions that were read from it: a restored backup, or a failover with losses"
