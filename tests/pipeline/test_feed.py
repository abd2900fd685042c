"""One sink's loop over a real log, with a sink that keeps ranges in memory."""

from __future__ import annotations

import functools
import threading
from typing import Any, cast

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from tailrace.backoff import Backoff
from tailrace.changelog.disclosure import keep_disclosure, keep_renames
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.changelog.retention.readers import Readers
from tailrace.config import ColumnPolicy, JsonlSink
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.sections import RealtimeConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline import sink_worker as feeding
from tailrace.pipeline.background import Background
from tailrace.pipeline.sink_worker import SinkWorker
from tailrace.pipeline.status.views import SinkState
from tailrace.protocol.renames import Renames
from tailrace.realtime.handover import Handover
from tailrace.realtime.path import RealtimePath
from tailrace.sinks.contract import SinkCommit
from tailrace.spark.datasource import StreamReader
from tailrace.spark.options import ReadOptions
from tests.support.orders_log import LogOfOrders
from tests.support.pipeline.staged import FakeSpark
from tests.support.wait import wait_until


class Target:
    """A sink's target, which outlives the sinks that are opened on it."""

    def __init__(self):
        self.spans = []
        self.failures = []
        self.refusals = []
        self.writing = threading.Event()
        self.may_write = threading.Event()
        self.may_write.set()
        self.opened = 0

    @property
    def position(self):
        return self.spans[-1][1] if self.spans else None


class MemorySink:
    type = "jsonl"

    def __init__(self, name, target):
        self.name, self.target = name, target

    def open(self, log, pipeline):
        self.target.opened += 1
        if self.target.refusals:
            raise self.target.refusals.pop(0)

    def position(self, task):
        return self.target.position

    reach = position

    def write(self, spark, log, span, splits):
        self.target.writing.set()
        assert self.target.may_write.wait(60)
        if self.target.failures:
            raise self.target.failures.pop(0)
        assert [splits[0].start, splits[-1].end] == [span.start, span.end]
        self.target.spans.append((span.start, span.end))
        return SinkCommit(span, rows=sum(split.rows for split in splits), bytes=span.size)

    def close(self):
        pass


@pytest.fixture
def orders(tmp_path):
    log = LogOfOrders(tmp_path / "log")
    yield log
    log.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(feeding, "Backoff", functools.partial(Backoff, first_s=0.001, longest_s=0.002))
    monkeypatch.setattr(feeding, "POLL_S", 0.005)


def feed_of(log, target, **settings):
    given = {name: settings.pop(name, None) for name in ("begin_at", "rules", "realtime")}
    settings = {"interval_ms": 0, **settings}
    config = JsonlSink(type="jsonl", path=log.directory.path, name="sink", **settings)
    return SinkWorker(
        config,
        "shop",
        log.directory.path,
        lambda: MemorySink("sink", target),
        cast(Any, FakeSpark()),
        **given,
    )


def fed_from_memory(log, consumer):
    """Return what feeds a consumer of the log from memory, once it has caught up."""
    realtime = RealtimePath(consumer, RealtimeConfig(enabled=True), 1 << 20)
    handover = Handover([realtime.buffer], lambda: None)
    realtime.attach(handover)
    log.give_to(handover)
    return realtime


def fed(feed, end):
    feed.finish_at(end)
    feed.run()
    return feed.view


def test_a_new_sink_reads_the_log_from_its_start(orders, quick):
    orders.insert(1, 2)
    end = orders.insert(3)
    target = Target()
    view = fed(feed_of(orders, target), end)
    assert target.spans == [(0, end)]
    assert (view.state, view.position, view.rows) == (SinkState.STOPPED, end, 3)
    assert Readers(orders.directory).require("sink").offsets == {"0": end}


