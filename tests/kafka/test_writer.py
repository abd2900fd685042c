"""Writers against a real broker: each record once, after crashes, pauses and takeovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.offsets.topic import OffsetsTopic
from tailrace.kafka.producer.sender import Sender
from tailrace.kafka.producer.transaction import ProducerEvent
from tailrace.kafka.producer.writer import AtomicWriter
from tailrace.records.events import Converted
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.counting import read_numbers, require_each_once
from tests.support.kafka.once import numbers, reached, writer

QUIET = {"log_level": 0}
POINTS = [
    "kafka.after_begin",
    "kafka.in_batch",
    "kafka.before_offset",
    "kafka.before_commit",
    "kafka.after_commit",
]


@pytest.fixture
def topic(kafka: EmbeddedKafka, topic_name: str) -> str:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, **QUIET})
    admin.create_topics([NewTopic(topic_name, 3, 1)])[topic_name].result(60)
    return topic_name


def test_a_batch_and_its_offset_become_visible_together(kafka: EmbeddedKafka, topic: str) -> None:
    first = writer(kafka.bootstrap, topic)
    assert first.open() is None
    first.send(topic, numbers(1, 100))
    first.commit({"number": 100})
    first.send(topic, numbers(101, 50))
    first.close()  # aborts what it had not committed
    second = writer(kafka.bootstrap, topic)
    assert second.open() == {"number": 100}
    second.commit({"number": 100, "later": True})  # progress without records
    second.close()
    require_each_once(read_numbers(kafka, topic), 100)
    third = writer(kafka.bootstrap, topic)
    assert third.open() == {"number": 100, "later": True}
    third.close()


def test_a_preempted_writer_commits_nothing_more_and_reports_it(kafka: EmbeddedKafka, topic: str) -> None:
    old = writer(kafka.bootstrap, topic)
    old.open()
    old.send(topic, numbers(1, 10))
    new = writer(kafka.bootstrap, topic)
    assert new.open() is None
    new.send(topic, numbers(1, 20))
    new.commit({"number": 20})
    with structlog.testing.capture_logs() as logs, pytest.raises(TailraceError) as refused:
        old.commit({"number": 10})
    assert refused.value.kind is Kind.SINK_PREEMPTED
    [told] = [entry for entry in logs if "fenced" in entry["event"]]
    assert (told["log_level"], told["transactional_id"]) == ("warning", f"test-{topic}-0")
    old.close()
    new.send(topic, numbers(21, 5))
    new.commit({"number": 25})
    new.close()
    require_each_once(read_numbers(kafka, topic), 25)


class _Failing:
    """A producer with one method that meets a fatal error while it reports deliveries."""

    def __init__(self, real: object, method: str) -> None:
        self._real = real
        self._method = method

    def __len__(self) -> int:
        return len(self._real)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return self._fail if name == self._method else getattr(self._real, name)

    def _fail(self, *_: object) -> None:
        # As the client raises it: its C code goes on with an exception set.
        fenced = KafkaException(KafkaError(KafkaError._FENCED, "a later producer", fatal=True))
        try:
            raise SystemError("returned a result with an exception set") from fenced
        except SystemError as error:
            raise SystemError("the same") from error


@pytest.mark.parametrize("method", ["begin_transaction", "commit_transaction", "abort_transaction", "flush"])
def test_a_fatal_error_that_the_client_raises_as_a_system_error_is_reported_correctly(
    kafka: EmbeddedKafka, topic: str, method: str
) -> None:
    out = writer(kafka.bootstrap, topic, atomic=method != "flush")
    out.open()
    out._producer = out._sender._producer = _Failing(out._producer, method)  # type: ignore[attr-defined]

    def write() -> None:
        out.send(topic, numbers(1, 10))
        if method == "abort_transaction":
            out._fail(ProducerEvent.REFUSED)  # type: ignore[attr-defined]
            out._raise_if_preempted(TailraceError(Kind.SINK_REFUSED, "send"))  # type: ignore[attr-defined]
        out.commit({"number": 10})

    with pytest.raises(TailraceError) as refused:
        write()
    assert refused.value.kind is Kind.SINK_PREEMPTED
    out.close()


def test_without_transactions_records_are_written_before_their_offset(
    kafka: EmbeddedKafka, topic: str
) -> None:
    plain = writer(kafka.bootstrap, topic, atomic=False)
    assert plain.open() is None
    plain.send(topic, numbers(1, 100))
    plain.commit({"number": 100})
    plain.close()
    again = writer(kafka.bootstrap, topic, atomic=False)
    assert again.open() == {"number": 100}
    again.close()
    require_each_once(read_numbers(kafka, topic, "read_uncommitted"), 100)


def test_records_with_headers_are_written_in_order_too(kafka: EmbeddedKafka, topic: str) -> None:
    headers = pa.array([{"of": str(number)} if number % 2 else {"of": None} for number in range(100)])
    out = writer(kafka.bootstrap, topic)
    out.open()
    out.send(topic, replace(numbers(1, 100), headers=headers))
    out.commit({"number": 100})
    out.close()
    require_each_once(read_numbers(kafka, topic), 100)


def test_an_offsets_topic_that_is_not_compacted_is_refused(kafka: EmbeddedKafka, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, **QUIET})
    admin.create_topics([NewTopic(f"{topic}-offsets", 1, 1)])[f"{topic}-offsets"].result(60)
    with pytest.raises(TailraceError) as refused:
        writer(kafka.bootstrap, topic)
    assert refused.value.kind is Kind.SINK_MISCONFIGURED
    assert "cleanup.policy=compact" in refused.value.hint


def test_an_offsets_topic_with_unknown_partitions_is_not_treated_as_empty(
    kafka: EmbeddedKafka, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = writer(kafka.bootstrap, topic, timeout_s=2.0)
    monkeypatch.setattr(OffsetsTopic, "_replicas", lambda _self: [])
    monkeypatch.setattr(OffsetsTopic, "_may", lambda _self, _operations: 0)
    assert isinstance(known, AtomicWriter)
    for ask in (known._task.offsets.exists, lambda: writer(kafka.bootstrap, topic, timeout_s=2.0)):
        with pytest.raises(TailraceError) as unknown:
            ask()
        assert unknown.value.kind is Kind.SINK_WRITE_FAILED
    known.close()


@pytest.mark.parametrize("point", POINTS)
def test_each_record_is_written_once_after_kills_anywhere(
    kafka: EmbeddedKafka, topic: str, point: str
) -> None:
    for hit in (1, 2):
        assert _life(kafka, topic, {"TAILRACE_FAILPOINTS": f"{point}=kill@{hit}"}) == -signal.SIGKILL
    assert _life(kafka, topic, {}) == 0
    last = writer(kafka.bootstrap, topic)
    offset = reached(last.open())
    last.close()
    assert offset >= 3 * 40
    require_each_once(read_numbers(kafka, topic), offset)


def _life(kafka: EmbeddedKafka, topic: str, environment: dict[str, str]) -> int:
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kafka.once", kafka.bootstrap, topic, "atomic", "3", "40"],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path)},
        timeout=240,
        check=False,
    )
    return done.returncode


@pytest.mark.parametrize("where", ["poll", "produce", "flush"])
def test_a_fenced_writer_is_reported_whichever_call_raises_it(where: str) -> None:
    class Fenced:
        def __len__(self) -> int:
            return 0

        def _call(self, name: str) -> int:
            if name == where:
                raise KafkaException(KafkaError(KafkaError._FENCED, "fenced", fatal=True))
            return 0

        def poll(self, _timeout_s: float) -> int:
            return self._call("poll")

        def produce(self, *_message: object) -> None:
            self._call("produce")

        def flush(self, _timeout_s: float) -> int:
            return self._call("flush")

    def send_all() -> None:
        sender = Sender(Fenced(), {}, timeout_s=1.0)  # type: ignore[arg-type]
        sender.send("topic", Converted(None, pa.array([b"value"])))
        sender.flush()

    with pytest.raises(TailraceError) as fenced:
        send_all()
    assert fenced.value.kind is Kind.SINK_PREEMPTED


def test_records_refused_before_the_report_of_the_cause_have_that_cause() -> None:
    class Failed:
        """A client whose transaction has failed, and which reports the reason later."""

        def __init__(self) -> None:
            self.reports: list[Any] = []
            self.polls = 0

        def __len__(self) -> int:
            return len(self.reports)

        def poll(self, _timeout_s: float) -> None:
            self.polls += 1
            if self.polls > 3:
                for report in self.reports:
                    report(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), SimpleNamespace(topic=lambda: "topic"))

        def produce(self, _topic: str, _value: bytes, _key: object, _place: int, report: Any) -> None:
            if self.reports:
                raise KafkaException(KafkaError(KafkaError._STATE))
            self.reports.append(report)

    sender = Sender(Failed(), {}, timeout_s=1.0)  # type: ignore[arg-type]
    with pytest.raises(TailraceError) as refused:
        sender.send("topic", Converted(None, pa.array([b"one", b"two"])))
    assert "MSG_SIZE_TOO_LARGE" in refused.value.message
