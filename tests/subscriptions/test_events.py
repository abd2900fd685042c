"""Changes as subscribers get them: forms, order, and division into parts."""

from __future__ import annotations

import json
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import TailraceError
from tailrace.pipeline.log import inspection
from tailrace.subscriptions import filters
from tailrace.subscriptions.events import DecodedRange, EventLines, in_order
from tailrace.subscriptions.filters import ChangeFilter, parsed
from tests.support.decode.wire import decode, insert, relation, transaction
from tests.support.examples import examples


def lines(*offsets: int) -> EventLines:
    found = [json.dumps({"at": offset, "text": "é" * (offset % 7)}) + "\n" for offset in offsets]
    return EventLines(np.array(offsets, np.int64), pa.array(found, pa.large_string()))


def texts(events: EventLines) -> list[str]:
    return events.lines.to_pylist()


def test_each_event_of_a_stream_has_the_position_after_it():
    assert (
        lines(3, 9).since(4).as_stream("@ab") == b'id: 10@ab\ndata: {"at": 9, "text": "\\u00e9\\u00e9"}\n\n'
    )
    assert lines().as_stream("@ab") == b""


def test_a_message_has_the_change_and_the_position_after_it():
    (message,) = lines(9).as_messages("@ab")
    assert json.loads(message) == {"from": "10@ab", "change": {"at": 9, "text": "éé"}}


@examples(100)
@given(
    st.sets(st.integers(0, 1000), max_size=40), st.integers(0, 1000), st.integers(1, 400), st.integers(0, 3)
)
def test_events_divided_at_any_position_are_the_same(places, since, bytes_max, tables):
    events = lines(*sorted(places))
    left = events.since(since)
    assert list(left.offsets) == [place for place in sorted(places) if place >= since]
    parts = []
    while len(left):
        part = left.first(bytes_max)
        assert len(part) == 1 or sum(len(line.encode()) for line in texts(part)) <= bytes_max
        parts.append(part.as_stream("@x"))
        left = left.since(part.end)
    assert b"".join(parts) == events.since(since).as_stream("@x")
    by_table = [
        lines(*[place for place in sorted(places) if place % (tables + 1) == n]) for n in range(tables + 1)
    ]
    together = in_order([(each.offsets, each.lines) for each in by_table])
    assert texts(together) == texts(events)


def test_an_expression_that_takes_long_blocks_no_other_subscriber(monkeypatch):
    begun, ends = threading.Event(), threading.Event()

    def truths(changes, where):
        if "1000" in where.text:
            begun.set()
            ends.wait(60)
        return inspection.truths(changes, where)

    monkeypatch.setattr(filters, "truths", truths)
    found = decode(transaction(relation(), insert("1", "a", "1.00"), insert("2", "b", "2.00")))
    range_ = DecodedRange(0, 1 << 30, found, "0", SourceInfo("shop", "shop", "0"))
    slow, quick = ChangeFilter(where="after.id < 1000"), ChangeFilter(where="after.id = 2")
    thread = threading.Thread(target=range_.look, args=[slow])
    thread.start()
    assert begun.wait(60)
    quickly = threading.Thread(target=range_.look, args=[quick])
    quickly.start()
    quickly.join(60)
    assert range_.has_looked(quick)
    assert not range_.has_looked(slow)
    ends.set()
    thread.join(60)
    assert [len(range_.events(wanted)) for wanted in (slow, quick)] == [2, 1]


def test_equivalent_filters_are_equal():
    assert parsed(["b.*", "a.b", "a.b"], "") == parsed(["a.b", "b.*"], "")
    assert parsed(["a.b", "a.c"], "").exact_tables == ("a.b", "a.c")
    assert parsed(["a.b", "a.*"], "").exact_tables is None
    assert ChangeFilter().exact_tables is None


@pytest.mark.parametrize(
    ("tables", "where"), [(["orders"], ""), ([""], ""), ([], "after.id >"), ([], "qty > 3")]
)
def test_an_invalid_filter_is_refused(tables, where):
    with pytest.raises(TailraceError, match="subscribe"):
        parsed(tables, where)
