"""CloudEvents beyond the golden files, Arrow and Python objects; converters by name."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.contract import Converter
from tailrace.converters.native import ArrowConverter, PythonConverter
from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tests.support.converters.customers import ANNE, FACTS, as_columns, groups_of


def test_cloudevents_have_debeziums_attributes() -> None:
    [group] = groups_of("create")
    event = json.loads(CloudEventsConverter().convert(group).values[0].as_py())
    assert event["id"] == 'name:PostgreSQL_server;lsn:100;txId:555;sequence:["24023119","100"]'
    assert event["source"] == "/debezium/postgresql/PostgreSQL_server"
    assert event["type"] == "io.debezium.connector.postgresql.DataChangeEvent"
    assert event["time"] == "2019-05-28T08:58:24.863Z"
    assert (event["iodebeziumop"], event["iodebeziumtsms"], event["iodebeziumtxId"]) == (
        "c",
        "1559033904863",
        "555",
    )
    assert event["data"] == {"before": None, "after": dict(zip(["id", "first_name", "last_name", "email"],
                                                               [1, *ANNE[1:]], strict=True))}  # fmt: skip
    assert all(name.isascii() and name.isalnum() for name in event)


def test_cloudevents_have_the_attributes_of_the_source() -> None:
    [group] = groups_of("create")
    group = replace(group, origin=replace(FACTS, connector="vitess"))
    event = json.loads(CloudEventsConverter().convert(group).values[0].as_py())
    assert event["source"] == "/debezium/vitess/PostgreSQL_server"
    assert event["type"] == "io.debezium.connector.vitess.DataChangeEvent"


def source_of(case: str) -> pa.Array:
    return groups_of(case)[0].column("source")


def test_events_of_an_outbox_carry_their_value_as_data() -> None:
    value = pa.array([{"order": 7}])
    columns = pa.record_batch({"key": ["a"], "value": value, "source": source_of("create")})
    group = Group.of_columns("orders", np.arange(1), columns, origin=FACTS)
    found = CloudEventsConverter().convert(group)
    event = json.loads(found.values[0].as_py())
    assert (found.keys.to_pylist(), event["data"], event["iodebeziumtable"]) == (
        ['"a"'],
        {"order": 7},
        "customers",
    )


def test_other_sources_have_no_cloud_events() -> None:
    group = Group.of_columns(
        "t", np.arange(1), pa.record_batch({"op": ["c"], "source": pa.array([{"file": "x"}])})
    )
    with pytest.raises(TailraceError) as caught:
        CloudEventsConverter().convert(group)
    assert caught.value.kind is Kind.CONFIG_INVALID


def test_arrow_events_have_the_columns_unchanged() -> None:
    [group] = groups_of("update_full")
    found = ArrowConverter().convert(group)
    assert found.keys.to_pylist() == [{"id": 1}]
    assert found.values[0].as_py()["after"]["first_name"] == "Anne Marie"
    plain = Group.of_columns("t", np.arange(1), pa.record_batch({"value": ["x"]}))
    assert ArrowConverter().convert(plain).values.to_pylist() == ["x"]
    assert ArrowConverter().convert(plain).keys is None


def test_python_objects_are_created_on_access() -> None:
    [group] = groups_of("update_full")
    found = PythonConverter().convert(group)
    assert "columns" not in vars(group)
    assert found.keys is not None
    assert list(found.keys) == [{"id": 1}]
    assert found.values[-1]["op"] == "u"
    assert found.values[0]["before"]["first_name"] == "Anne"
    assert len(found.values[:1]) == len(found) == 1


@pytest.mark.parametrize("case", ["create", "message", "key_change"])
def test_transformed_groups_give_the_same_events(case: str) -> None:
    for converter in (ArrowConverter(), PythonConverter()):
        for group in groups_of(case):
            assert list(converter.convert(group).values) == list(converter.convert(as_columns(group)).values)


def announced() -> dict[str, Any]:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    found: dict[str, Any] = project["entry-points"]["tailrace.converters"]
    return found


@pytest.mark.parametrize("name", announced())
def test_each_entry_point_is_a_converter_that_needs_at_most_a_registry(name: str) -> None:
    options: dict[str, Any] = (
        {"registry_url": "http://127.0.0.1:1"} if name in ("avro", "json_schema") else {}
    )
    made = EntryPoint(name, announced()[name], "tailrace.converters").load()(**options)
    assert isinstance(made, Converter)
    with pytest.raises(TailraceError, match="nonsense"):
        type(made)(**{**options, "nonsense": 1})
    made.close()
