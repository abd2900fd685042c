"""One read of the client: messages by partition, bounded in number and bytes."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from confluent_kafka import Message

from tailrace.join import messages
from tailrace.join.messages import MessageReader, Place

VALUE = b"v" * 1000


class _Client:
    """In place of the client: it has a list of messages."""

    def __init__(self, there: list[Message]) -> None:
        self._there = deque(there)

    def poll(self, timeout_s: float) -> Message | None:
        return self._there.popleft() if self._there else None

    def consume(self, count: int, timeout_s: float) -> list[Message]:
        return [self._there.popleft() for _ in range(min(count, len(self._there)))]

    def incremental_assign(self, partitions: Any) -> None: ...


def _message(place: Place, offset: int, value: bytes | None = VALUE, **more: Any) -> Message:
    topic, number = place
    return Message(
        topic=topic, partition=number, offset=offset, key=b"k", value=value, timestamp=(1, 7), **more
    )


def _reader(monkeypatch: pytest.MonkeyPatch, there: list[Message], **more: Any) -> MessageReader:
    monkeypatch.setattr(messages, "made", lambda _made, _settings: _Client(there))
    return MessageReader({"group.id": "g"}, {}, **more)


def test_a_read_ends_when_it_has_enough_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_READ_BYTES_MAX", 100 * len(VALUE))
    monkeypatch.setattr(messages, "_TAKEN_MAX", 10)
    place = ("data", 0)
    reader = _reader(monkeypatch, [_message(place, offset) for offset in range(500)])
    reader.begin({place: 0})
    counts = []
    while found := reader.read(0).messages:
        counts.append(len(found[place]))
        assert reader.position(place) == sum(counts)
    assert sum(counts) == 500
    # At least so much at a time, and at most one answer of the client beyond it.
    assert len(counts) >= 5
    assert all(80 <= count <= 110 for count in counts[:-1])


def test_headers_count_as_bytes_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_READ_BYTES_MAX", 100 * len(VALUE))
    monkeypatch.setattr(messages, "_TAKEN_MAX", 10)
    place = ("data", 0)
    there = [_message(place, offset, None, headers=[("h", VALUE)]) for offset in range(500)]
    reader = _reader(monkeypatch, there, with_headers=True)
    reader.begin({place: 0})
    counts = []
    while found := reader.read(0).messages:
        headers = found[place].column("headers").to_pylist()
        assert headers == [[{"key": "h", "value": VALUE}]] * len(headers)
        assert found[place].column("value").null_count == len(headers)
        counts.append(len(headers))
    assert sum(counts) == 500
    assert len(counts) >= 5
    assert all(80 <= count <= 110 for count in counts[:-1])


def test_messages_of_several_partitions_keep_their_order_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Place] = [("data", 0), ("data", 1), ("other", 1)]
    there = [_message(places[number // 7 % 3], number) for number in range(200)]
    reader = _reader(monkeypatch, there)
    found = reader.read(0).messages
    for place in places:
        wanted = [each.offset() for each in there if (each.topic(), each.partition()) == place]
        assert found[place].column("offset").to_pylist() == wanted


@pytest.mark.parametrize("with_times", [True, False])
def test_timestamps_are_read_only_on_request(monkeypatch: pytest.MonkeyPatch, with_times: bool) -> None:
    reader = _reader(monkeypatch, [_message(("data", 0), 0)], with_times=with_times)
    (found,) = reader.read(0).messages.values()
    assert found.column("timestamp_ms").to_pylist() == ([7] if with_times else [None])
