"""Events of a source with shards have the form of Debezium's Vitess connector.

That form is taken from its code (VitessSourceInfoStructMaker, Vgtid, VitessOrderedTransactionStructMaker,
SourceInfoTest), as its records are not at hand.
"""

from __future__ import annotations

import json
import pickle
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pytest

from tailrace.converters.avro.encoder import encoded
from tailrace.converters.avro.schema import ADJUSTMENTS, avro_schema
from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.debezium import JsonConverter
from tailrace.decode.changes import decode_block
from tailrace.decode.json.debezium import SourceInfo
from tailrace.records.group import Group
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.transcoder import Transcoder
from tests.support.converters.avro import decoded
from tests.support.converters.customers import as_columns
from tests.support.converters.fitting import require_fit
from tests.support.vitess import messages as ms

ORIGIN = SourceInfo("shop_server", ms.KEYSPACE, "3.6.0", "vitess")
COLUMNS = [ms.ID, ms.WHAT]
OTHER = "80-"
MS = ms.TIME_S * 1000


def vgtid(gtid: str, shard: str = ms.SHARD) -> str:
    return f'[{{"keyspace":"shop","shard":"{shard}","gtid":"{gtid}","table_p_ks":[]}}]'


def frames_of(*responses: bytes, shard: str = ms.SHARD, state: dict[str, Any] | None = None) -> Any:
    tables = LogTables({}, lambda *_: (None, ""))
    return Transcoder(ms.KEYSPACE, shard, tables, state).transcode(list(responses), 1000).frames


def groups_of(frames: Any) -> list[Group]:
    return [
        Group.of_changes(
            f"shop_server.{changes.relation.qualified_name}", np.arange(changes.count), changes, ORIGIN
        )
        for changes in decode_block(frames, 0, None, [])
        if changes.relation is not None
    ]


def documents(group: Group, **options: Any) -> list[Any]:
    values = JsonConverter(**options).convert(group).values.to_pylist()
    return [None if value is None else json.loads(value) for value in values]


def two_transactions() -> Any:
    return frames_of(
        ms.transaction(
            ms.described("t", COLUMNS),
            ms.rows("t", [ms.change(after=[b"1", b"a"]), ms.change(after=[b"2", b"b"])]),
            ms.described("u", COLUMNS),
            ms.rows("u", [ms.change(after=[b"7", b"x"])]),
            gtid="MySQL56/a-1:1-5,b-2:7:9-300",
        ),
        ms.transaction(ms.rows("t", [ms.change(before=[b"2", b"b"])]), gtid="MySQL56/a-1:1-6,b-2:7:9-300"),
        state={"epoch": 3, "copy": {"keys": {"gtid": "x", "epoch": "y"}, "done": []}},
    )


FORMS = [
    pytest.param(lambda group: group, id="wire"),
    pytest.param(as_columns, id="columns"),
    pytest.param(lambda group: pickle.loads(pickle.dumps(group)), id="sent"),  # noqa: S301
]


@pytest.mark.parametrize("form", FORMS)
def test_source_equals_that_of_debeziums_connector(form: Any) -> None:
    of_t, _ = groups_of(two_transactions())
    first, second, deleted, tombstone = documents(form(of_t))
    assert tombstone is None
    assert list(first["source"].items()) == [
        ("version", "3.6.0"),
        ("connector", "vitess"),
        ("name", "shop_server"),
        ("ts_ms", MS),
        ("snapshot", "false"),
        ("db", ""),
        ("sequence", None),
        ("ts_us", MS * 1000),
        ("ts_ns", MS * 1_000_000),
        ("keyspace", "shop"),
        ("table", "t"),
        ("shard", "-80"),
        ("vgtid", vgtid("MySQL56/a-1:1-5,b-2:7:9-300")),
    ]
    assert second["source"] == first["source"]
    assert deleted["source"]["vgtid"] == vgtid("MySQL56/a-1:1-6,b-2:7:9-300")


@pytest.mark.parametrize("form", FORMS)
def test_a_transaction_has_its_shards_epoch_and_a_rank_that_rises(form: Any) -> None:
    of_t, of_u = groups_of(two_transactions())
    blocks = [
        document["transaction"]
        for group in (of_t, of_u)
        for document in documents(form(group), provide_transaction_metadata=True, tombstones_on_delete=False)
    ]
    first = vgtid("MySQL56/a-1:1-5,b-2:7:9-300")
    assert [list(block) for block in blocks] == [
        ["id", "total_order", "data_collection_order", "transaction_epoch", "transaction_rank"]
    ] * 4
    rows = [tuple(block.values()) for block in blocks]
    # Kafka Connect's decimals are base64: 305 = 0x0131, 306 = 0x0132.
    assert rows == [
        (first, 1, 1, 3, "ATE="),
        (first, 2, 2, 3, "ATE="),
        (vgtid("MySQL56/a-1:1-6,b-2:7:9-300"), 1, 1, 3, "ATI="),
        (first, 3, 1, 3, "ATE="),
    ]


