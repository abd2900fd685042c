"""Which of several producers writes a record: chosen by its key, with the hash of Java's clients."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.kafka import KafkaSinkConfig
from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.contract import KeysFirst
from tailrace.converters.debezium import JsonConverter
from tailrace.kafka.producer.partitioner import Share, partition_of, shares_of
from tailrace.records.events import Converted
from tailrace.sinks.kafka.sink import account_of
from tests.support.converters.customers import CASES, groups_of
from tests.support.kafka.shares_rig import sink_of

KEYS = st.lists(st.none() | st.binary(max_size=20), min_size=1, max_size=30)


@given(KEYS, st.integers(1, 9), st.integers(0, 5))
def test_a_key_has_the_share_equal_to_the_partition_that_java_would_choose(
    keys: list[bytes | None], producers: int, first: int
) -> None:
    expected = [partition_of(b"orders" if key is None else key, producers) for key in keys]
    array = pa.array(keys, pa.binary())
    assert shares_of(array, "orders", len(keys), producers).tolist() == expected
    assert shares_of(keys, "orders", len(keys), producers).tolist() == expected
    assert shares_of(array.slice(first), "orders", len(keys[first:]), producers).tolist() == expected[first:]


@given(KEYS, st.integers(1, 5))
def test_each_event_is_in_one_share_with_its_key_headers_and_row(
    keys: list[bytes | None], producers: int
) -> None:
    numbers = list(range(len(keys)))
    headers = pa.array([{"n": str(n)} for n in numbers])
    whole = Converted(pa.array(keys, pa.binary()), pa.array(numbers), headers, np.array(numbers) // 2)
    found: list[int] = []
    for number in range(producers):
        part = Share(number, producers).of(whole, "orders")
        values = part.values.to_pylist()
        assert values == sorted(values)
        assert part.keys.to_pylist() == [keys[value] for value in values]
        if part.headers is not None:
            assert [header["n"] for header in part.headers.to_pylist()] == [str(value) for value in values]
        assert part.rows is not None
        assert part.rows.tolist() == [value // 2 for value in values]
        found += values
    assert sorted(found) == numbers


def test_a_topic_without_keys_is_written_by_one_producer() -> None:
    assert len(set(shares_of(None, "notes", 5, 4).tolist())) == 1


@pytest.mark.parametrize("schemas", [True, False])
@pytest.mark.parametrize("make", [JsonConverter, CloudEventsConverter])
@pytest.mark.parametrize("case", CASES)
def test_the_keys_converted_alone_equal_those_of_the_events(case: str, make: Any, schemas: bool) -> None:
    converter: Any = make(schemas_enable=schemas)
    assert isinstance(cast(object, converter), KeysFirst)
    for group in groups_of(case):
        keys, rows = converter.keys(group)
        events = converter.convert(group)
        assert (keys is None) == (events.keys is None)
        assert keys is None or keys.equals(events.keys)
        assert (rows is None) == (events.rows is None)
        assert rows is None or rows.tolist() == events.rows.tolist()


def test_several_producers_are_refused_without_spark() -> None:
    nowhere: Any = SimpleNamespace(bootstrap="127.0.0.1:1")
    with pytest.raises(ValueError, match="set runs_on: spark"):
        sink_of(nowhere, "a", 2, runs_on="process")


def test_jobs_sent_to_executors_have_references_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "canary-3f9d")
    given = {
        "type": "kafka",
        "bootstrap_servers": "127.0.0.1:1",
        "options": {"sasl.password": "${env:CANARY}"},
    }
    config = KafkaSinkConfig.model_validate(given)
    account = account_of(config, "shop")
    sent = pickle.dumps(account)
    assert b"canary-3f9d" not in sent
    assert "canary-3f9d" not in repr(account)
    assert account.admin()["sasl.password"] == "canary-3f9d"  # resolved where it is used
