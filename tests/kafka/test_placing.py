"""The topic, partition and size of records, and the counts of transactions: without a broker."""

from __future__ import annotations

import io
import json
import math
from collections import Counter, defaultdict
from dataclasses import replace
from decimal import Decimal

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.kafka import KafkaSinkConfig, TopicRoute
from tailrace.converters.avro.encoder import encoded
from tailrace.converters.avro.schema import ADJUSTMENTS, avro_schema
from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.debezium import JsonConverter
from tailrace.converters.headers import header_texts, with_json
from tailrace.decode.kernel import NONE
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.settings import BATCH_BYTES
from tailrace.kafka.client.topics import Topics
from tailrace.kafka.events import side_records
from tailrace.kafka.events.boundaries import Boundaries
from tailrace.kafka.events.dead_letters import KEY_BYTES_MAX, OVERHEAD, largest, letters, sizes
from tailrace.kafka.events.side_records import Heartbeats, ShapeChange
from tailrace.kafka.producer.partitioner import BY_KEY, by_transaction, murmur2, partition_of
from tailrace.records.events import Converted
from tailrace.sinks.kafka.sink import account_of
from tests.support.converters.customers import FACTS, as_columns, groups_of

#: From Kafka's own tests: org.apache.kafka.common.utils.UtilsTest, testMurmur2; as Java's signed numbers.
HASHES = {
    b"": 275646681,
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
    bytes([12, 42, 56, 24, 109, 111]): 274204207,
}


@pytest.mark.parametrize("key", HASHES)
def test_keys_are_hashed_as_in_java(key: bytes) -> None:
    assert murmur2(key) == HASHES[key] & 0xFFFFFFFF
    assert partition_of(key, 12) == (HASHES[key] & 0x7FFFFFFF) % 12


def test_a_transactions_records_share_a_partition_and_others_are_placed_by_key() -> None:
    found = by_transaction(np.array([7, 7, NONE, 123456, 7]), 12)
    of_7, of_other = partition_of(b"7", 12), partition_of(b"123456", 12)
    assert found.tolist() == [of_7, of_7, BY_KEY, of_other, of_7]
    assert by_transaction(np.empty(0, np.int64), 3).tolist() == []


def test_sizes_count_key_value_and_headers() -> None:
    headers = pa.array([{"a": "xyz", "b": None}, {"a": None, "b": None}])
    events = Converted(pa.array(["key", None]), pa.array(["värde", None]), headers)
    assert (sizes(events) - OVERHEAD).tolist() == [3 + 6 + 1 + 3 + 10, 0]
    assert largest(events) >= sizes(events).max()
    few = events.take(np.array([1]))
    assert (len(few), few.rows.tolist()) == (1, [1])
    assert sizes(Converted([b"k"], [b"value"])).tolist() == [6 + OVERHEAD]


def test_a_header_of_several_fields_is_json_and_counted_as_such() -> None:
    row = {"n": 1, "t": 'a"\x01ä' * 100, "b": b"\x00\xff", "l": [1, None], "f": 1.5, "x": None}
    values = pa.array([row, None, row | {"t": None, "f": float("nan")}])
    texts = with_json(pa.StructArray.from_arrays([values, values.field("n")], ["of", "n"])).field("of")
    assert [text and json.loads(text) for text in texts.to_pylist()] == [
        row | {"b": "AP8="}, None, row | {"b": "AP8=", "t": None, "f": "NaN"},
    ]  # fmt: skip
    events = Converted(None, [b"", b"", b""], pa.StructArray.from_arrays([texts], ["of"]))
    lengths = [len(text) + len("of") + 10 for text in texts.drop_null().to_pylist()]
    assert (sizes(events) - OVERHEAD).tolist() == [lengths[0], 0, lengths[1]]
    assert largest(events) >= sizes(events).max()


def test_a_header_has_postgresqls_text_of_its_value() -> None:
    utc = pa.timestamp("us", tz="UTC")
    found = {
        "infinity": pa.array([2**63 - 1], utc),
        "2024-02-29 12:00:00+00": pa.array([1_709_208_000_000_000], utc),
        "0044-03-15 BC": pa.array([-735_160], pa.date32()),
        "0.0000000001": pa.array([Decimal("1e-10")], pa.decimal128(38, 10)),
        "NaN": pa.array([math.nan]),
        "1e+22": pa.array([1e22]),
        "true": pa.array([True]),
        "-7": pa.array([-7]),
    }
    assert {text: header_texts(values).to_pylist() for text, values in found.items()} == {
        text: [text] for text in found
    }


