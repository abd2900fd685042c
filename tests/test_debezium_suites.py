"""The tests of Debezium's other suites, with the test of ours that shows the same, or why there is none.

Those of its engine are named above each test of engine/test_debezium_behaviours.py and
engine/test_retrying.py. A value is `file::test`, several in a tuple, or the reason why ours differs.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SIGNALS = (
    "there are neither signals nor a table for them: a snapshot is asked for by `tailrace snapshot`, which "
    "writes a file in the log's directory"
)
NAMES = "tables are named one by one; a name that is none is refused"
KEYS = (
    "chunks are cut by the table's own key, or by its pages where it has none: no other column can be named"
)
AT_ONCE = "there is no such time: what is in the log is polled at once"
WHOLE = (
    "a snapshot is taken back as a whole: all that were asked for, or those that have a table (--cancel "
    "--table); what is wanted of them all the same is asked for again"
)
PAUSE = "there is no pause: a snapshot that is taken back is asked for again"
STREAM = "requested snapshots never halt the stream: it waits for a window at most"

_REQUESTED = "capture/test_snapshot_requested.py"
_RESUMED = "capture/test_snapshot_resumed.py"
_AMONG_WRITERS = f"{_REQUESTED}::test_tables_are_read_again_among_writers_with_no_row_lost_or_out_of_order"
_KILLED = f"{_REQUESTED}::test_kills_in_a_requested_snapshot_neither_lose_nor_repeat_it"
_REFUSED = (
    f"{_REQUESTED}::test_a_request_that_cannot_be_fulfilled_fails_with_the_reason_and_the_stream_goes_on"
)
_CANCELLED = f"{_REQUESTED}::test_a_cancelled_snapshot_ends_and_another_and_the_stream_go_on"
_OF_SOME = (
    "capture/test_new_tables.py::test_a_request_for_a_part_of_a_new_table_keeps_the_changes_of_the_rest"
)
_MORTAL = f"{_RESUMED}::test_kills_in_a_snapshot_among_writers_lose_and_repeat_nothing"
_ADDED = f"{_REQUESTED}::test_a_table_added_while_nothing_ran_comes_once_and_completely"
_ASKED = "cli/test_commands.py::test_snapshots_are_requested_listed_and_cancelled_without_an_engine"
_INITIAL = "capture/test_snapshot.py::test_a_snapshot_among_writers_has_no_gap_and_no_repetition"
_BOUNDED = "engine/test_flows.py::test_polling_waits_while_the_queue_is_full"
_RESUMPTION = "capture/test_resumption.py"

ChangeEventQueueTest: dict[str, str | tuple[str, ...]] = {
    "shouldQueueAndPollMessages": (
        "pipeline/test_reading.py::test_every_change_is_read_once_in_order_while_the_log_grows"
    ),
    "shouldPollMessagesAfterDispatchTimeout": AT_ONCE,
    "shouldNotPollMessagesBeforeDispatchTimeout": AT_ONCE,
    "shouldPollMessagesBeforeDispatchTimeoutIfQueueFull": (AT_ONCE, _BOUNDED),
}

TransactionMonitorTest: dict[str, str | tuple[str, ...]] = {
    "shouldContinueEventCountersWhenRestoredTransactionIsStartedAgain": (
        "kafka/test_placing.py::test_the_numbering_of_a_transaction_continues_over_its_parts"
    ),
    "shouldBeginNewTransactionWhenStartEventHasDifferentTransactionId": (
        "kafka/test_placing.py::test_counts_of_parts_are_added_up_by_transaction"
    ),
    "shouldBeginTransactionWhenNoTransactionIsInProgress": (
        "kafka/test_placing.py::test_changes_outside_of_transactions_are_not_counted",
        "kafka/test_records.py::test_transactions_are_counted_and_each_is_in_one_partition",
    ),
}

WALPositionLocatorTest: dict[str, str | tuple[str, ...]] = {
    "resume from the first LSN, a transaction's start, the LSN after the last stored": (
        f"{_RESUMPTION}::test_a_commit_that_starts_at_the_position_is_new",
        f"{_RESUMPTION}::test_transactions_before_the_position_are_dropped_completely",
        f"{_RESUMPTION}::test_any_cut_between_frames_gives_the_same",
    ),
    "groups of one LSN with 0, 1, 2, n processed events": (
        "pipeline/test_reading.py::test_reading_continues_exactly_after_the_record_of_any_offset"
    ),
    "an unseen LSN throws": "capture/test_reconcile.py::test_a_mismatch_has_its_own_error_with_a_hint",
}

DebeziumEngineIT: dict[str, str | tuple[str, ...]] = {
    "shouldSerializeToJson": (
        "pipeline/test_embedded_engine.py::test_a_handler_gets_events_of_its_converter"
    ),
    "shouldSerializeToAvro": (
        "kafka/test_records.py::test_avro_uses_the_topics_subjects_and_a_refused_schema_stops_the_sink"
    ),
    "shouldSerializeToCloudEvents": (
        "converters/test_other_forms.py::test_cloudevents_have_debeziums_attributes",
        "pipeline/test_embedded_engine.py::test_a_handler_gets_events_of_its_converter",
    ),
    "shouldSerializeArbitraryPayloadFromOutbox": (
        "transforms/test_outbox.py::test_payloads_are_written_as_json",
        "transforms/test_outbox.py::test_the_json_converter_writes_a_json_payload_unchanged",
    ),
    "testOffsetsCommitAfterStop": (
        "pipeline/test_embedded_engine.py::"
        "test_the_next_engine_continues_after_the_record_at_which_a_handler_stopped"
    ),
}

AbstractIncrementalSnapshotTest: dict[str, str | tuple[str, ...]] = {
    "snapshotOnly": (_ASKED, _AMONG_WRITERS),
    "invalidTablesInTheList": _REFUSED,
    "inserts": _AMONG_WRITERS,
    "updates": _AMONG_WRITERS,
    "updatesLargeChunk": f"{_RESUMED}::test_a_table_of_one_window_is_handed_over_exactly",
    "updatesWithRestart": _KILLED,
    "snapshotOnlyWithRestart": _KILLED,
    "insertsWithKafkaSnapshotSignal": SIGNALS,
    "insertsWithoutPks": "capture/test_new_tables.py::test_a_table_without_a_key_is_not_read_twice",
    "insertsWithoutPksAndNull": "capture/test_new_tables.py::test_a_table_without_a_key_is_not_read_twice",
    "whenSnapshotMultipleTablesAndConnectorRestartsThenOnlyNotAlreadyProcessedTableMustBeProcessed": (
        f"{_RESUMED}::test_chunks_read_before_a_kill_are_not_read_again"
    ),
    "snapshotWithRegexDataCollections": NAMES,
    "snapshotWithRegexDataCollectionsNotExist": (NAMES, _REFUSED),
    "snapshotWithDuplicateDataCollections": (
        "capture/test_new_tables.py::test_a_table_requested_twice_before_it_is_read_loses_no_change_between"
    ),
    "stopCurrent…AndTakeNew…AfterRestart": _CANCELLED,
    "removeNotYetCaptured…, removeStartedCaptured…FromInProgress": (
        WHOLE,
        _CANCELLED,
    ),
    "shouldSnapshotNewlyAddedTableToIncludeListAfterRestart": _ADDED,
    "snapshotNewTableWithoutCapturedSchema": _ADDED,
    "testPauseDuringSnapshot": PAUSE,
    "snapshotWithAdditionalCondition": _OF_SOME,
    "snapshotWithAdditionalConditionRestart": _KILLED,
    "snapshotWithSurrogateKey": KEYS,
    "shouldNotGetStuckOnInvalidSurrogateKey": KEYS,
    "insertInsertWatermarkingStrategy": SIGNALS,
    "insertDeleteWatermarkingStrategy": SIGNALS,
}

AbstractBlockingSnapshotTest: dict[str, str | tuple[str, ...]] = {
    "executeBlockingSnapshot": _AMONG_WRITERS,
    "executeMultipleBlockingSnapshots": _AMONG_WRITERS,
    "executeBlockingSnapshotWhileStreaming": _AMONG_WRITERS,
    "executeBlockingSnapshotWithAdditionalCondition": _OF_SOME,
    "streamingMetricsResumeAfterBlockingSnapshot": STREAM,
    "readsSchemaOnlyForSignaledTables": "shapes come with the stream, whatever tables are asked for",
    "executeBlockingSnapshotWithEscapedCollectionName": "capture/test_rows.py::test_names_of_all_kinds",
    "anErrorDuringBlockingSnapshotShouldLeaveTheConnectorInAGoodState": _REFUSED,
    "anErrorDuringBlockingSnapshotShouldNotLeaveTheStreamingPaused": _REFUSED,
    "aFailedBlockingSnapshotShouldNotCauseInitialSnapshotOnRestart": _REFUSED,
    "blockingSnapshotMustReuseExistingOffsetAsSnapshotOffset": STREAM,
}

AbstractChunkedSnapshotTest: dict[str, str | tuple[str, ...]] = {
    "one thread for each table": "tables share the connections: a chunk is read by whichever is free",
    "a table without a key falls back": _MORTAL,
    "a multiplier for each table": "chunks have one size, in rows and bytes; larger tables have more of them",
    "a composite key": _AMONG_WRITERS,
    "varying row counts": f"{_RESUMED}::test_chunks_read_before_a_kill_are_not_read_again",
    "notifications": "pipeline/test_snapshot_progress.py::test_the_rest_is_shown_table_by_table",
    "shouldStreamInsertedRowDuringSnapshotOfSameTable": _INITIAL,
    "…WhileTableIsWaitingForSnapshot": _MORTAL,
    "select override": (
        "capture/test_snapshot.py::test_column_lists_row_filters_and_partitions_are_read_as_published"
    ),
    "shouldSnapshotChunkedPerformanceTest": "bench/test_bench.py::test_a_benchmark_prints_one_document",
}

SUITES = {name: suite for name, suite in dict(globals()).items() if name.endswith(("Test", "IT"))}


def names_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("suite", SUITES)
def test_every_test_of_debeziums_has_one_of_ours_or_a_reason(suite: str) -> None:
    for theirs, given in SUITES[suite].items():
        named = (given,) if isinstance(given, str) else given
        tests = [one.split("::") for one in named if "::" in one]
        missing = [f"{file}::{name}" for file, name in tests if name not in names_in(TESTS / file)]
        assert not missing, theirs
