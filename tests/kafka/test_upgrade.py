"""The setting `atomic_source_offset_commit`, turned on and off in any order, instance by instance.

The promises of each step are the table in docs/kafka.md: steps that keep each record once do so, those that
may repeat records do repeat these, and none loses any.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.producer.writer import AtomicWriter, Writer
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.counting import read_numbers, require_each_once
from tests.support.kafka.once import numbers, reached, writer
from tests.support.wait import wait_until

BATCH = 20
#: So soon the cluster aborts a transaction whose producer is gone.
SHORT = {"transaction.timeout.ms": "4000"}

ENDED, CRASHED, ASLEEP = "ended", "crashed", "asleep"
ONCE, DOUBLED = "once", "doubled"

#: (setting before, how that process ended, setting after) → what becomes of the batch that was under way.
#: `asleep`: it was paused, and went on when the next process had begun.
STEPS = {
    ("off", ENDED, "off"): ONCE,
    ("off", CRASHED, "off"): DOUBLED,
    ("off", ASLEEP, "off"): DOUBLED,
    ("off", ENDED, "on"): ONCE,
    ("off", CRASHED, "on"): DOUBLED,
    ("off", ASLEEP, "on"): DOUBLED,
    ("on", ENDED, "on"): ONCE,
    ("on", CRASHED, "on"): ONCE,
    ("on", ASLEEP, "on"): ONCE,
    ("on", ENDED, "off"): ONCE,
    ("on", CRASHED, "off"): ONCE,
    ("on", ASLEEP, "off"): DOUBLED,
}


@pytest.fixture
def topic(kafka: EmbeddedKafka, topic_name: str) -> str:
    _create(kafka, topic_name)
    return topic_name


def _create(kafka: EmbeddedKafka, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic, 3, 1)])[topic].result(60)


def _opened(
    kafka: EmbeddedKafka,
    topic: str,
    setting: str,
    shared: str | None = None,
    options: dict[str, str] | None = None,
) -> tuple[Writer, int]:
    made = writer(kafka.bootstrap, topic, atomic=setting == "on", offsets_topic=shared, options=options)
    return made, reached(made.open())


def _batch(out: Writer, topic: str, last: int) -> int:
    out.send(topic, numbers(last + 1, BATCH))
    out.commit({"number": last + BATCH})
    return last + BATCH


@pytest.mark.parametrize("step", STEPS, ids="-".join)
@pytest.mark.ci
def test_each_step_keeps_what_it_promises(
    kafka: EmbeddedKafka, topic: str, step: tuple[str, str, str]
) -> None:
    before, how, after = step
    old, last = _opened(kafka, topic, before, options=SHORT if how == CRASHED else None)
    last = _batch(old, topic, last)
    # A batch is under way: the broker has its records, but not its offset.
    if how != ENDED:
        old.send(topic, numbers(last + 1, BATCH))
        old._producer.flush(30)  # type: ignore[attr-defined]
    else:
        old.close()
    new, found = _opened(kafka, topic, after)
    assert found == last
    if how == ASLEEP:
        _wake(old, last + BATCH, fenced=(before, after) == ("on", "on"))
    last = _batch(new, topic, last)
    new.close()
    _require(kafka, topic, last, STEPS[step])
    if how != ENDED:
        old.close()


def _wake(old: Writer, number: int, *, fenced: bool) -> None:
    if not fenced:
        old.commit({"number": number})
        return
    with pytest.raises(TailraceError) as refused:
        old.commit({"number": number})
    assert refused.value.kind is Kind.SINK_PREEMPTED


def _require(kafka: EmbeddedKafka, topic: str, last: int, promise: str) -> None:
    # A transaction whose producer is gone blocks readers until the cluster ends it.
    def values() -> set[int]:
        return {value for _, _, value in read_numbers(kafka, topic)}

    wait_until(lambda: values() == set(range(1, last + 1)), 60, "all records, and no other")
    counts = Counter(value for _, _, value in read_numbers(kafka, topic))
    doubled = {value for value, count in counts.items() if count > 1}
    assert doubled == (set(range(last - BATCH + 1, last + 1)) if promise == DOUBLED else set())
    if promise == ONCE:
        require_each_once(read_numbers(kafka, topic), last)


def _orders() -> Iterator[tuple[tuple[int, str], ...]]:
    """Yield every order in which two instances are turned on and off again."""
    first, second = [(0, "on"), (0, "off")], [(1, "on"), (1, "off")]
    for places in itertools.combinations(range(4), 2):
        ours, theirs = iter(first), iter(second)
        yield tuple(next(ours) if at in places else next(theirs) for at in range(4))


@pytest.mark.slow
def test_instances_that_share_offsets_are_turned_on_and_off_in_any_order(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    shared = f"{topic_name}-offsets"
    for turn, order in enumerate(_orders()):
        names = [f"{topic_name}-{turn}-{instance}" for instance in range(2)]
        running: list[tuple[Writer, int]] = []
        for name in names:
            _create(kafka, name)
            running.append(_opened(kafka, name, "off", shared))
        for instance, setting in order:
            # The other instance works meanwhile.
            running = [
                (out, _batch(out, name, last)) for name, (out, last) in zip(names, running, strict=True)
            ]
            running[instance][0].close()
            running[instance] = _opened(kafka, names[instance], setting, shared)
            assert running[instance][1] == BATCH * (1 + order.index((instance, setting))), order
        for name, (out, last) in zip(names, running, strict=True):
            out.close()
            require_each_once(read_numbers(kafka, name), last)


def test_only_read_uncommitted_sees_uncommitted_offsets(kafka: EmbeddedKafka, topic: str) -> None:
    out, last = _opened(kafka, topic, "on")
    assert isinstance(out, AtomicWriter)
    last = _batch(out, topic, last)
    out.send(topic, numbers(last + 1, BATCH))
    out._send_offsets({out._task.key: {"number": last + BATCH}})
    out._producer.flush(30)
    task = out._task
    # This loses records if the transaction is then aborted: the process that continues there skips them.
    assert task.offsets.read(task.key, "read_uncommitted") == {"number": last + BATCH}
    out.close()
    assert task.offsets.read(task.key, "read_committed") == {"number": last}
