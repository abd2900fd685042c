"""An engine's records and source offsets in one Kafka transaction: its boundaries, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError

from tailrace import Engine, failpoints
from tailrace.engine.offsets.stores import MemoryOffsetStore
from tailrace.engine.offsets.transactions import fitting_places
from tailrace.errors import Kind, Policy, RetriableError, TailraceError
from tailrace.kafka.offsets.store import KafkaOffsetStore
from tailrace.kafka.offsets.topic import History, OffsetsTopic
from tailrace.kafka.producer import task_producer
from tailrace.kafka.producer.account import Account
from tailrace.kafka.producer.task_producer import OF_ENGINE, TaskProducer, require_ours
from tailrace.kafka.producer.writer import AtomicWriter
from tailrace.records.batch import Batch
from tailrace.records.events import Converted, Events
from tailrace.records.group import Group
from tailrace.records.making import SourceRecord
from tailrace.testing import Fault, LinesSource
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.engine_lines import BatchesSource, engine_of, numbers_in, options_of
from tests.support.kafka.reading import read_topic
from tests.support.kafka_proxy import Fault as Broken
from tests.support.kafka_proxy import How, KafkaProxy
from tests.support.postgres import Database
from tests.support.wait import wait_until

NOWHERE = {"bootstrap_servers": "127.0.0.1:9"}


def commits_of(kafka: EmbeddedKafka, name: str, partition: str) -> list[int]:
    """Return the offsets that were committed for a partition of lines, in order."""
    key = json.dumps([f"tailrace-{name}", {"partition": partition}], separators=(",", ":")).encode()
    return [
        message.document["line"]
        for message in read_topic(kafka.bootstrap, f"{name}-offsets")
        if message.key == key
    ]


@pytest.mark.parametrize("atomic", [False, True])
def test_records_and_offsets_of_any_source_are_in_topics_and_a_restart_continues_after_them(
    kafka: EmbeddedKafka, topic_name: str, atomic: bool
) -> None:
    for lines in (30, 55, 55):
        source = LinesSource(lines, tasks=2, partitions=2, words=topic_name)
        engine = engine_of(kafka, topic_name, source, atomic=atomic)
        engine.run()
        assert sum(task.committed for task in engine.view().tasks) in (4 * 30, 4 * 25, 0)
        assert source.committed["1-1"][-1:] in ([lines], [])
    for partition in source.partitions:
        assert numbers_in(kafka, topic_name, partition) == list(range(1, 56))
    assert commits_of(kafka, topic_name, "1-1")[-1] == 55
    (first, *_) = read_topic(kafka.bootstrap, f"{topic_name}.0-0")
    assert first.key_document == {"number": 1}
    assert first.document["after"]["line"] == f"{topic_name} 1"


@pytest.mark.parametrize(
    ("boundary", "commits"),
    [
        ("poll", [10, 20, 30, 40, 45]),
        ("interval", [45]),
        # With batches of 10 and transactions of 15, no transaction is split, but a batch may be.
        ("connector", [15, 30, 45]),
    ],
)
def test_a_transaction_ends_at_the_configured_boundary(
    kafka: EmbeddedKafka, topic_name: str, boundary: str, commits: list[int]
) -> None:
    source = LinesSource(45, batch=10, transaction=15)
    engine = engine_of(kafka, topic_name, source, transaction_boundary=boundary)
    engine.run()
    assert commits_of(kafka, topic_name, "0-0") == commits == source.committed["0-0"]


def test_no_transaction_of_the_source_is_committed_in_part(kafka: EmbeddedKafka, topic_name: str) -> None:
    source = LinesSource(25, batch=10, transaction=15, ends=False)
    engine = engine_of(kafka, topic_name, source, transaction_boundary="connector")
    engine.start()
    wait_until(lambda: source.committed["0-0"] == [15], 60, "the first transaction")
    engine.close()
    assert numbers_in(kafka, topic_name, "0-0") == list(range(1, 16))
    source.append(5)
    engine_of(kafka, topic_name, _ending(source), transaction_boundary="connector").run()
    assert numbers_in(kafka, topic_name, "0-0") == list(range(1, 31))


def _ending(source: LinesSource) -> LinesSource:
    source.ends = True
    return source


def test_a_large_transaction_is_committed_before_the_interval_ends(
    kafka: EmbeddedKafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.engine.offsets.transactions._BYTES_MAX", 14_000)
    source = LinesSource(40, batch=10, words="x" * 400)
    engine_of(kafka, topic_name, source, transaction_boundary="interval").run()
    assert commits_of(kafka, topic_name, "0-0") == [30, 40]


def test_a_large_batch_is_written_in_several_transactions(
    kafka: EmbeddedKafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_most = 500_000
    monkeypatch.setattr("tailrace.engine.offsets.transactions._BYTES_MAX", at_most)
    for name, words in ((f"{topic_name}-small", ""), (f"{topic_name}-large", "x" * 1000)):
        source = LinesSource(5000, batch=5000, words=words)
        engine_of(kafka, name, source).run()
        commits, values = commits_of(kafka, name, "0-0"), read_topic(kafka.bootstrap, f"{name}.0-0")
        assert numbers_in(kafka, name, "0-0") == list(range(1, 5001))
        for first, last in itertools.pairwise([0, *commits]):
            assert sum(len(each.value or b"") for each in values[first:last]) < 2 * at_most


def test_a_batch_with_all_its_large_records_in_one_place_is_divided_by_their_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.engine.offsets.transactions._BYTES_MAX", 20_000)
    values = ["x"] * 500 + ["x" * 3_000] * 8 + ["x" * 30_000, "x"]
    large = pa.record_batch({"op": ["c"] * len(values)})
    groups = (Group.of_columns("a", np.arange(len(values)), large),)
    batch = Batch({}, groups, len(values), [{"at": len(values)}])
    for made in (values, pa.array(values)):
        bounds = fitting_places(Events(batch, (Converted(None, made),)))
        assert (bounds[0], bounds[-1]) == (0, len(values))
        for first, last in itertools.pairwise(bounds):
            assert last == first + 1 or sum(len(each) for each in values[first:last]) <= 10_000
    monkeypatch.setattr("tailrace.engine.offsets.transactions._BYTES_MAX", 1 << 20)
    assert fitting_places(Events(batch, (Converted(None, values),))) == [0, len(values)]


def test_a_transaction_is_committed_before_its_timeout(kafka: EmbeddedKafka, topic_name: str) -> None:
    source = LinesSource(10, batch=10, ends=False)
    options = {"transaction.timeout.ms": "4000", "message.timeout.ms": "4000"}
    with engine_of(kafka, topic_name, source, transaction_boundary="interval", options=options):
        wait_until(lambda: source.committed["0-0"] == [10], 30, "the commit")


def test_dropped_records_count_and_others_keep_their_order(kafka: EmbeddedKafka, topic_name: str) -> None:
    batch = [
        SourceRecord(
            topic="ab"[number % 2], offset={"line": number}, key={"id": number % 3}, value={"number": number}
        )
        for number in range(1, 31)
    ]
    only = {"type": "filter", "where": "value.number > 10"}
    into_one = {"type": "route", "regex": ".*", "replacement": f"{topic_name}.all"}
    for number, transformations in enumerate(([into_one], [into_one, only])):
        name = f"{topic_name}-{number}"
        source = BatchesSource(Batch.of_records(batch, {"of": "x"}))
        options = options_of(kafka, name) | {"transformations": transformations}
        Engine(connector=source, name=name, options=options).run()
    found = [message.document["number"] for message in read_topic(kafka.bootstrap, f"{topic_name}.all")]
    assert found == [*range(1, 31), *range(11, 31)]


def test_after_an_unanswered_commit_the_next_attempt_finds_out_whether_it_succeeded(
    kafka: EmbeddedKafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the unanswered commits succeed, and half do not."""
    commit_all, asked = AtomicWriter.commit_all, iter(range(1000))

    def unanswered(writer: AtomicWriter, offsets: Any, *more: Any) -> None:
        number = next(asked) if len(offsets) > 1 else 0  # the engine's own head does not count
        if number % 3 != 1 or number % 2:
            commit_all(writer, offsets, *more)
        if number % 3 == 1:
            raise TailraceError(Kind.SINK_WRITE_FAILED, "commit a transaction: no answer")

    monkeypatch.setattr(AtomicWriter, "commit_all", unanswered)
    source = LinesSource(200, tasks=2, batch=10)
    engine = engine_of(kafka, topic_name, source)
    engine.run()
    assert sum(task.retries for task in engine.view().tasks) >= 10
    for partition in source.partitions:
        assert numbers_in(kafka, topic_name, partition) == list(range(1, 201))