def test_a_sink_waits_until_capture_has_started_with_the_same_rules(orders, quick):
    """The rules may use a column's present name, and only the server knows that it was renamed."""
    end, target = orders.insert(1), Target()
    rules = ColumnPolicy(columns_exclude=("public.orders.note",))
    assert fed(feed_of(orders, target, rules=rules), end).state is SinkState.STOPPED  # capture has ended
    assert not target.opened
    feed = feed_of(orders, target, rules=rules)
    running = Background("feed", feed.run)
    running.start()
    keep_disclosure(orders.directory, "0", ColumnPolicy())
    keep_renames(orders.directory, "0", Renames())
    assert not running.join(0.05)
    assert not target.opened
    keep_disclosure(orders.directory, "0", rules)
    wait_until(lambda: target.spans, 60, "the sink to begin")
    feed.stop()
    assert running.join(60)


def test_a_sink_waits_for_capture_while_the_end_mark_is_behind_after_a_loss_of_power(orders, quick):
    target = Target()
    first = orders.insert(1)
    with orders.power_lost():
        second = orders.insert(2)
        fed(feed_of(orders, target), second)
    assert LogReader.open(orders.directory, "0").end().offset == first
    view = fed(feed_of(orders, target), first)  # without capture
    assert (view.state, view.error) == (SinkState.STOPPED, None)
    feed = feed_of(orders, target)
    running = Background("feed", feed.run)
    running.start()
    assert not running.join(0.05)
    orders.open_again()
    third = orders.insert(3)
    wait_until(lambda: len(target.spans) == 2, 60, "the sink to continue")
    feed.stop()
    assert running.join(60)
    assert target.spans == [(0, second), (second, third)]


def test_a_sink_that_waits_after_a_loss_of_power_is_fed_if_the_end_is_asked_for_meanwhile(
    orders, quick, monkeypatch
):
    target = Target()
    orders.insert(1)
    with orders.power_lost():
        second = orders.insert(2)
        fed(feed_of(orders, target), second)
    feed = feed_of(orders, target)
    ends = []

    def open_and_ask_for_the_end(_timeout_s):
        monkeypatch.undo()
        orders.open_again()
        ends.append(orders.insert(3))
        feed.finish_at(ends[0])
        return False

    monkeypatch.setattr(feed._stop, "wait", open_and_ask_for_the_end)
    feed.run()
    assert target.spans == [(0, second), (second, ends[0])]


def test_a_second_run_writes_only_what_is_new(orders, quick):
    target = Target()
    first = orders.insert(1)
    fed(feed_of(orders, target), first)
    fed(feed_of(orders, target), first)
    second = orders.insert(2)
    fed(feed_of(orders, target), second)
    assert target.spans == [(0, first), (first, second)]


def test_batches_keep_their_limits_and_end_with_transactions(orders, quick):
    ends = [orders.insert(*range(10)) for _ in range(6)]
    target = Target()
    fed(feed_of(orders, target, batch_rows_max=25), ends[-1])
    assert target.spans == [(0, ends[1]), (ends[1], ends[3]), (ends[3], ends[5])]


def test_a_transaction_larger_than_a_batch_is_written_whole(orders, quick):
    end = orders.insert(*range(100))
    target = Target()
    fed(feed_of(orders, target, batch_rows_max=10), end)
    assert target.spans == [(0, end)]


def test_a_retriable_failure_is_retried_with_a_new_sink(orders, quick):
    end = orders.insert(1)
    target = Target()
    target.failures = [TailraceError(Kind.SINK_WRITE_FAILED, "x"), OSError(5, "io")]
    assert fed(feed_of(orders, target), end).error is None
    assert (target.spans, target.opened) == ([(0, end)], 3)


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_recovered_sink_shows_no_error_even_without_changes_to_write(orders, quick, is_quiet):
    end = orders.insert(1)
    target = Target()
    target.spans = [(0, end)]
    target.refusals = [TailraceError(Kind.SINK_WRITE_FAILED, "away") for _ in range(3)]
    if is_quiet:
        end = orders.progress()
    feed = feed_of(orders, target)
    running = Background("feed", feed.run)
    running.start()
    wait_until(lambda: (feed.view.state, feed.view.position) == (SinkState.RUNNING, end), 60, "the sink")
    error = feed.view.error
    feed.stop()
    assert running.join(10)
    assert (target.opened, error) == (4, None)


