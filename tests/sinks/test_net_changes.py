"""Net changes compared with a model: a dictionary to which the same statements were applied."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.sinks.delta.mirror.net_changes import net, net_plan, origin_type

KEY = ("k",)
OWN = pa.schema([("k", pa.int64()), ("a", pa.string()), ("b", pa.string())])
TEXTS = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        *OWN,
        ("_upsert", pa.bool_()),
        ("_log_offset", pa.int64()),
        ("_unchanged", pa.list_(pa.string())),
        ("_special", TEXTS),
        ("_origin", origin_type(OWN, KEY)),
    ]
)

Row = dict[str, Any]
Table = dict[int, Row]


def event(offset: int, key: int | None, row: Row | None, **more: Any) -> Row:
    values = {"k": key, "a": None, "b": None} | (row or {})
    left = sorted(name for name in ("a", "b") if row is not None and name not in row)
    return {
        **values,
        "_upsert": row is not None,
        "_log_offset": offset,
        "_unchanged": left,
        "_special": None,
        "_origin": None,
        **more,
    }


class Source:
    """A table with a key and two columns, whose statements are logged as PostgreSQL does."""

    def __init__(self, rows: Table) -> None:
        self.rows = {key: dict(row) for key, row in rows.items()}
        self.events: list[Row] = []

    def _next(self) -> int:
        return 10 * (1 + len(self.events))

    def insert(self, key: int, row: Row) -> None:
        self.rows[key] = row
        self.events.append(event(self._next(), key, row))

    def delete(self, key: int) -> None:
        del self.rows[key]
        self.events.append(event(self._next(), key, None))

    def update(self, key: int, new_key: int, sent: Row) -> None:
        row = self.rows.pop(key) | sent
        self.rows[new_key] = row
        offset = self._next()
        if new_key == key:
            self.events.append(event(offset, key, sent))
            return
        self.events.append(event(offset, key, None))
        origin = {"k": key, "_special": None} if len(sent) < 2 else None
        self.events.append(event(offset, new_key, sent, _origin=origin))


def random_history(seed: int, statements: int) -> tuple[Table, Source]:
    rng = random.Random(seed)
    before = {key: {"a": f"a{key}", "b": f"b{key}"} for key in rng.sample(range(6), rng.randrange(7))}
    source = Source(before)
    for number in range(statements):
        free = [key for key in range(6) if key not in source.rows]
        sent = {name: f"{name}{number}s" for name in ("a", "b") if rng.random() < 0.5}
        choice = rng.random()
        if free and (choice < 0.25 or not source.rows):
            source.insert(rng.choice(free), {"a": f"a{number}i", "b": rng.choice([None, f"b{number}i"])})
        elif choice < 0.4:
            source.delete(rng.choice(sorted(source.rows)))
        elif choice < 0.7 and free:
            source.update(rng.choice(sorted(source.rows)), rng.choice(free), sent)
        else:
            key = rng.choice(sorted(source.rows))
            source.update(key, key, sent)
    return before, source


def table(events: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(events, SCHEMA)


def applied(before: Table, changes: pa.Table) -> Table:
    """Apply net events to a table as a MERGE does."""
    after = {key: dict(row) for key, row in before.items()}
    for change in changes.to_pylist():
        after.pop(change["k"], None)
    for change in changes.to_pylist():
        if not change["_upsert"]:
            continue
        origin = change["_origin"]["k"] if change["_origin"] else change["k"]
        row = {name: change[name] for name in ("a", "b")}
        row.update({name: before[origin][name] for name in change["_unchanged"]})
        after[change["k"]] = row
    return after


def cut(events: list[Row], cuts: list[int]) -> list[list[Row]]:
    """Cut into batches, never between the two events of one statement."""
    edges = [0]
    for at in sorted(min(at, len(events)) for at in cuts):
        inside = 0 < at < len(events) and events[at - 1]["_log_offset"] == events[at]["_log_offset"]
        edges.append(at - 1 if inside else at)
    edges.append(len(events))
    return [events[a:b] for a, b in itertools.pairwise(edges) if b > a]


@given(st.integers(0, 2**32), st.integers(0, 40), st.lists(st.integers(0, 60), max_size=5))
def test_net_changes_of_any_history_turn_the_old_table_into_the_new_one(seed, statements, cuts):
    before, source = random_history(seed, statements)
    splits = [net(table(part), KEY) for part in cut(source.events, cuts)]
    for split in splits:
        assert len(set(split["k"].to_pylist())) == len(split)
    if not splits:
        return
    steps = np.repeat(np.arange(len(splits)), [len(split) for split in splits])
    whole = net(pa.concat_tables(splits), KEY, steps)
    assert applied(before, whole) == source.rows


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 5))
def test_net_changes_made_in_parts_are_those_made_at_once(seed, statements, parts):
    _, source = random_history(seed, statements)
    events = table(source.events)
    plan = net_plan(events.select([*KEY, *SCHEMA.names[3:]]), KEY)
    edges = [len(plan.winners) * number // parts for number in range(parts + 1)]
    made = []
    for first, last in itertools.pairwise(edges):
        part = plan.part(first, last)
        made.append(part.made(events.take(part.needed()), part.needed()))
    assert pa.concat_tables(made).to_pylist() == net(events, KEY).to_pylist()


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 60))
def test_net_changes_applied_split_by_split_give_the_same_table(seed, statements, at):
    before, source = random_history(seed, statements)
    for part in cut(source.events, [at]):
        before = applied(before, net(table(part), KEY))
    assert before == source.rows


def test_two_rows_that_swap_their_keys_keep_the_values_that_were_not_sent():
    before = {1: {"a": "x", "b": "one"}, 2: {"a": "y", "b": "two"}}
    source = Source(before)
    source.update(1, 9, {"a": "x"})
    source.update(2, 1, {"a": "y"})
    source.update(9, 2, {"a": "x"})
    whole = net(table(source.events), KEY)
    assert applied(before, whole) == {1: {"a": "y", "b": "two"}, 2: {"a": "x", "b": "one"}}


def test_a_row_that_gets_its_old_key_back_takes_no_value_from_the_row_that_had_it_meanwhile():
    before = {1: {"a": "x", "b": "one"}}
    source = Source(before)
    source.update(1, 2, {"a": "x"})
    source.insert(1, {"a": "other", "b": "other"})
    source.delete(1)
    source.update(2, 1, {"a": "z"})
    assert applied(before, net(table(source.events), KEY)) == {1: {"a": "z", "b": "one"}}


def test_a_special_text_is_kept_with_the_value_that_an_older_change_fills_in():
    first = event(10, 1, {"a": "x", "b": None}, _special=[("b", "NaN")])
    second = event(20, 1, {"a": "y"})
    (row,) = net(table([first, second]), KEY).to_pylist()
    assert row["a"] == "y"
    assert row["_special"] == [("b", "NaN")]
    assert row["_unchanged"] == []


@pytest.mark.parametrize(
    ("values", "kind", "groups"),
    [
        ([0.0, -0.0, float("nan"), float("-nan"), None], pa.float64(), 3),
        (["", None, "a", "a"], pa.string(), 3),
        ([[1, None], [1, None], [1], None], pa.list_(pa.int32()), 3),
        ([[0.0], [-0.0], [float("nan")], [float("nan")], None], pa.list_(pa.float64()), 3),
        ([b"\x00", b"", None], pa.binary(), 3),
    ],
)
def test_keys_are_equal_if_postgresql_says_so(values, kind, groups):
    own = pa.schema([("k", kind), ("a", pa.string()), ("b", pa.string())])
    schema = pa.schema([*own, *list(SCHEMA)[3:-1], ("_origin", origin_type(own, KEY))])
    events = [event(10 * at, value, {"a": str(at), "b": ""}) for at, value in enumerate(values)]
    assert len(net(pa.Table.from_pylist(events, schema), KEY)) == groups


def test_keys_that_the_column_type_cannot_hold_are_distinguished_by_their_text():
    events = [
        event(10, None, {"a": "1", "b": ""}, _special=[("k", "NaN")]),
        event(20, None, {"a": "2", "b": ""}, _special=[("k", "Infinity")]),
        event(30, None, {"a": "3", "b": ""}, _special=[("k", "NaN")]),
    ]
    assert net(table(events), KEY)["a"].to_pylist() == ["2", "3"]


def test_composite_keys_are_compared_whole():
    key = ("k", "a")
    schema = pa.schema([*list(SCHEMA)[:-1], ("_origin", origin_type(OWN, key))])
    rows = [(1, "x", "old"), (1, "y", "kept"), (2, "x", "kept too"), (1, "x", "new")]
    events = [event(10 * at, k, {"a": a, "b": b}) for at, (k, a, b) in enumerate(rows)]
    found = net(pa.Table.from_pylist(events, schema), key)
    assert sorted(found["b"].to_pylist()) == ["kept", "kept too", "new"]


def test_no_events_give_no_events():
    assert len(net(table([]), KEY)) == 0


def test_changes_may_have_more_text_than_one_arrow_array_holds() -> None:
    long = pa.array(["x" * (16 << 20)])
    events = [event(10 * number, 1, {"a": "", "b": ""}) for number in range(1, 135)]
    table = pa.Table.from_pylist(events, SCHEMA)
    texts = pa.chunked_array([long] * len(table))  # the same bytes each time, so memory holds them once
    assert texts.nbytes > 2**31
    last = net(table.set_column(1, SCHEMA.field("a"), texts), KEY)
    assert pc.binary_length(last["a"]).to_pylist() == [16 << 20]
    assert last["_log_offset"].to_pylist() == [1340]