@pytest.mark.parametrize("how", ["lose", "swallow", "belie", "hold"])
def test_the_answer_to_a_commit_may_be_lost_late_or_wrong(
    kafka: EmbeddedKafka, kafka_proxy: KafkaProxy, topic_name: str, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.kafka.offsets.store.START_S", 6.0)
    source = LinesSource(10, ends=False)
    with engine_of(kafka, topic_name, source, bootstrap_servers=kafka_proxy.bootstrap) as engine:
        wait_until(lambda: source.committed["0-0"] == [10], 60, "the first commit")
        fault = kafka_proxy.plan(Broken("EndTxn", how, KafkaError.INVALID_TXN_STATE))
        source.append(10)
        wait_until(fault.struck.is_set, 60, "the commit without an answer")
        source.append(10)
        wait_until(lambda: source.committed["0-0"][-1:] == [30], 90, "the last commit")
        fault.release()
        assert engine.view().tasks[0].retries == (0 if how in ("lose", "swallow") else 1)
    assert numbers_in(kafka, topic_name, "0-0") == list(range(1, 31))


def test_a_database_may_be_the_source(
    kafka: EmbeddedKafka, pg: Database, tmp_path: Path, topic_name: str
) -> None:
    pg.execute("create table orders (id int primary key)")
    options = options_of(kafka, topic_name)
    options["transformations"] = [{"type": "route", "regex": ".*", "replacement": f"{topic_name}.orders"}]
    file = {
        "name": topic_name,
        "source": {"type": "postgresql", "dsn": pg.dsn, "tables": ["public.orders"]},
        "log": {"path": str(tmp_path / "log")},
        "engine": options,
    }
    for last in (20, 50):
        pg.execute(
            "insert into orders select n from generate_series(%s::int, %s::int) n", [max(1, last - 29), last]
        )
        Engine(file, settings={"until_caught_up": True}).run()
    found = read_topic(kafka.bootstrap, f"{topic_name}.orders")
    assert sorted(message.document["after"]["id"] for message in found) == list(range(1, 51))


def test_a_process_that_was_paused_restarts_its_task_if_no_other_has_taken_over(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    options = {"transaction.timeout.ms": "3000", "message.timeout.ms": "3000"}
    source = LinesSource(30, batch=10)
    failpoints.arm("kafka.before_commit=sleep:7000@4")
    try:
        engine = engine_of(kafka, topic_name, source, options=options)
        engine.run()
    finally:
        failpoints.arm("")
    assert engine.view().tasks[0].retries == 1
    assert numbers_in(kafka, topic_name, "0-0") == list(range(1, 31))


def test_a_preempted_engine_commits_nothing_more_and_reports_it(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    old, new = (LinesSource(20, tasks=2, ends=False) for _ in range(2))
    first = engine_of(kafka, topic_name, old)
    first.start()
    wait_until(lambda: old.committed["1-0"][-1:] == [20], 60, "the first engine's commits")
    with engine_of(kafka, topic_name, new):
        for source in (old, new):
            for partition in source.partitions:
                source.append(20, partition)
        wait_until(lambda: all(new.committed[p][-1:] == [40] for p in new.partitions), 60, "the second's")
        with pytest.raises(TailraceError) as ended:
            first.wait(60)
    assert ended.value.kind is Kind.OFFSETS_PREEMPTED
    for partition in new.partitions:
        assert numbers_in(kafka, topic_name, partition) == list(range(1, 41))


def test_a_task_of_a_preempted_engine_that_opens_late_sends_nothing(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    """It is paused between its check of the head and its opening, while another engine takes over."""
    section = options_of(kafka, topic_name)["kafka"]
    storage = Engine(connector=LinesSource(1), options={"kafka": section})._parts.options.offset_storage
    assert storage is not None
    old, new = (KafkaOffsetStore(storage, topic_name, atomic=True, tasks=1) for _ in range(2))
    old.start()
    late = old.task_producer(0)
    looks = iter(range(10))
    require_ours: Callable[[], None] = late._require_ours

    def looking() -> None:
        require_ours()
        if next(looks) == 0:
            new.start()
            present.append(new.task_producer(0))
            present[0].open()
            present[0].commit([({"of": "x"}, {"line": 1})])

    present: list[Any] = []
    late._require_ours = looking  # type: ignore[method-assign]
    with pytest.raises(TailraceError) as refused:
        late.open()
    assert refused.value.kind is Kind.OFFSETS_PREEMPTED
    late.close()
    # The late opening fenced the other engine's producer; as none has taken over from it, that restarts its
    # task.
    with pytest.raises(TailraceError) as fenced:
        present[0].commit([({"of": "x"}, {"line": 2})])
    assert fenced.value.kind is Kind.SINK_WRITE_FAILED
    again = new.task_producer(0)
    again.open()
    assert again.read([{"of": "x"}]) == {0: {"line": 1}}
    for each in (present[0], again, old, new):
        (each.stop if isinstance(each, KafkaOffsetStore) else each.close)()


def test_retries_of_a_transformation_and_of_a_poll_repeat_no_record(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    calls = iter(range(1000))

    class Fails:
        def apply(self, group: Any) -> Any:
            if next(calls) % 3 == 0:
                raise RetriableError
            return [group]

        def close(self) -> None:
            pass

    source = LinesSource(50, faults=[Fault("poll", at=2, error=RetriableError())])
    options = options_of(kafka, topic_name) | {"errors_retry_delay_initial_ms": 1}
    Engine(connector=source, name=topic_name, options=options, transformations=[Fails()]).run()
    assert numbers_in(kafka, topic_name, "0-0") == list(range(1, 51))


def test_a_record_that_is_too_large_or_goes_to_the_offsets_topic_stops_the_engine(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    large = LinesSource(3, words="x" * 2_000_000)
    into_offsets = {"type": "route", "regex": ".*", "replacement": f"{topic_name}-offsets"}
    for source, transformations, kind in (
        (large, [], Kind.SINK_RECORD_TOO_LARGE),
        (LinesSource(3), [into_offsets], Kind.SINK_MISCONFIGURED),
    ):
        options = options_of(kafka, topic_name) | {"transformations": transformations}
        with pytest.raises(TailraceError) as stopped:
            Engine(connector=source, name=topic_name, options=options).run()
        assert stopped.value.kind is kind
        assert source.committed["0-0"] == []


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ({"on_batch": print}, {}, "kafka and on_batch"),
        ({"on_record": print}, {}, "kafka and on_record"),
        ({"processor": list}, {}, "kafka and processor"),
        ({"offsets": MemoryOffsetStore()}, {}, "kafka and offsets"),
        ({"commit_policy": list}, {}, "kafka and commit_policy"),
        ({"converter": "arrow"}, {}, "converter: arrow gives objects"),
        ({"converter": {"type": "python"}}, {}, "converter: python gives objects"),
        ({}, {"converter": {"type": "arrow"}}, "arrow gives objects"),
        ({}, {"offset_storage": {"type": "memory"}}, "offset_storage"),
        ({}, {"record_processing": {"order": "key"}}, "record_processing.order"),
        ({}, {"record_processing": {"order": "unordered"}}, "record_processing.order"),
        ({}, {"record_processing": {"runs_on": "spark"}}, "record_processing.runs_on"),
        ({}, {"offset_commit": {"policy": "always"}}, "transaction_boundary"),
        ({}, {"kafka": {**NOWHERE, "transaction_boundary": "transaction"}}, "transaction_boundary"),
        ({}, {"kafka": {}}, "bootstrap_servers"),
        ({}, {"kafka": {**NOWHERE, "options": {"enable.idempotence": "false"}}}, "enable.idempotence"),
    ],
)  # fmt: skip
def test_incompatible_settings_are_refused_before_anything_starts(
    arguments: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TailraceError) as refused:
        Engine(connector=LinesSource(), options={"kafka": NOWHERE, **options}, **arguments)
    assert refused.value.kind is Kind.CONFIG_INVALID
    assert words in refused.value.message


class _HeadSeenLate:
    """A topic whose newest head is after the end that is known to be decided: its commit was answered just
    now.
    """

    def __init__(self, lease: str) -> None:
        self._head = {"lease": lease}

    def settled(self, key: bytes, isolation: str) -> None:
        return None

    def read(self, key: bytes, isolation: str) -> dict[str, str]:
        return self._head


def test_a_head_that_is_not_visible_yet_is_not_taken_for_another_engines(kafka: EmbeddedKafka) -> None:
    account = Account(
        kafka.bootstrap, {}, "offsets", "tailrace", "e", OF_ENGINE, True, "read_committed", 1000
    )
    topic: Any = _HeadSeenLate("ours")
    require_ours(topic, account, "ours")
    with pytest.raises(TailraceError) as caught:
        require_ours(topic, account, "another's")
    assert caught.value.kind is Kind.OFFSETS_PREEMPTED


@pytest.mark.parametrize("atomic", [False, True])
def test_an_offsets_topic_that_was_deleted_meanwhile_is_reported(
    monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    monkeypatch.setattr(task_producer, "APPEARS_S", 0.3)
    looks = []  # a topic just created is not known at once
    monkeypatch.setattr(OffsetsTopic, "_may", lambda *_: looks.append(1))
    account = Account(
        NOWHERE["bootstrap_servers"], {}, "gone", "tailrace", "e", OF_ENGINE, atomic, "read_committed", 1000
    )
    producer = TaskProducer(account, 0, "ours", History(), create_topics=True)
    with pytest.raises(TailraceError, match="'gone': it does not exist any more") as caught:
        producer.open()
    producer.close()
    assert caught.value.policy is Policy.STOP
    assert len(looks) > 1