def test_a_failure_that_stays_stops_the_sink_with_its_error(orders, quick):
    end = orders.insert(1)
    target = Target()
    target.failures = [TailraceError(Kind.SINK_WRITE_FAILED, "x") for _ in range(9)]
    feed = feed_of(orders, target, retry_attempts_max=2)
    with pytest.raises(TailraceError, match="sink_write_failed"):
        fed(feed, end)
    assert feed.view.state is SinkState.FAILED
    assert feed.view.error is not None
    assert len(target.failures) == 6


@pytest.mark.slow
def test_by_default_retriable_failures_are_retried_without_limit(orders, quick):
    end = orders.insert(1)
    target = Target()
    target.failures = [TailraceError(Kind.SINK_WRITE_FAILED, "away") for _ in range(200)]
    feed = feed_of(orders, target)
    running = threading.Thread(target=feed.run)
    running.start()
    wait_until(lambda: target.spans == [(0, end)], 60, "the batch")
    feed.stop()
    running.join(60)
    assert feed.view.state is SinkState.STOPPED


def test_a_run_that_is_to_end_retries_a_limited_number_of_times(orders, quick):
    end = orders.insert(1)
    target = Target()
    target.failures = [TailraceError(Kind.SINK_WRITE_FAILED, "away") for _ in range(200)]
    with pytest.raises(TailraceError, match="away"):
        fed(feed_of(orders, target), end)
    assert len(target.failures) == 200 - (1 + feeding.ATTEMPTS_AT_END_MAX)


def test_an_error_that_a_person_must_resolve_is_not_retried(orders, quick):
    end = orders.insert(1)
    target = Target()
    target.failures = [TailraceError(Kind.SINK_SCHEMA_REFUSED, "x"), TailraceError(Kind.INTERNAL, "y")]
    with pytest.raises(TailraceError, match="sink_schema_refused"):
        fed(feed_of(orders, target), end)
    assert len(target.failures) == 1


def test_an_unexpected_error_shows_no_contents(orders, quick):
    end = orders.insert(1)
    target = Target()
    target.failures = [KeyError("row contents")]
    with pytest.raises(TailraceError) as caught:
        fed(feed_of(orders, target), end)
    assert caught.value.kind is Kind.INTERNAL
    assert "row contents" not in str(caught.value)


def test_a_batch_without_rows_moves_the_sink_without_a_batch(orders, quick):
    first = orders.insert(1)
    target = Target()
    feed = feed_of(orders, target)
    running = Background("feed", feed.run)
    running.start()
    wait_until(lambda: feed.view.position == first, 60, "the first row")
    quiet = orders.progress()
    wait_until(lambda: feed.view.position == quiet, 60, "the quiet batch")
    assert target.spans == [(0, first)]
    # It is recorded at the end of the run, so that the status shows the same afterwards.
    feed.finish_at(quiet)
    assert running.join(10)
    assert target.spans == [(0, first), (first, quiet)]


def test_an_idle_sink_writes_at_once_when_notified(orders, monkeypatch):
    monkeypatch.setattr(feeding, "POLL_S", 3600.0)
    first = orders.insert(1)
    target = Target()
    feed = feed_of(orders, target)
    running = Background("feed", feed.run)
    running.start()
    wait_until(lambda: target.position == first, 60, "what was there at the start")
    for number in range(2, 5):
        end = orders.insert(number)
        feed.look()
        wait_until(
            functools.partial(lambda wanted: target.position == wanted, end), 60, "what it was told of"
        )
    feed.stop()
    assert running.join(10)


def test_recording_a_batch_without_rows_delays_no_later_row(orders, monkeypatch):
    monkeypatch.setattr(feeding, "QUIET_RECORD_S", 0.0)
    quiet = orders.progress()
    target = Target()
    feed = feed_of(orders, target, interval_ms=3_600_000)
    running = Background("feed", feed.run)
    running.start()
    wait_until(lambda: target.position == quiet, 60, "the quiet batch")
    end = orders.insert(1)
    feed.look()
    wait_until(lambda: target.position == end, 60, "the row")
    feed.stop()
    assert running.join(10)


