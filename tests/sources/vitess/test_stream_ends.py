"""The meaning of each end of a call to vtgate: messages of a real one, and every code of gRPC."""

from __future__ import annotations

from concurrent.futures import Future

import grpc
import pytest

from tailrace.errors import Kind, Policy, TailraceError
from tailrace.sources.vitess.connection.errors import CLUSTER_EVENT, Status, from_status
from tailrace.sources.vitess.connection.vtgate import answer_of
from tailrace.sources.vitess.resharding.events import EndReason
from tailrace.sources.vitess.streaming.stream_events import stream_ended

JOURNAL = (
    "vttablet: rpc error: code = Internal desc = not all journaling participants are in the stream: journal: "
    '[keyspace:"ks" shard:"-80" keyspace:"ks" shard:"80-c0"], stream: [keyspace:"ks" shard:"-80"]'
)
PURGED = (
    "target: shop.-80.primary: vttablet: rpc error: code = Unknown desc = stream (at source tablet) error: "
    "Cannot replicate because the master purged required binary logs. (errno 1236) (sqlstate HY000)"
)
TRUNCATED = PURGED.replace(
    "Cannot replicate because the master purged required binary logs",
    "binlog truncated in the middle of event; consider out of disk space on master",
)
RESTORED = PURGED.replace(
    "Cannot replicate because the master purged required binary logs",
    "Slave has more GTIDs than the master has, using the master's SERVER_UUID",
)
UNDESCRIBED = (
    "vttablet: rpc error: code = Unknown desc = stream (at source tablet) error @ 1-7: failed to build table "
    "replication plan for table orders: cannot determine table columns for orders: event has [8 246], schema "
    "has []"
)
DROPPED = UNDESCRIBED.partition("cannot")[0] + "unknown table orders in schema"
UNLABELLED = UNDESCRIBED.partition("failed")[0] + (
    "enum or set column @43 does not have valid string values: \nfailed to build ENUM and SET column integer "
    "to string mappings\nfailed to build table replication plan for table orders"
)
DOWN = (
    "failed to get tablet connection to cell1-0000000105: target: shop.40-60.primary: tablet: "
    'cell:"cell1" uid:105 is either down or nonexistent'
)
DEMOTED = (
    "persistent error in vstream for shop/-80 on tablet zone1-0000000100; giving up: vttablet: rpc error: "
    "code = FailedPrecondition desc = wrong tablet type: PRIMARY, want: REPLICA or []"
)
NO_SHARD = "shard provided in VGTID, 0, not found in the ks keyspace"


@pytest.mark.parametrize(
    ("status", "reason", "participants"),
    [
        (Status("OK", "it ended the stream"), EndReason.INTERRUPTED, ()),
        (Status("SILENT", "no response for 60 s, not even a heartbeat"), EndReason.INTERRUPTED, ()),
        (Status("INTERNAL", JOURNAL), EndReason.PARTICIPANTS_ABSENT, ("-80", "80-c0")),
        (Status("INTERNAL", "stream terminated by RST_STREAM"), EndReason.INTERRUPTED, ()),
        (Status("UNKNOWN", PURGED), EndReason.PURGED, ()),
        (Status("UNKNOWN", TRUNCATED), EndReason.INTERRUPTED, ()),
        (Status("UNKNOWN", RESTORED), EndReason.BEHIND, ()),
        (Status("UNKNOWN", UNDESCRIBED), EndReason.UNDESCRIBED, ()),
        (Status("UNKNOWN", DROPPED), EndReason.UNDESCRIBED, ()),
        (Status("UNKNOWN", UNLABELLED), EndReason.UNDESCRIBED, ()),
        (Status("INVALID_ARGUMENT", "GTIDSet Mismatch: requested …"), EndReason.BEHIND, ()),
        (Status("UNKNOWN", "net.Dial(/tmp/mysql.sock) failed (errno 2002)"), EndReason.INTERRUPTED, ()),
        (Status("FAILED_PRECONDITION", NO_SHARD), EndReason.SHARD_UNKNOWN, ()),
        (Status("FAILED_PRECONDITION", DEMOTED), EndReason.INTERRUPTED, ()),
        (Status("CANCELLED", "failed to find a RDONLY tablet for VStream"), EndReason.INTERRUPTED, ()),
        (Status("UNAVAILABLE", "vstream failed liveness checks"), EndReason.INTERRUPTED, ()),
        (Status("NOT_FOUND", DOWN), EndReason.INTERRUPTED, ()),
        (Status("UNKNOWN", "table h_zz is not present in the database"), EndReason.INTERRUPTED, ()),
        (Status("NOT_FOUND", "Table 'vt_shop.h_zz' doesn't exist (errno 1146)"), EndReason.INTERRUPTED, ()),
    ],
)
def test_ends_after_which_another_stream_is_opened(
    status: Status, reason: EndReason, participants: tuple[str, ...]
) -> None:
    found = stream_ended("-80", 3, status)
    assert (found.shard, found.attempt, found.reason, found.participants) == (
        "-80",
        3,
        reason,
        participants,
    )
    assert status.code in found.trouble


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status("UNAUTHENTICATED", "username and password must be provided"), Kind.SOURCE_AUTH_FAILED),
        (Status("PERMISSION_DENIED", "auth failed"), Kind.SOURCE_AUTH_FAILED),
        (Status("RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 4)"), Kind.FRAME_TOO_LARGE),
        (Status("UNIMPLEMENTED", "unknown service"), Kind.SOURCE_MISCONFIGURED),
    ],
)
def test_errors_that_no_other_stream_would_resolve_end_the_run_and_name_the_shard(
    status: Status, kind: Kind
) -> None:
    with pytest.raises(TailraceError) as refused:
        stream_ended("80-", 1, status)
    assert refused.value.kind is kind
    assert refused.value.context["shard"] == "80-"
    assert refused.value.hint


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("CLIENT: Received message larger than max (9 vs. 4)", "source.message_bytes_max"),
        ("trying to send message larger than max (9 vs. 4)", "--grpc-max-message-size"),
    ],
)
def test_the_hint_for_a_large_message_names_the_setting_of_the_side_that_refused_it(
    words: str, setting: str
) -> None:
    assert setting in from_status(Status("RESOURCE_EXHAUSTED", words), "stream a shard").hint


@pytest.mark.parametrize("code", [*(code.name for code in grpc.StatusCode), CLUSTER_EVENT])
def test_every_code_has_a_kind(code: str) -> None:
    found = from_status(Status(code, "words of a later version"), "stream a shard", "-80")
    passes = code in {
        "OK", "CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL",
        "UNAVAILABLE", CLUSTER_EVENT,
    }  # fmt: skip
    assert (found.policy is Policy.RETRY) == passes
    assert found.context == {"status": code, "shard": "-80"}


def test_a_request_without_an_answer_in_time_is_repeated() -> None:
    asked: Future[str] = Future()
    with pytest.raises(TailraceError) as late:
        answer_of(asked, 0.01, "ask the shard -80 for its tables")
    assert late.value.kind is Kind.SOURCE_UNREACHABLE
    assert late.value.policy is Policy.RETRY
    assert "ask the shard -80 for its tables" in late.value.message
    assert asked.cancelled()