def test_a_dead_letter_has_table_position_and_size() -> None:
    [group] = groups_of("two_in_one")
    assert group.wire is not None
    events = JsonConverter().convert(group)
    rows = events.rows
    assert rows is not None
    found = letters(events, rows, group.wire, "topic", 100)
    first = found.headers[0].as_py()
    assert first | {"tailrace.log_offset": "", "tailrace.size": ""} == {
        "tailrace.error": "sink_record_too_large", "tailrace.topic": "topic",
        "tailrace.table": "public.customers", "tailrace.op": "c", "tailrace.log_offset": "",
        "tailrace.commit_lsn": "24023119", "tailrace.ordinal": "0", "tailrace.size": "",
        "tailrace.limit": "100", "tailrace.key_size": "8",
    }  # fmt: skip
    assert int(first["tailrace.log_offset"]) == group.wire.log_offset[0]
    assert int(first["tailrace.size"]) == len(events.values[0].as_py().encode()) + 8
    assert found.keys[0].as_py() == b'{"id":1}'
    assert set(found.values.to_pylist()) == {None}
    long = Converted(pa.array(["k" * (KEY_BYTES_MAX + 1)]), pa.array(["v"]))
    assert letters(long, rows[:1], group.wire, "t", 9).keys.to_pylist() == [None]


_PARTS = st.lists(
    st.tuples(st.integers(1, 5), st.sampled_from("abc"), st.lists(st.integers(1, 3), min_size=1, max_size=4)),
    max_size=12,
)


@given(_PARTS)
def test_counts_of_parts_are_added_up_by_transaction(
    parts: list[tuple[int, str, list[int]]],
) -> None:
    boundaries = Boundaries()
    expected: dict[int, Counter[str]] = defaultdict(Counter)
    firsts: dict[int, int] = {}
    for number, table, counts in parts:
        lsn = [1000 * number + 100 * k for k in range(len(counts))]
        for at, count in zip(lsn, counts, strict=True):
            expected[number][table] += count
            firsts[number] = min(firsts.get(number, at), at)
        same = np.full(len(counts), number, np.int64)
        boundaries.note(
            table, same * 5000, same + 700, same * 1_000_000, np.array(lsn), np.array(counts, np.int64)
        )
    ended = boundaries.ended()
    assert ended.xid.tolist() == [number + 700 for number in sorted(expected)]
    assert ended.commit_lsn.tolist() == [number * 5000 for number in sorted(expected)]
    assert ended.first_lsn.tolist() == [firsts[number] for number in sorted(expected)]
    assert ended.events.tolist() == [expected[number].total() for number in sorted(expected)]
    found = [
        {one["data_collection"]: one["event_count"] for one in tables} for tables in ended.tables.to_pylist()
    ]
    assert found == [dict(expected[number]) for number in sorted(expected)]
    assert len(boundaries.ended()) == 0


def test_changes_outside_of_transactions_are_not_counted() -> None:
    boundaries = Boundaries()
    numbers = np.array([5, 9])
    boundaries.note("", numbers, np.array([NONE, 3]), numbers, numbers, numbers)
    boundaries.note("", numbers, np.array([NONE, NONE]), numbers, numbers, numbers)
    assert boundaries.ended().xid.tolist() == [3]


def test_boundaries_and_heartbeats_have_debeziums_form_and_schemas() -> None:
    boundaries = Boundaries()
    one = np.array([24_023_119])
    boundaries.note("public.a", one, np.array([571]), one * 1000, one - 9, np.array([2]))
    group = side_records.transactions("p.transaction", boundaries.ended(), FACTS)
    for converter in (JsonConverter(), CloudEventsConverter()):
        events = converter.convert(group)
        assert [json.loads(key) for key in events.keys.to_pylist()] == [
            {"id": "571:24023110"}, {"id": "571:24023119"},
        ]  # fmt: skip
        assert [list(json.loads(value).items()) for value in events.values.to_pylist()] == [
            [("status", "BEGIN"), ("id", "571:24023110"), ("event_count", None), ("data_collections", None),
             ("ts_ms", 24023119)],
            [("status", "END"), ("id", "571:24023119"), ("event_count", 2),
             ("data_collections", [{"data_collection": "public.a", "event_count": 2}]), ("ts_ms", 24023119)],
        ]  # fmt: skip
    schema = json.loads(JsonConverter(schemas_enable=True).convert(group).values[0].as_py())["schema"]
    assert (schema["name"], schema["version"]) == (
        "io.debezium.connector.common.TransactionMetadataValue", 1,
    )  # fmt: skip
    assert [field["optional"] for field in schema["fields"]] == [False, False, True, True, False]
    items = schema["fields"][3]["items"]
    assert (items["name"], items["optional"]) == ("event.collection", True)
    beat = JsonConverter(schemas_enable=True).convert(side_records.heartbeat("h", 5, FACTS))
    assert json.loads(beat.values[0].as_py())["payload"] == {"ts_ms": 5}
    key = json.loads(beat.keys[0].as_py())
    assert (key["payload"], key["schema"]["name"]) == (
        {"serverName": "PostgreSQL_server"}, "io.debezium.connector.common.ServerNameKey",
    )  # fmt: skip


