"""A cluster that accepts little in time, or a paused process, is not taken for a takeover."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tailrace import failpoints
from tailrace.changelog.retention.readers import Readers
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.kafka.client import settings as client
from tailrace.kafka.offsets.topic import OffsetsTopic
from tailrace.kafka.producer.account import raise_out_of_time
from tailrace.kafka.producer.sender import SendProgress
from tailrace.kafka.producer.writer import AtomicWriter
from tailrace.pipeline.sink_worker import SinkWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status.views import SinkState
from tailrace.sinks.kafka import shares
from tailrace.sinks.kafka.records import Records
from tailrace.sinks.kafka.sink import KafkaSink
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.batches import fill, not_shrinking
from tests.support.kafka.quotas import limit
from tests.support.kafka.shares_rig import ORDERS, opened, records, sink_of, write
from tests.support.spark.wire import HandmadeLog, insert

#: In milliseconds: the timeout of a transaction, and for how long its process is paused.
SHORT, STILL = 3000, 8000
QUOTA = 60_000
LENGTH = 600
#: Records of a transaction that takes some ten seconds.
LARGE = 1000
#: So often a run may end with a retriable error.
ENDS = 4

pytestmark = pytest.mark.ci


@pytest.fixture
def log(tmp_path: Path) -> Iterator[HandmadeLog]:
    with HandmadeLog(tmp_path / "log") as found:
        yield found


@pytest.fixture(scope="module")
def slow(kafka: EmbeddedKafka) -> str:
    """The id of a client from which the cluster accepts little."""
    limit(kafka, "slow", QUOTA)
    return "slow"


def feed_of(kafka: EmbeddedKafka, name: str, log: HandmadeLog, end: int, **settings: Any) -> SinkWorker:
    config = sink_of(kafka, name, 0, **settings)._config
    feed = SinkWorker(config, "shop", log.path, lambda: sink_of(kafka, name, 0, **settings), SparkHost(None))  # type: ignore[arg-type]
    feed.finish_at(end)
    return feed


def after(step: Callable[..., Any], act: Callable[..., None]) -> Callable[..., Any]:
    """Return `step` with a call of `act` after it."""

    def both(*args: Any) -> Any:
        found = step(*args)
        act()
        return found

    return both


def each_once(kafka: EmbeddedKafka, name: str, rows: int) -> None:
    keys = [key for key, _ in records(kafka, f"{name}.public.orders")]
    assert len(keys) == len(set(keys)) == rows


def small(log: HandmadeLog, *rows: int, first: bool = False) -> int:
    return log.commit(*([ORDERS] if first else []), *(insert(1, row, "x") for row in rows))


def test_a_sink_paused_for_longer_than_its_transaction_goes_on_if_no_other_has_taken_over(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog
) -> None:
    small(log, 1, first=True)
    end = small(log, 2, 3)
    for point in ("kafka.in_batch", "kafka.before_commit"):
        failpoints.arm(f"{point}=sleep:{STILL}")
        name = f"{topic_name}-{point}"
        Readers(log.directory).remove("kafka")  # so that the new topics are written from the start
        feed = feed_of(kafka, name, log, end, options={"transaction.timeout.ms": str(SHORT)})
        with capture_logs() as logs:
            feed.run()
        failpoints.arm("")
        each_once(kafka, name, 3)
        [failed] = [line for line in logs if line["event"] == "sink failed; trying again"]
        assert "sink_write_failed" in failed["error"]
        assert "of 3 records" in failed["error"]


@pytest.mark.parametrize("has_written", [False, True])
def test_a_preempted_sink_reports_it_even_before_the_other_has_written(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, has_written: bool
) -> None:
    ends = [small(log, 1, first=True), small(log, 2), small(log, 3)]
    old = opened(sink_of(kafka, topic_name, 0), log)
    write(old, log, ends[0])
    new = opened(sink_of(kafka, topic_name, 0), log)
    if has_written:
        write(new, log, ends[1])
    with pytest.raises(TailraceError) as refused:
        write(old, log, ends[1])  # the same position: the offset does not distinguish them
    assert refused.value.kind is Kind.SINK_PREEMPTED
    write(new, log, ends[2])
    each_once(kafka, topic_name, 3)
    old.close()
    new.close()


def test_a_late_share_that_was_taken_over_is_reported_as_preempted(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "PATIENCE_S", (0.5,))
    ends = [small(log, 1, first=True), small(log, 2)]
    options = {"transaction.timeout.ms": str(SHORT)}
    old = opened(sink_of(kafka, topic_name, 1, options=options), log)
    write(old, log, ends[0])
    taken: list[KafkaSink] = []

    def take_over_late(*_: Any) -> None:
        taken.append(opened(sink_of(kafka, topic_name, 1), log))
        time.sleep(SHORT / 1000)

    send = Records.send
    monkeypatch.setattr(Records, "send", after(send, take_over_late))
    with pytest.raises(TailraceError) as refused:
        write(old, log, ends[1])
    monkeypatch.setattr(Records, "send", send)
    assert refused.value.kind is Kind.SINK_PREEMPTED
    write(taken[0], log, ends[1])
    each_once(kafka, topic_name, 2)
    old.close()
    taken[0].close()


def test_the_check_for_a_takeover_is_repeated_if_the_cluster_does_not_answer(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = small(log, 1, first=True)
    name = f"{topic_name}-unknown"
    feed = feed_of(kafka, name, log, end, options={"transaction.timeout.ms": str(SHORT)})
    settled, asked = OffsetsTopic.settled, []

    def unanswered(topic: OffsetsTopic, *args: Any) -> Any:
        asked.append(args)
        if len(asked) == 2:  # the first one is at the start
            raise TailraceError(Kind.SINK_WRITE_FAILED, "look up the first and last offsets: no answer")
        return settled(topic, *args)

    monkeypatch.setattr(OffsetsTopic, "settled", unanswered)
    failpoints.arm(f"kafka.in_batch=sleep:{STILL}")
    unarm = threading.Timer(STILL / 2000, failpoints.arm, [""])
    unarm.start()
    with capture_logs() as logs:
        feed.run()
    unarm.join()
    assert feed.view.state is SinkState.STOPPED
    each_once(kafka, name, 1)
    [failed] = [line for line in logs if line["event"] == "sink failed; trying again"]
    assert "look whether another engine has taken over" in failed["error"]


def test_an_error_unrelated_to_timeouts_is_raised_unchanged() -> None:
    error = TailraceError(Kind.SINK_REFUSED, "write records: refused")
    writer = SimpleNamespace(progress=SendProgress(1, 1, 0, 1.0, 1.0), limit_s=60.0)
    try:
        raise error
    except TailraceError:
        with pytest.raises(TailraceError) as raised:
            raise_out_of_time(error, writer)
    assert raised.value is error
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.parametrize("atomic", [True, False])
def test_a_backlog_is_split_into_batches_that_can_be_sent_in_time(
    kafka: EmbeddedKafka, slow: str, topic_name: str, log: HandmadeLog, atomic: bool
) -> None:
    rows = 50
    for at in range(30):
        described = [ORDERS] if at == 0 else []
        changes = [insert(1, at * rows + row, _text(at * rows + row)) for row in range(rows)]
        end = log.commit(*described, *changes)
    timeouts = {"transaction.timeout.ms": "6000"} if atomic else {"message.timeout.ms": "6000"}
    feed = feed_of(
        kafka, topic_name, log, end, atomic_source_offset_commit=atomic, offset_flush_timeout_ms=5000,
        options={"client.id": slow, "batch.size": "16000", **timeouts},
    )  # fmt: skip
    feed.run()
    assert feed.view.state is SinkState.STOPPED
    assert feed.view.batches > 1
    keys = [key for key, _ in records(kafka, f"{topic_name}.public.orders")]
    assert len(set(keys)) == 30 * rows
    assert len(keys) == 30 * rows or not atomic


def test_a_large_source_transaction_gets_more_time(
    kafka: EmbeddedKafka, slow: str, topic_name: str, log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TRANSACTION_MS_MIN", 5000)
    # More than the broker allows: after the refusal it is halved.
    monkeypatch.setattr(client, "LONGEST_MS", 1_200_000)
    end = fill(log, LARGE, LENGTH, not_shrinking)
    feed = feed_of(
        kafka, topic_name, log, end, offset_flush_timeout_ms=5000,
        options={"client.id": slow, "batch.size": "16000"},
    )  # fmt: skip
    with capture_logs() as logs:
        feed.run()
    each_once(kafka, topic_name, LARGE)
    [warning] = [line for line in logs if "longer timeout" in line["event"]]
    assert f"of {LARGE} records" in warning["why"]


@pytest.mark.follows("sink_transaction_too_long")
@pytest.mark.timeout(1200)
def test_a_source_transaction_too_large_for_the_configured_time_is_refused_with_a_hint(
    kafka: EmbeddedKafka, slow: str, topic_name: str, log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = fill(log, LARGE, LENGTH, not_shrinking)
    asked: list[float] = []
    commit_once = AtomicWriter._commit_once

    def noted(writer: AtomicWriter, timeout_s: float) -> None:
        asked.append(timeout_s)
        commit_once(writer, timeout_s)

    monkeypatch.setattr(AtomicWriter, "_commit_once", noted)
    settings = {"client.id": slow, "batch.size": "16000", "transaction.timeout.ms": "5000"}
    for _ in range(ENDS):
        feed = feed_of(kafka, topic_name, log, end, offset_flush_timeout_ms=5000, options=settings)
        with pytest.raises(TailraceError) as refused:
            feed.run()
        if refused.value.kind is not Kind.SINK_WRITE_FAILED:  # retriable
            break
    assert len(asked) < 100, "a commit that has ended is requested again and again"
    assert refused.value.kind is Kind.SINK_TRANSACTION_TOO_LONG
    assert refused.value.policy is Policy.STOP
    found = rf"of {LARGE} records \(\d+ bytes\) were delivered in \d+ s, and the time limit is 5 s"
    assert re.search(found, refused.value.message)
    assert refused.value.context["log_offset"] == 0
    assert "raise transaction.timeout.ms in `options`" in refused.value.hint
    settings["transaction.timeout.ms"] = "120000"
    feed_of(kafka, topic_name, log, end, offset_flush_timeout_ms=5000, options=settings).run()
    each_once(kafka, topic_name, LARGE)


def _text(seed: int) -> str:
    return not_shrinking(random.Random(seed), LENGTH)
