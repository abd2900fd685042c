"""Random chains keep positions and order, add nothing, and can be pickled."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailrace.transforms.factory import build
from tests.support.decode.wire import UNCHANGED, delete, insert, update
from tests.support.examples import examples
from tests.support.transforms.groups import orders, places, rows, topics

PREDICATES = {
    "changes": {"type": "operation", "operations": ["create", "update"]},
    "ones": {"type": "expression", "where": "key.id::text = '1'", "missing": "null"},
    "orders": {"type": "table", "tables": ["public.orders"]},
    "routed": {"type": "topic", "pattern": r"to-.*"},
    "tombs": {"type": "tombstone"},
    "headed": {"type": "has_header", "name": "h"},
}

STEPS: list[dict[str, Any]] = [
    {"type": "filter", "where": "op <> 'd' or after.price > 5", "missing": "null"},
    {
        "type": "filter",
        "where": "coalesce(after.note, value.note) is not null",
        "missing": "null",
        "nulls": "keep",
    },
    {"type": "drop", "predicate": "ones"},
    {"type": "route", "regex": r"public\.(.*)", "replacement": "to-$1"},
    {"type": "route", "topic": "case when op = 'u' then 'updates' end"},
    {"type": "rename", "fields": {"note": "remark", "price": "cost"}},
    {"type": "rename", "fields": {"remark": "note"}},
    {"type": "drop_fields", "fields": ["note"]},
    {"type": "mask", "fields": ["note", "remark"], "value": "*"},
    {"type": "mask", "fields": ["price"], "method": "null"},
    {"type": "add_fields", "metadata": {"t": "table", "ts": "ts_ms"}, "static": {"s": 1}},
    {"type": "cast", "fields": {"id": "text"}},
    {"type": "set_headers", "headers": {"h": "op", "k": "key.id"}, "missing": "null"},
    {"type": "fields_from_headers", "fields": {"h": "h"}, "operation": "move"},
    {"type": "drop_headers", "headers": ["h"]},
    {"type": "flatten", "deletes": "rewrite", "add_fields": ["op"]},
    {"type": "flatten", "add_headers": ["lsn"]},
    {"type": "hoist_field", "field": "f"},
    {"type": "outbox"},
]

NAMES = st.none() | st.sampled_from(sorted(PREDICATES))
STEP = st.builds(
    lambda step, name, negate: (
        step if "predicate" in step or name is None else {**step, "predicate": name, "negate": negate}
    ),
    st.sampled_from(STEPS),
    NAMES,
    st.booleans(),
)
CHANGE = st.one_of(
    st.builds(
        insert,
        st.sampled_from("123"),
        st.sampled_from(["a", None]),
        st.sampled_from(["5", "NaN"]),
    ),
    st.builds(lambda n, t: update(n, t, "7"), st.sampled_from("123"), st.sampled_from(["u", UNCHANGED])),
    st.builds(lambda n: update(n, "k", "7", key=("9", None, None)), st.sampled_from("123")),
    st.builds(lambda n: delete(n, None, None), st.sampled_from("123")),
)


@examples(150)
@given(st.lists(STEP, max_size=5), st.lists(CHANGE, min_size=1, max_size=6))
def test_random_chains_keep_positions_and_order(steps: list[dict[str, Any]], changes: list[bytes]) -> None:
    chain = build(steps, PREDICATES)  # type: ignore[arg-type]
    group = orders(*changes)
    found = chain.apply(group)
    index = [group.index.tolist() for group in found]
    assert all(part == sorted(part) and part for part in index)
    assert len(set(places(found))) == len(places(found)) <= len(changes)
    assert set(places(found)) <= set(range(len(changes)))
    for part in found:
        part.columns.validate(full=True)
        assert part.columns.num_rows == len(part)
        if part.relation is not None and part.wire is not None:
            assert part.wire.relation == part.relation

    again = pickle.loads(pickle.dumps(chain)).apply(orders(*changes))  # noqa: S301
    assert topics(again) == topics(found)
    assert rows(again) == rows(found)


@examples(80)
@given(st.lists(STEP, max_size=4), st.lists(CHANGE, min_size=2, max_size=6), st.data())
def test_a_records_result_does_not_depend_on_the_other_records(
    steps: list[dict[str, Any]], changes: list[bytes], data: st.DataObject
) -> None:
    chain = build(steps, PREDICATES)  # type: ignore[arg-type]
    whole = chain.apply(orders(*changes))
    at = data.draw(st.integers(1, len(changes) - 1))
    group = orders(*changes)
    halves = [group.take(np.arange(at)), group.take(np.arange(at, len(changes)))]
    parts = [made for half in halves for made in chain.apply(half)]
    assert topics(parts) == topics(whole)
    assert _bare(rows(parts)) == _bare(rows(whole))


def _bare(found: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    # Fields that a group has only because one of its records needs them are empty in the others.
    return {
        place: {name: v for name, v in row.items() if v not in (None, [], {})} for place, row in found.items()
    }