def test_the_schema_equals_debeziums_and_fits_the_value() -> None:
    for group in groups_of(two_transactions()):
        for form in (group, as_columns(group)):
            found = JsonConverter(schemas_enable=True, provide_transaction_metadata=True).convert(form)
            for text in found.values.to_pylist():
                if text is not None:
                    document = json.loads(text)
                    require_fit(document["schema"], document["payload"])
    fields = {field["field"]: field for field in document["schema"]["fields"]}
    source, block = fields["source"], fields["transaction"]
    assert (source["name"], source["version"]) == ("io.debezium.connector.vitess.Source", 1)
    optional = {"snapshot", "sequence", "ts_us", "ts_ns"}
    assert [(field["field"], field["type"], field["optional"]) for field in source["fields"]] == [
        (name, "int64" if name.startswith("ts_") else "string", name in optional)
        for name in (
            "version", "connector", "name", "ts_ms", "snapshot", "db", "sequence", "ts_us", "ts_ns",
            "keyspace", "table", "shard", "vgtid",
        )
    ]  # fmt: skip
    assert (block["name"], block["version"], block["optional"]) == ("event.block", 1, True)
    assert block["fields"][-1] == {
        "type": "bytes",
        "optional": False,
        "name": "org.apache.kafka.connect.data.Decimal",
        "version": 1,
        "parameters": {"scale": "0"},
        "field": "transaction_rank",
    }
    assert block["fields"][-2] == {"type": "int64", "optional": False, "field": "transaction_epoch"}


@pytest.mark.parametrize("form", FORMS)
def test_avro_means_the_same_as_json(form: Any) -> None:
    group = form(groups_of(two_transactions())[0])
    converter = JsonConverter(provide_transaction_metadata=True)
    events, schemas = converter.columns(group, with_keys=False)
    document = schemas.value.document()
    avro = fastavro.parse_schema(avro_schema(document, ADJUSTMENTS["avro"], logical_types=True))
    values = [
        None if event.as_py() is None else decoded(event.as_py(), avro)
        for event in encoded(events.values, document, 1)
    ]
    expected = documents(group, provide_transaction_metadata=True)
    assert [None if value is None else value["source"] for value in values] == [
        None if value is None else value["source"] for value in expected
    ]
    ranks = [value and value["transaction"].pop("transaction_rank") for value in values]
    assert ranks == [Decimal(305), Decimal(305), Decimal(306), None]
    for value in expected:
        if value is not None:
            value["transaction"].pop("transaction_rank")
    assert [value and value["transaction"] for value in values] == [
        value and value["transaction"] for value in expected
    ]


def test_rows_of_a_copy_have_its_position_but_no_transaction() -> None:
    copied = ms.copied(ms.described("t", COLUMNS), ms.rows("t", [ms.change(after=[b"1", b"a"])], time_s=0))
    [group] = groups_of(frames_of(copied))
    for form in (group, as_columns(group)):
        [read] = documents(form, provide_transaction_metadata=True)
        assert (read["op"], read["transaction"], read["source"]["snapshot"]) == ("r", None, "true")
        assert (read["source"]["shard"], read["source"]["vgtid"]) == ("-80", vgtid("MySQL56/a:1-5"))


def test_json_lines_have_the_shard_and_position_too() -> None:
    [of_t, _] = decode_block(two_transactions(), 0, None, [])
    lines = [json.loads(line) for line in of_t.json_lines("0", ORIGIN).to_pylist()]
    assert [line["source"]["vgtid"] for line in lines] == [
        vgtid("MySQL56/a-1:1-5,b-2:7:9-300"),
        vgtid("MySQL56/a-1:1-5,b-2:7:9-300"),
        vgtid("MySQL56/a-1:1-6,b-2:7:9-300"),
    ]
    assert list(lines[0]["source"])[-5:] == ["keyspace", "table", "shard", "vgtid", "schema_version"]
    assert Decimal(lines[0]["position"]["commit_lsn"]) == 1000


def test_names_with_quotes_are_valid_json() -> None:
    odd = 'a"\\é'
    tables = LogTables({}, lambda *_: (None, ""))
    made = Transcoder(ms.KEYSPACE, odd, tables).transcode(
        [
            ms.transaction(
                ms.described("t", COLUMNS, odd), ms.rows("t", [ms.change(after=[b"1", b"a"])], odd), shard=odd
            )
        ],
        1,
    )
    [group] = groups_of(made.frames)
    for form in (group, as_columns(group)):
        [event] = documents(form)
        assert event["source"]["shard"] == odd
        assert json.loads(event["source"]["vgtid"])[0]["shard"] == odd


def test_cloudevents_have_the_vgtid_in_their_id_and_their_source_in_attributes() -> None:
    [of_t, _] = groups_of(two_transactions())
    first = vgtid("MySQL56/a-1:1-5,b-2:7:9-300")
    for form in (of_t, as_columns(of_t)):
        found = CloudEventsConverter(provide_transaction_metadata=True, schemas_enable=True).convert(form)
        event = json.loads(found.values.to_pylist()[0])
        data = event.pop("data")
        assert event == {
            "id": f"name:shop_server;vgtid:{first}",
            "source": "/debezium/vitess/shop_server",
            "specversion": "1.0",
            "type": "io.debezium.connector.vitess.DataChangeEvent",
            "time": "2023-11-14T22:13:20.000Z",
            "datacontenttype": "application/json",
            "iodebeziumop": "c",
            "iodebeziumversion": "3.6.0",
            "iodebeziumconnector": "vitess",
            "iodebeziumname": "shop_server",
            "iodebeziumtsms": str(MS),
            "iodebeziumsnapshot": "false",
            "iodebeziumdb": "",
            "iodebeziumsequence": None,
            "iodebeziumtsus": str(MS * 1000),
            "iodebeziumtsns": str(MS * 1_000_000),
            "iodebeziumkeyspace": "shop",
            "iodebeziumtable": "t",
            "iodebeziumshard": "-80",
            "iodebeziumvgtid": first,
            "iodebeziumtxid": first,
            "iodebeziumtxtotalorder": "1",
            "iodebeziumtxdatacollectionorder": "1",
        }
        require_fit(data["schema"], data["payload"])
        assert data["schema"]["name"] == "io.debezium.connector.vitess.Data"
