"""Events: a batch's converted records, in the source's order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch
from tailrace.records.events import Converted, Events
from tailrace.records.group import Group


def group(topic: str, *index: int) -> Group:
    columns = pa.record_batch({"op": ["c"] * len(index)})
    return Group.of_columns(topic, np.array(index, np.int64), columns)


def events(*converted: tuple[Group, Converted]) -> Events:
    groups = tuple(group for group, _ in converted)
    return Events(Batch({}, groups, 9, [{"at": n} for n in range(9)]), tuple(made for _, made in converted))


def test_there_is_an_event_for_each_record_in_the_source_order() -> None:
    found = events(
        (group("a", 0, 3), Converted(pa.array(["k0", None]), pa.array(["0", "3"]))),
        (group("b", 1, 2), Converted(None, ["1", "2"])),
    )
    assert [(event.topic, event.key, event.value, event.record.place) for event in found] == [
        ("a", "k0", "0", 0), ("b", None, "1", 1), ("b", None, "2", 2), ("a", None, "3", 3),
    ]  # fmt: skip
    assert found.values.to_pylist() == ["0", "1", "2", "3"]
    assert found.keys.to_pylist() == ["k0", None, None, None]
    assert found.topics.to_pylist() == ["a", "b", "b", "a"]


def test_structs_of_several_topics_have_the_fields_of_all() -> None:
    found = events(
        (group("a", 0, 2), Converted(pa.array([{"id": 1}] * 2), pa.array([{"a": 1, "b": {"c": 2}}] * 2))),
        (group("b", 1), Converted(pa.array([{"id": 2**40, "x": "k"}]), pa.array([{"a": 5, "b": {"d": 6}}]))),
    )
    assert found.keys.to_pylist() == [{"id": 1, "x": None}, {"id": 2**40, "x": "k"}, {"id": 1, "x": None}]
    first = {"a": 1, "b": {"c": 2, "d": None}}
    assert found.values.to_pylist() == [first, {"a": 5, "b": {"c": None, "d": 6}}, first]


def test_values_without_a_common_type_are_refused_without_showing_any() -> None:
    for other in (pa.array([{"a": 5}]), [[{"a": 5}, "secret"]]):
        found = events(
            (group("a", 0), Converted(None, pa.array(["secret"]))), (group("b", 1), Converted(None, other))
        )
        with pytest.raises(TailraceError) as caught:
            found.values  # noqa: B018
        assert caught.value.kind is Kind.CONVERSION_FAILED
        assert "secret" not in str(caught.value)
        assert found[0].value == "secret"


def test_a_record_may_become_several_events_or_none() -> None:
    headers = pa.array([None, {"old": "x"}, None, None])
    several = Converted(pa.array(["x", "x", "y", "z"]), pa.array(["d", None, "c", "u"]), headers,
                        np.array([0, 0, 0, 2], np.int64))  # fmt: skip
    found = events((group("a", 1, 2, 5), several), (group("b", 0, 4), Converted(None, ["0", "4"])))
    assert len(found) == 6
    assert [(event.value, event.record.place) for event in found] == [
        ("0", 0), ("d", 1), (None, 1), ("c", 1), ("4", 4), ("u", 5),
    ]  # fmt: skip
    assert found[2].headers == {"old": "x"}
    assert found[-1].record.row == 2
    assert found.keys.to_pylist() == [None, "x", "x", "y", None, "z"]
    assert found.topics.to_pylist() == ["b", "a", "a", "a", "b", "a"]


def test_a_topics_events_are_merged_from_its_groups_in_the_source_order() -> None:
    marked = pa.array([{"n": 1, "mark": "x"}, {"n": 3, "mark": None}])
    found = events(
        (group("a", 0, 3), Converted(pa.array(["k0", "k3"]), pa.array(["0", None]), marked)),
        (group("b", 1), Converted(None, pa.array(["1"]))),
        (group("a", 2, 5), Converted(None, [b"2", b"5"], pa.array([{"n": "two"}, None]))),
        (group("a", 4), Converted(pa.array(["k4"], pa.large_string()), pa.array(["4"]))),
    )
    by_topic = dict(found.by_topic(0, 9))
    assert by_topic["b"].values.to_pylist() == ["1"]
    both = by_topic["a"]
    assert both.keys.to_pylist() == [b"k0", None, b"k3", b"k4", None]
    assert both.values.to_pylist() == [b"0", b"2", None, b"4", b"5"]
    assert [(one["n"], one["mark"]) for one in both.headers.to_pylist()] == [
        (b"1", "x"), (b"two", None), (b"3", None), (None, None), (None, None),
    ]  # fmt: skip
    [(_, part)] = found.by_topic(2, 4)
    assert part.values.to_pylist() == [b"2", None]


def test_a_topics_headers_of_several_types_have_postgresqls_text() -> None:
    stamps = pa.StructArray.from_arrays([pa.array([2**63 - 1, 0], pa.timestamp("us", tz="UTC"))], ["h"])
    found = events(
        (group("a", 0, 2), Converted(None, pa.array(["0", "2"]), stamps)),
        (group("a", 1), Converted(None, pa.array(["1"]), pa.array([{"h": "text"}]))),
    )
    [(_, part)] = found.by_topic(0, 9)
    assert [one["h"] for one in part.headers.to_pylist()] == [b"infinity", b"text", b"1970-01-01 00:00:00+00"]
