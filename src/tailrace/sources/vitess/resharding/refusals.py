"""Why a shard can't be gone on with, or not now: what is told, and after how many ends in a row. Pure."""

from __future__ import annotations

from tailrace.sources.vitess.resharding.events import EndReason

#: So often in a row a server must say that it has purged what follows: another tablet may have it.
PURGED_MAX = 3

#: So often in a row it must say that it does not know a table of what follows: it may have read its schema
#: before the table was altered. It takes the waits between attempts, some 25 s.
UNDESCRIBED_MAX = 8

#: So often in a row a shard must lack what was read of it. A replica may just lag: its primary is asked then.
BEHIND_MAX = 3

#: So many lists of serving shards in a row must lack one that was in them, and does not reach a journal.
UNLISTED_MAX = 2

#: After so many ends in a row a shard's trouble is told: one is no more than a tablet that was restarted.
FAILURES_TOLD = 2

PURGED = "the server has purged the changes after its position"
UNDESCRIBED = (
    "the server does not know any more what a table was at its position: it was altered or "
    "dropped since. With vttablet's --track_schema_versions it does"
)
AMBIGUOUS = (
    "several streams copied it, and which of the changes meanwhile the log already has is not known: its "
    "tablets apply transactions in different orders, or a row with a partial image moved between chunks"
)
#: Ends after which the server can't give what follows: how often in a row, and what is told then.
REFUSALS = {
    EndReason.PURGED: (PURGED_MAX, PURGED),
    EndReason.UNDESCRIBED: (UNDESCRIBED_MAX, UNDESCRIBED),
    EndReason.UNNAMED: (1, UNDESCRIBED),
    EndReason.AMBIGUOUS: (1, AMBIGUOUS),
}
NO_JOURNAL = "other shards serve its keys, and no journal of a reshard came: Vitess wrote none"
STILL = (
    "its stream stood still, and the server had changes. If it stays so, its tablet may be throttled: "
    "vtctldclient GetThrottlerStatus; or a row is larger than its --grpc-max-message-size: see vtgate's log"
)
BEHIND = "the server lacks transactions that were read of it: a restored backup, or a failover that lost some"
