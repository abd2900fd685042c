"""An engine's offsets in a topic: the contract of stores, and who may write when there are two."""

from __future__ import annotations

from typing import Any

import pytest

from fix_wait import wait_until
from tailrace import Engine
from tailrace.config.engine_options import OffsetStorage
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.engine.offset_stores import store_for
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.offset_store import KafkaOffsetStore
from tailrace.testing import LinesSource, conformance

HERE = {"server": "a"}


def storage(kafka: EmbeddedKafka, topic: str, **more: Any) -> OffsetStorage:
    return OffsetStorage.model_validate(
        {"type": "kafka", "bootstrap_servers": kafka.bootstrap, "topic": f"{topic}-offsets", **more}
    )


@pytest.mark.parametrize("atomic", [False, True])
def test_it_keeps_the_contract_of_stores(kafka: EmbeddedKafka, topic_name: str, atomic: bool) -> None:
    section = storage(kafka, topic_name)
    conformance.check_offset_store(lambda: store_for(section, "shop", atomic=atomic))
    # Others in the same topic see nothing of it, and what was not started reads it all the same.
    assert KafkaOffsetStore(section, "other", atomic=False).read([HERE]) == {}
    assert KafkaOffsetStore(section, "shop", atomic=atomic).read([HERE]) == {0: {"line": 1}}


def test_the_newer_of_two_stores_has_the_offsets_and_the_older_never_again(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    section = storage(kafka, topic_name)
    old, new = (KafkaOffsetStore(section, "shop", atomic=True) for _ in range(2))
    old.start()
    old.write([(HERE, {"line": 1})], 30)
    new.start()
    assert new.read([HERE]) == {0: {"line": 1}}
    new.write([(HERE, {"line": 2})], 30)
    for _ in range(2):
        with pytest.raises(TailraceError) as refused:
            old.write([(HERE, {"line": 5})], 30)
        assert refused.value.kind is Kind.OFFSETS_PREEMPTED
    new.write([(HERE, {"line": 3})], 30)
    old.stop()
    new.stop()
    assert KafkaOffsetStore(section, "shop", atomic=True).read([HERE]) == {0: {"line": 3}}


def test_an_engine_that_was_taken_over_stops_and_says_so(kafka: EmbeddedKafka, topic_name: str) -> None:
    options = {
        "offset_storage": storage(kafka, topic_name).model_dump(mode="json", exclude_unset=True),
        "offset_commit": {"policy": "always", "timeout_ms": 30_000},
        "atomic_source_offset_commit": True,
    }
    got: list[list[int]] = [[], []]
    sources = [LinesSource(50, ends=False), LinesSource(50, ends=False)]

    def engine(number: int) -> Engine:
        return Engine(
            connector=sources[number],
            name="shop",
            on_record=lambda record: got[number].append(record.after["number"]),
            options=options,
        )

    first = engine(0)
    first.start()
    wait_until(lambda: sources[0].committed["0-0"][-1:] == [50], 60, "the first engine's last commit")
    with engine(1):
        sources[0].append(10)
        sources[1].append(10)
        wait_until(lambda: len(got[1]) >= 10, 60, "the records of the second")
        with pytest.raises(TailraceError) as ended:
            first.wait(60)
    assert ended.value.kind is Kind.OFFSETS_PREEMPTED
    assert got[1][-10:] == list(range(51, 61))