def test_heartbeats_go_on_while_the_next_batch_is_not_due(orders, quick):
    class BeatingSink(MemorySink):
        def beat(self):
            beats.append(self.target.position)

    beats, target, end = [], Target(), orders.insert(1)
    config = JsonlSink(type="jsonl", path=orders.directory.path, name="sink", interval_ms=3_600_000)
    path, spark = orders.directory.path, cast(Any, FakeSpark())
    feed = SinkWorker(config, "shop", path, lambda: BeatingSink("sink", target), spark)
    running = Background("feed", feed.run)
    running.start()
    wait_until(lambda: beats.count(end) > 2, 20, "heartbeats after the batch")
    orders.insert(2)
    assert target.spans == [(0, end)]
    feed.stop()
    assert running.join(10)


def test_segments_without_rows_are_passed_also_in_real_time(tmp_path, quick, monkeypatch):
    """Otherwise retention would keep them for a sink that has everything, or drop the sink."""
    monkeypatch.setattr(feeding, "REGISTER_S", 0.0)
    monkeypatch.setattr(feeding, "QUIET_RECORD_S", 0.0)
    log, target = LogOfOrders(tmp_path / "log", segment_bytes=1 << 12), Target()
    realtime, readers = fed_from_memory(log, "sink"), Readers(log.directory)
    log.insert(1)
    feed = feed_of(log, target, realtime=realtime)
    running = Background("feed", feed.run)
    running.start()
    wait_until(lambda: realtime.works, 10, "the sink to be fed from memory")
    for number in (2, 3):
        row = log.insert(number)
        wait_until(functools.partial(lambda end: target.position >= end, row), 10, "the row")
        begin = log.roll()
        reached = functools.partial(lambda at: readers.require("sink").offsets["0"] >= at, begin)
        wait_until(reached, 10, "what has no rows")
    assert realtime.works
    feed.stop()
    assert running.join(10)
    assert feed.view.rows == 3
    log.close()


def test_a_stop_waits_for_the_batch(orders, quick):
    end = orders.insert(1)
    target = Target()
    target.may_write.clear()
    feed = feed_of(orders, target)
    running = Background("feed", feed.run)
    running.start()
    assert target.writing.wait(60)
    feed.stop()
    assert not running.join(0.05)
    target.may_write.set()
    assert running.join(10)
    assert running.error is None
    assert target.spans == [(0, end)]


def test_a_batch_cancelled_by_the_stop_is_no_failure(orders, quick):
    orders.insert(1)
    target = Target()
    target.may_write.clear()
    target.failures = [TailraceError(Kind.SPARK_FAILED, "cancelled")]
    feed = feed_of(orders, target)
    running = Background("feed", feed.run)
    running.start()
    assert target.writing.wait(60)
    feed.stop()
    target.may_write.set()
    assert running.join(10)
    assert (running.error, feed.view.state) == (None, SinkState.STOPPED)


def test_a_feed_waits_for_a_log_that_does_not_exist_yet(tmp_path, quick):
    target = Target()
    log_path = tmp_path / "later"
    config = JsonlSink(type="jsonl", path=tmp_path / "out", name="sink", interval_ms=0)
    feed = SinkWorker(config, "shop", log_path, lambda: MemorySink("sink", target), cast(Any, FakeSpark()))
    running = Background("feed", feed.run)
    running.start()
    log = LogOfOrders(log_path)
    end = log.insert(1)
    wait_until(lambda: target.position == end, 60, "the row")
    feed.stop()
    assert running.join(10)
    log.close()


def with_its_start_removed(tmp_path):
    log = LogOfOrders(tmp_path / "log", segment_bytes=1 << 16)
    while len(log.directory.segments("0")) < 3:
        log.insert(*range(500))
    end = log.insert(1)
    apply(log.directory, "0", RetentionRules(size_bytes=1))
    return log, end


def test_a_new_sink_on_a_log_without_its_start_fails_with_a_hint(tmp_path, quick):
    log, end = with_its_start_removed(tmp_path)
    with pytest.raises(TailraceError) as caught:
        fed(feed_of(log, Target()), end)
    assert caught.value.kind is Kind.LOG_RANGE_GONE
    assert "tailrace replay FILE --sink sink --from" in caught.value.hint
    log.close()


