"""Updates that change the key are split before transformations that would lose the relation of the two rows.

A reader of a compacted topic must get the table: of each key the last row, and no deleted ones.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.debezium import JsonConverter
from tailrace.engine.processing.ordering_keys import in_order
from tailrace.engine.processing.stage import ReadyBatch, Stage
from tailrace.protocol import frames
from tailrace.records.batch import Batch
from tailrace.records.events import Events
from tailrace.records.fingerprints import fingerprints
from tailrace.records.group import Group
from tailrace.transforms.factory import build
from tests.support.decode.wire import ORDERS, begin, commit, decode, delete, insert, relation, update
from tests.support.transforms.groups import COMMIT_US, orders

KEY, BOTH = {"apply_to": "key"}, {"apply_to": "both"}

#: Steps, and the name and value of a key after them.
STEPS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "nothing": ([], lambda key: {"id": key}),
    "flatten": ([{"type": "flatten"}], lambda key: {"id": key}),
    "extract": ([{"type": "extract_field", "field": "id", **KEY}], lambda key: key),
    "hoist": ([{"type": "hoist_field", "field": "of", **KEY}], lambda key: {"of": {"id": key}}),
    "route": (
        [{"type": "route", "regex": ".*", "replacement": "all", "key_field": "was"}],
        lambda key: {"id": key, "was": "public.orders"},
    ),
    "rename keys": ([{"type": "rename", "fields": {"id": "number"}, **KEY}], lambda key: {"number": key}),
    "rename rows": ([{"type": "rename", "fields": {"id": "n"}, "apply_to": "row"}], lambda key: {"id": key}),
    "drop from rows": ([{"type": "drop_fields", "fields": ["id"]}], lambda key: {"id": key}),
    "mask rows": (
        [{"type": "mask", "fields": ["i*"], "method": "null", "apply_to": "row"}],
        lambda key: {"id": key},
    ),
    "cast keys": ([{"type": "cast", "fields": {"id": "text"}, **KEY}], lambda key: {"id": str(key)}),
    "add to keys": (
        [{"type": "add_fields", "static": {"of": "shop"}, **KEY}],
        lambda key: {"id": key, "of": "shop"},
    ),
    "compute": (
        [{"type": "add_fields", "computed": {"odd": "coalesce(after.id, before.id) % 2"}, **BOTH}],
        lambda key: {"id": key, "odd": key % 2},
    ),
    "null": (
        [{"type": "add_fields", "static": {"of": None}, **BOTH}, {"type": "flatten"}],
        lambda key: {"id": key, "of": None},
    ),
    "move to a header": (
        [{"type": "set_headers", "headers": {"number": "after.id"}, "operation": "move", "missing": "null"}],
        lambda key: {"id": key},
    ),
    "many": (
        [{"type": "cast", "fields": {"price": "text"}}, {"type": "extract_field", "field": "id", **KEY},
         {"type": "flatten"}, {"type": "hoist_field", "field": "id", **KEY}],
        lambda key: {"id": key},
    ),
}  # fmt: skip


@st.composite
def histories(draw: st.DrawFn) -> tuple[Group, dict[int, str | None]]:
    """Changes of a table with rows of a few keys, and the rows that are left."""
    is_full = draw(st.booleans())
    table: dict[int, tuple[str, str | None]] = {}
    changes = []
    for number in range(draw(st.integers(1, 12))):
        free = [key for key in range(1, 6) if key not in table]
        new = (f"note {number}", draw(st.sampled_from(["1.50", "NaN", None])))
        what = draw(st.sampled_from(["insert", "update", "move", "delete"] if table else ["insert"]))
        if what == "insert" and not free:
            what = "update"
        if what == "insert":
            key = draw(st.sampled_from(free))
            changes.append(insert(str(key), *new))
        else:
            was = draw(st.sampled_from(sorted(table)))
            row = (str(was), *table.pop(was))
            before: dict[str, Any] = {"old": row} if is_full else {}
            key = draw(st.sampled_from(free)) if what == "move" and free else was
            if key != was and not is_full:
                before = {"key": (str(was), None, None)}
            if what == "delete":
                changes.append(delete(*row, mark=b"O") if is_full else delete(str(was), None, None))
                continue
            changes.append(update(str(key), *new, **before))
        table[key] = new
    return group_of(*changes, is_full=is_full), {key: note for key, (note, _) in table.items()}


def group_of(*changes: bytes, is_full: bool = False) -> Group:
    """Changes of a table with the primary key `id`, under either replica identity."""
    if not is_full:
        return orders(*changes)
    facts = frames.control_frame(b"F", 0, 0, {"relation": ORDERS, "primary_key": ["id"]})
    shape = relation(key=("id", "note", "price"), identity="f")
    [found] = decode(facts + begin(1000, COMMIT_US, 7) + shape + b"".join(changes) + commit(1000))
    return Group.of_changes("public.orders", np.arange(len(found)), found)


def compacted(group: Group, steps: list[dict[str, Any]], converter: Any) -> dict[str, Any]:
    """Return the note that is left of each key (JSON) in the compacted topic."""
    left: dict[str, Any] = {}
    for event in converted(build(steps, splits_updates=True).apply(group), len(group), converter):
        key, value = (None if text is None else json.loads(text) for text in (event.key, event.value))
        left[as_text(key["payload"] if is_described(key) else key)] = value
    return {key: note_of(value) for key, value in left.items() if value is not None}


def as_text(key: Any) -> str:
    return json.dumps(key, separators=(",", ":"))


def is_described(document: Any) -> bool:
    return isinstance(document, dict) and document.keys() == {"schema", "payload"}


def converted(groups: list[Group], polled: int, converter: Any) -> Events:
    batch = Batch({}, tuple(groups), polled, [{"at": n} for n in range(polled)])
    return Events(batch, tuple(converter.convert(each) for each in groups))


def note_of(value: Any) -> Any:
    value = value["data"] if "specversion" in value else value
    value = value["payload"] if is_described(value) else value
    return value.get("after", value)["note"]


@pytest.mark.parametrize("name", STEPS)
@given(history=histories())
def test_a_compacted_topic_has_the_rows_of_the_table(name: str, history: Any) -> None:
    group, expected = history
    steps, key_of = STEPS[name]
    converters = [JsonConverter(), JsonConverter(schemas_enable=True), CloudEventsConverter()]
    for converter in converters if name in ("flatten", "extract") else converters[:1]:
        left = compacted(group, steps, converter)
        assert left == {as_text(key_of(key)): note for key, note in expected.items()}


def test_the_two_records_have_the_others_key_as_a_header() -> None:
    group = group_of(insert("1", "a", None), update("2", "b", "NaN", key=("1", None, None)))
    [made] = build([{"type": "flatten"}], splits_updates=True).apply(group)
    assert (made.index.tolist(), made.is_second.tolist()) == ([0, 1, 1], [False, False, True])
    assert made.column("op").to_pylist() == ["c", "d", "c"]
    assert made.column("special").to_pylist() == [None, None, [("value.price", "NaN")]]
    events = converted([made], 2, JsonConverter())
    assert [(event.record.place, event.key, event.headers) for event in events] == [
        (0, '{"id":1}', {}),
        (1, '{"id":1}', {"__debezium.newkey": '{"id":2}'}),
        (1, '{"id":2}', {"__debezium.oldkey": '{"id":1}'}),
    ]
    assert [(topic, found.keys.to_pylist()) for topic, found in events.by_topic(1, 2)] == [
        ("public.orders", ['{"id":1}', '{"id":2}'])
    ]
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - our own
    assert again.is_second.tolist() == made.is_second.tolist()
    assert made.slice(1, 3).is_second.tolist() == [False, True]


def test_a_route_does_not_split_the_updates_of_other_topics() -> None:
    group = group_of(insert("1", "a", None), update("2", "b", "1.00", key=("1", None, None)))
    for regex, ops in ((".*orders", ["c", "d", "c"]), (".*others", ["c", "u"])):
        route = {"type": "route", "regex": regex, "replacement": "all", "key_field": "was"}
        [made] = build([route], splits_updates=True).apply(group)
        assert made.column("op").to_pylist() == ops


def moved(route: str) -> ReadyBatch:
    """An update that changed the key, with a change before and after it, as they go to a handler."""
    group = group_of(
        insert("1", "a", None), insert("7", "b", None), update("2", "b", "1.00", key=("1", None, None)),
        delete("7", None, None),
    )  # fmt: skip
    steps = [{"type": "flatten"}, {"type": "route", "topic": route}]
    staged = Stage(build(steps, splits_updates=True).apply, JsonConverter().convert, finds_keys=True)([group])
    return ReadyBatch.of(Batch({}, (group,), 4, [{"at": n} for n in range(4)]), staged)


@pytest.mark.parametrize("route", ["'all'", "case when value is null then 'deletes' else 'rows' end"])
def test_a_split_update_counts_as_processed_after_its_second_record_and_waits_for_both_keys(
    route: str,
) -> None:
    ready = moved(route)
    assert len(ready.batch) == 4
    assert [(place, [event.key for event in events]) for place, events in ready.by_record()] == [
        (0, ['{"id":1}']),
        (1, ['{"id":7}']),
        (2, ['{"id":1}', '{"id":2}']),
        (3, ['{"id":7}']),
    ]
    delivered = [(count, event.key) for count, event in ready.in_turn()]
    assert delivered == [(1, '{"id":1}'), (2, '{"id":7}'), (2, '{"id":1}'), (3, '{"id":2}'), (4, '{"id":7}')]
    own, other, _ = in_order(ready.ordering_keys, ready.batch.rows)
    keys = fingerprints(pa.array([{"id": key} for key in (1, 7, 2, 7)], pa.struct([("id", pa.int32())])))
    assert own.tolist() == keys.tolist()
    assert other.tolist() == [keys[0], keys[1], keys[0], keys[3]]


def test_transformations_that_do_not_affect_the_key_get_the_whole_update() -> None:
    group = group_of(insert("1", "a", None), update("2", "b", "1.00", key=("1", None, None)))
    steps: list[dict[str, Any]] = [
        {"type": "filter", "where": "op in ('c', 'u')"},
        {"type": "rename", "fields": {"price": "cost"}, "apply_to": "row"},
        {"type": "drop_fields", "fields": ["cost"]},
        {"type": "add_fields", "static": {"of": "shop"}},
        {"type": "value_to_key", "fields": ["id"]},
    ]
    unknown = Group.of_columns("lines", group.index, group.columns)  # of a source without relations
    for changes in (group, unknown):
        [made] = build(steps[: len(steps) - (changes is unknown)], splits_updates=True).apply(changes)
        assert made.column("op").to_pylist() == ["c", "u"]
    [made] = build([{"type": "flatten"}], splits_updates=True).apply(unknown)
    assert made.column("op").to_pylist() == ["c", "u"], "`partial` rows may lack values"
    whole = group_of(update("2", "b", "1.00", old=("1", "a", None)), is_full=True)
    unknown = Group.of_columns("lines", whole.index, whole.columns)
    [made] = build([{"type": "flatten"}], splits_updates=True).apply(unknown)
    assert (made.column("op").to_pylist(), made.column("value").to_pylist()[0]) == (["d", "c"], None)


def test_headers_for_both_kinds_of_changed_keys_are_combined() -> None:
    group = group_of(
        update("2", "b", "1.00", old=("1", "a", None)), update("5", "d", None, old=("5", "c", None)),
        is_full=True,
    )  # fmt: skip
    steps: list[dict[str, Any]] = [
        {"type": "add_fields", "static": {"of": "shop"}, "apply_to": "key"},
        {"type": "value_to_key", "fields": ["note"]},
    ]
    events = converted(build(steps, splits_updates=True).apply(group), 2, JsonConverter())
    found = [(event.key, *event.headers.values()) for event in events if event.value is not None]
    assert found == [
        ('{"note":"a"}', '{"note":"b"}'), ('{"note":"b"}', '{"note":"a"}'),
        ('{"note":"c"}', '{"note":"d"}'), ('{"note":"d"}', '{"note":"c"}'),
    ]  # fmt: skip
