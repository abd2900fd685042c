"""Which records pass, and to which topic; frames are decoded only if necessary, and stay as they are."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tailrace.transforms.factory import build
from tests.support.decode.wire import insert
from tests.support.transforms.groups import applied, messages, only, orders, places, plain, rows, topics


def is_undecoded(group: Group) -> bool:
    return group.wire is not None and "columns" not in vars(group)


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("op <> 'd'", [0, 1, 2, 3]),
        ("after.price >= 7", [2, 3]),
        ("after.price >= 7 or after.price is null and op = 'c'", [1, 2, 3]),
        ("after.note like '%o%' and key.id = 2", [1]),
        ("not was_sent(after.note)", [2]),
        ("before.id <> after.id", [3]),
        ("op in ('d', 'u') and source.xid = 7", [2, 3, 4]),
        ("source.table = 'others' and after.qty > 5", []),
        ("source.commit_ts >= '2023-11-14 22:13:20+00' and topic = 'public.orders'", [0, 1, 2, 3, 4]),
        ("value.op = 'd' and value.after is null", [4]),
        ("cast(after.price as integer) = 8", [2]),
        ("after.id::text || coalesce(after.note, '-') = '1-'", [2]),
    ],
)
def test_a_filter_keeps_records_for_which_its_expression_is_true(where: str, kept: list[int]) -> None:
    found = applied(orders(), {"type": "filter", "where": where})
    assert places(found) == kept
    assert all(part.wire is not None for part in found)
    assert rows(found) == {place: row for place, row in rows([orders()]).items() if place in kept}


def test_null_results_are_dropped_or_kept_as_configured() -> None:
    where = "after.price > 6"
    assert places(applied(orders(), {"type": "filter", "where": where})) == [2, 3]
    kept = applied(orders(), {"type": "filter", "where": where, "nulls": "keep"})
    assert places(kept) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "where", ["op = 'u'", "source.table = 'orders' and op <> 'd'", "topic like 'public.%'", "source.lsn > 0"]
)
def test_conditions_on_the_envelope_need_no_decoding(where: str) -> None:
    group = orders()
    found = only(applied(group, {"type": "filter", "where": where}))
    assert is_undecoded(group)
    assert is_undecoded(found)


def test_source_is_the_same_decoded_or_not() -> None:
    group = orders()
    assert group.wire is not None
    assert group.wire.source().equals(group.columns.column("source"))


def test_a_missing_column_is_an_error_with_its_place_or_null() -> None:
    where = "op = 'c' and\n after.pricee > 5"
    with pytest.raises(TailraceError) as caught:
        applied(orders(), {"type": "filter", "where": where})
    error = caught.value
    assert error.kind is Kind.TRANSFORM_FAILED
    assert "line 2, column 2" in error.message
    assert "did you mean 'price'?" in error.message
    assert error.context == {"table": "public.orders", "transformation": "transformations[0] filter"}
    assert pickle.loads(pickle.dumps(error)).context == error.context  # noqa: S301
    assert applied(orders(), {"type": "filter", "where": where, "missing": "null"}) == []
    for where in ("after.pricee + 1 > 5", "lower(after.pricee) = 'x'", "after.pricee like 'x%'"):
        with pytest.raises(TailraceError, match=r"did you mean 'price'\?"):
            applied(orders(), {"type": "filter", "where": where})
        assert applied(orders(), {"type": "filter", "where": where, "missing": "null"}) == []
    flat = {"type": "flatten"}
    with pytest.raises(TailraceError, match="no longer a change has no row after: ask for its value"):
        applied(orders(), flat, {"type": "filter", "where": "after.price > 5"})
    missing = {"type": "filter", "where": "after.price > 5", "missing": "null"}
    assert applied(orders(), flat, missing) == []
    with pytest.raises(TailraceError, match="messages has no 'qty'"):
        applied(messages(b"x"), {"type": "filter", "where": "after.qty > 5"})
    assert places(applied(messages(b"x"), {"type": "filter", "where": "after.prefix = 'audit'"})) == [0]


def test_no_error_of_an_expression_shows_a_value() -> None:
    with pytest.raises(TailraceError) as caught:
        applied(orders(), {"type": "filter", "where": "cast(after.note as integer) > 1"})
    assert "first" not in str(caught.value)
    assert "can't be converted" in caught.value.message


def test_topics_are_renamed_by_a_pattern_without_decoding() -> None:
    group = orders()
    route = {"type": "route", "regex": r"(?<schema>\w+)\.(\w+)", "replacement": "shop.${schema}-$2"}
    found = only(applied(group, route))
    assert (found.topic, is_undecoded(found), is_undecoded(group)) == ("shop.public-orders", True, True)
    assert only(applied(group, {**route, "regex": "public(.)(x?)", "replacement": "$1"})) is group


def test_an_expression_chooses_the_topic_of_each_record() -> None:
    case = "case when after.price > 8 then 'dear' when op = 'd' then 'gone' end"
    found = applied(orders(), {"type": "route", "topic": case})
    assert topics(found) == {0: "public.orders", 1: "public.orders", 2: "public.orders", 3: "dear", 4: "gone"}
    assert all(part.wire is not None for part in found)
    assert rows(found) == rows([orders()])


def test_a_topic_that_is_no_text_or_empty_is_refused() -> None:
    for topic, words in (("1 + 1", "a topic is text"), ("''", "is empty")):
        with pytest.raises(TailraceError, match=words) as caught:
            applied(orders(), {"type": "route", "topic": topic})
        assert caught.value.kind is Kind.TRANSFORM_FAILED


def test_the_former_topic_may_become_part_of_the_key() -> None:
    route = {"type": "route", "regex": ".*", "replacement": "all", "key_field": "from_topic"}
    found = only(applied(orders(), route))
    assert rows([found], "key")[4]["key"] == {"id": 1, "from_topic": "public.orders"}
    keyless = only(applied(orders(insert("1", "a", "2"), key=()), route))
    assert keyless.column("key").null_count == 1
    assert keyless.topic == "all"


def test_predicates_choose_records_and_may_be_negated() -> None:
    deletes = {"type": "operation", "operations": ["delete"]}
    drop = {"type": "drop", "predicate": "deletes"}
    group = orders()
    assert places(applied(group, drop, deletes=deletes)) == [0, 1, 2, 3]
    assert places(applied(group, {**drop, "negate": True}, deletes=deletes)) == [4]
    assert is_undecoded(group)


@pytest.mark.parametrize(
    ("predicate", "dropped"),
    [
        ({"type": "table", "tables": ["public.ord*"]}, [0, 1, 2, 3, 4]),
        ({"type": "table", "tables": ["/sales\\..*/", "public.users"]}, []),
        ({"type": "operation", "operations": ["create", "update"]}, [0, 1, 2, 3]),
        ({"type": "topic", "pattern": r"public\..*"}, [0, 1, 2, 3, 4]),
        ({"type": "topic", "pattern": "public"}, []),
        ({"type": "tombstone"}, []),
        ({"type": "has_header", "name": "h"}, []),
        ({"type": "expression", "where": "after.id = 3"}, [3]),
    ],
)
def test_each_predicate_chooses_its_records(predicate: dict[str, object], dropped: list[int]) -> None:
    found = applied(orders(), {"type": "drop", "predicate": "these"}, these=predicate)
    assert places(found) == [place for place in range(5) if place not in dropped]


def test_predicates_read_plain_records_too() -> None:
    source = pa.array([{"schema": "s", "table": "a"}, {"schema": "s", "table": "b"}, None])
    headers = pa.array([{"h": "x"}, {"h": None}, None])
    group = plain([{"n": 1}, None, {"n": 3}], source=source, headers=headers, op=pa.array(["c", "d", None]))
    drop = {"type": "drop", "predicate": "these"}

    def left(**these: object) -> list[int]:
        return places(applied(group, drop, these=these))

    assert left(type="table", tables=["s.a"]) == [1, 2]
    assert left(type="operation", operations=["delete"]) == [0, 2]
    assert left(type="tombstone") == [0, 2]
    assert left(type="has_header", name="h") == [1, 2]
    assert left(type="expression", where="value.n > 1 or headers.h = 'x'") == [1]
    assert left(type="expression", where="headers.none is null") == []


def test_a_pickled_chain_gives_the_same() -> None:
    chain = build(
        [
            {"type": "filter", "where": "after.price > 1", "predicate": "changes"},
            {"type": "route", "topic": "'t' || after.id"},
        ],
        {"changes": {"type": "operation", "operations": ["create", "update"]}},
    )
    again = pickle.loads(pickle.dumps(chain))  # noqa: S301
    assert topics(again.apply(orders())) == topics(chain.apply(orders()))
    assert topics(chain.apply(orders())) == {0: "t1", 2: "t1", 3: "t3", 4: "public.orders"}


def test_an_empty_group_gives_no_groups() -> None:
    group = orders().take(np.array([], np.int64))
    assert applied(group, {"type": "filter", "where": "after.price > 1"}) == []


@pytest.mark.parametrize("column", ["key", "before", "after"])
@pytest.mark.parametrize("name", ["id", "note", "price"])
def test_a_column_read_alone_equals_the_one_read_with_all(column: str, name: str) -> None:
    group, whole = orders(), orders().columns.column(column)
    alone = group.member(column, name)
    assert "columns" not in vars(group)
    if whole.type.get_field_index(name) < 0:
        assert alone is None
        return
    assert alone is not None
    assert alone.to_pylist() == [None if row is None else row[name] for row in whole.to_pylist()]
    assert alone.type == whole.type.field(name).type