def test_retention_does_not_wait_for_a_sink_that_it_dropped(tmp_path, quick):
    log, _ = with_its_start_removed(tmp_path)
    Readers(log.directory).register("sink", {"0": 0})
    Readers(log.directory).drop("sink")
    feed = feed_of(log, Target())
    with pytest.raises(TailraceError) as raised:
        feed.run()
    assert raised.value.kind is Kind.LOG_RANGE_GONE
    assert feed.is_registered
    assert Readers(log.directory).get("sink").dropped
    log.close()


def test_retention_keeps_the_whole_log_for_a_new_sink_that_cannot_be_opened(orders, quick):
    orders.insert(1)
    target = Target()
    target.refusals = [TailraceError(Kind.SINK_FOREIGN, "open the sink: it is another's", "")]
    feed = feed_of(orders, target)
    with pytest.raises(TailraceError):
        feed.run()
    assert feed.is_registered
    found = Readers(orders.directory).get("sink")
    assert found is not None
    assert found.offsets == {"0": 0}


def test_a_new_sink_may_be_configured_to_begin_where_the_log_does(tmp_path, quick):
    log, end = with_its_start_removed(tmp_path)
    begin = log.directory.segments("0")[0]
    target = Target()
    fed(feed_of(log, target, begin_at=begin), end)
    assert (target.spans[0][0], target.spans[-1][1]) == (begin, end)
    log.close()


def test_retention_keeps_the_log_again_for_an_emptied_target(orders, quick):
    end = orders.insert(1)
    fed(feed_of(orders, Target()), end)
    assert Readers(orders.directory).require("sink").offsets == {"0": end}
    emptied = Target()
    emptied.may_write.clear()
    feed = feed_of(orders, emptied)
    running = Background("feed", feed.run)
    running.start()
    assert emptied.writing.wait(60)
    assert Readers(orders.directory).require("sink").offsets == {"0": 0}
    emptied.may_write.set()
    feed.stop()
    assert running.join(10)


def test_a_sink_ahead_of_the_log_is_refused(orders, quick):
    end = orders.insert(1)
    target = Target()
    target.spans = [(0, end + 1000)]
    with pytest.raises(TailraceError) as caught:
        fed(feed_of(orders, target), end)
    assert caught.value.kind is Kind.SINK_AHEAD_OF_LOG


def test_a_query_of_spark_is_not_registered_under_the_name_of_a_sink(orders, quick):
    end = orders.insert(1)
    fed(feed_of(orders, Target()), end)
    options = ReadOptions.parse({"path": str(orders.directory.path), "task": "0", "readerName": "sink"})
    query = StreamReader(options, StructType())
    with pytest.raises(TailraceError, match="register the query as reader 'sink'") as caught:
        query.latestOffset(query.initialOffset(), ReadAllAvailable())
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert Readers(orders.directory).require("sink").offsets == {"0": end}
    Readers(orders.directory).remove("sink")  # as the hint says, if the sink does not exist any more
    query.latestOffset(query.initialOffset(), ReadAllAvailable())
    assert Readers(orders.directory).require("sink").offsets == {"0": 0}


def test_a_missing_offset_is_accepted_if_the_sink_was_to_begin_later(orders, quick):
    end = orders.insert(1)
    orders.insert(2)
    config = KafkaSinkConfig(type="kafka", bootstrap_servers="127.0.0.1:9", name="topics")
    readers = Readers(orders.directory)
    readers.register("topics", {"0": end})

    def feed(begin_at):
        nothing: Any = None
        return SinkWorker(config, "shop", orders.directory.path, lambda: nothing, nothing, begin_at=begin_at)

    feed(end)._require_offset(readers, None, config)  # replayed from there: nothing is committed yet
    feed(None)._require_offset(readers, end, config)
    for position in (None, end - 1):
        with pytest.raises(TailraceError, match="sink_damaged"):
            feed(None)._require_offset(readers, position, config)
