"""What converters return is in the topic unchanged: keys, values, tombstones, headers."""

from __future__ import annotations

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.contract import Converter
from tailrace.converters.debezium import JsonConverter
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.converters.customers import groups_of
from tests.support.kafka.once import writer
from tests.support.kafka.reading import QUIET, read_topic

FORMS: dict[str, Converter] = {
    "json": JsonConverter(),
    "json with schemas": JsonConverter(schemas_enable=True),
    "without tombstones": JsonConverter(tombstones_on_delete=False),
    "cloudevents": CloudEventsConverter(),
}
CASES = ("create", "update_full", "delete", "key_change", "message")


def test_each_form_is_read_as_it_was_written(kafka: EmbeddedKafka, topic_name: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, **QUIET})
    topics = [f"{topic_name}-{number}" for number in range(len(FORMS))]
    for made in admin.create_topics([NewTopic(topic, 1, 1) for topic in topics]).values():
        made.result(60)
    out = writer(kafka.bootstrap, topic_name)
    out.open()
    expected: dict[str, list[tuple[object, ...]]] = {topic: [] for topic in topics}
    for topic, converter in zip(topics, FORMS.values(), strict=True):
        for group in (group for case in CASES for group in groups_of(case)):
            events = converter.convert(group)
            out.send(topic, events)
            keys = events.keys.to_pylist() if events.keys is not None else [None] * len(events)
            headers = events.headers.to_pylist() if events.headers is not None else [{}] * len(events)
            for key, value, told in zip(keys, events.values.to_pylist(), headers, strict=True):
                kept = {name: text for name, text in told.items() if text is not None}
                expected[topic].append((key, value, kept))
    out.commit({"number": 1})
    out.close()
    for topic in topics:
        found = [
            (one.key and one.key.decode(), one.value and one.value.decode(), one.headers)
            for one in read_topic(kafka.bootstrap, topic)
        ]
        assert found == expected[topic]
    assert [value is None for _, value, _ in expected[topics[0]]].count(True) == 2
    assert not any(value is None for _, value, _ in expected[topics[2]])