def test_heartbeats_are_due_an_interval_after_the_last_one() -> None:
    now = [100.0]
    beats = Heartbeats(5.0, lambda: now[0])
    assert not beats.is_due
    now[0] += 5
    assert beats.is_due
    beats.sent()
    assert not beats.is_due
    now[0] += 1000
    assert not Heartbeats(0, lambda: now[0]).is_due


def test_the_numbering_of_a_transaction_continues_over_its_parts() -> None:
    [group] = groups_of("two_in_one")
    converter = JsonConverter(provide_transaction_metadata=True, tombstones_on_delete=False)
    whole = converter.convert(group).values.to_pylist()
    for same in (group, as_columns(group)):
        parts = [replace(same.slice(at, at + 1), orders=np.array([at + 1])) for at in range(3)]
        orders = [
            json.loads(value)["transaction"]["data_collection_order"]
            for part in parts
            for value in converter.convert(part).values.to_pylist()
        ]
        assert orders == [1, 2, 3]
    assert [json.loads(value)["transaction"]["data_collection_order"] for value in whole] == [1, 2, 3]


def test_names_of_topics_follow_tables_or_routes() -> None:
    routes = [{"tables": ["sales.*"], "topic": "{prefix}.all.{schema}"}]
    config = {"type": "kafka", "bootstrap_servers": "b:1", "routes": routes}
    topics = Topics(KafkaSinkConfig.model_validate(config), {}, "shop", 1)
    assert topics.of_table("public", "größe") == "shop.public.gr__e"
    assert {topics.of_table("sales", name) for name in ("a", "b")} == {"shop.all.sales"}
    assert topics.beside("message") == "shop.message"
    assert topics.of_table("a.b", "c") == "shop.a.b.c"
    for refused in (("public", "grö?e"), ("public", "x" * 250), ("a", "b.c")):
        with pytest.raises(TailraceError) as caught:
            topics.of_table(*refused)
        assert caught.value.kind is Kind.SINK_MISCONFIGURED
    with pytest.raises(ValueError, match="placeholder"):
        TopicRoute(tables=("a.b",), topic="{tabel}")


def test_the_topic_of_dead_letters_takes_no_changes_of_tables() -> None:
    config = {"type": "kafka", "bootstrap_servers": "b:1", "dead_letter_topic": "shop.public.or ders"}
    topics = Topics(KafkaSinkConfig.model_validate(config), {}, "shop", 1)
    for use in (topics.require, topics.check):
        with pytest.raises(TailraceError, match="would pass for the delete of a row") as caught:
            use(topics.of_table("public", "or_ders"), "public", "or_ders")
        assert caught.value.kind is Kind.SINK_MISCONFIGURED


def test_batches_of_the_client_fit_the_smallest_topic_that_is_created() -> None:
    sink = {"type": "kafka", "bootstrap_servers": "b:1"}
    rules = [{"tables": ["a.*"], "settings": {"max.message.bytes": "50000"}}, {"tables": ["b.*"]}]
    limited = KafkaSinkConfig.model_validate({**sink, "topics": rules})
    assert account_of(limited, "shop").batch_bytes == 50_000
    assert account_of(KafkaSinkConfig.model_validate(sink), "shop").batch_bytes == BATCH_BYTES
    for objects in ("arrow", "python"):
        with pytest.raises(ValueError, match="not bytes"):
            KafkaSinkConfig.model_validate({**sink, "converter": {"type": objects}})
    told = {**sink, "provide_transaction_metadata": True}
    assert KafkaSinkConfig.model_validate(told).converter_options() == {"provide_transaction_metadata": True}


def test_a_schema_change_event_has_columns_and_key_in_every_form() -> None:
    [group] = groups_of("create")
    assert group.relation is not None
    made = side_records.shape("shop", ShapeChange("ALTER", group.relation, 24), FACTS)
    for converter in (JsonConverter(), CloudEventsConverter()):
        events = converter.convert(made)
        value = json.loads(events.values[0].as_py())
        assert {name: value[name] for name in ("type", "lsn", "tableName", "replicaIdentity")} == {
            "type": "ALTER", "lsn": 24, "tableName": "customers", "replicaIdentity": "default",
        }  # fmt: skip
        assert value["columns"][0] == {
            "name": "id", "position": 1, "typeOid": 23, "typeModifier": -1, "typeName": "int4",
            "optional": False, "identity": True,
        }  # fmt: skip
    events, _ = JsonConverter().payloads(made)
    columns, schemas = JsonConverter().columns(made, with_keys=True)
    document = schemas.value.document()
    [found] = encoded(columns.values, document, 1).to_pylist()
    parsed = fastavro.parse_schema(avro_schema(document, ADJUSTMENTS["avro"], logical_types=False))
    assert fastavro.schemaless_reader(io.BytesIO(found[5:]), parsed) == json.loads(events.values[0].as_py())
    assert document["name"] == "tailrace.SchemaChange"
